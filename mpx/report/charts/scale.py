"""The loss scale over the run, with what moved it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

from mpx.record.model import RunRecord
from mpx.record.parts import Scaler
from mpx.report import wording
from mpx.report.charts.loss import LINES_DRAWN
from mpx.report.charts.plot import Axis, Chart, Line, Mark, Plot, Point, finite, pairs
from mpx.report.facts import own_overflows, skips_nonfinite
from mpx.report.wording import amount, times

__all__ = ["loss_scales"]


def loss_scales(record: RunRecord) -> Iterator[Chart]:
    """Yield the chart of the loss scales; nothing where no loss was scaled."""
    drawn = sorted(record.scalers, key=lambda item: -item.overflows)[:LINES_DRAWN]
    series = [(item, _history(item)) for item in drawn]
    if not series or not record.backwards:
        return
    end = max(float(record.backwards), *(points[-1][0] for _, points in series))
    lines = tuple(
        Line(item.site or "scale", (*points, (end, item.final)), stairs=True) for item, points in series
    )
    changes = tuple(mark for item, points in series for mark in _changes(item, points))
    rows = [
        (item.site or "?", amount(int(at)), wording.scale(value))
        for item in record.scalers
        for at, value in _history(item)
    ]
    yield Chart(
        id="loss-scale",
        title="Loss scale",
        summary=" ".join(_sentence(item) for item in drawn),
        plot=Plot(
            unit="backward pass",
            end=end,
            y=Axis("loss scale, in powers of two", "binary", wording.scale),
            lines=tuple(line for line in lines if all(y > 0 for _, y in line.points)),
            marks=changes + tuple(_overflows(record, {item.site for item in drawn})),
        ),
        table=(("backward at", "from backward pass", "loss scale"), *rows),
    )


def _history(item: Scaler) -> tuple[Point, ...]:
    points = tuple(point for point in pairs(item.history) if point[1] > 0)
    return points if points and points[0][0] <= 1 else ((0.0, item.init), *points)


def _changes(item: Scaler, points: Sequence[Point]) -> Iterator[Mark]:
    for (_, before), (at, after) in pairwise(points):
        if after != before:
            kind, verb = ("raised", "raised") if after > before else ("lowered", "lowered")
            yield Mark(kind, at, after, f"{verb} to {wording.scale(after)}")


def _overflows(record: RunRecord, sites: set[str]) -> Iterator[Mark]:
    kind = "skipped" if skips_nonfinite(record) else "overflow"
    said = "step skipped" if kind == "skipped" else "overflow"
    for item in own_overflows(record):
        if (
            item.kind == "backward_inf"
            and item.site in sites
            and finite(item.scale)
            and (item.scale or 0) > 0
        ):
            place = item.parameter or item.module
            text = f"{said}, in the gradient of {place}" if place else said
            yield Mark(kind, float(item.backward), item.scale or 1.0, text)


def _sentence(item: Scaler) -> str:
    changes = {"raised": item.growths, "lowered": item.backoffs}
    told = [f"{verb} {times(number)}" for verb, number in changes.items() if number]
    changed = ", ".join(told) or "never changed"
    ends = f"{wording.scale(item.init)} to {wording.scale(item.final)}, lowest {wording.scale(item.min)}"
    return f"The loss scale of `{item.site or '?'}` goes from {ends}; {changed}."
