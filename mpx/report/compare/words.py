"""What a comparison says in numbers and words: the table and the noise, the same in every format."""

from __future__ import annotations

import math

from mpx.report import wording
from mpx.report.compare.gaps import distance
from mpx.report.compare.levels import Comparison, LevelResult
from mpx.report.wording import percent, printable

__all__ = ["noise_in_words", "rows_of"]


def rows_of(comparison: Comparison) -> list[list[str]]:
    """Return the table, a row for each level below the names of the columns."""
    with_metric = any(result.metric is not None for result in comparison.levels)
    head = [
        "level",
        "runs",
        "steps",
        "final loss",
        "gap",
        "largest gap",
        "step",
        "speed",
        "memory",
        "overflows",
    ]
    rows = [head + ["metric"] * with_metric]
    for result in comparison.levels:
        row = _row(result, is_baseline=result.level == comparison.baseline)
        rows.append(row + [_metric(result)] * with_metric)
    return rows


def _row(result: LevelResult, *, is_baseline: bool) -> list[str]:
    failed = f", {result.failed} failed" if result.failed else ""
    largest = "-" if result.largest_gap is None else _share(result.largest_gap)
    if result.largest_gap_at is not None:
        largest += f" in pass {result.largest_gap_at:,}"
    memory = "-" if result.peak_bytes is None else wording.bytes_(result.peak_bytes)
    if result.memory_ratio is not None:
        memory += f" ({result.memory_ratio:.2f}x)"
    return [
        printable(result.level),
        f"{result.runs}{failed}",
        f"{result.steps:,}",
        "-" if result.final_loss is None else wording.loss(result.final_loss),
        "reference" if is_baseline else _signed(result.final_gap),
        "" if is_baseline else largest,
        "-" if result.step_ms is None else wording.milliseconds(result.step_ms),
        "reference" if is_baseline else _speed(result),
        memory,
        "-" if result.overflow_rate is None else percent(result.overflow_rate),
    ]


def _speed(result: LevelResult) -> str:
    if result.speedup is None:
        return "-"
    text = f"{result.speedup:.2f}x"
    if result.speedup_low is not None and result.speedup_high is not None:
        text += f" ({result.speedup_low:.2f}-{result.speedup_high:.2f})"
    return text


def _metric(result: LevelResult) -> str:
    if result.metric is None:
        return "-"
    text = f"{result.metric:.5g}"
    return text if result.metric_gap is None else f"{text} ({_signed(result.metric_gap)})"


def _signed(gap: float | None) -> str:
    if gap is None:
        return "-"
    text = _share(gap)
    return f"+{text}" if gap > 0 and text[0].isdigit() else text


def _share(gap: float) -> str:
    if not math.isfinite(gap):
        return "not finite"
    return f"-{distance(-gap)}" if gap < 0 else distance(gap)


def noise_in_words(comparison: Comparison) -> str | None:
    """Return how far the baseline is from itself; None when it gave nothing that says so."""
    noise, base = comparison.noise, comparison.baseline
    if noise is None:
        return f"one run of {base} only: how far it is from itself is not known, see `--repeat`"
    parts = {
        "final gap": noise.final_gap,
        "largest gap": noise.largest_gap,
        "metric": noise.metric_gap,
        "step time": noise.step_time,
    }
    known = [f"{name} {_share(value)}" for name, value in parts.items() if value is not None]
    return f"noise, {printable(base)} against itself: {', '.join(known)}" if known else None
