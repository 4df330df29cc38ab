"""Starting a session in a process of a run."""

from __future__ import annotations

import atexit
import multiprocessing.util
import os
import time
from pathlib import Path

from mpx.engine.allocator import HostMemory
from mpx.engine.journal import Journal
from mpx.engine.session import Session
from mpx.presets import Policy
from mpx.presets.groups import hand_over
from mpx.record import RunDirectory

__all__ = ["let_gloo_finish", "start"]

GRACE_S = 0.005


def start(run_dir: Path) -> Session:
    """Install a session for the run in `run_dir` and return it. Called when torch has just been imported.

    Raises:
        MpxError: The preset cannot be carried out here; torch is as before.
    """
    directory = RunDirectory.open(run_dir)
    preset, _ = directory.read_preset()
    policy = Policy.from_dict(preset)
    hand_over(directory.read_op_groups())
    session: Session
    journal = Journal(
        run_dir,
        policy.flush_interval_s,
        lambda: session.summary(),  # noqa: PLW0108 - made next
        after_snapshot=HostMemory(keeps=policy.keep_freed_memory).tidy,
    )
    session = Session(policy, journal.emit, journal.tick)
    session.install()
    if not journal.of_child:
        journal.begin()
    _end_with_process(session, journal)
    os.register_at_fork(after_in_child=lambda: _continue(session, journal))
    return session


def _end_with_process(session: Session, journal: Journal) -> None:
    """See to the last snapshot. Children of multiprocessing leave by `os._exit`: they run finalizers, not atexit."""

    def end() -> None:
        session.catch_up()
        journal.end()
        let_gloo_finish()

    def finalize(_: Journal) -> None:
        multiprocessing.util.Finalize(None, end, exitpriority=0)

    atexit.register(end)
    finalize(journal)
    # a forked child of multiprocessing forgets the finalizers that it inherited, then runs these
    multiprocessing.util.register_after_fork(journal, finalize)


def let_gloo_finish() -> None:
    """Let go of the interpreter for a moment before it ends, if threads of gloo's are there.

    They release the last work when the script has its result, and for that they need the interpreter. One that asks for
    it too late aborts the process, whose exit code is 134 then (torch 2.13; in up to half of short DDP runs).
    """
    if any(_name_of(thread).startswith("pt_gloo") for thread in Path("/proc/self/task").glob("*")):
        time.sleep(GRACE_S)


def _name_of(thread: Path) -> str:
    try:
        return (thread / "comm").read_text()
    except OSError:  # it has just ended
        return ""


def _continue(session: Session, journal: Journal) -> None:
    session.forked()
    journal.continue_in_child()
