"""What a script asks `apex.amp` for."""

from __future__ import annotations

from collections.abc import Iterator

from mpx.record.model import RunRecord
from mpx.record.parts import Finding
from mpx.report.checks.registry import check
from mpx.report.facts import level

__all__: list[str] = []

ASKS = {f"apex-asks-{name}": name for name in ("O0", "O1", "O2", "O3")}


@check(order=36)
def apex_level(record: RunRecord) -> Iterator[Finding]:
    """The script asks for another level than the default, and nobody chose one."""
    if record.origin.get("name") != "default":
        return
    for row in record.substitutions:
        asked = ASKS.get(row.id)
        if asked is not None:
            yield Finding(
                id="apex-level",
                severity="info",
                text=f"no --opt-level was given, so {level(record)} ran; the script asks apex.amp for {asked}",
                hint=f"`mpx run -O {asked} ...` runs what it asks for",
            )
