"""What it costs to keep the weights themselves in a half type (O3)."""

from __future__ import annotations

from collections.abc import Iterator

from mpx.record.model import RunRecord
from mpx.record.parts import Finding
from mpx.report.checks.registry import check
from mpx.report.facts import half_type
from mpx.report.wording import code

__all__: list[str] = []

# The spacing of a half type's numbers around 1 is 2^-bits: half of it is the smallest relative change that counts.
_SMALLEST_UPDATE = {"float16": "1/2048", "bfloat16": "1/256"}


@check(order=40)
def half_weights(record: RunRecord) -> Iterator[Finding]:
    """Updates are rounded to the weights' precision."""
    half = half_type(record)
    if not record.steps.attempted or half is None or not _in_half(record):
        return
    yield Finding(
        id="half-weights",
        severity="info",
        text=f"the weights themselves are {half}: an update smaller than about "
        f"{_SMALLEST_UPDATE.get(half, 'the spacing')} of its weight is rounded away",
        hint="`--opt-level O2` keeps float32 weights beside the half ones",
    )


@check(order=41)
def adam_epsilon(record: RunRecord) -> Iterator[Finding]:
    """Adam's eps of 1e-8 is 0 in float16."""
    if half_type(record) != "float16" or not _in_half(record):
        return
    adam = next((item.name for item in record.optimizers if "adam" in item.name.lower()), None)
    if adam is None:
        return
    guards = record.preset.get("optimizer")
    least = guards.get("min_eps", 0.0) if isinstance(guards, dict) else 0.0
    if least and any(item.id.startswith("eps") for item in record.substitutions):
        return  # told as a replacement, with the numbers
    if least:
        yield Finding(
            id="adam-eps",
            severity="info",
            text=f"the usual eps of {code(adam)}, 1e-8, is 0 in float16: the preset raises it to at least {least:g}",
        )
    else:
        yield Finding(
            id="adam-eps",
            severity="warning",
            text=f"the usual eps of {code(adam)}, 1e-8, is 0 in float16, and the preset does not raise it: "
            "a weight with a tiny gradient may become infinite",
            hint="`--set optimizer.min_eps=1e-4`",
        )


def _in_half(record: RunRecord) -> bool:
    return record.preset.get("cast_model_type") == "half" and not record.preset.get("master_weights")
