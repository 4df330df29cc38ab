"""The loss scale: finding its range, testing it now and then, and losing it."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from mpx.record.model import RunRecord
from mpx.record.parts import Finding, Overflow
from mpx.report.checks.registry import check
from mpx.report.facts import (
    half_type,
    loss_scale,
    overflow_unit,
    own_overflows,
    settling,
    skips_nonfinite,
    updates_by_hand,
    worst_scaler,
    zeroed,
)
from mpx.report.wording import code, count, percent, plural, scale, setting, share

__all__: list[str] = []

RARE = 0.01  # of the passes: a run loses a batch in a hundred, and nothing else
FEW = 3  # fewer than this say nothing about a rate


@check(order=20)
def collapse(record: RunRecord) -> Iterator[Finding]:
    """The scale went to its floor, or steps were skipped without end."""
    after = _collapse_after(record)
    floored = _floored(record)
    counts = record.overflow_counts
    if not _skips_without_end(record) or (
        not floored and counts.loss_nan + counts.forward_inf > counts.backward_inf
    ):
        return  # with a NaN loss every step is skipped, and the scale has no part in it (`nonfinite_loss`)
    worst = worst_scaler(record)
    lowest = f"the loss scale fell to {scale(worst.min)}" if worst else "the loss scale is not known"
    floor = ", its floor" if floored else ""
    skipped = f"{share(record.steps.skipped, record.steps.attempted, 'step')} were skipped"
    if updates_by_hand(record):
        skipped = f"gradients overflowed in {share(counts.backward_inf, record.backwards, 'backward pass')}"
    in_a_row = record.longest_skip_run
    run = f", {in_a_row:,} of them in a row" if 0 < in_a_row < record.steps.skipped else ""
    where, hint = _cause(record)
    grave = floored or not record.steps.applied
    yield Finding(
        id="scale-collapse" if grave else "long-skip-run",
        severity="error" if grave else "warning",
        text=f"{'collapse: ' if grave else ''}{lowest}{floor}; {skipped}{run}. This is not normal: {where}",
        evidence=f"longest run of skipped steps: {record.longest_skip_run}; the preset calls {after} too many",
        hint=hint,
    )


@check(order=21)
def nothing_applied(record: RunRecord) -> Iterator[Finding]:
    """Every step was skipped, before anything could be called a collapse."""
    if not _in_vain(record) or any(_known_bad(record)):
        return
    found = settling(record)
    text = f"no step was applied: all {count(record.steps.skipped, 'step')} were skipped"
    if updates_by_hand(record):
        text = f"no update had gradients: those of all {count(record.backwards, 'backward pass')} overflowed"
    hint = None
    if found.overflows and found.scale is not None:
        text += ", because the run ended while the scale was still finding its range"
        hint = f"run it longer, or start lower: `--set loss_scale.init={setting(found.scale)}`"
    yield Finding(
        id="nothing-applied", severity="warning", text=f"{text}. The model has not learned", hint=hint
    )


@check(order=22)
def settled(record: RunRecord) -> Iterator[Finding]:
    """Overflows at the start are the search for the range."""
    found = settling(record)
    if not found.overflows or found.scale is None or _in_vain(record) or _skips_without_end(record):
        return
    unit = overflow_unit(record)
    first = f"in the first {count(found.passes, unit)}" if found.passes > 1 else f"in the first {unit}"
    low = found.scale < 1
    unusual = "A scale below 1 works, but is unusual: the loss is large, such as a sum in place of a mean"
    yield Finding(
        id="scale-below-1" if low else "scale-settled",
        severity="warning" if low else "info",
        text=f"{count(found.overflows, 'overflow')} {first}: the scale was finding its range. "
        f"{unusual if low else 'This is normal'}",
        evidence=f"the scale was {scale(found.scale)} after them",
        hint=f"`--set loss_scale.init={setting(found.scale)}` starts where the search ended",
    )


@check(order=23)
def later_overflows(record: RunRecord) -> Iterator[Finding]:
    """Gradients that overflowed after the search."""
    late = record.overflow_counts.backward_inf - settling(record).overflows
    if late <= 0 or not record.scalers or not skips_nonfinite(record) or any(collapse(record)):
        return
    rate = late / record.backwards if record.backwards else 0.0
    growths = sum(item.growths for item in record.scalers)
    unit = overflow_unit(record)
    dynamic = loss_scale(record).get("mode") == "dynamic"
    if dynamic and late <= growths:
        yield Finding(
            id="scale-probing",
            severity="info",
            text=f"{count(late, 'later overflow')} for {count(growths, 'growth')} of the scale: it grows after "
            f"{count(int(loss_scale(record).get('growth_interval', 0)), 'clean pass')} to see whether it can. "
            "This is normal",
        )
        return
    text = f"{count(late, 'overflow')} after the start, {percent(rate)} of the {plural(unit)}"
    if rate <= RARE or late < FEW:
        lost = "their gradients were set to 0" if updates_by_hand(record) else "their steps were skipped"
        text += f"; {lost}. This is rare enough to be normal"
        yield Finding(id="rare-overflows", severity="info", text=text)
        return
    where, hint = _cause(record)
    lost = "an update by hand" if updates_by_hand(record) else "a step"
    yield Finding(
        id="frequent-overflows",
        severity="warning",
        text=f"{text}, each {lost} lost. More than {percent(RARE)} is not normal: {where}",
        hint=hint if dynamic else f"`--loss-scale dynamic` finds a scale that fits, or {hint}",
    )


def _in_vain(record: RunRecord) -> bool:
    """Tell whether no gradient ever reached a weight, as every pass overflowed."""
    if updates_by_hand(record):
        return zeroed(record) >= record.backwards
    return bool(record.steps.skipped) and not record.steps.applied


def _floored(record: RunRecord) -> bool:
    floor = loss_scale(record).get("min")
    dynamic = loss_scale(record).get("mode") == "dynamic"
    return dynamic and floor is not None and any(s.backoffs and s.final <= floor for s in record.scalers)


def _skips_without_end(record: RunRecord) -> bool:
    after = _collapse_after(record)
    return _floored(record) or (after is not None and record.longest_skip_run >= after)


def _collapse_after(record: RunRecord) -> int | None:
    settings = record.preset.get("collapse")
    after = settings.get("after") if isinstance(settings, dict) else None
    return after if isinstance(after, int) else None


def _known_bad(record: RunRecord) -> Iterator[bool]:
    yield record.nonfinite_losses > 0
    yield from (True for _ in collapse(record))


def _cause(record: RunRecord) -> tuple[str, str]:
    """Return where the overflows come from, and what may help."""
    half = half_type(record) or "the half type"
    other = "`--dtype bfloat16`, which has the range of float32" if half == "float16" else "`--opt-level O0`"
    first = next((item for item in _named(record) if item.parameter), None)
    if first is None or first.parameter is None:
        return f"gradients do not fit into {half}", other
    unit = overflow_unit(record).removeprefix("backward ")
    owner = first.parameter.rpartition(".")[0]
    keep = f", or `--fp32-module {shlex.quote(owner)}`" if owner else ""
    place = f"first seen in {code(first.parameter)} ({unit} {first.backward:,})"
    return f"gradients do not fit into {half}, {place}", f"{other}{keep}"


def _named(record: RunRecord) -> list[Overflow]:
    return [item for item in (*own_overflows(record), *record.overflows) if item.kind == "backward_inf"]
