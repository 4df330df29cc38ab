"""Where non-finite values came from: the loss, a module's forward pass, or the gradients of the scaled loss."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mpx.monitors.base import Monitor, Pass

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

__all__ = ["Overflows"]

MOST_EVENTS = 200  # later ones are only counted


class Overflows(Monitor):
    """The `overflow` events, and the counts of the record."""

    def __init__(
        self, where: Callable[[Sequence[Tensor]], tuple[str | None, str]], emit: Callable[..., None]
    ) -> None:
        """Make the monitor.

        Args:
            where: Names the module and the parameter at which gradients overflowed first, of all that did.
            emit: Writes one event of the record.
        """
        self._where, self._emit = where, emit
        self._counts = {"loss_nan": 0, "forward_inf": 0, "backward_inf": 0}

    def went_wrong(self, one: Pass) -> None:
        kind = str(one.kind)
        self._counts[kind] += 1
        if sum(self._counts.values()) > MOST_EVENTS:
            return
        module, parameter = one.module, None
        if kind == "backward_inf" and one.seen.overflowed:
            module, parameter = self._where(one.seen.overflowed)
        self._emit(
            "overflow",
            backward=one.number,
            step=one.step,
            scale=one.seen.scale,
            kind=kind,
            module=module,
            parameter=parameter,
            site=one.seen.site,
            value=one.seen.number,
        )

    def snapshot(self) -> dict[str, Any]:
        return {"overflow_counts": dict(self._counts)}
