"""Values that are not finite and that no loss scale explains: in the loss, in activations, in applied gradients."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator

from mpx.record.model import RunRecord
from mpx.record.parts import Finding
from mpx.report.checks.registry import check
from mpx.report.facts import half_type, last_loss, level, loss_scale, overflow_unit, skips_nonfinite
from mpx.report.wording import code, count, share

__all__: list[str] = []

MODULES_NAMED = 3


@check(order=10)
def nonfinite_loss(record: RunRecord) -> Iterator[Finding]:
    """The loss itself was not finite before anything scaled it: the forward pass or the data did that."""
    counts = record.overflow_counts
    number = max(record.nonfinite_losses, counts.loss_nan + counts.forward_inf)
    if not number:
        return
    events = [item for item in record.overflows if item.kind in ("loss_nan", "forward_inf")]
    modules: dict[str, int] = {}
    for item in events:
        if item.module:
            modules.setdefault(item.module, item.backward)
    unit = overflow_unit(record)
    short = unit.removeprefix("backward ")
    text = f"the loss was NaN or infinite in {share(number, record.backwards, unit)}"
    text += f", first in {short} {events[0].backward:,}" if events else ""
    named = [
        f"{code(name)} (first seen in {short} {at:,})" for name, at in list(modules.items())[:MODULES_NAMED]
    ]
    if named:
        rest = len(modules) - len(named)
        text += f": NaN or infinity came out of {', '.join(named)}"
        text += f" and {count(rest, 'other module')}" if rest else ""
    last = last_loss(record)
    ended_well = last is not None and math.isfinite(last)
    yield Finding(
        id="forward-infinity" if named else "nan-loss",
        severity="warning" if ended_well else "error",
        text=f"{text}. This is not normal. {_part_of_precision(record)}",
        evidence="the last loss is finite" if ended_well else "the last loss is not finite",
        hint=_way_out(record, next(iter(modules), None)),
    )


def _part_of_precision(record: RunRecord) -> str:
    half = half_type(record)
    if half is None:
        return "Nothing ran in half precision: the cause is in the script or its data"
    text = "float16 ends at 65504. " if half == "float16" else f"{half} has the range of float32. "
    scaled = loss_scale(record).get("mode") in ("dynamic", "static")
    return text + (
        "No loss scale can help: it was left alone" if scaled else "There is no loss scale that could help"
    )


def _way_out(record: RunRecord, module: str | None) -> str | None:
    half = half_type(record)
    if half is None:
        return None
    again = "the same run with `--opt-level O0` tells whether the precision is the cause"
    if module is None:
        return again
    wider = ", or `--dtype bfloat16`" if half == "float16" else ""
    return f"`--fp32-module {shlex.quote(module)}`{wider}; {again}"


@check(order=11)
def applied_nonfinite(record: RunRecord) -> Iterator[Finding]:
    """Nothing skips a step at this level, and gradients were not finite."""
    number = record.overflow_counts.backward_inf
    if not number or skips_nonfinite(record) or record.steps.skipped:
        return
    last = last_loss(record)
    broken = last is not None and not math.isfinite(last)
    after = "the weights are likely to be NaN by now" if broken else "the script went on with them"
    yield Finding(
        id="nonfinite-gradients",
        severity="error" if broken else "warning",
        text=f"gradients were NaN or infinite in {share(number, record.backwards, overflow_unit(record))}, and "
        f"{level(record)} skips no step for that, as plain PyTorch does not: {after}",
        hint="`--set skip_nonfinite=always` skips such steps",
    )
