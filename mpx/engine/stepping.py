"""Optimizer steps: applied, or skipped when a gradient of this optimizer overflowed.

The wrapper sits on the class, outside torch's own (profiling and step hooks) and inside the one that a learning-rate scheduler puts on the instance.
So hooks fire only for steps that are applied, and a scheduler knows that `step` was called: it gives no warning after a skip.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import wraps
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer

    from mpx.engine.gradients import Flags

__all__ = ["Step", "Stepping"]

Call = Callable[..., Any]
OURS = "_mpx_inner"


@dataclass(frozen=True)
class Step:
    """One call of `Optimizer.step`.

    Attributes:
        optimizer: Whose.
        skipped: Whether it was skipped.
        overflowed: The parameters whose gradients were not finite.
    """

    optimizer: Optimizer
    skipped: bool
    overflowed: list[Tensor]


class _SkipStep(Exception):  # noqa: N818 - control flow out of a closure, never seen by the script
    """The closure of a step went on overflowing."""


class _Here(threading.local):
    depth = 0


class Stepping:
    """Wraps the `step` of every optimizer class."""

    def __init__(
        self,
        flags: Flags,
        *,
        skips: bool,
        attempts: int,
        before: Callable[[Optimizer], None],
        after: Callable[[Step], None],
        around: Callable[[], AbstractContextManager[Any]],
    ) -> None:
        """Make the service.

        Args:
            flags: Which gradients overflowed.
            skips: Whether a step with an overflowed gradient is skipped.
            attempts: How often a closure is evaluated again, at a scale that falls each time, before the step is skipped.
            before: Told before each step (the optimizer's guards).
            after: Told of each step.
            around: Context for the update itself: no autocast.
        """
        self._flags, self._skips, self._attempts = flags, skips, attempts
        self._before, self._after, self._around = before, after, around
        self._here = _Here()

    def wrap_profile_hook_step(self, original: Callable[[Call], Call]) -> staticmethod[[Call], Call]:
        """Return the `Optimizer.profile_hook_step` of the session; torch applies it to a class at its first instance."""

        @wraps(original)
        def profile_hook_step(step: Call) -> Call:
            return self.wrap_step(original(step))

        return staticmethod(profile_hook_step)

    def wrap_step(self, inner: Call) -> Call:
        """Return the `step` of one class."""

        @wraps(inner)
        def step(optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
            if self._here.depth or torch.compiler.is_compiling():
                return inner(optimizer, *args, **kwargs)  # `super().step()`, or an optimizer inside an optimizer: one step
            self._here.depth += 1
            try:
                return self._step(inner, optimizer, args, kwargs)
            finally:
                self._here.depth -= 1

        setattr(step, OURS, inner)
        return step

    def _step(self, inner: Call, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._before(optimizer)
        closure = args[0] if args else kwargs.get("closure")
        if callable(closure):
            return self._step_with_closure(inner, optimizer, closure, args[1:], {k: v for k, v in kwargs.items() if k != "closure"})
        overflowed = self._overflowed(optimizer)
        if overflowed and self._skips:
            self._after(Step(optimizer, skipped=True, overflowed=overflowed))
            return None
        idle = all(parameter.grad is None for group in optimizer.param_groups for parameter in group["params"])
        with self._around():
            result = inner(optimizer, *args, **kwargs)
        if not idle:  # a step without any gradient changes nothing: neither an update nor an overflow
            self._after(Step(optimizer, skipped=False, overflowed=overflowed))
        return result

    def _step_with_closure(self, inner: Call, optimizer: Optimizer, closure: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        def guarded() -> Any:
            loss = closure()
            for _ in range(self._attempts if self._skips else 0):
                if not self._overflowed(optimizer):
                    return loss
                loss = closure()
            if self._skips and self._overflowed(optimizer):
                raise _SkipStep
            return loss

        try:
            with self._around():
                result = inner(optimizer, guarded, *args, **kwargs)
        except _SkipStep:
            self._after(Step(optimizer, skipped=True, overflowed=self._overflowed(optimizer)))
            return None
        self._after(Step(optimizer, skipped=False, overflowed=self._overflowed(optimizer)))
        return result

    def _overflowed(self, optimizer: Optimizer) -> list[Tensor]:
        return self._flags.among(p for group in optimizer.param_groups for p in group["params"])


def wrapped_classes(root: type[Optimizer]) -> list[type[Optimizer]]:
    """Return the optimizer classes, below and including `root`, whose own `step` torch has wrapped already."""
    found, stack = [], [root]
    while stack:
        kind = stack.pop()
        stack.extend(kind.__subclasses__())
        if getattr(kind.__dict__.get("step"), "hooked", False):
            found.append(kind)
    return found
