"""Peak memory of the process: of the accelerator once it was used, else resident memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mpx.monitors.base import Monitor, Step
from mpx.record.series import Thinned

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["PeakMemory"]


class PeakMemory(Monitor):
    """`memory` of the record; the peak is asked for when a snapshot is due, never in a step."""

    def __init__(self, points: int, peak: Callable[[], tuple[str, int]]) -> None:
        """Make the monitor.

        Args:
            points: Kept of the history.
            peak: Tells the type of the device that counts, and its peak so far in bytes.
        """
        self._peak = peak
        self._history = Thinned(points)
        self._steps = 0

    def stepped(self, step: Step) -> None:
        self._steps += 1

    def snapshot(self) -> dict[str, Any]:
        device, peak_bytes = self._peak()
        self._history.append(self._steps, peak_bytes)
        history = [[step, most] for step, most in zip(*self._history.to_lists(), strict=True)]
        return {"memory": {"peak_bytes": peak_bytes, "device": device, "history": history}}
