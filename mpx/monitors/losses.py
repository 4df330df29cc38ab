"""The losses that the script minimised, one bounded curve for each call site of backward."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from mpx.monitors.base import Monitor, Pass
from mpx.record.series import Thinned

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Losses"]

PENDING = 64  # losses of an accelerator are read together: one synchronisation for so many passes


class Losses(Monitor):
    """`losses` of the record: true values, never scaled; losses that are not one number are left out."""

    def __init__(self, points: int) -> None:
        self._points = points
        self._curves: dict[str, Thinned] = {}
        self._pending: list[tuple[str, int, Tensor]] = []

    def passed(self, one: Pass) -> None:
        losses = one.seen.losses
        if len(losses) != 1 or losses[0].numel() != 1 or losses[0].is_complex():
            return
        if losses[0].device.type == "cpu":
            self._add(one.seen.site, one.number, float(losses[0]))
            return
        self._pending.append((one.seen.site, one.number, losses[0].reshape(()).to(torch.float64, copy=True)))
        if len(self._pending) >= PENDING:
            self._read()

    def _read(self) -> None:
        if self._pending:
            values = torch.stack([value for *_, value in self._pending]).tolist()
            for (site, number, _), value in zip(self._pending, values, strict=True):
                self._add(site, number, value)
            self._pending.clear()

    def _add(self, site: str, number: int, value: float) -> None:
        if site not in self._curves:
            self._curves[site] = Thinned(self._points)
        self._curves[site].append(number, value)

    def snapshot(self) -> dict[str, Any]:
        self._read()
        curves = []
        for site, curve in self._curves.items():
            numbers, values = curve.to_lists()
            curves.append({"site": site, "backward": numbers, "value": values})
        return {"losses": curves}
