"""The formats of a report: one function each, in one table."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from mpx.record.model import RunRecord
from mpx.report.formats.as_json import as_json
from mpx.report.formats.options import Options
from mpx.report.formats.terminal import terminal

__all__ = ["FORMATS", "Options", "Renderer", "as_json", "render", "terminal"]

Renderer = Callable[[RunRecord, Options], str]

FORMATS: Mapping[str, Renderer] = {"terminal": terminal, "json": as_json}


def render(record: RunRecord, options: Options, *, format_name: str = "terminal") -> str:
    """Return the report of a record that has its findings (`with_findings`), with a final newline."""
    return FORMATS[format_name](record, options)
