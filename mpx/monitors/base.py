"""What a monitor is: a few moments that it may look at, and a part of the record that it fills."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

__all__ = ["Monitor", "Pass", "Seen", "Shared", "Step", "is_one_number"]


# Some are made once a pass or a step, and therefore of the kind that is made fastest.


class Shared(NamedTuple):
    """What ranks that share gradients make of a pass together.

    Attributes:
        finite: Whether the scale was low enough; None where the pass says nothing about that.
        loss_finite: Whether every loss was.
        alone: Leaves that overflowed here and are no other rank's.
    """

    finite: bool | None
    loss_finite: bool
    alone: tuple[Tensor, ...] = ()


@dataclass(slots=True)
class Seen:
    """What one backward pass showed.

    Attributes:
        site: Call site in the script.
        scale: The loss scale that it ran with.
        losses: The detached roots, true; empty where `number` is known from the beginning.
        loss_finite: Whether every root was finite; True where nobody looked (O0 on an accelerator, to save the wait).
        overflowed: Leaves whose gradients became infinite or NaN in this pass. Empty in a window that had overflowed
            before: the first overflow speaks for all.
        sticky: Whether the pass added to a gradient that had overflowed before.
        shared: What the ranks that share gradients agreed on; None where this process trains for itself.
        number: The loss, where it is one real number and somebody has read it.
    """

    site: str
    scale: float
    losses: tuple[Tensor, ...]
    loss_finite: bool
    overflowed: tuple[Tensor, ...] = ()
    sticky: bool = False
    shared: Shared | None = None
    number: float | None = None

    @property
    def value(self) -> float | None:
        """The loss, where it is one real number. Synchronises with an accelerator, the first time."""
        if self.number is None and is_one_number(self.losses):
            self.number = float(self.losses[0].item())
        return self.number


def is_one_number(losses: tuple[Tensor, ...]) -> bool:
    """Whether the roots of a pass are one real number."""
    return len(losses) == 1 and losses[0].numel() == 1 and not losses[0].is_complex()


@dataclass(slots=True)
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


@dataclass(slots=True)
class Step:
    """One call of `Optimizer.step`.

    Attributes:
        optimizer: Whose.
        skipped: Whether it was skipped.
        overflowed: The parameters whose gradients were not finite.
    """

    optimizer: Optimizer
    skipped: bool
    overflowed: tuple[Tensor, ...] = ()


class Monitor:
    """Base of the monitors: looks at nothing and adds nothing."""

    def called(self, root: nn.Module) -> None:
        """An outermost module call begins."""

    def around(self, root: nn.Module) -> AbstractContextManager[Any]:
        """Return a context for the work of an outermost call."""
        return nullcontext()

    def passed(self, one: Pass) -> None:
        """A backward pass was judged."""

    def went_wrong(self, one: Pass) -> None:
        """That pass was not clean."""

    def stepped(self, step: Step) -> None:
        """An optimizer stepped, or was made to skip."""

    def snapshot(self) -> dict[str, Any]:
        """Return this monitor's part of the cumulative `snapshot` event."""
        return {}
