"""A comparison as charts: the losses laid over one another, and how far each is from the baseline's."""

from __future__ import annotations

import math
from collections.abc import Iterator

from mpx.report import wording
from mpx.report.charts.loss import LINES_DRAWN, is_wide
from mpx.report.charts.plot import Axis, Chart, Level, Line, Mark, Plot, Point, finite
from mpx.report.compare.gaps import Curve, distance, gap
from mpx.report.compare.levels import Comparison, LevelResult
from mpx.report.compare.weigh import loss_limit
from mpx.report.curves import at
from mpx.report.wording import amount, code, count

__all__ = ["comparison_charts"]


def comparison_charts(comparison: Comparison) -> list[Chart]:
    """Return every chart that there is something for."""
    drawn = [result for result in comparison.levels if result.curve][:LINES_DRAWN]
    return [*_losses(comparison, drawn), *_gaps(comparison, drawn)]


def _losses(comparison: Comparison, drawn: list[LevelResult]) -> Iterator[Chart]:
    values = [value for result in drawn for value in result.curve if finite(value)]
    if not values:
        return
    rest = sum(bool(result.curve) for result in comparison.levels) - len(drawn)
    yield Chart(
        id="losses",
        title="Losses over one another",
        summary=" ".join(_goes(result) for result in drawn),
        plot=Plot(
            unit="backward pass",
            end=max(result.passes[-1] for result in drawn),
            y=Axis("loss, smoothed", "decimal" if is_wide(values) else "linear", wording.loss),
            lines=tuple(Line(result.level, _points(result.passes, result.curve)) for result in drawn),
            marks=tuple(_beginnings(comparison, drawn)),
        ),
        table=(
            ("level", "backward pass", "loss"),
            *(
                (result.level, amount(int(x)), wording.loss(y))
                for result in comparison.levels
                for x, y in zip(result.passes, result.curve, strict=True)
            ),
        ),
        note=f"{count(rest, 'more level')} in the table." if rest > 0 else "",
    )


def _gaps(comparison: Comparison, drawn: list[LevelResult]) -> Iterator[Chart]:
    base = next((result for result in drawn if result.level == comparison.baseline), None)
    if base is None:
        return
    reference = Curve(base.passes, base.curve)
    apart = {
        result.level: gap(Curve(result.passes, result.curve), reference) for result in drawn
    }  # also of the baseline, which is 0: a level keeps its colour
    others = {level: one for level, one in apart.items() if level != comparison.baseline}
    if not any(finite(value) for one in others.values() for value in one.distances):
        return
    yield Chart(
        id="gaps",
        title=f"Distance from the loss of {comparison.baseline}",
        summary=" ".join(
            f"The loss of {code(level)} ends {_far(one.final)} {code(comparison.baseline)}."
            for level, one in others.items()
        ),
        plot=Plot(
            unit="backward pass",
            end=max(one.passes[-1] for one in apart.values()),
            y=Axis("above the baseline, as a share of it", "linear", _share),
            lines=tuple(Line(level, _points(one.passes, one.distances)) for level, one in apart.items()),
            levels=(Level("allowed at the end:", loss_limit(comparison.settings, comparison.noise)),),
        ),
        table=(
            ("level", "backward pass", "distance"),
            *(
                (level, amount(int(x)), _share(y))
                for level, one in others.items()
                for x, y in zip(one.passes, one.distances, strict=True)
            ),
        ),
    )


def _points(xs: list[float], ys: list[float]) -> tuple[Point, ...]:
    # What is not finite stays in as NaN, where the line breaks.
    return tuple((x, y if finite(y) else math.nan) for x, y in zip(xs, ys, strict=True))


def _beginnings(comparison: Comparison, drawn: list[LevelResult]) -> Iterator[Mark]:
    """Yield a mark on a level's curve where something that was found begins."""
    curves = {result.level: result for result in drawn}
    for issue in comparison.issues:
        result = curves.get(issue.level)
        if result is not None and issue.at is not None and issue.at <= result.passes[-1]:
            y = at(result.passes, result.curve, issue.at)
            if finite(y):
                yield Mark("begins", float(issue.at), y, f"{issue.level}: {issue.id} begins")


def _goes(result: LevelResult) -> str:
    first, last = wording.loss(result.curve[0]), wording.loss(result.curve[-1])
    return f"The loss of {code(result.level)} goes from {first} to {last}."


def _far(share: float) -> str:
    if not math.isfinite(share):
        return "not finite, unlike that of"
    return (
        "on that of" if share == 0 else f"{distance(abs(share))} {'above' if share > 0 else 'below'} that of"
    )


def _share(value: float) -> str:
    if not math.isfinite(value):
        return "not finite"
    return f"-{distance(-value)}" if value < 0 else distance(value)
