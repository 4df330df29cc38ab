"""`fold(events) -> RunRecord`: the one place where what the processes left becomes what the run did."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from mpx.errors import RecordError
from mpx.record import codec, ranks
from mpx.record.model import Process, RunRecord, Snapshot
from mpx.record.parts import (
    Communication,
    Coverage,
    Fault,
    Memory,
    OpWork,
    Overflow,
    OverflowCounts,
    Steps,
    Stop,
    Substitution,
    Verdict,
)
from mpx.record.retention import Event, retain

__all__ = ["fold"]

T = TypeVar("T")

_HALF = frozenset({"float16", "bfloat16"})
RECORDED = 2000  # overflows in a record


@dataclass
class _Log:
    """What one process wrote, sorted by kind; the supervisor's own faults are the process of no name's."""

    process: str
    start: Event = field(default_factory=dict)
    last: Snapshot = field(default_factory=Snapshot)
    last_t: float | None = None
    ended: bool = False
    overflows: list[Overflow] = field(default_factory=list)
    stopped: Stop | None = None
    faults: list[Fault] = field(default_factory=list)


def fold(events: Iterable[Event]) -> RunRecord:
    """Return the record of a run from the events of all its processes.

    The events of one process must come in the order in which it wrote them; processes may come in any order.
    An event that does not have the expected form becomes a fault of the record and never an exception.
    """
    run: Event = {}
    preset: Event = {}
    ending: Event = {}
    verdicts: Any = []
    notices: list[str] = []
    failed: list[Event] = []
    logs: dict[str, _Log] = {}
    kept = retain(events)
    numbers = [_whole(event.get("rank")) for event in kept if event.get("event") == "start"]
    lowest = min((number for number in numbers if number is not None), default=None)
    for event in kept:
        kind = event.get("event")
        if kind == "run":
            run = event
        elif kind == "preset":
            preset = event
        elif kind == "exit":
            ending = event
        elif kind == "gates":
            verdicts = event.get("verdicts")
        elif kind == "failure":
            failed.append(event)
        elif kind == "skipped":
            notices.append(str(event.get("text", "")))
        else:
            process = str(event.get("process", ""))
            _take(logs.setdefault(process, _Log(process)), event, lowest)
    ordered = sorted(logs.values(), key=lambda log: (_number(log.start.get("t")) or 0.0, log.process))
    known = ranks.failures(failed)
    processes = [_process(log, known) for log in ordered if log.process]
    of_ranks = [
        ranks.RankLog(process, log.last, log.overflows)
        for process, log in zip(processes, (log for log in ordered if log.process), strict=True)
    ]
    record = _totals(ordered)
    head = processes[0] if processes else None
    lead = next((item for item in processes if item.trained), head)
    faults = [fault for log in ordered for fault in log.faults]
    return replace(
        record,
        mpx=_text(run.get("mpx")),
        torch=lead.torch if lead else None,
        python=(lead.python if lead else None) or _text(run.get("python")),
        device=lead.device if lead else None,
        host=_text(run.get("host")),
        command=_texts(run.get("command")),
        script=_text(run.get("script")),
        target_kind=_text(run.get("target_kind")),
        cwd=_text(run.get("cwd")),
        preset=_mapping(run.get("preset")) or _mapping(preset.get("preset")),
        origin=_mapping(run.get("origin")) or _mapping(preset.get("origin")),
        exit_code=_whole(ending.get("exit_code")),
        signal=_text(ending.get("signal")),
        status=_text(ending.get("status")) or "unknown",
        started=_text(run.get("started")),
        wall_s=_number(ending.get("wall_s")),
        ended_t=_number(ending.get("t")),
        processes=processes,
        ranks=ranks.rank_rows(of_ranks),
        overflowing=ranks.overflowing_modules(of_ranks),
        desyncs=ranks.desyncs(of_ranks),
        stopped=min((log.stopped for log in ordered if log.stopped), key=lambda stop: stop.t, default=None),
        gates=_verdicts(verdicts),
        faults=faults,
        notices=_texts(run.get("notices")) + sorted(notices),
    )


def _take(log: _Log, event: Event, lowest: int | None) -> None:
    def misfit(error: RecordError) -> None:
        log.faults.append(Fault("record", f"event `{event.get('event')}`: {error}", process=log.process))

    kind = event.get("event")
    log.last_t = max((t for t in (log.last_t, _number(event.get("t"))) if t is not None), default=None)
    try:
        if kind == "start":
            log.start = event
        elif kind == "snapshot":
            if _whole(log.start.get("rank")) not in (None, lowest):
                event = ranks.without_histories(event)
            log.last = codec.from_json(Snapshot, event, on_error=misfit)
        elif kind == "overflow":
            log.overflows.append(codec.from_json(Overflow, event, on_error=misfit))
        elif kind == "stopped":
            log.stopped = log.stopped or codec.from_json(Stop, event, on_error=misfit)
        elif kind == "fault":
            log.faults.append(codec.from_json(Fault, event, on_error=misfit))
        elif kind == "end":
            log.ended = True
    except RecordError as error:
        misfit(error)


def _process(log: _Log, failed: Mapping[tuple[str, int], Mapping[str, Any]]) -> Process:
    start, last = log.start, log.last
    described = {**start, "process": log.process}
    try:
        process = codec.from_json(Process, described, on_error=lambda _: None)
    except RecordError:
        process = Process(log.process)
    failure = failed.get((process.host, process.pid), {})
    return replace(
        process,
        exit_code=_whole(failure.get("exit_code")),
        signal=_text(failure.get("signal")),
        started_t=_number(start.get("t")),
        last_t=log.last_t,
        ended=log.ended,
        trained=last.trained,
        forwards=last.forwards,
        backwards=last.backwards,
        steps=last.steps,
    )


def _leading(logs: Sequence[_Log]) -> list[_Log]:
    """Return the processes whose counts are the run's.

    Those that trained, or, when none did, those that called a module. Of ranks only the lowest (all ranks
    take the same steps), with its restarts; processes without a rank are runs of their own and add up.
    """
    active = [log for log in logs if log.last.trained] or [log for log in logs if log.last.active]
    numbers = [rank for log in active if (rank := _whole(log.start.get("rank"))) is not None]
    lowest = min(numbers, default=None)
    return [log for log in active if _whole(log.start.get("rank")) in (None, lowest)] or list(logs)


def _totals(logs: Sequence[_Log]) -> RunRecord:
    lead = _leading(logs)
    last = [log.last for log in lead]
    busiest = max(last, key=lambda item: (item.steps.attempted, item.forwards), default=Snapshot())
    return RunRecord(
        forwards=sum(snapshot.forwards for snapshot in last),
        backwards=sum(snapshot.backwards for snapshot in last),
        steps=Steps(
            attempted=sum(snapshot.steps.attempted for snapshot in last),
            applied=sum(snapshot.steps.applied for snapshot in last),
            skipped=sum(snapshot.steps.skipped for snapshot in last),
        ),
        optimizers=[item for snapshot in last for item in snapshot.optimizers],
        scalers=[item for snapshot in last for item in snapshot.scalers],
        nonfinite_losses=sum(_at_least(log, "nonfinite_losses") for log in lead),
        overflow_counts=OverflowCounts(
            loss_nan=sum(_at_least(log, "loss_nan") for log in lead),
            forward_inf=sum(_at_least(log, "forward_inf") for log in lead),
            backward_inf=sum(_at_least(log, "backward_inf") for log in lead),
        ),
        overflows=_overflows(logs),
        losses=[item for snapshot in last for item in snapshot.losses],
        throughput=busiest.throughput,
        gradients=busiest.gradients,
        communication=_communication(last),
        memory=_memory(logs),
        coverage=_coverage(last),
        casts=_casts(last),
        substitutions=_substitutions(lead, logs),
        longest_skip_run=max((snapshot.longest_skip_run for snapshot in last), default=0),
        saw_script_amp=any(log.last.saw_script_amp for log in logs),
    )


def _at_least(log: _Log, kind: str) -> int:
    # A process that was killed between an overflow and its next snapshot left the event only.
    if kind == "nonfinite_losses":
        counted, kind = log.last.nonfinite_losses, "loss_nan"
    else:
        counted = getattr(log.last.overflow_counts, kind)
    return max(counted, sum(overflow.kind == kind for overflow in log.overflows))


def _overflows(logs: Sequence[_Log]) -> list[Overflow]:
    found = [
        replace(overflow, process=log.process, rank=_whole(log.start.get("rank")))
        for log in logs
        for overflow in log.overflows
    ]
    found.sort(key=lambda overflow: (overflow.t, overflow.process, overflow.backward))
    if (
        len(found) > RECORDED
    ):  # of very many ranks: all of those whose counts are the run's, and the first of the others
        own = {log.process for log in _leading(logs)}
        others = [overflow for overflow in found if overflow.process not in own]
        allowed = {id(overflow) for overflow in others[:RECORDED]}
        found = [overflow for overflow in found if overflow.process in own or id(overflow) in allowed]
    return found


def _memory(logs: Sequence[_Log]) -> Memory | None:
    known = [log.last.memory for log in logs if log.last.memory is not None]
    return max(known, key=lambda memory: (memory.peak_bytes, memory.device), default=None)


def _communication(last: Sequence[Snapshot]) -> Communication | None:
    known = [snapshot.communication for snapshot in last if snapshot.communication is not None]
    if not known:
        return None
    return replace(
        known[0],
        buckets=sum(item.buckets for item in known),
        bytes=sum(item.bytes for item in known),
        full_bytes=sum(item.full_bytes for item in known),
    )


def _coverage(last: Sequence[Snapshot]) -> Coverage | None:
    known = [snapshot.coverage for snapshot in last if snapshot.coverage is not None]
    if len(known) <= 1:
        return known[0] if known else None
    work: dict[tuple[str, str], OpWork] = {}
    for item in (item for coverage in known for item in coverage.by_op):
        before = work.get((item.op, item.dtype), OpWork(item.op, item.dtype))
        flops, calls = before.flops + item.flops, before.calls + item.calls
        work[item.op, item.dtype] = replace(before, flops=flops, calls=calls)
    total = sum(item.flops for item in work.values())
    half = sum(item.flops for item in work.values() if item.dtype in _HALF)
    return Coverage(half / total if total else None, list(work.values()), "" if total else known[0].missing)


def _casts(last: Sequence[Snapshot]) -> dict[str, Any]:
    total: dict[str, Any] = {}
    for snapshot in last:
        _add_up(total, snapshot.casts)
    return total


def _add_up(total: dict[str, Any], more: Mapping[str, Any]) -> None:
    """Add the numbers of `more` to those of `total`, at every depth; of what is no number the first stays."""
    for key, value in more.items():
        before = total.get(key)
        if isinstance(value, dict):
            _add_up(total.setdefault(key, {}) if isinstance(before, dict | None) else {}, value)
        elif _number(before) is not None and _number(value) is not None:
            total[key] = before + value
        elif before is None:
            total[key] = value


def _substitutions(lead: Sequence[_Log], logs: Sequence[_Log]) -> list[Substitution]:
    # Every rank replaces the same things: the counts are those of the leading processes, and the others add
    # what only they met.
    total: dict[tuple[str, str], Substitution] = {}
    for log in lead:
        for item in log.last.substitutions:
            before = total.get((item.id, item.text))
            total[item.id, item.text] = replace(item, count=before.count + item.count) if before else item
    for log in logs:
        for item in log.last.substitutions:
            total.setdefault((item.id, item.text), item)
    return list(total.values())


def _verdicts(told: Any) -> list[Verdict]:
    verdicts = []
    for item in told if isinstance(told, list) else ():
        with suppress(RecordError):
            verdicts.append(codec.from_json(Verdict, item))
    return verdicts


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def _texts(value: Any) -> list[str]:
    return [str(item) for item in value] if isinstance(value, (list, tuple)) else []


def _mapping(value: Any) -> dict[str, Any]:
    return dict(value) if isinstance(value, dict) else {}


def _number(value: Any) -> float | None:
    return value if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None
