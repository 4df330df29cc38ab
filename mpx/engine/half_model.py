"""O3: parameters and buffers that really are half, and what keeps an optimizer alive on them.

Conversion swaps the data under a Parameter, so its identity holds: it may come before or after the optimizer is built,
and whichever is first (an optimizer, DDP, a call) converts.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from mpx.engine.placing import Placement, in_transform, traced
from mpx.engine.structure import modules_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from mpx.engine.kernels import Report
    from mpx.engine.module_rules import ModuleRules
    from mpx.presets.policy import OptimizerSettings

__all__ = ["HalfModel", "guard_optimizer"]


class HalfModel:
    """Converts modules and optimizer parameters in place."""

    def __init__(self, half: torch.dtype, rules: ModuleRules) -> None:
        self._half = half
        self._rules = rules
        self._held: list[nn.Module] = []

    @contextmanager
    def hold(self, root: nn.Module, parts: list[nn.Module]) -> Iterator[None]:
        """Convert a tree that is still FP32 and leave it so."""
        if torch.compiler.is_compiling() or in_transform():
            # converting can be neither traced nor transformed: half stand-ins, until an optimizer comes
            with traced(self._places(parts, torch.float32), lambda own: own.to(self._half)):
                yield
            return
        self.adopt(root, parts)
        self._held.append(root)
        try:
            yield
        finally:
            self._held.remove(root)

    def adopt(self, root: nn.Module, parts: list[nn.Module]) -> None:
        """Convert a tree that is still FP32, except for modules that stay so."""
        self._rules.learn(root, parts)
        for module in parts:
            if not self._rules.keeps_float32(module):
                self._convert_module(module)

    @contextmanager
    def withdrawn(self) -> Iterator[None]:
        """Show parameters in FP32 in the middle of a call: the script opened an `autocast(enabled=False)` region."""
        parts = (part for root in self._held for part in modules_of(root))
        placement = Placement(self._places(parts, self._half), lambda own: own.float())
        placement.place()
        try:
            yield
        finally:
            placement.withdraw()

    @torch.no_grad()
    def convert(self, parameters: Iterable[Tensor]) -> None:
        """Make FP32 parameters half, with the gradients that they have, except those of modules that stay FP32."""
        kept = self._rules.kept_parameters()
        for parameter in parameters:
            if id(parameter) not in kept:
                self._convert(parameter)

    @torch.no_grad()
    def _convert_module(self, module: nn.Module) -> None:
        converted = [self._convert(p) for p in module._parameters.values() if p is not None]
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.dtype is torch.float32:
                module._buffers[name] = buffer.to(self._half)
        if isinstance(module, nn.RNNBase) and any(converted):
            module.flatten_parameters()

    def _convert(self, parameter: Tensor) -> bool:
        if parameter.dtype is not torch.float32 or isinstance(parameter, UninitializedParameter):
            return False
        grad, parameter.grad = parameter.grad, None
        parameter.data = parameter.data.to(self._half)
        parameter.grad = None if grad is None else grad.to(self._half)
        return True

    def _places(
        self, parts: Iterable[nn.Module], dtype: torch.dtype
    ) -> Iterator[tuple[nn.Module, str, Tensor]]:
        for module in parts:
            for name, parameter in module._parameters.items():
                if (
                    parameter is not None
                    and parameter.dtype is dtype
                    and not self._rules.keeps_float32(module)
                ):
                    yield module, name, parameter


def guard_optimizer(optimizer: torch.optim.Optimizer, guards: OptimizerSettings, report: Report) -> None:
    """Raise an `eps` that is zero in half, and take the fused kernel away where it does not update half parameters.

    Adam's eps of 1e-8 is 0 in FP16, so a parameter without gradient becomes 0/0. torch 2.12.1 and 2.13.0 leave full
    SIMD vectors of half parameters unchanged in the fused CPU SGD (pytorch issue 191763).
    """
    name = type(optimizer).__name__
    for group in optimizer.param_groups:
        if not any(p.dtype in (torch.float16, torch.bfloat16) for p in group["params"]):
            continue
        if 0 <= group.get("eps", guards.min_eps) < guards.min_eps:
            report(
                f"eps:{name}",
                f"eps of {name} raised from {group['eps']:g} to {guards.min_eps:g}: it is lost in half state",
            )
            group["eps"] = guards.min_eps
        if guards.unfuse and group.get("fused") and any(p.device.type == "cpu" for p in group["params"]):
            report(
                f"fused:{name}",
                f"fused {name} replaced by the plain one: the fused CPU kernel does not update half parameters",
            )
            group["fused"] = False
