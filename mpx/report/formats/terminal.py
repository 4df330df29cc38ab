"""The report on a terminal: at most 18 lines, the gravest first to stay when there is no room for all."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Sequence

from mpx.record.model import RunRecord
from mpx.record.parts import Finding
from mpx.report import wording
from mpx.report.facts import failed_early, half_type, last_loss, level, program
from mpx.report.formats.options import Options
from mpx.report.formats.rows import ROWS, Row, Style
from mpx.report.formats.tables import tables
from mpx.report.headline import ALL_CLEAR, SEVERITY_WORDS, all_clear, ending, headline
from mpx.report.wording import amount, count, printable
from mpx.values import frozen

__all__ = ["MOST_LINES", "terminal"]

MOST_LINES = 18
_LABEL = 13  # columns
_IMPORTANCE = {"error": 95, "warning": 90, "info": 65}
_HINT_OF_A_NOTE = 20
_COLORS = {"error": "31;1", "warning": "33", "note": "36", "ok": "32", "hint": "36"}


@frozen
class _Block:
    """Lines that stay or go together."""

    lines: tuple[str, ...]
    importance: int


def terminal(record: RunRecord, options: Options) -> str:
    """Return the report as text for `options`' stream, with a final newline."""
    if options.verbosity < 0 or (options.verbosity == 0 and _is_told_by_the_script(record)):
        lines = [_one_line(record, options)]
    else:
        blocks = _blocks(record, options)
        if options.verbosity == 0:
            blocks = _fitting(blocks, options)
        lines = [line for block in blocks for line in block.lines]
        if options.verbosity > 0:
            lines += tables(record, options)
    text = "".join(f"{line}\n" for line in lines)
    return text.encode(options.encoding, "backslashreplace").decode(options.encoding)


def _is_told_by_the_script(record: RunRecord) -> bool:
    return failed_early(record) and all(finding.severity == "info" for finding in record.findings)


def _blocks(record: RunRecord, options: Options) -> list[_Block]:
    style = Style(unicode=options.unicode)
    blocks = [_Block((_header(record, options),), 100)]
    blocks += [_row_block(row, options) for maker in ROWS for row in maker(record, style)]
    for finding in record.findings:
        blocks += _finding_blocks(finding, options)
    if all_clear(record):
        blocks.append(_Block(_wrapped("ok", (ALL_CLEAR,), options), 40))
    if options.run_path is not None:
        # Never wrapped or cut: it is there to be copied.
        blocks.append(_Block((_labelled("record", _shortest(str(options.run_path)), options),), 99))
    return blocks


def _fitting(blocks: Sequence[_Block], options: Options) -> list[_Block]:
    """Return the blocks that fit into the room, the most important ones, in their own order."""
    if sum(len(block.lines) for block in blocks) <= MOST_LINES:
        return list(blocks)
    room = MOST_LINES - 1  # for the line that says that there is more
    kept = set()
    for index in sorted(range(len(blocks)), key=lambda index: -blocks[index].importance):
        if len(blocks[index].lines) <= room:
            room -= len(blocks[index].lines)
            kept.add(index)
    text = f"{count(len(blocks) - len(kept), 'entry')} left out: see `mpx report -v`"
    more = _Block(_wrapped("more", (text,), options), 0)
    chosen = [blocks[index] for index in sorted(kept)]
    return [*chosen[:-1], more, *chosen[-1:]]


def _header(record: RunRecord, options: Options) -> str:
    return _colored("mpx  " + _separator(options).join(headline(record)), "1", options)


def _one_line(record: RunRecord, options: Options) -> str:
    steps = record.steps
    parts = [f"{level(record)} {half_type(record) or 'float32'}", printable(program(record))]
    if steps.attempted:
        parts.append(f"{amount(steps.applied)} of {count(steps.attempted, 'step')} applied")
    elif record.backwards:
        parts.append(f"{count(record.backwards, 'backward pass')}, no optimizer step")
    elif record.forwards:
        parts.append(f"{count(record.forwards, 'forward call')}, nothing trained")
    elif record.processes:
        parts.append("nothing trained")
    else:
        parts.append("torch not imported")
    last = last_loss(record)
    if last is not None:
        parts.append(f"last loss {wording.loss(last)}")
    parts.append(ending(record))
    for severity in ("error", "warning"):
        number = sum(finding.severity == severity for finding in record.findings)
        if number:
            parts.append(_colored(count(number, severity), _COLORS[severity], options))
    if options.run_path is not None:
        parts.append(_shortest(str(options.run_path)))
    return "mpx  " + _separator(options).join(parts)


def _row_block(row: Row, options: Options) -> _Block:
    return _Block(_wrapped(row.label, row.parts, options), row.importance)


def _finding_blocks(finding: Finding, options: Options) -> list[_Block]:
    word = SEVERITY_WORDS.get(finding.severity, finding.severity)
    importance = _IMPORTANCE.get(finding.severity, 0)
    lines = _wrapped(word, (printable(finding.text),), options)
    if options.verbosity > 0 and finding.evidence:
        lines += _wrapped("evidence", (printable(finding.evidence),), options)
    hint = _wrapped("hint", (printable(finding.hint),), options) if finding.hint else ()
    if finding.severity == "info" and hint:
        return [_Block(lines, importance), _Block(hint, _HINT_OF_A_NOTE)]
    return [_Block(lines + hint, importance)]


def _wrapped(label: str, parts: Sequence[str], options: Options) -> tuple[str, ...]:
    """Return lines no wider than the width; a part goes to the next line whole when it can."""
    room = options.width - _LABEL
    separator = _separator(options)
    lines: list[str] = []
    for part in parts:
        if lines and len(lines[-1]) + len(separator) + len(part) <= room:
            lines[-1] += separator + part
        else:
            lines += textwrap.wrap(part, room, break_long_words=False, break_on_hyphens=False) or [""]
    first, *rest = lines or [""]
    return (_labelled(label, first, options), *(" " * _LABEL + line for line in rest))


def _labelled(label: str, text: str, options: Options) -> str:
    return _colored(f" {label:<{_LABEL - 1}}", _COLORS.get(label, "2"), options) + text


def _colored(text: str, color: str, options: Options) -> str:
    return f"\x1b[{color}m{text}\x1b[0m" if options.color else text


def _separator(options: Options) -> str:
    return " · " if options.unicode else " | "


def _shortest(path: str) -> str:
    try:
        relative = os.path.relpath(path)
    except (OSError, ValueError):
        return path
    return relative if not relative.startswith("..") else path
