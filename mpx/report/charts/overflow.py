"""When gradients, activations or losses were not finite, and in which module."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

from mpx.record.model import RunRecord
from mpx.record.parts import Overflow
from mpx.report import wording
from mpx.report.charts.plot import Axis, Chart, Mark, Plot
from mpx.report.wording import amount, code, count

__all__ = ["overflow_timeline"]

ROWS_DRAWN = 12
OTHERS = "other places"
LOSS = "the loss"

_KINDS: Mapping[str, tuple[str, str]] = {
    "backward_inf": ("overflow", "gradient not finite"),
    "forward_inf": ("forward", "module's output not finite"),
    "loss_nan": ("not-finite", "loss NaN or infinite"),
}


def overflow_timeline(record: RunRecord) -> Iterator[Chart]:
    """Yield the timeline, a row for each place; nothing when all was finite."""
    events = record.overflows
    if not events:
        return
    numbers = Counter(_place(item) for item in events)
    shown = [name for name, _ in numbers.most_common()]
    if len(shown) > ROWS_DRAWN:
        shown = [*shown[: ROWS_DRAWN - 1], OTHERS]
    row_of = {name: index for index, name in enumerate(shown)}
    last = row_of.get(OTHERS, 0)
    marks = tuple(
        Mark(_KINDS[item.kind][0], float(item.backward), float(row_of.get(_place(item), last)), _text(item))
        for item in events
        if item.kind in _KINDS
    )
    rows = [(name, amount(number), *_span(events, name)) for name, number in numbers.most_common()]
    counts = record.overflow_counts
    total = counts.backward_inf + counts.forward_inf + counts.loss_nan
    worst, most = numbers.most_common(1)[0]
    named = worst if worst == LOSS else code(worst)
    yield Chart(
        id="overflows",
        title="Overflows by module",
        summary=f"{count(len(events), 'recorded overflow')} in {count(len(numbers), 'place')}; "
        f"the most, {amount(most)}, in {named}.",
        plot=Plot(
            unit="backward pass",
            end=float(max(record.backwards, *(item.backward for item in events))),
            y=Axis("place", "rows", lambda value: shown[int(value)], names=tuple(shown)),
            marks=marks,
        ),
        table=(("place", "events", "first pass", "last pass"), *rows),
        note=f"{amount(total)} were counted; the first of each process are kept."
        if total > len(events)
        else "",
    )


def _place(item: Overflow) -> str:
    if item.kind == "loss_nan":
        return LOSS
    return item.module or (item.parameter or "unknown").rpartition(".")[0] or item.parameter or "unknown"


def _text(item: Overflow) -> str:
    parts = [_KINDS[item.kind][1]]
    parts += [item.parameter] if item.parameter else []
    parts += [f"loss scale {wording.scale(item.scale)}"] if item.scale is not None else []
    parts += [f"rank {item.rank}"] if item.rank is not None else []
    return ", ".join(parts)


def _span(events: list[Overflow], name: str) -> tuple[str, str]:
    passes = [item.backward for item in events if _place(item) == name]
    return amount(min(passes)), amount(max(passes))
