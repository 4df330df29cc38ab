"""A history in a few characters."""

from __future__ import annotations

import math
from collections.abc import Sequence

__all__ = ["NOT_FINITE", "means", "sparkline", "steps"]

_BARS = "▁▂▃▄▅▆▇█"
NOT_FINITE = "×"  # noqa: RUF001  (a sign that no bar can be taken for)


def sparkline(values: Sequence[float | None]) -> str:
    """Return one character per value: a bar between the least and the greatest, `×` where it is not finite."""  # noqa: RUF002
    finite = [value for value in values if value is not None and math.isfinite(value)]
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    text = ""
    for value in values:
        if value is None:
            text += " "
        elif not math.isfinite(value):
            text += NOT_FINITE
        elif high == low:
            text += _BARS[len(_BARS) // 2 - 1]
        else:
            text += _BARS[round((value - low) / (high - low) * (len(_BARS) - 1))]
    return text


def steps(points: Sequence[Sequence[float]], end: float, width: int) -> list[float | None]:
    """Return the values in force at `width` equally spaced moments, the first and the last point's among them.

    Args:
        points: `[x, y]` with rising x: y holds from x on.
        end: The x of the end, not before the last point.
        width: How many values to return, at least two.
    """
    known = [point for point in points if len(point) == 2]
    if not known:
        return []
    begin, last = known[0][0], max(end, known[-1][0])
    values: list[float | None] = []
    at = 0
    for i in range(width):
        x = begin + (last - begin) * i / (width - 1)
        while at + 1 < len(known) and known[at + 1][0] <= x:
            at += 1
        values.append(known[at][1])
    return values


def means(xs: Sequence[float], ys: Sequence[float], width: int) -> list[float | None]:
    """Return the mean of the points in each of `width` equal stretches; one value that is not finite shows."""
    if not xs or len(xs) != len(ys):
        return []
    width = min(width, len(xs))
    span = (xs[-1] - xs[0]) or 1.0
    stretches: list[list[float]] = [[] for _ in range(width)]
    for x, y in zip(xs, ys, strict=True):
        stretches[min(width - 1, int((x - xs[0]) / span * width))].append(y)
    return [sum(stretch) / len(stretch) if stretch else None for stretch in stretches]
