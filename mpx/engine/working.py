"""O2: half working copies of the script's FP32 parameters, in place while a module call or a backward pass runs.

The parameters that the script owns are the FP32 masters. For the length of an outermost module call each floating parameter of its tree is
replaced, in the modules' `_parameters`, by a half copy that autograd ties to it; so gradients arrive at the FP32 parameter, and
optimizers, checkpoints, EMA, clipping and tied weights never see a half tensor. This is the recipe of Micikevicius et al. (2018,
arXiv:1710.03740, section 3.1) and what FSDP2 does.

What stays FP32, because a half copy would lose something that the module does with the parameter itself:
BatchNorm (with `keep_batchnorm_fp32`), `fp32_modules`, buffers (running statistics, frequencies, codebooks), RNNs (they hold their weights in a second
list), embeddings with sparse gradients or `max_norm`, and the operands of weight and spectral normalization.
"""

from __future__ import annotations

import weakref
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import UninitializedTensorMixin
from torch.nn.utils.parametrize import ParametrizationList
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from mpx.engine.structure import modules_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mpx.engine.kernels import Report
    from mpx.presets.policy import Policy

__all__ = ["ModuleRules", "WorkingCopies"]


class ModuleRules:
    """Which modules keep FP32 weights, and which compute in FP32 because the preset names them."""

    def __init__(self, policy: Policy) -> None:
        self._patterns = list(policy.fp32_modules)
        self._keep_batchnorm = bool(policy.keep_batchnorm_fp32)
        self._known: weakref.WeakKeyDictionary[nn.Module, bool] = weakref.WeakKeyDictionary()
        self._named: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self.any_named = bool(self._patterns)
        # TorchScript differentiates by rules of its own, which fail on the mixed types of autocast (torch 2.13), and lets nobody
        # replace its parameters: such a module computes in FP32. At O3, where it really is half, it works as it is.
        casts_calls = policy.cast_model_type != "float32" and policy.master_weights is not False
        self._compiled: tuple[type[nn.Module], ...] = (torch.jit.ScriptModule,) if casts_calls else ()

    def learn(self, root: nn.Module) -> None:
        """Match the names of a tree that has modules not seen before."""
        if all(module in self._known for module in modules_of(root)):
            return
        for path, module in root.named_modules():
            if any(pattern == kind.__name__ for pattern in self._patterns for kind in type(module).__mro__) or any(
                fnmatchcase(path, pattern) for pattern in self._patterns
            ):
                self._named.update(module.modules())
        for module in modules_of(root):
            self._known[module] = module in self._named or self._needs_float32(module)

    def computes_float32(self, module: nn.Module) -> bool:
        """Whether this is TorchScript's, or `fp32_modules` names it or one that contains it; `learn` must have seen its tree."""
        return isinstance(module, self._compiled) or (self.any_named and module in self._named)

    def name(self, module: nn.Module) -> None:
        """Let a module compute in FP32 from now on, as if the preset had named it."""
        self.any_named = True
        self._named.update(module.modules())
        for part in module.modules():
            self._known[part] = True

    def keep(self, module: nn.Module) -> None:
        """Keep the parameters of one module FP32 from now on."""
        self._known[module] = True

    def keeps_float32(self, module: nn.Module) -> bool:
        """Whether the parameters that this module itself owns stay FP32; `learn` must have seen its tree."""
        return self._known.get(module, False)

    def _needs_float32(self, module: nn.Module) -> bool:
        if isinstance(module, _BatchNorm):
            return self._keep_batchnorm
        if isinstance(module, (nn.RNNBase, ParametrizationList, *self._compiled)):
            return True
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and (module.sparse or module.max_norm is not None):
            return True
        return any(isinstance(hook, (WeightNorm, SpectralNorm)) for hook in module._forward_pre_hooks.values())


class WorkingCopies:
    """The half copies of one process: made when first needed in an iteration, shared by its calls, dropped at its end."""

    def __init__(self, half: torch.dtype, rules: ModuleRules, report: Report) -> None:
        self._half = half
        self._rules = rules
        self._report = report
        self._copies: dict[tuple[int, bool], _Copy] = {}  # by identity of the parameter and whether the copy has a graph
        self._roots: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._placed: list[list[_Slot]] = []

    @contextmanager
    def in_place(self, root: nn.Module) -> Iterator[None]:
        """Hold the copies of a tree in its modules; parameters that the forward assigned anew keep their new value."""
        self._rules.learn(root)
        slots = self._slots(root)
        self._placed.append(slots)
        if torch.is_grad_enabled():
            self._roots.add(root)
        _place(slots)
        try:
            yield
        finally:
            self._placed.pop()
            self._withdraw(slots)
            if not torch.is_grad_enabled():
                for key in [key for key in self._copies if not key[1]]:
                    del self._copies[key]

    @contextmanager
    def in_place_for_backward(self) -> Iterator[None]:
        """Hold the copies of every tree of this iteration: activation checkpointing recomputes inside the backward pass."""
        slots = [slot for root in self._roots for slot in self._slots(root)]
        self._placed.append(slots)
        _place(slots)
        try:
            yield
        finally:
            self._placed.pop()
            self._withdraw(slots)

    @contextmanager
    def withdrawn(self) -> Iterator[None]:
        """Show the FP32 parameters in the middle of a call: the script opened an `autocast(enabled=False)` region."""
        placed, self._placed = self._placed, []
        for slots in reversed(placed):
            self._withdraw(slots)
        try:
            yield
        finally:
            for slots in placed:
                _place(slots)
            self._placed = placed

    def drop(self) -> None:
        """Forget the copies: the weights are about to change, or the graph that they belong to is gone."""
        self._copies.clear()
        self._roots.clear()

    def _slots(self, root: nn.Module) -> list[_Slot]:
        return [
            _Slot(module, name, parameter, self._copy(parameter))
            for module in modules_of(root)
            if not self._rules.keeps_float32(module)
            for name, parameter in module._parameters.items()
            if parameter is not None
            and parameter.dtype is torch.float32
            and not isinstance(parameter, UninitializedTensorMixin)
        ]

    def _copy(self, parameter: Tensor) -> Tensor:
        if type(parameter) is not nn.Parameter or parameter.is_inference():
            return parameter.to(self._half)  # put there by functional_call, a DTensor, ...: not ours to remember
        key = (id(parameter), torch.is_grad_enabled() and not torch.is_inference_mode_enabled())
        state = (parameter._version, parameter.data_ptr())
        found = self._copies.get(key)
        if found is not None and found.parameter is parameter and found.state == state:
            return found.copy
        copy = parameter.to(self._half)
        self._copies[key] = _Copy(parameter, state, copy)
        return copy

    def _withdraw(self, placement: list[_Slot]) -> None:
        for slot in placement:
            owner = slot.module._parameters
            if owner.get(slot.name) is not slot.copy:
                continue  # the forward assigned a new parameter, or deleted it: that is what the script wants
            owner[slot.name] = slot.parameter
            if slot.version is not None and slot.copy._version != slot.version:
                self._keep_edit(slot)

    def _keep_edit(self, slot: _Slot) -> None:
        """The forward wrote into a parameter: bring that to the FP32 one, which stays FP32 from now on so that no more is rounded."""
        with torch.no_grad():
            slot.parameter.copy_(slot.copy)
        self._rules.keep(slot.module)
        self._report(f"written:{type(slot.module).__name__}.{slot.name}", f"parameter `{slot.name}` of a `{type(slot.module).__name__}` kept in FP32: the forward writes it")


class _Copy(NamedTuple):
    parameter: Tensor
    state: tuple[int, int]  # version counter and address when the copy was made
    copy: Tensor


class _Slot:
    """A parameter's place in a module, and the copy that takes it for a while."""

    __slots__ = ("copy", "module", "name", "parameter", "version")

    def __init__(self, module: nn.Module, name: str, parameter: Tensor, copy: Tensor) -> None:
        self.module, self.name, self.parameter, self.copy = module, name, parameter, copy
        self.version = None if copy.is_inference() else copy._version


def _place(slots: list[_Slot]) -> None:
    for slot in slots:
        slot.module._parameters[slot.name] = slot.copy  # type: ignore[assignment]
