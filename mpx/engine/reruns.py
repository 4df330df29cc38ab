"""What may run parts of a forward pass again inside the backward pass: activation checkpointing of any make.

What was computed in half is computed again by an `autograd.Function` that does so, or by hooks on saved tensors. Where
a call of a module had neither in it or around it, its copies are not needed again. (Hooks that a script sets on tensors
and nodes find the parameters then: outside of a call they are FP32.)
"""

from __future__ import annotations

import threading
from functools import wraps
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Reruns"]


class Reruns(threading.local):
    """Counts them in one thread.

    Attributes:
        open: Those that we are in.
        begun: All that there have been.
    """

    open = 0
    begun = 0

    def begin(self) -> None:
        """A function is applied, or hooks are set."""
        self.open += 1
        self.begun += 1

    def end(self) -> None:
        """It has returned, or they are off again."""
        self.open -= 1

    def wrap_enter(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return the `saved_tensors_hooks.__enter__` of the session."""
        return self._wrap(original, self.begin)

    def wrap_exit(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return its `__exit__`."""
        return self._wrap(original, self.end)

    def _wrap(self, original: Callable[..., Any], then: Callable[[], None]) -> Callable[..., Any]:
        @wraps(original)
        def counted(*args: Any) -> Any:
            result = original(*args)
            if not torch.compiler.is_compiling():
                then()
            return result

        return counted
