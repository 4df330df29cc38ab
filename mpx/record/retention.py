"""Which events of a process matter to the record: the bound on a shard's size, however long the run.

Both the fold and the compaction of a shard go through `retain`, so compaction cannot change a record:
`retain` is idempotent and may be applied to any prefix first.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

__all__ = ["FAULTS_KEPT", "OTHERS_KEPT", "OVERFLOWS_KEPT", "Event", "retain"]

Event = dict[str, Any]

OVERFLOWS_KEPT = 200  # a process; the counts in its snapshot go on
FAULTS_KEPT = 50  # different ones, a process; equal ones are counted
OTHERS_KEPT = 200  # a kind and process, of kinds that this version does not know

_FIRST = {"run": 1, "preset": 1, "start": 1, "stopped": 1, "overflow": OVERFLOWS_KEPT, "fault": FAULTS_KEPT}
_LAST = frozenset({"snapshot", "exit", "gates", "end"})  # cumulative or final: the last one says it all


def retain(events: Iterable[Event]) -> list[Event]:
    """Return the events that count, in their order: the first few of some kinds, the last one of others."""
    kept: dict[tuple[Any, ...], Event] = {}
    seen: dict[tuple[str, str], int] = {}
    for event in events:
        kind, process = str(event.get("event")), str(event.get("process", ""))
        if kind in _LAST:
            kept.pop((process, kind), None)
            kept[process, kind] = event
            continue
        if kind == "fault":
            key: tuple[Any, ...] = (process, kind, str(event.get("where")), str(event.get("text")))
            if key in kept:
                kept[key] = {**kept[key], "count": _count(kept[key]) + _count(event)}
                continue
        else:
            key = (process, kind, seen.get((process, kind), 0))
        number = seen.get((process, kind), 0)
        if number < _FIRST.get(kind, OTHERS_KEPT):
            kept[key] = event
            seen[process, kind] = number + 1
    return list(kept.values())


def _count(event: Event) -> int:
    count = event.get("count", 1)
    return count if isinstance(count, int) else 1
