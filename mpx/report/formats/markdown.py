"""The report as GitHub-flavoured Markdown: for a job summary, a pull request or an issue."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from mpx.record.model import RunRecord
from mpx.record.parts import Finding
from mpx.report.formats.options import Options
from mpx.report.formats.rows import ROWS, Style
from mpx.report.formats.tables import ROWS_SHOWN, TABLES, numeric_columns
from mpx.report.headline import ALL_CLEAR, SEVERITY_WORDS, all_clear, headline
from mpx.report.wording import pieces, printable

__all__ = ["markdown"]

_SPECIAL = re.compile(r"([\\*_\[\]<>|#~&])")


def markdown(record: RunRecord, options: Options) -> str:
    """Return headline, findings, rows and, folded away, the tables; the headline alone at verbosity -1."""
    lines = [f"### mpx: {' · '.join(_escaped(part) for part in headline(record))}", ""]
    if options.verbosity >= 0:
        lines += _findings(record)
        lines += _rows(record)
        lines += _tables(record)
        if options.run_path is not None:
            lines += [f"Record: `{printable(str(options.run_path))}`", ""]
    return "\n".join(lines[:-1]) + "\n"


def _findings(record: RunRecord) -> Iterator[str]:
    for finding in record.findings:
        yield from _finding(finding)
    if all_clear(record):
        yield f"- **ok**: {_escaped(ALL_CLEAR)}"
    if record.findings or all_clear(record):
        yield ""


def _finding(finding: Finding) -> Iterator[str]:
    word = SEVERITY_WORDS.get(finding.severity, finding.severity)
    yield f"- **{word}**: {_escaped(finding.text)}"
    if finding.hint:
        yield f"  - try: {_escaped(finding.hint)}"
    if finding.evidence:
        yield f"  - evidence: {_escaped(finding.evidence)}"


def _rows(record: RunRecord) -> Iterator[str]:
    rows = [row for maker in ROWS for row in maker(record, Style(unicode=True))]
    if rows:
        yield from _table([("", ""), *((row.label, " · ".join(row.parts)) for row in rows)])
        yield ""


def _tables(record: RunRecord) -> Iterator[str]:
    for make in TABLES:
        for title, (head, *rows) in make(record):
            yield f"<details><summary>{_escaped(title)}</summary>"
            yield ""
            yield from _table([head, *rows[:ROWS_SHOWN]])
            if len(rows) > ROWS_SHOWN:
                yield ""
                yield f"... and {len(rows) - ROWS_SHOWN:,} more, in `run.json`"
            yield ""
            yield "</details>"
            yield ""


def _table(rows: Sequence[tuple[str, ...]]) -> Iterator[str]:
    rules = ["--:" if right else ":--" for right in numeric_columns(rows)]
    for number, row in enumerate(rows):
        yield "| " + " | ".join(_escaped(cell, in_table=True) for cell in row) + " |"
        if number == 0:
            yield "| " + " | ".join(rules) + " |"


def _escaped(text: str, *, in_table: bool = False) -> str:
    """Return `text` with what Markdown would read as its own made literal, and its code kept code."""
    written = ""
    for piece, is_code in pieces(printable(text)):
        if is_code:
            written += f"`{piece.replace('|', chr(92) + '|') if in_table else piece}`"
        else:
            written += _SPECIAL.sub(r"\\\1", piece)
    return written
