"""What the ranks of a run did side by side: one row each, and where their loss scales parted."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from mpx.record.model import Process, Snapshot
from mpx.record.parts import Desync, Overflow, Rank

__all__ = ["RankLog", "desyncs", "failures", "overflowing_modules", "rank_rows", "without_histories"]


class RankLog(NamedTuple):
    """One process with a rank, and the last that it told."""

    process: Process
    last: Snapshot
    overflows: Sequence[Overflow]


def rank_rows(logs: Iterable[RankLog]) -> list[Rank]:
    """Return a row for each rank of each attempt; of a launcher's own process, which has no rank, none."""
    rows = []
    for process, last, _ in _trained(logs):
        memory, throughput = last.memory, last.throughput
        rows.append(
            Rank(
                rank=process.rank or 0,
                attempt=process.restart or 0,
                process=process.process,
                host=process.host,
                pid=process.pid,
                backwards=last.backwards,
                steps=last.steps,
                shared_passes=last.shared_passes,
                step_ms=throughput.step_ms if throughput else None,
                peak_bytes=memory.peak_bytes if memory else None,
                scales={item.site: item.final for item in last.scalers},
                overflows=sum(item.overflows for item in last.scalers),
                ended=process.ended,
                last_t=process.last_t,
                exit_code=process.exit_code,
                signal=process.signal,
            )
        )
    return sorted(rows, key=lambda row: (row.attempt, row.rank, row.process))


def desyncs(logs: Iterable[RankLog]) -> list[Desync]:
    """Return, for each attempt and call site, the first pass at which ranks that share gradients had other scales.

    Compared are the passes that both histories hold, and the last scales of ranks that made as many passes. Histories
    are thinned alike, so what is in one of them only says nothing: the rank may have ended earlier.
    """
    attempts: dict[int, list[RankLog]] = {}
    for log in _trained(logs):
        if log.last.shared_passes:
            attempts.setdefault(log.process.restart or 0, []).append(log)
    found = []
    for attempt, ranks in sorted(attempts.items()):
        known: dict[str, dict[int, dict[float, float]]] = {}  # site -> rank -> pass -> scale
        for log in ranks:
            for scaler in log.last.scalers:
                points = {point[0]: point[1] for point in scaler.history}
                points[log.last.backwards + 0.5] = scaler.final  # after all of them
                known.setdefault(scaler.site, {})[log.process.rank or 0] = points
        found += [desync for site, of in known.items() if (desync := _first_difference(site, of, attempt))]
    return found


def overflowing_modules(logs: Iterable[RankLog]) -> dict[str, list[int]]:
    """Return the places that overflowed, on any rank, each with its ranks."""
    found: dict[str, set[int]] = {}
    for log in _trained(logs):
        for item in log.overflows:
            place = item.module or item.parameter
            if place:
                found.setdefault(place, set()).add(log.process.rank or 0)
    return {place: sorted(ranks) for place, ranks in found.items()}


def without_histories(snapshot: Mapping[str, Any]) -> dict[str, Any]:
    """Return the snapshot of a rank whose series no report shows; that of the loss scale stays, to be compared."""
    thin = {**snapshot, "losses": []}
    for part in ("throughput", "memory"):
        if isinstance(thin.get(part), dict):
            thin[part] = {**thin[part], "history": []}
    return thin


def _trained(logs: Iterable[RankLog]) -> Iterator[RankLog]:
    return (log for log in logs if log.process.rank is not None and log.process.trained)


def _first_difference(site: str, of: Mapping[int, Mapping[float, float]], attempt: int) -> Desync | None:
    by_pass: dict[float, dict[int, float]] = {}
    for rank, points in of.items():
        for at, scale in points.items():
            by_pass.setdefault(at, {})[rank] = scale
    for at in sorted(by_pass):
        scales = by_pass[at]
        if len(set(scales.values())) > 1:
            return Desync(site, int(at), attempt, {str(rank): scales[rank] for rank in sorted(scales)})
    return None


def failures(events: Iterable[Mapping[str, Any]]) -> dict[tuple[str, int], Mapping[str, Any]]:
    """Return what launchers said of ranks that failed, by host and process id."""
    found: dict[tuple[str, int], Mapping[str, Any]] = {}
    for event in events:
        host, pid = event.get("host"), event.get("pid")
        if isinstance(host, str) and isinstance(pid, int):
            found.setdefault((host, pid), event)
    return found
