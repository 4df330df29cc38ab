"""One loss laid over another: how far apart, where, and from where on for good."""

from __future__ import annotations

import math
from collections.abc import Sequence

from mpx.record.model import RunRecord
from mpx.record.parts import LossCurve
from mpx.report.curves import at, relative_gap, smoothed
from mpx.report.facts import loss_curve
from mpx.report.wording import percent
from mpx.values import frozen

__all__ = ["Curve", "Gap", "curve_of", "distance", "gap", "mean_curve"]

WARM_UP = 0.1  # of the points: a level that skips its first steps begins a little later


@frozen
class Curve:
    """A smoothed loss at backward passes."""

    passes: list[float]
    values: list[float]


@frozen
class Gap:
    """Distances of a curve from another, as shares of the other; positive `final` is above it."""

    final: float
    largest: float
    largest_at: int
    passes: list[float]
    distances: list[float]

    def begins_above(self, limit: float) -> int | None:
        """Return the pass from which on the curve stays further above the other than `limit`; None if it does not."""
        begins = None
        for x, apart in zip(reversed(self.passes), reversed(self.distances), strict=True):
            if apart <= limit:
                break
            begins = int(x)
        return begins


def curve_of(record: RunRecord, site: str | None = None) -> Curve | None:
    """Return the record's loss, of the call site `site` if it is known there."""
    named: LossCurve | None = next((item for item in record.losses if item.site == site and item.value), None)
    found = named or loss_curve(record)
    if found is None:
        return None
    return Curve([float(x) for x in found.backward], smoothed(found.value))


def mean_curve(curves: Sequence[Curve]) -> Curve | None:
    """Return the mean of curves, at the passes of the first that all of them have."""
    if not curves:
        return None
    last = min(curve.passes[-1] for curve in curves)
    passes = [x for x in curves[0].passes if x <= last] or curves[0].passes[:1]
    return Curve(passes, [sum(at(c.passes, c.values, x) for c in curves) / len(curves) for x in passes])


def gap(curve: Curve, reference: Curve) -> Gap:
    """Return how far `curve` is from `reference`, at the passes that both have."""
    last = min(curve.passes[-1], reference.passes[-1])
    passes = [x for x in reference.passes if x <= last] or reference.passes[:1]
    distances = [
        _signed(at(curve.passes, curve.values, x), at(reference.passes, reference.values, x)) for x in passes
    ]
    settled = max(range(round(WARM_UP * len(passes)), len(passes)), key=lambda i: abs(distances[i]))
    return Gap(distances[-1], abs(distances[settled]), int(passes[settled]), passes, distances)


def distance(share: float) -> str:
    """Return how far apart in words: unlike a part of a whole, a distance can be more than 100 %."""
    return f"{100 * share:,.0f} %" if share > 0.999 else percent(share)


def _signed(value: float, reference: float) -> float:
    apart = relative_gap(value, reference)
    # What is not finite is far above, whatever its sign: it is no lower loss.
    below = math.isfinite(value) and value < reference
    return -apart if below else apart
