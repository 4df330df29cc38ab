"""Optimizer steps: applied, or skipped when a gradient of this optimizer overflowed.

The wrapper sits on the class, outside torch's own (profiling and step hooks) and inside the one that a learning-rate
scheduler puts on the instance. So hooks fire only for steps that are applied, and a scheduler knows that `step` was
called: it gives no warning after a skip.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import wraps
from typing import TYPE_CHECKING, Any

import torch

from mpx.monitors import Step

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer

    from mpx.engine.arrivals import Arrivals
    from mpx.engine.doubts import Doubts
    from mpx.engine.gradients import Flags

__all__ = ["OURS", "Stepping", "wrap_zero_grad", "wrapped_classes"]

Call = Callable[..., Any]
OURS = "_mpx_inner"
PREPARED = "_zero_grad_profile_name"  # an attribute that torch gives to an optimizer together with all others


class _SkipStep(Exception):  # noqa: N818 - control flow out of a closure, never seen by the script
    """The closure of a step went on overflowing."""


class _Here(threading.local):
    depth = 0


class Stepping:
    """Wraps the `step` of every optimizer class."""

    def __init__(
        self,
        flags: Flags,
        arrivals: Arrivals,
        doubts: Doubts,
        *,
        skips: bool,
        attempts: int,
        falls: Callable[[], int],
        before: Callable[[Optimizer], None],
        after: Callable[[Optimizer, Step], None],
        ahead: Callable[[Optimizer, Tensor | None], None],
        around: Callable[[], AbstractContextManager[Any]],
        fused: Callable[[Optimizer], bool],
        bare: Callable[[Call], Call],
    ) -> None:
        """Make the service.

        Args:
            flags: Which gradients overflowed.
            arrivals: Verdicts that are on their way from an accelerator.
            doubts: Decides about a step before they are here.
            skips: Whether a step with an overflowed gradient is skipped.
            attempts: How often a closure is evaluated again, at a scale that falls each time, before a skip.
            falls: Counts how often a loss scale fell: while it does, a closure is worth another evaluation.
            before: Told before each step (the optimizer's guards).
            after: Told of each step.
            ahead: Told of one instead that nobody knows yet to be applied: `found_inf`, with which it was.
            around: Context for the update itself: no autocast.
            fused: Updates in place of a step that needs no argument, if it can, and says whether it did.
            bare: Returns the `step` of a class such that it imports nothing.
        """
        self._flags, self._skips, self._attempts, self._falls = flags, skips, attempts, falls
        self._arrivals, self._doubts = arrivals, doubts
        self._before, self._after, self._ahead, self._around = before, after, ahead, around
        self._fused, self._bare = fused, bare
        self._here = _Here()
        # whether a class moves its parameters before the last evaluation of a closure, as LBFGS and SAM do
        self._moves_early: dict[type, bool] = {}

    def wrap_profile_hook_step(self, original: Callable[[Call], Call]) -> staticmethod[[Call], Call]:
        """Return the `Optimizer.profile_hook_step`; torch applies it to a class at its first instance."""

        @wraps(original)
        def profile_hook_step(step: Call) -> Call:
            return self.wrap_step(original(self._bare(step)))

        return staticmethod(profile_hook_step)

    def wrap_step(self, inner: Call) -> Call:
        """Return the `step` of one class."""
        here, is_compiling = self._here, torch.compiler.is_compiling

        @wraps(inner)
        def step(optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
            # `super().step()`, or an optimizer inside an optimizer, is no step of its own
            if here.depth or is_compiling():
                return inner(optimizer, *args, **kwargs)
            here.depth = 1
            try:
                return self._step(inner, optimizer, args, kwargs)
            finally:
                here.depth = 0

        setattr(step, OURS, inner)
        return step

    @contextmanager
    def _at_depth(self, depth: int) -> Iterator[None]:
        outer, self._here.depth = self._here.depth, depth
        try:
            yield
        finally:
            self._here.depth = outer

    @contextmanager
    def told_by_others(self) -> Iterator[None]:
        """Apply steps and say nothing: the script's own GradScaler decides about them."""
        with self._at_depth(1):
            yield

    def _step(self, inner: Call, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._before(optimizer)
        closure = args[0] if args else kwargs.get("closure")
        if callable(closure):
            rest = {name: value for name, value in kwargs.items() if name != "closure"}
            return self._step_with_closure(inner, optimizer, closure, args[1:], rest)
        if self._arrivals and self._can_go_ahead(optimizer):
            return self._step_ahead(inner, optimizer, args, kwargs)
        overflowed = self.overflowed(optimizer)
        if overflowed and self._skips:
            self._skip(optimizer, overflowed)
            return None
        updates = _has_gradient(optimizer)
        with self._around():
            done = not (args or kwargs) and self._fused(optimizer)
            result = None if done else inner(optimizer, *args, **kwargs)
        if updates:  # a step without any gradient changes nothing: neither an update nor an overflow
            self._after(optimizer, Step(skipped=False))
        return result

    def _can_go_ahead(self, optimizer: Optimizer) -> bool:
        if self._flags.raised:
            return False
        return not self._skips or self._doubts.decide(optimizer)

    def _step_ahead(
        self, inner: Call, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Step before it is known whether gradients overflowed: the optimizer's kernel skips by itself."""
        updates = _has_gradient(optimizer)
        found = self._doubts.found_inf(optimizer) if self._skips else None
        if found is not None:
            optimizer.found_inf = found  # type: ignore[attr-defined]
        try:
            with self._around():
                result = inner(optimizer, *args, **kwargs)
        finally:
            if found is not None:
                del optimizer.found_inf  # type: ignore[attr-defined]
        if updates:
            self._ahead(optimizer, found)
        return result

    def skipped(self, optimizer: Optimizer) -> None:
        """A step of before is known now to have been skipped."""
        self._flags.spend(self.overflowed(optimizer))

    def _step_with_closure(
        self,
        inner: Call,
        optimizer: Optimizer,
        closure: Call,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        kind = type(optimizer)
        copies = (
            [(parameter, parameter.detach().clone()) for parameter in _parameters(optimizer)]
            if self._skips and self._moves_early.get(kind, True)
            else []
        )
        evaluations = 0
        moved = False

        def guarded() -> Any:
            nonlocal evaluations, moved
            moved = moved or any(not torch.equal(parameter, before) for parameter, before in copies)
            evaluations += 1
            with self._at_depth(0):  # the script's code: an optimizer that steps in it is no part of this one
                return self._evaluate(optimizer, closure)

        try:
            with self._around():
                result = inner(optimizer, guarded, *args, **kwargs)
        except _SkipStep:
            with torch.no_grad():
                for parameter, before in copies:
                    parameter.copy_(before)
            self._skip(optimizer, self.overflowed(optimizer))
            return None
        if (
            kind is not torch.optim.LBFGS
        ):  # which may end after one evaluation, and move between two the next time
            self._moves_early[kind] = moved or evaluations > 1
        self._after(optimizer, Step(skipped=False))
        return result

    def _evaluate(self, optimizer: Optimizer, closure: Call) -> Any:
        """Call a closure, again while it overflows and the scale falls.

        Raises:
            _SkipStep: It overflows for another reason, or for too long.
        """
        for _ in range(1 + self._attempts):
            falls = self._falls()
            loss = closure()
            if not (self._skips and self.overflowed(optimizer)):
                return loss
            if self._falls() == falls:
                break
        raise _SkipStep

    def _skip(self, optimizer: Optimizer, overflowed: list[Tensor]) -> None:
        self._flags.spend(overflowed)
        self._after(optimizer, Step(skipped=True))

    def overflowed(self, optimizer: Optimizer) -> list[Tensor]:
        """Return the parameters of an optimizer whose gradient overflowed, and is as the pass left it."""
        if self._arrivals:
            self._arrivals.wait()
        return self._flags.reach(_parameters(optimizer)) if self._flags.raised else []

    def will_skip(self, grads: Sequence[Tensor]) -> bool:
        """Return whether gradients are not finite by the loss scale alone, so that their step is to be skipped."""
        self._arrivals.wait()
        return self._skips and self._flags.explain(grads)


def _parameters(optimizer: Optimizer) -> Iterator[Tensor]:
    return (parameter for group in optimizer.param_groups for parameter in group["params"])


def _has_gradient(optimizer: Optimizer) -> bool:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                return True
    return False


def wrap_zero_grad(original: Callable[..., None]) -> Callable[..., None]:
    """Return the `Optimizer.zero_grad` of the session: most of torch's time goes into a mark for profilers."""
    is_compiling, is_profiled = torch.compiler.is_compiling, torch._C._autograd._profiler_enabled

    @wraps(original)
    def zero_grad(optimizer: Optimizer, set_to_none: bool = True) -> None:  # noqa: FBT001, FBT002 - torch's signature
        # a compiler that looks at this goes on in torch's own
        if is_compiling() or set_to_none is not True or is_profiled() or not hasattr(optimizer, PREPARED):
            original(optimizer, set_to_none)
            return
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad = None

    return zero_grad


def wrapped_classes(root: type) -> list[type]:
    """Return the optimizer classes, below and including `root`, whose own `step` torch has wrapped already."""
    found, stack = [], [root]
    while stack:
        kind = stack.pop()
        stack.extend(kind.__subclasses__())
        if getattr(kind.__dict__.get("step"), "hooked", False):
            found.append(kind)
    return found
