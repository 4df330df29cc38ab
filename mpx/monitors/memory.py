"""Peak memory of the process: of the accelerator once it was used, else resident memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from mpx.engine.devices import DEVICES
from mpx.monitors.base import Monitor
from mpx.record.series import Thinned

if TYPE_CHECKING:
    from mpx.engine.stepping import Step

__all__ = ["PeakMemory"]


class PeakMemory(Monitor):
    """`memory` of the record; the peak is asked for when a snapshot is due, never in a step."""

    def __init__(self, points: int) -> None:
        self._history = Thinned(points)
        self._steps = 0

    def stepped(self, step: Step) -> None:
        self._steps += 1

    def snapshot(self) -> dict[str, Any]:
        kind = "cuda" if torch.cuda.is_available() and torch.cuda.is_initialized() else "cpu"
        peak = DEVICES[kind].peak_bytes()
        self._history.append(self._steps, peak)
        history = [[step, most] for step, most in zip(*self._history.to_lists(), strict=True)]
        return {"memory": {"peak_bytes": peak, "device": kind, "history": history}}
