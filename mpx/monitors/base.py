"""What a monitor is: a few moments that it may look at, and a part of the record that it fills."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

    from mpx.engine.backward import Seen
    from mpx.engine.stepping import Step

__all__ = ["Monitor", "Pass"]


@dataclass(frozen=True)
class Pass:
    """A judged backward pass.

    Attributes:
        number: Counted from 1.
        step: Optimizer steps attempted before it.
        seen: What it showed.
        kind: None when clean; else "backward_inf", "forward_inf" or "loss_nan" as in the record.
        module: The module whose forward pass went wrong, for "forward_inf".
    """

    number: int
    step: int
    seen: Seen
    kind: str | None
    module: str | None = None


class Monitor:
    """Base of the monitors: looks at nothing and adds nothing."""

    def called(self, root: nn.Module) -> None:
        """An outermost module call begins."""

    def around(self, root: nn.Module) -> AbstractContextManager[Any]:
        """Return a context for the work of an outermost call."""
        return nullcontext()

    def passed(self, one: Pass) -> None:
        """A backward pass was judged."""

    def stepped(self, step: Step) -> None:
        """An optimizer stepped, or was made to skip."""

    def snapshot(self) -> dict[str, Any]:
        """Return this monitor's part of the cumulative `snapshot` event."""
        return {}
