"""The registry of findings: each is one small function of a record."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from mpx.record.model import RunRecord
from mpx.record.parts import Finding

__all__ = ["CHECKS", "SEVERITIES", "check", "findings", "with_findings"]

Check = Callable[[RunRecord], Iterator[Finding]]

SEVERITIES = ("error", "warning", "info")  # in the order in which a report tells them
CHECKS: list[tuple[int, Check]] = []


def check(*, order: int) -> Callable[[Check], Check]:
    """Enter a function into the registry; of equal severity, the finding with the lower `order` is told first."""

    def enter(function: Check) -> Check:
        CHECKS.append((order, function))
        return function

    return enter


def findings(record: RunRecord) -> list[Finding]:
    """Return what the record says to a reader, the gravest first."""
    in_order = sorted(CHECKS, key=lambda entry: entry[0])
    found = [finding for _, function in in_order for finding in function(record)]
    return sorted(found, key=lambda finding: SEVERITIES.index(finding.severity))


def with_findings(record: RunRecord) -> RunRecord:
    """Return the record with its findings filled in: what `run.json` holds and a format renders."""
    return replace(record, findings=findings(record))
