"""Bounded series: what a run of any length leaves behind fits in a fixed number of points."""

from __future__ import annotations

import math
import random

__all__ = ["Durations", "Thinned"]

_LEAST = 4


class Thinned:
    """A series of `(x, y)` points that never holds more than `capacity` of them.

    Every `stride`-th point is kept; when the room is full, every second kept point goes and the stride
    doubles. The first and the last point are always among those returned.
    """

    __slots__ = ("_capacity", "_countdown", "_last_x", "_last_y", "_stride", "_xs", "_ys", "count")

    def __init__(self, capacity: int) -> None:
        if capacity < _LEAST:
            raise ValueError(f"capacity is too small. Expected at least {_LEAST}. Received: {capacity}")
        # One place is reserved for the newest point. An odd number of kept points halves onto the wider grid
        # with the newest of them still on it.
        self._capacity = capacity - 1 if capacity % 2 == 0 else capacity - 2
        self._stride = 1
        self._countdown = 1
        self._xs: list[float] = []
        self._ys: list[float] = []
        self._last_x: float = 0.0
        self._last_y: float = 0.0
        self.count = 0

    def append(self, x: float, y: float) -> None:
        """Take one point in; constant time when amortised."""
        self.count += 1
        self._last_x = x
        self._last_y = y
        self._countdown -= 1
        if self._countdown:
            return
        self._xs.append(x)
        self._ys.append(y)
        if len(self._xs) >= self._capacity:
            del self._xs[1::2]
            del self._ys[1::2]
            self._stride *= 2
        self._countdown = self._stride

    def to_lists(self) -> tuple[list[float], list[float]]:
        """Return the kept `x` and `y` in order, the newest point last; copies, safe to keep."""
        xs, ys = list(self._xs), list(self._ys)
        if self.count and self._countdown != self._stride:
            xs.append(self._last_x)
            ys.append(self._last_y)
        return xs, ys

    def __len__(self) -> int:
        return len(self.to_lists()[0])


class Durations:
    """Median and tail of a stream of durations, from a bounded and reproducible sample.

    The stream is cut into blocks of `stride` and one value of each block is kept, at a pseudo-random place: a
    fixed place would see only the fast or only the slow steps of a loop that alternates, as gradient
    accumulation does. The generator is private and seeded: no random number of the script's is drawn.
    """

    __slots__ = ("_at", "_capacity", "_generator", "_kept", "_pick", "_stride", "count", "total")

    def __init__(self, capacity: int) -> None:
        if capacity < _LEAST:
            raise ValueError(f"capacity is too small. Expected at least {_LEAST}. Received: {capacity}")
        self._capacity = capacity - capacity % 2
        self._generator = random.Random(0)  # noqa: S311  (a sample, not a secret)
        self._kept: list[float] = []
        self._stride = 1
        self._at = 0
        self._pick = 0
        self.count = 0
        self.total = 0.0

    def append(self, duration: float) -> None:
        """Take one duration in; constant time when amortised."""
        self.count += 1
        self.total += duration
        if self._at == self._pick:
            self._kept.append(duration)
        self._at += 1
        if self._at == self._stride:
            self._begin_block()

    def _begin_block(self) -> None:
        if len(self._kept) >= self._capacity:
            choose = self._generator.getrandbits
            self._kept = [self._kept[i + choose(1)] for i in range(0, len(self._kept), 2)]
            self._stride *= 2
        self._at = 0
        self._pick = self._generator.randrange(self._stride) if self._stride > 1 else 0

    def quantile(self, q: float) -> float | None:
        """Return the smallest kept duration that at least `q` (0 to 1) of the kept ones do not exceed."""
        if not self._kept:
            return None
        ordered = sorted(self._kept)
        return ordered[max(0, math.ceil(q * len(ordered)) - 1)]

    def median(self) -> float | None:
        """Return the duration that half of the sample does not exceed; None when empty."""
        return self.quantile(0.5)

    def p95(self) -> float | None:
        """Return the duration that 95 % of the sample does not exceed; None when empty."""
        return self.quantile(0.95)

    def __len__(self) -> int:
        return len(self._kept)
