"""How fast it trains: the time from one optimizer step to the next."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from mpx.monitors.base import Monitor
from mpx.record.series import Durations, Thinned

if TYPE_CHECKING:
    from torch.optim import Optimizer

__all__ = ["Throughput"]

SAMPLE = 512
WARM_UP = 2  # steps: allocations, lazy initialisation, compilation


class Throughput(Monitor):
    """`throughput` of the record, from step to step without the first ones."""

    def __init__(self, points: int) -> None:
        self._durations = Durations(SAMPLE)
        self._history = Thinned(points)
        self._last: float | None = None
        self._seen = 0

    def asked_to_step(self, optimizer: Optimizer) -> None:
        now = time.perf_counter()
        if self._last is not None and self._seen >= WARM_UP:
            took = now - self._last
            self._durations.append(took)
            self._history.append(self._seen + 1, took)
        self._last = now
        self._seen += 1

    def snapshot(self) -> dict[str, Any]:
        median, p95 = self._durations.median(), self._durations.p95()
        if median is None or p95 is None:
            return {"throughput": None}
        mean = self._durations.total / self._durations.count
        history = zip(*self._history.to_lists(), strict=True)
        return {
            "throughput": {
                "steps_per_s": 1.0 / mean,
                "step_ms": {"median": 1000.0 * median, "p95": 1000.0 * p95},
                "history": [[step, round(1000.0 * took, 4)] for step, took in history],
            }
        }
