"""The losses that the script minimised, one bounded curve for each call site of backward."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from mpx.monitors.base import Monitor, Pass, is_one_number
from mpx.record.series import Thinned

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Losses"]

PENDING = 64  # losses of an accelerator are read together: one synchronisation for so many passes
MOST_CURVES = 64  # a script that is written as it runs may have call sites without end


class Losses(Monitor):
    """`losses` and `nonfinite_losses` of the record: true values; losses that are not one number are left out."""

    def __init__(self, points: int) -> None:
        self._points = points
        self._curves: dict[str, Thinned] = {}
        self._pending: list[tuple[str, int, Tensor]] = []
        self._nonfinite = 0

    def passed(self, one: Pass) -> None:
        seen = one.seen
        if seen.number is not None:
            self._add(seen.site, one.number, seen.number)
            return
        if not is_one_number(seen.losses):
            return
        (loss,) = seen.losses
        self._pending.append((seen.site, one.number, loss.reshape(()).to(torch.float64, copy=True)))
        if len(self._pending) >= PENDING:
            self._read()

    def _read(self) -> None:
        pending, self._pending = self._pending, []
        if pending:
            values = torch.stack([loss.to(pending[0][2].device) for *_, loss in pending]).tolist()
            for (site, number, _), value in zip(pending, values, strict=True):
                self._add(site, number, value)

    def _add(self, site: str, number: int, value: float) -> None:
        self._nonfinite += not math.isfinite(value)
        if site not in self._curves:
            if len(self._curves) >= MOST_CURVES:
                return
            self._curves[site] = Thinned(self._points)
        self._curves[site].append(number, value)

    def snapshot(self) -> dict[str, Any]:
        self._read()
        curves = []
        for site, curve in self._curves.items():
            numbers, values = curve.to_lists()
            curves.append({"site": site, "backward": numbers, "value": values})
        return {"losses": curves, "nonfinite_losses": self._nonfinite}
