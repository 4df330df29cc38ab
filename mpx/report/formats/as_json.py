"""The record itself, for tools."""

from __future__ import annotations

from mpx.record.model import RunRecord
from mpx.report.formats.options import Options

__all__ = ["as_json"]


def as_json(record: RunRecord, _: Options) -> str:
    """Return what `run.json` holds; verbosity, width and colour change nothing."""
    return record.to_json()
