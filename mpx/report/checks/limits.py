"""What the run was told not to do, and how long it was told to go on."""

from __future__ import annotations

from collections.abc import Iterator

from mpx.record.model import RunRecord
from mpx.record.parts import Finding
from mpx.report.checks.registry import check
from mpx.report.wording import amount, code, count, printable

__all__: list[str] = []

NAMED = 3


@check(order=1)
def failed_gates(record: RunRecord) -> Iterator[Finding]:
    """A gate did not hold."""
    failed = [verdict for verdict in record.gates if not verdict.passed]
    if not failed:
        return
    named = "; ".join(f"{code(verdict.gate)}: {printable(verdict.text)}" for verdict in failed[:NAMED])
    rest = f"; and {len(failed) - NAMED:,} more" if len(failed) > NAMED else ""
    yield Finding(
        id="gates-failed",
        severity="error",
        text=f"{amount(len(failed))} of {count(len(record.gates), 'gate')} failed: {named}{rest}",
        evidence="a gate fails when its expression is true, or when it cannot be judged",
    )


@check(order=2)
def aborted(record: RunRecord) -> Iterator[Finding]:
    """The script was ended because of what it did."""
    stop = record.stopped
    if stop is not None and stop.reason == "abort-on":
        where = f"in backward pass {stop.backward:,}, after {count(stop.step, 'step')}"
        yield Finding(
            id="aborted",
            severity="error",
            text=f"mpx ended the script {where}: {printable(stop.text)}",
            hint="without `--abort-on` the script goes on",
        )


@check(order=54)
def step_budget(record: RunRecord) -> Iterator[Finding]:
    """The script was ended because it had done enough."""
    stop = record.stopped
    if stop is not None and stop.reason == "max-steps":
        steps = count(stop.step, "optimizer step")
        yield Finding(
            id="step-budget",
            severity="info",
            text=f"step budget reached: mpx ended the script after {steps}, as {printable(stop.text)}",
        )
