"""Whether a run goes on, and what it is made of on disk."""

from __future__ import annotations

import os
import platform
import shutil
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from mpx.errors import RecordError
from mpx.record.directory import RunDirectory, is_run
from mpx.record.find import all_runs
from mpx.record.model import RunRecord

__all__ = ["is_going_on", "remove_run", "size_of", "strangers"]

# Everything that mpx ever writes into a run directory.
_FILES = ("preset.json", "ops.json", "run.json")
_BEING_WRITTEN = tuple(f".{name}." for name in _FILES)
_OURS = (*_FILES, *_BEING_WRITTEN, "events", "report.", "tensorboard")
_MAY_STILL_START_S = 3600.0
_MAY_STILL_GO_ON_S = 10.0


def is_going_on(directory: RunDirectory, record: RunRecord) -> bool:
    """Tell whether something may still write into the run, as far as this machine can know.

    A run whose processes have all ended may start another: it is given some seconds. Of a process on another machine
    that wrote no ending it is not known that it is gone.
    """
    if record.status != "unknown":
        return False
    if not record.processes:
        return time.time() - directory.path.stat().st_mtime < _MAY_STILL_START_S
    if all(item.ended for item in record.processes):
        last = max((item.last_t for item in record.processes if item.last_t is not None), default=0.0)
        return time.time() - last < _MAY_STILL_GO_ON_S
    return any(
        item.host != platform.node() or _is_alive(item.pid) for item in record.processes if not item.ended
    )


def strangers(directory: RunDirectory) -> list[str]:
    """Return the names in a run directory that mpx did not put there."""
    names = (path.name for path in directory.path.iterdir())
    return sorted(name for name in names if not name.startswith(_OURS))


def size_of(directory: RunDirectory) -> int:
    """Return the bytes that the run takes on disk."""
    return sum(path.stat().st_size for path in directory.path.rglob("*") if path.is_file())


def remove_run(directory: RunDirectory) -> None:
    """Delete a run; where `latest` named it, it names the newest that is left.

    Raises:
        RecordError: The disk refuses.
    """
    runs = directory.path.parent
    link = runs / "latest"
    named = link.is_symlink() and link.resolve() == directory.path.resolve()
    try:
        shutil.rmtree(directory.path)
        if named:
            link.unlink(missing_ok=True)
            _relink(link, (path for path in all_runs(runs) if is_run(path)))
    except OSError as error:
        raise RecordError(f"cannot delete `{directory.path}`: {error.strerror or error}") from None


def _relink(link: Path, left: Iterable[Path]) -> None:
    newest = max(left, key=lambda path: (path.stat().st_mtime, path.name), default=None)
    if newest is not None:
        with suppress(OSError):
            link.symlink_to(newest.name)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return pid > 0
