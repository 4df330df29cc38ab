"""The formats of a report, in one table: a new one is a row here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from mpx.record.model import RunRecord
from mpx.report.formats.as_csv import as_csv
from mpx.report.formats.as_html import as_html
from mpx.report.formats.as_json import as_json
from mpx.report.formats.junit import junit
from mpx.report.formats.markdown import markdown
from mpx.report.formats.options import Options
from mpx.report.formats.terminal import terminal

__all__ = ["FORMATS", "Format", "Options", "Renderer", "render"]

Renderer = Callable[[RunRecord, Options], str]


@dataclass(frozen=True)
class Format:
    """One way to show a record: `file_name` is what it is called in a run directory, `holds` what it is, in words."""

    render: Renderer
    file_name: str
    holds: str


FORMATS: Mapping[str, Format] = {
    "terminal": Format(terminal, "report.txt", "text"),
    "markdown": Format(markdown, "report.md", "for a job summary or an issue"),
    "html": Format(as_html, "report.html", "one page with charts, no network"),
    "json": Format(as_json, "report.json", "the record, as in run.json"),
    "junit": Format(junit, "report.xml", "test cases for a CI server"),
    "csv": Format(as_csv, "report.csv", "the numbers, one a row"),
}


def render(record: RunRecord, options: Options, *, format_name: str = "terminal") -> str:
    """Return the report of a record that has its findings (`with_findings`), with a final newline."""
    return FORMATS[format_name].render(record, options)
