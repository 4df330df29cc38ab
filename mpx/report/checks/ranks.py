"""What ranks did side by side: one that died, scales that parted, one that was slow, and attempts."""

from __future__ import annotations

from collections.abc import Iterator

from mpx.record.model import RunRecord
from mpx.record.parts import Finding, Rank
from mpx.report.checks.registry import check
from mpx.report.wording import code, count, plural, scale, seconds

__all__: list[str] = []

SLOW = 1.2  # times the median of all ranks


@check(order=4)
def died(record: RunRecord) -> Iterator[Finding]:
    """A rank failed by itself: the launcher then ends the others, so it is the one to look at."""
    for rank in record.ranks:
        if rank.signal is None and rank.exit_code is None:
            continue
        how = f"was killed by {rank.signal}" if rank.signal else f"ended with exit code {rank.exit_code}"
        again = any(other.rank == rank.rank and other.attempt > rank.attempt for other in record.ranks)
        hint = (
            "`dmesg` on that host tells whether the system was out of memory"
            if rank.signal == "SIGKILL"
            else None
        )
        yield Finding(
            id="rank-died",
            severity="warning",
            text=f"{_named(rank)} {how}, with {count(rank.steps.attempted, 'step')} recorded{_flushed(record, rank)}. "
            + ("It was started again" if again else "The launcher then ended the other ranks"),
            evidence=f"pid {rank.pid}, attempt {rank.attempt}",
            hint=hint,
        )


@check(order=19)
def desync(record: RunRecord) -> Iterator[Finding]:
    """Ranks that share gradients scaled their losses differently: the sums of their gradients are wrong."""
    for item in record.desyncs:
        parted = ", ".join(f"rank {rank}: {scale(value)}" for rank, value in item.scales.items())
        yield Finding(
            id="scale_desync",
            severity="error",
            text=f"ranks that share gradients had different loss scales from backward pass {item.backward} on "
            f"(at {code(item.site)}; {parted}): their averaged gradients are wrong",
            evidence=f"attempt {item.attempt}",
            hint="do all ranks call `backward` equally often? If so, please report it, with `run.json`",
        )


@check(order=61)
def straggler(record: RunRecord) -> Iterator[Finding]:
    """A rank whose steps took longer. Ranks that wait for each other in each step are all as slow as the slowest."""
    last = max((rank.attempt for rank in record.ranks), default=0)
    timed = [(rank, rank.step_ms.median) for rank in record.ranks if rank.attempt == last and rank.step_ms]
    if len(timed) < 2:
        return
    usual = sorted(ms for _, ms in timed)[(len(timed) - 1) // 2]
    slowest, took = max(timed, key=lambda entry: entry[1])
    if usual > 0 and took > SLOW * usual:
        yield Finding(
            id="straggler",
            severity="info",
            text=f"{_named(slowest)} was the slowest: {took:.3g} ms a step (median), all ranks {usual:.3g} ms",
        )


@check(order=62)
def restarted(record: RunRecord) -> Iterator[Finding]:
    """The ranks were started again, as torchrun does with `--max-restarts`."""
    attempts = len({rank.attempt for rank in record.ranks})
    if attempts > 1:
        yield Finding(
            id="restarted",
            severity="info",
            text=f"the ranks ran in {attempts} {plural('attempt')}: torchrun started them again. Counts are sums",
        )


def _named(rank: Rank) -> str:
    return f"rank {rank.rank} (pid {rank.pid} on {rank.host})" if rank.host else f"rank {rank.rank}"


def _flushed(record: RunRecord, rank: Rank) -> str:
    if record.ended_t is None or rank.last_t is None or rank.ended:
        return ""
    return f"; its last flush was {seconds(max(0.0, record.ended_t - rank.last_t))} before the end of the run"
