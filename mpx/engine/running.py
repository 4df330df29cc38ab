"""The passes that the engine runs now, for what happens inside one: hooks of the script divide by its scale."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Running", "RunningPass"]


@dataclass(eq=False)
class RunningPass:
    """One pass.

    Attributes:
        scale: What its gradients are multiplied by.
        overflowed: Leaves of which a hook saw it before the end: the hook may have used their gradients up.
        replaced: Gradients that a hook saw, true, and then put away: nobody is to make them true again.
        bad: Leaves whose gradient was not finite at the end.
        zeroed: Whether gradients that no optimizer steps were zeroed, as something had overflowed.
    """

    scale: float
    overflowed: list[Tensor] = field(default_factory=list)
    replaced: list[Tensor] = field(default_factory=list)
    bad: list[Tensor] = field(default_factory=list)
    zeroed: bool = False


class Running:
    """The running passes of a process. One, but for threads that train side by side: each has its own."""

    def __init__(self) -> None:
        self._passes: list[tuple[int, RunningPass]] = []  # with the thread that asked for it

    @contextmanager
    def at(self, scale: float) -> Iterator[RunningPass]:
        """Hold a pass for as long as the engine runs it."""
        one = RunningPass(scale)
        entry = (threading.get_ident(), one)
        self._passes.append(entry)
        try:
            yield one
        finally:
            self._passes.remove(entry)

    @property
    def latest(self) -> RunningPass | None:
        """The pass whose hooks fire."""
        own = [one for thread, one in self._passes if thread == threading.get_ident()]
        if own:
            return own[-1]
        return (
            self._passes[-1][1] if self._passes else None
        )  # an accelerator's hooks fire in threads of the engine
