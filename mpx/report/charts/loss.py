"""The loss, one line for each call site of `backward`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from mpx.record.model import RunRecord
from mpx.record.parts import LossCurve
from mpx.report import wording
from mpx.report.charts.plot import Axis, Chart, Line, Mark, Plot, finite
from mpx.report.wording import amount, count

__all__ = ["LINES_DRAWN", "is_wide", "losses"]

LINES_DRAWN = 6
_WIDE = 50  # a range of so many times its least value is read better in powers of ten


def losses(record: RunRecord) -> Iterator[Chart]:
    """Yield the chart of the losses, if any was seen."""
    known = [curve for curve in record.losses if curve.value and len(curve.value) == len(curve.backward)]
    drawn = sorted(known, key=lambda curve: -len(curve.value))[:LINES_DRAWN]
    values = [value for curve in drawn for value in curve.value if finite(value)]
    if not values:
        return
    wide = is_wide(values)
    lines = tuple(Line(curve.site or "loss", _points(curve)) for curve in drawn)
    marks = tuple(_not_finite(curve, at, max(values)) for curve in drawn for at in _gaps(curve))
    rows = [
        (curve.site or "?", amount(at), wording.loss(value))
        for curve in known
        for at, value in zip(curve.backward, curve.value, strict=True)
    ]
    rest = len(known) - len(drawn)
    yield Chart(
        id="loss",
        title="Loss",
        summary=" ".join(_sentence(curve) for curve in drawn),
        plot=Plot(
            unit="backward pass",
            end=float(max(curve.backward[-1] for curve in drawn)),
            y=Axis("loss", "decimal" if wide else "linear", wording.loss),
            lines=lines,
            marks=marks,
        ),
        table=(("backward at", "backward pass", "loss"), *rows),
        note=f"{count(rest, 'more loss')} in the table." if rest > 0 else "",
    )


def is_wide(values: Sequence[float]) -> bool:
    """Tell whether finite values span so much that an axis of powers of ten reads better."""
    return min(values) > 0 and max(values) > _WIDE * min(values)


def _points(curve: LossCurve) -> tuple[tuple[float, float], ...]:
    # What is not finite stays in as NaN, where the line breaks.
    return tuple(
        (float(at), value if finite(value) else float("nan"))
        for at, value in zip(curve.backward, curve.value, strict=True)
    )


def _gaps(curve: LossCurve) -> list[int]:
    return [at for at, value in zip(curve.backward, curve.value, strict=True) if not finite(value)]


def _not_finite(curve: LossCurve, at: int, top: float) -> Mark:
    return Mark("not-finite", float(at), top, f"{curve.site}: NaN or infinite")


def _sentence(curve: LossCurve) -> str:
    first, last = wording.loss(curve.value[0]), wording.loss(curve.value[-1])
    passes = f"backward pass {amount(curve.backward[0])} to {amount(curve.backward[-1])}"
    return f"The loss of `{curve.site or '?'}` goes from {first} to {last}, {passes}."
