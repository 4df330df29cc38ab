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
def nan_loss(record: RunRecord) -> Iterator[Finding]:
    """The loss itself was not finite before anything scaled it."""
    if not record.nonfinite_losses:
        return
    first = next((item for item in record.overflows if item.kind == "loss_nan"), None)
    unit = overflow_unit(record)
    start = f", first in {unit.removeprefix('backward ')} {first.backward:,}" if first else ""
    last = last_loss(record)
    ended_well = last is not None and math.isfinite(last)
    half = half_type(record)
    if half is None:
        text, hint = ". Nothing ran in half precision: the cause is in the script or its data", None
    else:
        scaled = loss_scale(record).get("mode") in ("dynamic", "static")
        text = ". The loss scale has no part in it and was left alone" if scaled else ""
        again = f"the same run with `--opt-level O0` tells whether {half} is the cause"
        culprit = first.module if first else None
        hint = f"`--fp32-module {shlex.quote(culprit)}`; {again}" if culprit else again
        text += f"; the first value that is not finite came out of {code(culprit)}" if culprit else ""
    yield Finding(
        id="nan-loss",
        severity="warning" if ended_well else "error",
        text=f"the loss was NaN or infinite in {share(record.nonfinite_losses, record.backwards, unit)}"
        f"{start}. This is not normal{text}",
        evidence="the last loss is finite" if ended_well else "the last loss is not finite",
        hint=hint,
    )


@check(order=11)
def forward_infinity(record: RunRecord) -> Iterator[Finding]:
    """An activation left the half type's range."""
    number = record.overflow_counts.forward_inf
    if not number:
        return
    first: dict[str, int] = {}
    for item in record.overflows:
        if item.kind == "forward_inf" and item.module:
            first.setdefault(item.module, item.backward)
    named = list(first.items())[:MODULES_NAMED]
    half = half_type(record)
    unit = overflow_unit(record).removeprefix("backward ")
    text = f"infinity or NaN arose in the forward pass of {share(number, record.backwards, unit)}"
    if named:
        text += ": in the output of " + ", ".join(
            f"{code(name)} (first in {unit} {at:,})" for name, at in named
        )
        text += f" and {count(len(first) - len(named), 'other module')}" if len(first) > len(named) else ""
    text += ". float16 ends at 65504" if half == "float16" else ""
    keep = [f"`--fp32-module {shlex.quote(name)}`" for name, _ in named[:1]]
    other = (
        ["`--dtype bfloat16`"]
        if half == "float16"
        else ["`--opt-level O0` to see whether the half type is the cause"]
    )
    yield Finding(
        id="forward-infinity",
        severity="warning",
        text=f"{text}. This is not normal, and no loss scale can help",
        evidence=f"{count(len(first), 'module')} named in the first events",
        hint=", or ".join(keep + other) if half else None,
    )


@check(order=12)
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
