"""Where non-finite values came from: the loss, a module's forward pass, or the gradients of the scaled loss."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mpx.monitors.base import Monitor, Pass

if TYPE_CHECKING:
    from collections.abc import Callable

    from mpx.engine.names import Names

__all__ = ["Overflows"]

MOST_EVENTS = 200  # later ones are only counted


class Overflows(Monitor):
    """The `overflow` events, and the counts of the record."""

    def __init__(self, names: Names, emit: Callable[..., None]) -> None:
        self._names, self._emit = names, emit
        self._counts = {"loss_nan": 0, "forward_inf": 0, "backward_inf": 0}
        self._nonfinite_losses = 0

    def passed(self, one: Pass) -> None:
        self._nonfinite_losses += not one.seen.loss_finite if one.kind in ("loss_nan", "forward_inf") else 0
        if one.kind is None:
            return
        self._counts[one.kind] += 1
        if sum(self._counts.values()) > MOST_EVENTS:
            return
        module, parameter = one.module, None
        if one.kind == "backward_inf" and one.seen.overflowed:
            module, parameter = self._names.of_parameter(self._names.nearest_to_loss(one.seen.overflowed))
        value = one.seen.value
        self._emit(
            "overflow",
            backward=one.number,
            step=one.step,
            scale=one.seen.scale,
            kind=one.kind,
            module=module,
            parameter=parameter,
            site=one.seen.site,
            value=value,
        )

    def snapshot(self) -> dict[str, Any]:
        return {"overflow_counts": dict(self._counts), "nonfinite_losses": self._nonfinite_losses}
