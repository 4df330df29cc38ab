"""A comparison as text, Markdown and JSON: the same table in each."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Mapping

from mpx.record.codec import dumps
from mpx.report import wording
from mpx.report.compare.gaps import distance
from mpx.report.compare.levels import Comparison, LevelResult
from mpx.report.formats.options import Options
from mpx.report.sparkline import means, sparkline
from mpx.report.wording import percent, printable

__all__ = ["COMPARISONS", "show"]

BARS = 40
_WORDS = {"error": "error", "warning": "warning", "info": "note"}


def show(comparison: Comparison, options: Options, *, format_name: str = "terminal") -> str:
    """Return the comparison in a format, with a final newline."""
    return COMPARISONS[format_name](comparison, options)


def terminal(comparison: Comparison, options: Options) -> str:
    """Return the table, the losses over one another, what was found, and the verdict."""
    head, *rows = _table(comparison)
    widths = [max(len(row[column]) for row in (head, *rows)) for column in range(len(head))]
    lines = [
        "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in (head, *rows)
    ]
    if (noise := _noise(comparison)) is not None:
        lines += ["", f"  {noise}"]
    if options.unicode:
        lines += ["", *(f"  {line}" for line in _bars(comparison))]
    texts = [*_found(comparison), f"verdict: {comparison.reason}"]
    for text in texts:
        wrapped = textwrap.wrap(text, options.width - 2, subsequent_indent="    ", break_on_hyphens=False)
        lines += ["", *(f"  {line}" for line in wrapped)]
    text = "\n".join(lines) + "\n"
    return text.encode(options.encoding, "backslashreplace").decode(options.encoding)


def markdown(comparison: Comparison, _: Options) -> str:
    """Return the same for a pull request or a job's summary."""
    head, *rows = _table(comparison)
    lines = [f"### mpx: {comparison.reason}", ""]
    lines += ["| " + " | ".join(row) + " |" for row in (head, ["--"] * len(head), *rows)]
    if (noise := _noise(comparison)) is not None:
        lines += ["", noise]
    found = _found(comparison)
    lines += ["", *(f"- {text}" for text in found)] if found else []
    return "\n".join(lines) + "\n"


def as_json(comparison: Comparison, _: Options) -> str:
    """Return everything, for tools."""
    return dumps(comparison, indent=2) + "\n"


COMPARISONS: Mapping[str, Callable[[Comparison, Options], str]] = {
    "terminal": terminal,
    "markdown": markdown,
    "json": as_json,
}


def _table(comparison: Comparison) -> list[list[str]]:
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
    return _share(gap) if gap <= 0 else f"+{_share(gap)}"


def _share(gap: float) -> str:
    if not math.isfinite(gap):
        return "not finite"
    return f"-{distance(-gap)}" if gap < 0 else distance(gap)


def _noise(comparison: Comparison) -> str | None:
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


def _found(comparison: Comparison) -> list[str]:
    return [
        f"{_WORDS.get(issue.severity, issue.severity)}: {printable(issue.level)}: {issue.id}: {printable(issue.text)}"
        for issue in comparison.issues
    ]


def _bars(comparison: Comparison) -> list[str]:
    """Return each loss as bars between the least and the greatest of all of them."""
    curves = [result for result in comparison.levels if result.curve]
    finite = [value for result in curves for value in result.curve if math.isfinite(value)]
    if not finite:
        return []
    width = max(len(result.level) for result in curves)
    last = max(result.passes[-1] for result in curves)
    lines = []
    for result in curves:
        room = max(1, round(BARS * result.passes[-1] / last)) if last else 1
        values = means(result.passes, result.curve, room)
        # the extremes set the scale, and are cut off again
        bars = sparkline([*values, min(finite), max(finite)])[:-2]
        lines.append(f"{result.level.ljust(width)}  {bars}")
    return lines
