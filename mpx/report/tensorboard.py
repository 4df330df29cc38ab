"""The series of a record as TensorBoard's event files, written by its own package."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mpx.errors import RecordError, UsageError
from mpx.record.model import RunRecord
from mpx.values import frozen

__all__ = ["Scalar", "scalars", "write_events"]


@frozen
class Scalar:
    """One point of a series; `t` is when it was, as far as it is known: passes are taken to be evenly spread."""

    tag: str
    step: int
    value: float
    t: float


def scalars(record: RunRecord) -> Iterator[Scalar]:
    """Yield every point of every series: losses and scales by backward pass, times and memory by optimizer step."""
    begin = next((item.started_t for item in record.processes if item.trained and item.started_t), 0.0)
    end = record.ended_t or max((item.last_t or 0.0 for item in record.processes), default=0.0) or begin

    def series(tag: str, points: list[list[float]], whole: int) -> Iterator[Scalar]:
        for x, y in (point for point in points if len(point) == 2):
            yield Scalar(tag, int(x), y, begin + (end - begin) * min(1.0, x / whole if whole else 1.0))

    for number, curve in enumerate(record.losses):
        points = [[float(x), y] for x, y in zip(curve.backward, curve.value, strict=False)]
        yield from series(_tag("loss", curve.site, number), points, record.backwards)
    for number, scaler in enumerate(record.scalers):
        yield from series(_tag("loss_scale", scaler.site, number), scaler.history, record.backwards)
    if record.throughput is not None:
        yield from series("step_time_ms", record.throughput.history, record.steps.attempted)
    if record.memory is not None:
        yield from series("peak_memory_bytes", record.memory.history, record.steps.attempted)
    overflows = [[float(item.backward), float(number)] for number, item in enumerate(record.overflows, 1)]
    yield from series("overflows", overflows, record.backwards)


def write_events(record: RunRecord, folder: Path) -> int:
    """Write one event file into `folder` and return how many points it has.

    Raises:
        UsageError: The package is not installed.
        RecordError: The disk refuses.
    """
    events, summaries, writers = (_package(name) for name in _MODULES)
    points = list(scalars(record))
    try:
        writer = writers.EventFileWriter(str(folder))
        for point in points:
            value = summaries.Summary.Value(tag=f"mpx/{point.tag}", simple_value=point.value)
            summary = summaries.Summary(value=[value])
            writer.add_event(events.Event(step=point.step, wall_time=point.t, summary=summary))
        writer.close()
    except OSError as error:
        raise RecordError(f"cannot write `{folder}`: {error.strerror or error}") from None
    return len(points)


# The parts of its package that need neither TensorFlow nor torch.
_MODULES = (
    "tensorboard.compat.proto.event_pb2",
    "tensorboard.compat.proto.summary_pb2",
    "tensorboard.summary.writer.event_file_writer",
)


def _package(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise UsageError(
            f"TensorBoard's event files are written by its own package, which is not installed here: {error}",
            hint="`pip install tensorboard`, or `--to csv`, which needs nothing",
        ) from None


def _tag(name: str, site: str, number: int) -> str:
    return name if number == 0 else f"{name}/{site or number}"
