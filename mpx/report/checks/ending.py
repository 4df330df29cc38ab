"""How the run ended, and what the report may lack because of it."""

from __future__ import annotations

from collections.abc import Iterator

from mpx.record.model import Process, RunRecord
from mpx.record.parts import Finding
from mpx.report.checks.registry import check
from mpx.report.facts import working
from mpx.report.wording import code, count, seconds

__all__: list[str] = []

AT_ONCE_S = 0.05


@check(order=5)
def killed(record: RunRecord) -> Iterator[Finding]:
    """A signal ended the run."""
    if record.status != "killed":
        return
    signal = record.signal or "a signal"
    why = ""
    if record.signal == "SIGKILL":
        why = ". Often the system does that when memory runs out, or a scheduler at a job's limit"
    elif record.signal in ("SIGSEGV", "SIGBUS", "SIGABRT", "SIGILL", "SIGFPE"):
        why = ": a crash of compiled code, not an error of Python"
    yield Finding(
        id="killed",
        severity="warning",
        text=f"the run was killed by {signal}{why}. {_tail(record)}",
        evidence=f"signal {signal}",
        hint="`dmesg` tells whether the system was out of memory" if record.signal == "SIGKILL" else None,
    )


@check(order=50)
def ended_without_cleanup(record: RunRecord) -> Iterator[Finding]:
    """The script ended by itself, but in a way that runs no exit handlers."""
    silent = _silent(record)
    if record.status not in ("completed", "failed", "interrupted") or not silent:
        return
    pids = {item.pid for item in record.processes}
    children = all(item.ppid in pids for item in silent)
    who = f"{count(len(silent), 'child process')} of the script's" if children else "the process"
    yield Finding(
        id="ended-without-cleanup",
        severity="info",
        text=f"{who} ended without exit handlers (`os._exit`, `exec` or a signal). {_tail(record)}",
    )


@check(order=51)
def interrupted(record: RunRecord) -> Iterator[Finding]:
    """Somebody stopped the run."""
    if record.status == "interrupted":
        yield Finding(
            id="interrupted",
            severity="info",
            text="the run was interrupted (Ctrl-C, SIGINT). The numbers cover it up to there",
        )


@check(order=52)
def failed(record: RunRecord) -> Iterator[Finding]:
    """The script's exit code is not 0."""
    aborted = record.stopped is not None and record.stopped.reason == "abort-on"
    if record.status == "failed" and record.processes and not aborted:
        yield Finding(
            id="failed",
            severity="info",
            text=f"the script ended with exit code {record.exit_code}, which mpx passes on"
            + (". The numbers cover the run up to there" if working(record) else ""),
        )


@check(order=53)
def no_ending(record: RunRecord) -> Iterator[Finding]:
    """Nobody wrote how it ended."""
    if record.status != "unknown" or (record.processes and all(item.ended for item in record.processes)):
        return
    yield Finding(
        id="no-ending",
        severity="warning",
        text="no ending is recorded: the run still goes on, or mpx was killed with it. "
        "The numbers are those of the last flush",
    )


@check(order=90)
def faults(record: RunRecord) -> Iterator[Finding]:
    """A part of mpx failed."""
    if not record.faults:
        return
    first = record.faults[0]
    total = sum(fault.count for fault in record.faults)
    yield Finding(
        id="mpx-fault",
        severity="warning",
        text=f"a part of mpx failed while the script went on: {count(total, 'fault')}, the first in "
        f"{code(first.where)}. Numbers of that part may be missing",
        evidence=first.text,
        hint="please report it, with `run.json`",
    )


def _silent(record: RunRecord) -> list[Process]:
    """Return the processes that ended without an `end`; one that did nothing does not count beside one that did."""
    known = working(record) or record.processes
    return [item for item in known if not item.ended and item.last_t is not None]


def _unflushed(record: RunRecord) -> float | None:
    """Return the seconds between the last words of a process that ended without an `end`, and the end."""
    last = [item.last_t for item in _silent(record) if item.last_t is not None]
    return max(0.0, record.ended_t - min(last)) if last and record.ended_t is not None else None


def _tail(record: RunRecord) -> str:
    gap = _unflushed(record)
    if gap is None:
        return "The numbers cover it up to there"
    if not working(record):
        return f"It left no numbers: nothing had been flushed yet, {seconds(gap)} after torch was imported"
    if gap < AT_ONCE_S:
        return "The last flush was right before the end"
    return f"The last flush was {seconds(gap)} before the end: what came after it is not in the numbers"
