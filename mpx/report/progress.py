"""A run in one line, while it goes on."""

from __future__ import annotations

from mpx.record.model import RunRecord
from mpx.report import wording
from mpx.report.facts import last_loss, worst_scaler
from mpx.report.wording import count

__all__ = ["progress_line"]


def progress_line(record: RunRecord) -> str:
    """Return how far the run is: `1,200 steps | loss 0.12 | scale 65536 | 3 overflows | 24.1 ms a step`."""
    if not record.processes:
        return "torch has not been imported yet"
    if not (record.steps.attempted or record.backwards):
        return f"{count(record.forwards, 'forward call')}, nothing trained yet"
    steps = record.steps.attempted
    parts = [count(steps, "step") if steps else count(record.backwards, "backward pass")]
    if record.steps.skipped:
        parts.append(f"{record.steps.skipped:,} skipped")
    if (last := last_loss(record)) is not None:
        parts.append(f"loss {wording.loss(last)}")
    if (scaler := worst_scaler(record)) is not None:
        parts.append(f"scale {wording.scale(scaler.final)}")
    if overflows := record.overflow_counts.backward_inf:
        parts.append(count(overflows, "overflow"))
    if record.nonfinite_losses:
        parts.append(f"loss not finite {wording.times(record.nonfinite_losses)}")
    if record.throughput is not None and record.throughput.step_ms is not None:
        parts.append(f"{wording.milliseconds(record.throughput.step_ms.median)} a step")
    return " | ".join(parts)
