"""Shards: one append-only file of events per process, bounded by compaction, readable at any moment."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from mpx.record import codec
from mpx.record.retention import Event, retain

__all__ = ["ShardWriter", "read_shard", "write_atomically"]

COMPACT_ABOVE_BYTES = 256 * 1024
_APPEND = os.O_WRONLY | os.O_APPEND | os.O_CREAT | getattr(os, "O_CLOEXEC", 0)
RETRY_AFTER_S = 30.0  # a disk that filled up while a checkpoint was written may have room again


def read_shard(path: Path) -> Iterator[Event]:
    """Yield the events of a shard; a line that was cut off while being written is passed over."""
    try:
        text = path.read_bytes()
    except FileNotFoundError:
        return
    for line in text.splitlines():
        try:
            event = json.loads(line)
        except ValueError:
            continue
        if isinstance(event, dict):
            yield event


def write_atomically(path: Path, text: str) -> None:
    """Write `text` so that a reader sees the old file or the new one, never a part."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise


class ShardWriter:
    """Appends events to one file. Never raises, whatever the disk does: a report must not cost a run.

    The file is made by the first event. One `write` call of the system carries one line, so a killed process
    leaves whole lines, and threads cannot mix theirs. The file is not held open in between: once a script has
    closed every descriptor (to become a daemon), the next line would go into whatever file took the number.
    After a fork the child's copy is mute: the child makes a writer of its own.
    """

    def __init__(self, path: Path, *, compact_above_bytes: int = COMPACT_ABOVE_BYTES) -> None:
        self.path = Path(path).absolute()  # the script may change its working directory
        self.pid = os.getpid()
        self.fault: str | None = None
        self._limit = compact_above_bytes
        self._threshold = compact_above_bytes
        self._torn = False
        self._silent_until: float | None = None
        self._lock = threading.RLock()
        self._writing = False
        self._waiting: list[bytes] = []

    def write(self, event: Event) -> None:
        """Append `event`, with the time `t` added when it has none."""
        if os.getpid() != self.pid:
            return
        try:
            line = codec.dumps({"t": time.time(), **event}).encode() + b"\n"
        except Exception as error:  # noqa: BLE001  (a value's own code may raise anything: the run must go on)
            line = _fault_line(f"event `{event.get('event')}` has no JSON form: {error!r}")
        with self._lock:
            self._waiting.append(line)
            if self._writing:  # in a signal handler: the write that it interrupted takes this line along
                return
            self._writing = True
            try:
                while self._waiting:
                    self._put(self._waiting.pop(0))
            finally:
                self._writing = False

    def _put(self, line: bytes) -> None:
        if self._silent_until is not None and time.monotonic() < self._silent_until:
            return
        try:
            size = self._append(line)
            if self._silent_until is not None:
                self._silent_until = None
                size = self._append(_fault_line(f"events were lost: {self.fault}"))
            if size > self._threshold:
                self._compact()
        except Exception as error:  # noqa: BLE001  (disk, memory, a damaged line: the run must go on)
            self._fail(error)

    def _append(self, line: bytes) -> int:
        """Return the size of the file with `line` at its end."""
        try:
            descriptor = os.open(self.path, _APPEND, 0o666)
        except FileNotFoundError:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self.path, _APPEND, 0o666)
        try:
            if self._torn:
                line = b"\n" + line
            self._torn = os.write(descriptor, line) < len(line)
            if self._torn:
                raise OSError("the disk took a part of a line only")
            return os.fstat(descriptor).st_size
        finally:
            os.close(descriptor)

    def _compact(self) -> None:
        kept = retain(read_shard(self.path))
        text = "".join(codec.dumps(event) + "\n" for event in kept)
        write_atomically(self.path, text)
        # What must be kept may itself be large: then wait until as much again has come.
        self._threshold = max(self._limit, 2 * len(text))

    def _fail(self, error: Exception) -> None:
        first = self.fault is None
        self.fault = self.fault or f"cannot write `{self.path}`: {error}"
        self._silent_until = time.monotonic() + RETRY_AFTER_S
        if first:
            with suppress(Exception):
                sys.stderr.write(f"mpx: {self.fault}; the run goes on, its report will lack some numbers\n")


def _fault_line(text: str) -> bytes:
    fault: dict[str, Any] = {"event": "fault", "t": time.time(), "where": "record", "text": text}
    return codec.dumps(fault).encode() + b"\n"
