"""O2: half working copies of the script's FP32 parameters, in place while a module call or a backward pass runs.

The parameters that the script owns are the FP32 masters. For the length of an outermost module call each floating
parameter of its tree is replaced, in the modules' `_parameters`, by a half copy that autograd ties to it; so gradients
arrive at the FP32 parameter, and optimizers, checkpoints, EMA, clipping and tied weights never see a half tensor. This
is the recipe of Micikevicius et al. (2018, arXiv:1710.03740, section 3.1) and what FSDP2 does.

Each call makes its copies anew: between two calls a script may edit weights in ways that nothing records (`.data`).
Buffers stay FP32 (running statistics, codebooks, tables of frequencies), and so do the parameters that `ModuleRules`
keeps.
"""

from __future__ import annotations

import threading
import weakref
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import UninitializedParameter

from mpx.engine.module_rules import ModuleRules
from mpx.engine.placing import Placement, in_transform, traced

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mpx.engine.kernels import Report

__all__ = ["ModuleRules", "WorkingCopies"]

COMPARED_CALLS = 3  # how often a root's copies are compared afterwards with what they were made from


class _Here(threading.local):
    """The copies of one thread: the end of its pass must not take those of a model that another thread trains."""

    def __init__(self) -> None:
        self.recent: weakref.WeakKeyDictionary[nn.Module, Placement] = weakref.WeakKeyDictionary()
        self.placed: list[Placement] = []
        self.islands = 0
        self.island_opened = False


class WorkingCopies:
    """The half copies of one process: made for each call, kept for its backward pass, dropped at the end of that."""

    def __init__(self, half: torch.dtype, rules: ModuleRules, report: Report) -> None:
        self._half = half
        self._rules = rules
        self._report = report
        self._here = _Here()
        self._calls: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()

    @contextmanager
    def in_place(self, root: nn.Module, parts: list[nn.Module]) -> Iterator[None]:
        """Hold the copies of a tree in its modules; parameters that the forward assigned anew keep their new value."""
        if torch.compiler.is_compiling():
            with traced(self._places(parts), self._to_half):
                yield
            return
        new = self._rules.unseen(parts)
        self._rules.learn(root, parts)
        for module in new:
            self._tell(module)
        placement = Placement(self._places(parts), self._to_half)
        placement.place()
        self._here.placed.append(placement)
        self._here.island_opened = False
        if torch.is_grad_enabled() and not in_transform():
            self._here.recent[root] = placement
        try:
            yield
        finally:
            self._here.placed.remove(placement)
            self._withdraw(placement, compare=self._looks_closely(root))

    def _looks_closely(self, root: nn.Module) -> bool:
        """Whether to compare numbers after this call: after the first that train, if nothing withdrew the copies."""
        calls = self._calls.get(root, 0)
        if calls == COMPARED_CALLS or not root.training:
            return False
        self._calls[root] = calls + 1
        return not self._here.island_opened

    @contextmanager
    def in_place_for_backward(self) -> Iterator[None]:
        """Hold the copies of this iteration's calls: activation checkpointing recomputes inside the backward pass."""
        placements = list(self._here.recent.values())
        with torch.enable_grad():  # a copy that has to be made anew is tied to its parameter
            for placement in placements:
                placement.place()
        self._here.placed += placements
        try:
            yield
        finally:
            for placement in reversed(placements):
                self._here.placed.remove(placement)
                self._withdraw(placement)

    @contextmanager
    def withdrawn(self) -> Iterator[None]:
        """Show the FP32 parameters in the middle of a call: the script opened an `autocast(enabled=False)` region."""
        self._here.islands += 1
        self._here.island_opened = True
        if self._here.islands == 1:
            for placement in reversed(self._here.placed):
                self._withdraw(placement)
        try:
            yield
        finally:
            self._here.islands -= 1
            if not self._here.islands:
                for placement in self._here.placed:
                    placement.place()

    def drop(self) -> None:
        """Forget the copies: the weights are about to change, or the graph that they belong to is gone.

        In the middle of a call (a training step that is a module's method, with the optimizer's step in it) the rest of
        the call works on the FP32 parameters, which autocast casts op by op.
        """
        self._here.recent.clear()
        for placement in reversed(self._here.placed):
            self._withdraw(placement)
            placement.clear()

    def _places(self, parts: list[nn.Module]) -> Iterator[tuple[nn.Module, str, Tensor]]:
        for module in parts:
            if module._parameters and not self._rules.keeps_float32(module):
                for name, parameter in module._parameters.items():
                    if (
                        parameter is not None
                        and parameter.dtype is torch.float32
                        and not isinstance(parameter, UninitializedParameter)
                    ):
                        yield module, name, parameter

    def _tell(self, module: nn.Module) -> None:
        """Say what of a module stays FP32, where neither the preset nor the level says so."""
        kind = type(module).__name__
        if isinstance(module, _BatchNorm):
            return
        buffers = [name for name, b in module._buffers.items() if b is not None and b.dtype is torch.float32]
        if buffers:
            self._report(f"buffers:{kind}", f"buffers of `{kind}` stay FP32 ({', '.join(buffers)})")
        if (
            module._parameters
            and self._rules.keeps_float32(module)
            and not self._rules.computes_float32(module)
        ):
            self._report(
                f"weights:{kind}",
                f"weights of `{kind}` stay FP32: a half copy would not reach all that it does with them",
            )

    def _to_half(self, parameter: Tensor) -> Tensor:
        half = parameter.to(self._half)
        if parameter.requires_grad or not isinstance(parameter, nn.Parameter):
            # a stranger's tensor (`functional_call`, `vmap`) may have a graph and say that it requires no gradient
            return half
        # `self.counter += 1` assigns what it updated: a module takes nothing but a Parameter there
        return nn.Parameter(half, requires_grad=False)

    def _withdraw(self, placement: Placement, *, compare: bool = False) -> None:
        for place in placement.withdraw(compare=compare):
            # the forward writes a parameter: it stays FP32 from now on, so that nothing that is written is rounded
            if (module := place.module()) is not None:
                self._rules.keep(module)
                kind = type(module).__name__
                self._report(
                    f"written:{kind}.{place.name}",
                    f"parameter `{place.name}` of a `{kind}` kept in FP32: its forward pass writes it",
                )
