"""How large the gradients were, beside what the half type can hold."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from mpx.record.model import RunRecord
from mpx.report import wording
from mpx.report.charts.plot import Axis, Bar, Chart, Edge, Plot
from mpx.report.facts import keeps_script_amp, underflow
from mpx.report.wording import count

__all__ = ["gradient_exponents"]

# What is not larger than this power of two becomes 0 in the type.
_FLUSHED: Mapping[str, int] = {"float16": -25, "bfloat16": -134}


def gradient_exponents(record: RunRecord) -> Iterator[Chart]:
    """Yield the histogram, if gradients were sampled."""
    known = record.gradients
    if (
        known is None
        or known.exponents is None
        or not sum(known.exponents.counts)
        or keeps_script_amp(record)
    ):
        return
    total = sum(known.exponents.counts)
    first, last = known.exponents.min, known.exponents.min + len(known.exponents.counts)
    bars = tuple(
        Bar(float(first + index), number / total) for index, number in enumerate(known.exponents.counts)
    )
    edges = tuple(edge for edge in _edges(known.half, known.scale) if first <= edge.x <= last)
    yield Chart(
        id="gradients",
        title="Size of the gradients",
        summary=_sentence(record),
        plot=Plot(
            unit="size from",
            begin=float(first),
            end=float(last),
            at=lambda value: f"2^{int(value)}",
            y=Axis("share of the gradients that are not 0", "from-zero", _share),
            bars=bars,
            edges=edges,
        ),
        table=(
            ("from", "to", "share"),
            *((f"2^{int(bar.x)}", f"2^{int(bar.x) + 1}", _share(bar.y)) for bar in bars),
        ),
    )


def _edges(half: str, scale: float) -> Iterator[Edge]:
    limit = _FLUSHED.get(half)
    if limit is None:
        return
    yield Edge(f"below: 0 in {half}", float(limit))
    if scale > 1:
        name = f"below: 0 in {half} at loss scale {wording.scale(scale)}"
        yield Edge(name, limit - math.log2(scale))


def _sentence(record: RunRecord) -> str:
    known = record.gradients
    if known is None or known.exponents is None:
        return ""
    said = f"{count(known.passes, 'backward pass')} sampled: gradients that are not 0 lie between "
    said += f"2^{known.exponents.min} and 2^{known.exponents.max + 1}."
    lost = underflow(record)
    said += f" Of these, {lost}." if lost else ""
    return f"{said} {_share(known.zeros)} of all are exactly 0." if known.zeros else said


def _share(value: float) -> str:
    return wording.percent(value)
