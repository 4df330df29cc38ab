"""A comparison as text, Markdown, HTML and JSON: the same table in each."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Mapping

from mpx.record.codec import dumps
from mpx.report.compare.levels import Comparison
from mpx.report.compare.words import noise_in_words, rows_of
from mpx.report.formats.options import Options
from mpx.report.headline import SEVERITY_WORDS
from mpx.report.sparkline import means, sparkline
from mpx.report.wording import printable

__all__ = ["COMPARISONS", "show"]

BARS = 40


def show(comparison: Comparison, options: Options, *, format_name: str = "terminal") -> str:
    """Return the comparison in a format, with a final newline."""
    return COMPARISONS[format_name](comparison, options)


def terminal(comparison: Comparison, options: Options) -> str:
    """Return the table, the losses over one another, what was found, and the verdict."""
    head, *rows = rows_of(comparison)
    widths = [max(len(row[column]) for row in (head, *rows)) for column in range(len(head))]
    lines = [
        "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in (head, *rows)
    ]
    if (noise := noise_in_words(comparison)) is not None:
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
    head, *rows = rows_of(comparison)
    lines = [f"### mpx: {comparison.reason}", ""]
    lines += ["| " + " | ".join(row) + " |" for row in (head, ["--"] * len(head), *rows)]
    if (noise := noise_in_words(comparison)) is not None:
        lines += ["", noise]
    found = _found(comparison)
    lines += ["", *(f"- {text}" for text in found)] if found else []
    return "\n".join(lines) + "\n"


def as_html(comparison: Comparison, options: Options) -> str:
    """Return the same as a page with charts."""
    from mpx.report.compare.page import page

    return page(comparison, options)


def as_json(comparison: Comparison, _: Options) -> str:
    """Return everything, for tools."""
    return dumps(comparison, indent=2) + "\n"


COMPARISONS: Mapping[str, Callable[[Comparison, Options], str]] = {
    "terminal": terminal,
    "markdown": markdown,
    "html": as_html,
    "json": as_json,
}


def _found(comparison: Comparison) -> list[str]:
    found = []
    for issue in comparison.issues:
        word = SEVERITY_WORDS.get(issue.severity, issue.severity)
        found.append(f"{word}: {printable(issue.level)}: {issue.id}: {printable(issue.text)}")
    return found


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
