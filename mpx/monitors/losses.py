"""The losses that the script minimised, one bounded curve for each call site of backward."""

from __future__ import annotations

import math
from typing import Any

from mpx.monitors.base import Monitor, Pass
from mpx.record.series import Thinned

__all__ = ["Losses"]

MOST_CURVES = 64  # a script that is written as it runs may have call sites without end


class Losses(Monitor):
    """`losses` and `nonfinite_losses` of the record: true values; losses that are not one number are left out."""

    def __init__(self, points: int) -> None:
        self._points = points
        self._curves: dict[str, Thinned] = {}
        self._nonfinite = 0

    def passed(self, one: Pass) -> None:
        site, value = one.seen.site, one.seen.number
        if value is None:
            return
        self._nonfinite += not math.isfinite(value)
        if site not in self._curves:
            if len(self._curves) >= MOST_CURVES:
                return
            self._curves[site] = Thinned(self._points)
        self._curves[site].append(one.number, value)

    def snapshot(self) -> dict[str, Any]:
        curves = []
        for site, curve in self._curves.items():
            numbers, values = curve.to_lists()
            curves.append({"site": site, "backward": numbers, "value": values})
        return {"losses": curves, "nonfinite_losses": self._nonfinite}
