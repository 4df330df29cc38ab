"""The passes that the engine runs now, for what happens inside one: hooks of the script divide by its scale."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

from mpx.engine.gradients import rescale

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any

    from torch import Tensor

__all__ = ["Running", "RunningPass"]


class RunningPass:
    """One pass.

    Attributes:
        scale: What its gradients are multiplied by; a tensor where only the device knows it.
        thread: Who asked for it.
        leaves: Those whose gradients it may fill.
        hooks: How many hooks of the script run in it: what they are shown is true already.
        shown: Leaves whose gradient is true for as long, as a hook was given them.
        overflowed: Leaves of which a hook saw it before the end: the hook may have used their gradients up.
        replaced: Gradients that a hook saw, true, and then put away: nobody is to make them true again.
        bad: Leaves whose gradient was not finite at the end.
        zeroed: Whether gradients that no optimizer steps were zeroed, as something had overflowed.
    """

    __slots__ = ("bad", "hooks", "leaves", "overflowed", "replaced", "scale", "shown", "thread", "zeroed")

    def __init__(self, scale: float | Tensor, leaves: list[Tensor]) -> None:
        self.scale, self.leaves = scale, leaves
        self.hooks = 0
        self.shown: list[Tensor] = []
        self.thread = threading.get_ident()
        self.overflowed: list[Tensor] = []
        self.replaced: list[Tensor] = []
        self.bad: list[Tensor] = []
        self.zeroed = False

    @contextmanager
    def of_a_hook(self) -> Iterator[None]:
        """A hook of the script runs a pass of its own: at the scale of this one, which makes true what both leave."""
        hooks, self.hooks = self.hooks, 0
        shown, self.shown = self.shown, []
        rescale(shown, self.scale)
        try:
            yield
        finally:
            rescale(shown, 1.0 / self.scale)
            self.hooks, self.shown = hooks, shown

    def show(self, hook: Callable[..., Any], *true: Any) -> Any:
        """Call a hook of the script with what is true."""
        self.hooks += 1
        try:
            return hook(*true)
        finally:
            self.hooks -= 1


class Running:
    """The running passes of a process. One, but for threads that train side by side: each has its own."""

    def __init__(self) -> None:
        self._passes: list[RunningPass] = []

    def begin(self, scale: float | Tensor, leaves: list[Tensor] | None = None) -> RunningPass:
        """Return a pass that runs until `end`."""
        one = RunningPass(scale, [] if leaves is None else leaves)
        self._passes.append(one)
        return one

    def end(self, one: RunningPass) -> None:
        """The engine has run it, or failed."""
        self._passes.remove(one)

    @property
    def latest(self) -> RunningPass | None:
        """The pass whose hooks fire."""
        if len(self._passes) > 1:
            own = [one for one in self._passes if one.thread == threading.get_ident()]
            if own:
                return own[-1]
        return (
            self._passes[-1] if self._passes else None
        )  # an accelerator's hooks fire in threads of the engine
