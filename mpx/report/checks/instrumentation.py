"""Whether there was anything to do, and how much of it."""

from __future__ import annotations

from collections.abc import Iterator

from mpx.record.model import RunRecord
from mpx.record.parts import Finding
from mpx.report.checks.registry import check
from mpx.report.facts import (
    failed_early,
    half_type,
    keeps_script_amp,
    level,
    updates_by_hand,
    working,
    zeroed,
)
from mpx.report.headline import ending
from mpx.report.wording import count, percent

__all__: list[str] = []

LITTLE = 0.5  # with less than half of the work in the half type there is little to win


@check(order=30)
def nothing_instrumented(record: RunRecord) -> Iterator[Finding]:
    """No process imported torch, or none used it."""
    if record.status == "unknown" and not record.processes:
        return
    if failed_early(record):
        yield Finding(
            id="ended-before-torch",
            severity="info",
            text=f"the script ended before it imported torch ({ending(record)}): nothing ran in mixed precision",
        )
    elif not record.processes:
        yield Finding(
            id="nothing-instrumented",
            severity="warning",
            text="no process imported torch, so nothing ran in mixed precision",
            evidence="0 processes imported torch",
            hint="if the script does use torch: it ran in an interpreter that mpx cannot follow "
            "(`python -I`, `-E` or `-S`, or an environment without PYTHONPATH)",
        )
    elif not working(record) and all(item.ended for item in record.processes):
        yield Finding(
            id="nothing-ran",
            severity="warning",
            text="torch was imported, but no module with parameters was called and nothing was trained: "
            f"{level(record)} had nothing to do",
            evidence=f"{count(len(record.processes), 'process')} imported torch, 0 forward calls, 0 backward passes",
        )


@check(order=31)
def inference_only(record: RunRecord) -> Iterator[Finding]:
    """Modules were called, and nothing was trained."""
    if record.forwards and not record.backwards and not record.steps.attempted:
        yield Finding(
            id="inference-only",
            severity="info",
            text=f"nothing was trained: {count(record.forwards, 'forward call')}, no backward pass, no optimizer "
            "step. Normal for a script that only evaluates",
        )


@check(order=32)
def no_step(record: RunRecord) -> Iterator[Finding]:
    """Gradients were computed and no optimizer used them."""
    if not updates_by_hand(record):
        return
    text = (
        f"{count(record.backwards, 'backward pass')}, but no step of a torch optimizer. Normal for a script that "
        "uses gradients in its own way: mpx gives them unscaled"
    )
    if number := zeroed(record):
        text += f". In {count(number, 'pass')} they overflowed, and mpx set them to 0: an update by hand adds nothing"
    yield Finding(id="no-step", severity="info", text=text)


@check(order=33)
def no_module(record: RunRecord) -> Iterator[Finding]:
    """The script trains raw tensors."""
    if record.backwards and not record.forwards and half_type(record):
        yield Finding(
            id="no-module",
            severity="info",
            text=f"no module was called: {level(record)} chooses the precision inside calls of modules, so what this "
            "script computes stayed in float32",
        )


@check(order=34)
def little_in_half(record: RunRecord) -> Iterator[Finding]:
    """Most of the work was not done in the half type."""
    share = record.coverage.half_flops_share if record.coverage else None
    half = half_type(record)
    if share is not None and share < LITTLE and half and working(record):
        yield Finding(
            id="little-in-half",
            severity="info",
            text=f"only {percent(share)} of the matmul and convolution work of a forward call ran in {half}: "
            "there is little speed or memory to win this way",
            hint="`mpx report -v` lists the operations and the type that each ran in",
        )


@check(order=35)
def own_amp(record: RunRecord) -> Iterator[Finding]:
    """The script has mixed precision of its own."""
    if not record.saw_script_amp:
        return
    if keeps_script_amp(record):
        text = "the script's own autocast and GradScaler ran as written, as `--script-amp keep` asks; mpx only watched"
        yield Finding(id="script-amp-kept", severity="info", text=text)
        return
    yield Finding(
        id="script-amp-taken-over",
        severity="info",
        text=f"the script has autocast or a GradScaler of its own: {level(record)} took their place",
        hint="`--script-amp keep` lets the script's own run instead",
    )
