"""The passes that the engine runs now, for what happens inside one: hooks of the script divide by its scale."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from torch import Tensor

__all__ = ["Running", "RunningPass"]


class RunningPass:
    """One pass.

    Attributes:
        scale: What its gradients are multiplied by; a tensor where only the device knows it.
        thread: Who asked for it.
        leaves: Those whose gradients it may fill.
        hooks: How many hooks of the script run in it: what they differentiate is true already.
        overflowed: Leaves of which a hook saw it before the end: the hook may have used their gradients up.
        replaced: Gradients that a hook saw, true, and then put away: nobody is to make them true again.
        bad: Leaves whose gradient was not finite at the end.
        zeroed: Whether gradients that no optimizer steps were zeroed, as something had overflowed.
    """

    __slots__ = ("bad", "hooks", "leaves", "overflowed", "replaced", "scale", "thread", "zeroed")

    def __init__(self, scale: float | Tensor, leaves: list[Tensor]) -> None:
        self.scale, self.leaves = scale, leaves
        self.hooks = 0
        self.thread = threading.get_ident()
        self.overflowed: list[Tensor] = []
        self.replaced: list[Tensor] = []
        self.bad: list[Tensor] = []
        self.zeroed = False

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
