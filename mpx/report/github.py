"""What a GitHub job shows of a run: annotations beside the log, and a summary on the job's page."""

from __future__ import annotations

from mpx.record.model import RunRecord
from mpx.report.facts import level, program
from mpx.report.wording import printable

__all__ = ["workflow_commands"]

_COMMANDS = {"error": "error", "warning": "warning"}


def workflow_commands(record: RunRecord) -> list[str]:
    """Return a workflow command for each finding that is more than a note."""
    title = f"mpx {level(record)} {program(record)}"
    return [
        f"::{_COMMANDS[finding.severity]} title={_property(title)}::"
        + _data(f"{finding.text}. {finding.hint}" if finding.hint else finding.text)
        for finding in record.findings
        if finding.severity in _COMMANDS
    ]


def _data(text: str) -> str:
    return printable(text).replace("%", "%25")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")
