"""O2: half working copies of the script's FP32 parameters, in place while a call of a module runs.

The parameters that the script owns are the FP32 masters. For the length of an outermost module call each floating
parameter of its tree is replaced, in the modules' `_parameters`, by a half copy that autograd ties to it; only layers
of torch whose op casts a weight as it comes (`nn.Linear`) keep theirs, and the op makes the copy. So gradients
arrive at the FP32 parameter, and optimizers, checkpoints, EMA, clipping and tied weights never see a half tensor. This
is the recipe of Micikevicius et al. (2018, arXiv:1710.03740, section 3.1) and what FSDP2 does.

Each call makes its copies anew: between two calls a script may edit weights in ways that nothing records (`.data`).
They are in place again during a backward pass that may run parts of the call once more (activation checkpointing).
Buffers stay FP32 (running statistics, codebooks, tables of frequencies), and so do the parameters that `ModuleRules`
keeps.
"""

from __future__ import annotations

import threading
import weakref
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import UninitializedTensorMixin  # type: ignore[attr-defined]

from mpx.engine.devices import HALF
from mpx.engine.module_rules import ModuleRules
from mpx.engine.placing import Placement, in_transform, traced
from mpx.engine.reused import CAST_AT_USE, COMPARED_CALLS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mpx.engine.kernels import Report
    from mpx.engine.reruns import Reruns
    from mpx.presets.policy import Policy

__all__ = ["ModuleRules", "WorkingCopies"]

NOTHING = nullcontext()
# The engine begins with what was made last, and copies are made before all else. With the number of the nodes that fill
# `.grad` their gradients reach the parameters as soon as they are known, as those of a cast at its use do: half ones do
# not gather until the end of the pass, and a data-parallel reducer need not wait for it.
SOON = 2**64 - 1


class _Here(threading.local):
    """The copies of one thread: the end of its pass must not take those of a model that another thread trains."""

    def __init__(self, everywhere: dict[int, list[Placement]]) -> None:
        # by root, which it does not keep alive; walking and clearing a WeakKeyDictionary takes 4 us in each pass
        self.recent: dict[weakref.ref[nn.Module], Placement] = {}
        self.placed: list[Placement] = []
        everywhere[threading.get_ident()] = self.placed
        self.islands = 0


class WorkingCopies:
    """The half copies of one process: made for each call, kept for a backward pass that may run parts of it again."""

    def __init__(self, policy: Policy, rules: ModuleRules, reruns: Reruns, report: Report) -> None:
        half = HALF[policy.dtype]
        self._at_use = CAST_AT_USE if policy.ops.cast_layers() else frozenset()
        # by name it takes two thirds of the time of `to`
        self._cast = Tensor.half if half is torch.float16 else Tensor.bfloat16
        self._rules, self._reruns = rules, reruns
        self._report = report
        self._everywhere: dict[int, list[Placement]] = {}  # what is placed, by thread
        self._here = _Here(self._everywhere)
        self._calls: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()

    def in_place(self, root: nn.Module, parts: list[nn.Module]) -> AbstractContextManager[None]:
        """Hold the copies of a tree in its modules; parameters that the forward assigned anew keep their new value."""
        if torch.compiler.is_compiling():
            return traced(self._places(parts), self._to_half)
        for module in self._rules.learn(root, parts):
            self._tell(module)
        places = self._places(parts)
        if not places:
            return NOTHING
        placement = Placement(places, self._copy, closely=self._looks_closely(root))
        return _Call(self, placement, root, self._reruns)

    def _looks_closely(self, root: nn.Module) -> bool:
        """Whether to compare numbers as well: in the first calls that train."""
        calls = self._calls.get(root, 0)
        if calls == COMPARED_CALLS or not root.training:
            return False
        self._calls[root] = calls + 1
        return True

    def in_place_for_backward(self) -> AbstractContextManager[None]:
        """Hold the copies that were kept: activation checkpointing runs parts of a call again in the backward pass."""
        recent = self._here.recent
        return _Pass(self, list(recent.values())) if recent else NOTHING

    def put(self, placement: Placement) -> None:
        """Let stand-ins take their places."""
        placement.place()
        self._here.placed.append(placement)

    def take_back(self, placement: Placement) -> None:
        """Let parameters have their places again."""
        self._here.placed.remove(placement)
        self._withdraw(placement)

    def keep(self, placement: Placement, root: nn.Module) -> None:
        """Keep the copies of a call for the backward pass."""
        if torch.is_grad_enabled() and not in_transform():
            placement.closely = False  # the script's own code is over
            recent = self._here.recent
            recent[weakref.ref(root, lambda dead: recent.pop(dead, None))] = placement

    @contextmanager
    def withdrawn(self) -> Iterator[None]:
        """Show the FP32 parameters in the middle of a call: the script opened an `autocast(enabled=False)` region."""
        self._here.islands += 1
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

    def in_use(self) -> bool:
        """Whether copies are in place in this thread."""
        return bool(self._here.placed)

    def parameter_of(self, tensor: Tensor) -> Tensor | None:
        """Return the parameter of which a tensor is the copy in place, in whatever thread; None of any other tensor."""
        placements = [placement for placed in list(self._everywhere.values()) for placement in placed]
        owned = (placement.own_of(tensor) for placement in placements)
        return next((own for own in owned if own is not None), None)

    def drop(self) -> None:
        """Forget the copies: the weights are about to change, or the graph that they belong to is gone.

        In the middle of a call (a training step that is a module's method, with the optimizer's step in it) the rest of
        the call works on the FP32 parameters, which autocast casts op by op.
        """
        here = self._here
        here.recent.clear()
        for placement in reversed(here.placed):
            self._withdraw(placement)
            placement.clear()

    def _places(self, parts: list[nn.Module]) -> list[tuple[nn.Module, str, Tensor]]:
        keeps, at_use = self._rules.keeps_float32, self._at_use
        places = [
            place
            for module in parts
            if type(module) not in at_use and module._parameters and not keeps(module)
            for place in _float32_of(module)
        ]
        if places:
            # an embedding's weight may be that of a linear layer as well: one copy for both
            placed = {id(own) for _, _, own in places}
            others = [module for module in parts if type(module) in at_use and not keeps(module)]
            places += [p for module in others for p in _float32_of(module) if id(p[2]) in placed]
        return places

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

    def _copy(self, parameter: Tensor) -> Tensor:
        half = self._to_half(parameter)
        if (node := half.grad_fn) is not None:
            node._set_sequence_nr(SOON)  # type: ignore[attr-defined]
        return half

    def _to_half(self, parameter: Tensor) -> Tensor:
        half = self._cast(parameter)
        if parameter.requires_grad or not isinstance(parameter, nn.Parameter):
            # a stranger's tensor (`functional_call`, `vmap`) may have a graph and say that it requires no gradient
            return half
        # `self.counter += 1` assigns what it updated: a module takes nothing but a Parameter there
        return nn.Parameter(half, requires_grad=False)

    def _withdraw(self, placement: Placement) -> None:
        for module, name in placement.withdraw():
            # the forward writes a parameter: it stays FP32 from now on, so that nothing that is written is rounded
            if module is not None:
                self._rules.keep(module)
                kind = type(module).__name__
                self._report(
                    f"written:{kind}.{name}",
                    f"parameter `{name}` of a `{kind}` kept in FP32: its forward pass writes it",
                )


def _float32_of(module: nn.Module) -> list[tuple[nn.Module, str, Tensor]]:
    return [
        (module, name, own)
        for name, own in module._parameters.items()
        if own is not None and own.dtype is torch.float32 and not isinstance(own, UninitializedTensorMixin)
    ]


class _Call:
    """The length of a call of `root`, with its copies in their places."""

    __slots__ = ("_begun", "_copies", "_placement", "_reruns", "_root")

    def __init__(self, copies: WorkingCopies, placement: Placement, root: nn.Module, reruns: Reruns) -> None:
        self._copies, self._placement, self._root, self._reruns = copies, placement, root, reruns

    def __enter__(self) -> None:
        self._begun = self._reruns.begun
        self._copies.put(self._placement)

    def __exit__(self, *error: object) -> None:
        self._copies.take_back(self._placement)
        if self._reruns.open or self._reruns.begun != self._begun:
            self._copies.keep(self._placement, self._root)


class _Pass:
    """The length of a backward pass, with the copies of the calls in their places of which it may run parts again."""

    __slots__ = ("_copies", "_placements")

    def __init__(self, copies: WorkingCopies, placements: list[Placement]) -> None:
        self._copies, self._placements = copies, placements

    def __enter__(self) -> None:
        for placement in self._placements:
            self._copies.put(placement)

    def __exit__(self, *error: object) -> None:
        for placement in reversed(self._placements):
            self._copies.take_back(placement)
