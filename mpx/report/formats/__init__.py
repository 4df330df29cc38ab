"""The formats of a report, in one table: a new one is a row here. Each is loaded when it is asked for."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping

from mpx.record.model import RunRecord
from mpx.report.formats.options import Options
from mpx.values import frozen

__all__ = ["FORMATS", "Format", "Options", "Renderer", "render"]

Renderer = Callable[[RunRecord, Options], str]


@frozen
class Format:
    """One way to show a record.

    Attributes:
        home: The renderer, as `module:function` of this package.
        file_name: What it is called in a run directory.
        holds: What it is, in words.
    """

    home: str
    file_name: str
    holds: str

    @property
    def render(self) -> Renderer:
        """The renderer: its module is imported now."""
        module, _, name = self.home.partition(":")
        renderer: Renderer = getattr(importlib.import_module(f"{__name__}.{module}"), name)
        return renderer


FORMATS: Mapping[str, Format] = {
    "terminal": Format("terminal:terminal", "report.txt", "text"),
    "markdown": Format("markdown:markdown", "report.md", "for a job summary or an issue"),
    "html": Format("as_html:as_html", "report.html", "one page with charts, no network"),
    "json": Format("as_json:as_json", "report.json", "the record, as in run.json"),
    "junit": Format("junit:junit", "report.xml", "test cases for a CI server"),
    "csv": Format("as_csv:as_csv", "report.csv", "the numbers, one a row"),
}


def render(record: RunRecord, options: Options, *, format_name: str = "terminal") -> str:
    """Return the report of a record that has its findings (`with_findings`), with a final newline."""
    return FORMATS[format_name].render(record, options)
