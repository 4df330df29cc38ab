"""What the run cost: the time of a step, and memory."""

from __future__ import annotations

from collections.abc import Iterator

from mpx.record.model import RunRecord
from mpx.report import wording
from mpx.report.charts.plot import Axis, Chart, Level, Line, Plot, pairs
from mpx.report.wording import amount, printable

__all__ = ["peak_memory", "step_time"]


def step_time(record: RunRecord) -> Iterator[Chart]:
    """Yield the chart of step times."""
    known = record.throughput
    points = pairs(known.history) if known else ()
    if known is None or not points:
        return
    levels: tuple[Level, ...] = ()
    said = f"{known.steps_per_s:.3g} steps a second on average."
    if known.step_ms:
        median, tail = known.step_ms.median, known.step_ms.p95
        levels = (Level("median", median), Level("95 %", tail))
        said += f" Half of the steps took at most {wording.milliseconds(median)}, "
        said += f"95 % at most {wording.milliseconds(tail)}."
    yield Chart(
        id="step-time",
        title="Time of a step",
        summary=said,
        plot=Plot(
            unit="optimizer step",
            end=max(float(record.steps.attempted), points[-1][0]),
            y=Axis("time from step to step", "from-zero", wording.milliseconds),
            lines=(Line("time of a step", points),),
            levels=levels,
        ),
        table=(
            ("optimizer step", "time"),
            *((amount(int(at)), wording.milliseconds(value)) for at, value in points),
        ),
    )


def peak_memory(record: RunRecord) -> Iterator[Chart]:
    """Yield the chart of the peak so far."""
    known = record.memory
    points = pairs(known.history) if known else ()
    if known is None or not points:
        return
    whose = "the process" if known.device == "cpu" else f"`{printable(known.device)}`"
    end = max(float(record.steps.attempted), points[-1][0])
    yield Chart(
        id="memory",
        title="Peak memory",
        summary=f"The most memory of {whose} in use at once was {wording.bytes_(known.peak_bytes)}.",
        plot=Plot(
            unit="optimizer step",
            end=end,
            y=Axis("most in use until then", "memory", lambda value: wording.bytes_(int(value))),
            lines=(Line("peak", (*points, (end, points[-1][1])), stairs=True),),
        ),
        table=(
            ("after optimizer step", "peak until then"),
            *((amount(int(at)), wording.bytes_(int(value))) for at, value in points),
        ),
    )
