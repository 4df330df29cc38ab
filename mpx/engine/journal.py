"""What this process tells the record: events as they happen, and a cumulative snapshot every few seconds."""

from __future__ import annotations

import multiprocessing.process
import os
import platform
import socket
import sys
import time
from typing import TYPE_CHECKING, Any

import torch

from mpx.engine.devices import describe
from mpx.record import RunDirectory

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

__all__ = ["Journal"]

FIRST_WAIT_S = (
    0.1  # the first snapshots come early and ever further apart: a run that dies young has numbers too
)
AT_OVERFLOW_S = 0.5  # snapshots that overflows ask for are at least so far apart


class Journal:
    """Writes one shard for one process; a forked child writes its own from its first event on."""

    def __init__(
        self,
        run_dir: Path,
        interval_s: float,
        summary: Callable[[], dict[str, Any]],
        *,
        after_snapshot: Callable[[], None],
    ) -> None:
        """Open a shard of the run.

        Args:
            run_dir: The run directory.
            interval_s: Seconds from one snapshot to the next, in a process that trains.
            summary: Returns what a snapshot holds.
            after_snapshot: Called after each of those.
        """
        self._directory = RunDirectory.open(run_dir)
        self._interval_s = interval_s
        self._summary, self._after_snapshot = summary, after_snapshot
        self._child = _is_child()
        self._fresh()

    def _fresh(self) -> None:
        rank = os.environ.get("RANK", "0")
        self._pid = os.getpid()
        self.process = f"{socket.gethostname()}-{rank}-{self._pid}-{time.time_ns()}"
        self._shard = self._directory.shard(self.process)
        self._begun = False
        self._ended = False
        self._wait_s = 0.0
        self._last = self._due = time.monotonic()

    @property
    def of_child(self) -> bool:
        """Whether multiprocessing started this process: unless it does something, it leaves nothing."""
        return self._child or multiprocessing.parent_process() is not None

    @property
    def forked(self) -> bool:
        """Whether this process is a child of the one that began the journal."""
        return os.getpid() != self._pid

    def continue_in_child(self) -> None:
        """Begin a shard of this process's own after a fork."""
        self._fresh()

    def begin(self) -> None:
        """Write the `start` event, once."""
        if not self._begun:
            self._begun = True
            self._shard.write({"event": "start", "process": self.process, **_facts()})

    def emit(self, event: str, **fields: Any) -> None:
        """Write one event now."""
        self.begin()
        self._shard.write({"event": event, "process": self.process, **fields})

    def tick(self, *, urgent: bool = False) -> None:
        """Write a snapshot when the last one is old enough."""
        now = time.monotonic()
        if now >= self._due or (urgent and now >= self._last + AT_OVERFLOW_S):
            self.snapshot()
            self._wait_s = min(max(2.0 * self._wait_s, FIRST_WAIT_S), self._interval_s)
            self._due = self._last + self._wait_s
            self._after_snapshot()

    def snapshot(self) -> None:
        """Write a snapshot now."""
        self._last = time.monotonic()
        self.emit("snapshot", **self._summary())

    def end(self) -> None:
        """Write the last snapshot and the `end` event, once, if this process did anything or is the run's own."""
        if self._ended or self.forked:
            return
        if self.of_child and not self._begun and not self._summary().get("forwards"):
            return
        self._ended = True
        self.snapshot()
        self.emit("end")


def _is_child() -> bool:
    # A child that is spawned imports the script, and with it torch, before it knows its parent: until then this tells.
    return hasattr(multiprocessing.process.current_process(), "_inheriting")


def _facts() -> dict[str, Any]:
    def number(name: str) -> int | None:
        text = os.environ.get(name, "")
        return int(text) if text.isdigit() else None

    return {
        "pid": os.getpid(),
        "ppid": os.getppid(),
        "host": socket.gethostname(),
        "rank": number("RANK"),
        "local_rank": number("LOCAL_RANK"),
        "world_size": number("WORLD_SIZE"),
        "restart": number("TORCHELASTIC_RESTART_COUNT"),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": describe(),
        "argv": list(getattr(sys, "argv", [])),
        "threads": torch.get_num_threads(),
    }
