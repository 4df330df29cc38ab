"""The numbers of a record as one tidy table: a row a number, for a spreadsheet or a data frame."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator

from mpx.record.model import RunRecord
from mpx.report.facts import half_type, level
from mpx.report.formats.options import Options
from mpx.report.wording import printable

__all__ = ["COLUMNS", "as_csv"]

COLUMNS = ("quantity", "site", "at", "value", "unit", "detail")

_Row = tuple[str, str, float | None, object, str, str]


def as_csv(record: RunRecord, _: Options) -> str:
    """Return the table: first what is one number for the run, then every series, then the overflows.

    `at` is the backward pass that a number belongs to; for step time and memory the optimizer step, for the sizes of
    gradients the exponent of two.
    """
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    for source in (_totals, _gates, _series, _overflows):
        for quantity, site, at, value, unit, detail in source(record):
            place = "" if at is None else f"{at:.15g}"
            writer.writerow((quantity, printable(site), place, value, unit, printable(detail)))
    return text.getvalue()


def _totals(record: RunRecord) -> Iterator[_Row]:
    counts = record.overflow_counts
    numbers: dict[str, tuple[object, str]] = {
        "preset": (printable(level(record)), ""),
        "dtype": (half_type(record) or "float32", ""),
        "status": (record.status, ""),
        "exit_code": (record.exit_code, ""),
        "wall": (record.wall_s, "s"),
        "forwards": (record.forwards, "calls"),
        "backwards": (record.backwards, "passes"),
        "steps_attempted": (record.steps.attempted, "steps"),
        "steps_applied": (record.steps.applied, "steps"),
        "steps_skipped": (record.steps.skipped, "steps"),
        "longest_skip_run": (record.longest_skip_run, "steps"),
        "overflows_backward_inf": (counts.backward_inf, "passes"),
        "overflows_forward_inf": (counts.forward_inf, "passes"),
        "overflows_loss_nan": (counts.loss_nan, "passes"),
        "nonfinite_losses": (record.nonfinite_losses, "passes"),
    }
    if record.coverage:
        numbers["half_flops_share"] = (record.coverage.half_flops_share, "fraction")
    if record.throughput:
        numbers["steps_per_second"] = (record.throughput.steps_per_s, "1/s")
        if record.throughput.step_ms:
            numbers["step_time_median"] = (record.throughput.step_ms.median, "ms")
            numbers["step_time_p95"] = (record.throughput.step_ms.p95, "ms")
    if record.communication:
        numbers["reduced"] = (record.communication.bytes, "bytes")
        numbers["reduced_in_full"] = (record.communication.full_bytes, "bytes")
    if record.memory:
        numbers["peak_memory"] = (record.memory.peak_bytes, "bytes")
        numbers["memory_device"] = (printable(record.memory.device), "")
    for quantity, (value, unit) in numbers.items():
        if value is not None:
            yield quantity, "", None, value, unit, ""


def _gates(record: RunRecord) -> Iterator[_Row]:
    for verdict in record.gates:
        yield "gate_failed", "", None, int(not verdict.passed), "", f"{verdict.gate}: {verdict.text}"


def _series(record: RunRecord) -> Iterator[_Row]:
    for curve in record.losses:
        for passes, loss in zip(curve.backward, curve.value, strict=False):
            yield "loss", curve.site, passes, loss, "", ""
    for scaler in record.scalers:
        yield from _history("loss_scale", scaler.site, scaler.history, "")
    if record.throughput:
        yield from _history("step_time", "", record.throughput.history, "ms")
    if record.memory:
        yield from _history("peak_memory", "", record.memory.history, "bytes")
    if record.gradients and record.gradients.exponents:
        known = record.gradients.exponents
        yield from (
            ("gradient_exponent", "", known.min + index, number, "gradients", "")
            for index, number in enumerate(known.counts)
        )


def _overflows(record: RunRecord) -> Iterator[_Row]:
    for item in record.overflows:
        place = item.parameter or item.module or ""
        scale = "" if item.scale is None else item.scale
        yield f"overflow_{item.kind}", item.site or "", item.backward, scale, "loss scale", place


def _history(quantity: str, site: str, history: list[list[float]], unit: str) -> Iterator[_Row]:
    return ((quantity, site, point[0], point[1], unit, "") for point in history if len(point) == 2)
