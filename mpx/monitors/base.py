"""What a monitor is: a few moments that it may look at, and a part of the record that it fills."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

__all__ = ["Monitor", "Pass", "Seen", "Shared", "Step"]


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
        loss_finite: Whether every root was finite.
        overflowed: Leaves whose gradients became infinite or NaN in this pass. Empty in a window that had overflowed
            before: the first overflow speaks for all.
        sticky: Whether the pass added to a gradient that had overflowed before.
        shared: What the ranks that share gradients agreed on; None where this process trains for itself.
        number: The loss, true, where it is one real number.
        mended: Modules whose running statistics were poisoned before it and put back after it; None where nobody has
            looked yet.
    """

    site: str
    scale: float
    loss_finite: bool
    overflowed: tuple[Tensor, ...] = ()
    sticky: bool = False
    shared: Shared | None = None
    number: float | None = None
    mended: tuple[nn.Module, ...] | None = None


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
        skipped: Whether it was skipped.
    """

    skipped: bool


class Monitor:
    """Base of the monitors: looks at nothing and adds nothing."""

    def called(self, root: nn.Module) -> None:
        """An outermost module call begins."""

    def around(self, root: nn.Module) -> AbstractContextManager[Any]:
        """Return a context for the work of an outermost call."""
        return nullcontext()

    def ran(self, number: int) -> None:
        """Backward pass `number` has run; `passed` comes once it is judged.

        Told only of a pass whose verdict is on its way from an accelerator: by then its gradients may be gone.
        """

    def passed(self, one: Pass) -> None:
        """A backward pass was judged."""

    def went_wrong(self, one: Pass) -> None:
        """That pass was not clean."""

    def asked_to_step(self, optimizer: Optimizer) -> None:
        """An optimizer was asked to step; `stepped` comes once it is known whether it did."""

    def stepped(self, step: Step) -> None:
        """The optimizer that was asked first, of those of which this was not known, stepped, or was made to skip."""

    def snapshot(self) -> dict[str, Any]:
        """Return this monitor's part of the cumulative `snapshot` event."""
        return {}
