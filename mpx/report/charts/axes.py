"""Axes: from values to a place between 0 and 1, and the values that are written beside them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from mpx.values import frozen

__all__ = ["KINDS", "Scale", "counted"]

MOST_TICKS = 6
_DECADE = (1, 2, 5)
_LEAST = 1e-300  # smaller is 0: there is no room for a step below it
_LEAST_RANGE = 1e-5  # less, in relation to the values, is a flat line: ticks would all read the same
_EXPONENTS = (-1022, 1022)


@frozen
class Scale:
    """Values from `low` to `high`, seen through `through` (a logarithm, or nothing), with its ticks."""

    low: float
    high: float
    ticks: tuple[float, ...]
    through: Callable[[float], float] = float

    def at(self, value: float) -> float:
        """Return the place of `value`, 0 at `low` and 1 at `high`."""
        low, high = self.through(self.low), self.through(self.high)
        return (self.through(value) - low) / ((high - low) or 1.0)


def counted(begin: float, end: float) -> Scale:
    """Return a straight axis from `begin` to `end`, exactly, for what comes in whole numbers."""
    end = max(end, begin + 1.0)
    step = max(1.0, _round_step((end - begin) / MOST_TICKS))
    ticks = tuple(number * step for number in range(math.ceil(begin / step), math.floor(end / step) + 1))
    return Scale(begin, end, ticks)


def linear(values: Sequence[float]) -> Scale:
    """Return a straight axis around `values`, from one round number to another."""
    low, high = min(values, default=0.0), max(values, default=1.0)
    size = max(abs(low), abs(high))
    if high - low <= _LEAST_RANGE * size or size < _LEAST:
        room = size / 2 if size > _LEAST else 1.0
        low, high = low - room, high + room
    step = _round_step((high - low) / MOST_TICKS)
    first, last = math.floor(low / step), math.ceil(high / step)
    ticks = tuple(number * step for number in range(first, last + 1))
    return Scale(ticks[0], ticks[-1], ticks)


def from_zero(values: Sequence[float]) -> Scale:
    """Return a straight axis on which lengths compare."""
    return linear([0.0, *values])


def memory(values: Sequence[float]) -> Scale:
    """Return a straight axis from zero that is round in KiB, MiB or GiB."""
    unit = 1024.0 ** max(0, int(math.log(max([1.0, *values]), 1024)))
    inner = from_zero([value / unit for value in values])
    return Scale(inner.low * unit, inner.high * unit, tuple(tick * unit for tick in inner.ticks))


def binary(values: Sequence[float]) -> Scale:
    """Return an axis of powers of two."""
    exponents = [math.log2(value) for value in values if value > 0]
    low, high = math.floor(min(exponents, default=0.0)), math.ceil(max(exponents, default=1.0))
    low, high = (low - 1, high + 1) if high - low < 2 else (low, high)
    low, high = max(low, _EXPONENTS[0]), min(high, _EXPONENTS[1])
    stride = math.ceil((high - low) / MOST_TICKS)
    ticks = tuple(2.0**exponent for exponent in range(low, high + 1) if exponent % stride == 0)
    return Scale(2.0**low, 2.0**high, ticks, math.log2)


def decimal(values: Sequence[float]) -> Scale:
    """Return an axis of powers of ten."""
    positive = [value for value in values if value > _LEAST] or [1.0]
    low, high = math.floor(math.log10(min(positive))), math.ceil(math.log10(max(positive)))
    every = [digit * 10.0**power for power in range(low, high + 1) for digit in _DECADE]
    first = max(value for value in every if value <= min(positive) * (1 + 1e-9))
    last = min(value for value in every if value >= max(positive) * (1 - 1e-9))
    ticks = [value for value in every if first <= value <= last]
    if len(ticks) > MOST_TICKS + 2:
        ticks = [10.0**power for power in range(low, high + 1) if first <= 10.0**power <= last]
    ticks = ticks[:: math.ceil(len(ticks) / MOST_TICKS)]
    return Scale(first, last if last > first else 10 * first, tuple(ticks), math.log10)


def rows(values: Sequence[float]) -> Scale:
    """Return an axis of names: value 0 is the first, at the top."""
    last = max(values, default=0.0)
    return Scale(last + 0.5, -0.5, tuple(range(int(last) + 1)))


KINDS: Mapping[str, Callable[[Sequence[float]], Scale]] = {
    "linear": linear,
    "from-zero": from_zero,
    "memory": memory,
    "binary": binary,
    "decimal": decimal,
    "rows": rows,
}


def _round_step(least: float) -> float:
    power = 10.0 ** math.floor(math.log10(least))
    return next(digit * power for digit in (1, 2, 5, 10) if digit * power >= least * (1 - 1e-9))
