"""The loss of a run as a curve that can be laid over another's."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence

from mpx.record.model import RunRecord
from mpx.report.facts import loss_curve

__all__ = ["at", "relative_gap", "smoothed", "tail_loss"]

TAIL = 0.1  # of the points: the last batch alone says little about where a run ended
SMOOTHED_OVER = 0.05  # of the points, on each side


def tail_loss(record: RunRecord) -> float | None:
    """Return the mean of the last tenth of the loss; None when there is none, NaN or infinite when it ended so."""
    curve = loss_curve(record)
    if curve is None:
        return None
    tail = curve.value[-max(1, round(TAIL * len(curve.value))) :]
    return sum(tail) / len(tail)


def relative_gap(value: float, reference: float) -> float:
    """Return how far `value` is from `reference`, as a share of it; infinite when one of them alone is not finite."""
    if not (math.isfinite(value) and math.isfinite(reference)):
        return 0.0 if not math.isfinite(value) and not math.isfinite(reference) else math.inf
    if value == reference:
        return 0.0
    return abs(value - reference) / abs(reference) if reference else math.inf


def smoothed(values: Sequence[float]) -> list[float]:
    """Return the mean of each value and its neighbours: batches differ, and a curve is about what they share."""
    reach = round(SMOOTHED_OVER * len(values))
    windows = (values[max(0, i - reach) : i + reach + 1] for i in range(len(values)))
    return [sum(window) / len(window) for window in windows]


def at(xs: Sequence[float], ys: Sequence[float], x: float) -> float:
    """Return the curve's value at `x`, on the straight line between the points beside it."""
    right = bisect_left(xs, x)
    if right == len(xs):
        return ys[-1]
    if xs[right] == x or right == 0:
        return ys[right]
    left = right - 1
    part = (x - xs[left]) / (xs[right] - xs[left])
    return ys[left] + part * (ys[right] - ys[left])
