"""Start the target, stay beside it until it ends, and end as it did.

The child shares our process group, terminal and open files. A signal to the group, from a terminal or by `kill -PGID`,
reaches it without us; one that somebody sends to us alone is passed on. We hold all of them back from ourselves, so
that what ends the child leaves us there to write the report.
"""

from __future__ import annotations

import ctypes
import errno
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Literal, NoReturn

from mpx.errors import LaunchError
from mpx.launch.target import NOT_EXECUTABLE, NOT_FOUND, Target
from mpx.launch.witness import Witness
from mpx.values import frozen

__all__ = ["Beat", "Ending", "child_environment", "mirror", "replace", "supervise"]

Status = Literal["completed", "failed", "interrupted", "killed"]

_BOOT = str(Path(__file__).parent / "boot")
_HELD = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
_FROM_KEYBOARD = (signal.SIGINT, signal.SIGQUIT)
_PR_SET_PDEATHSIG = 1


@frozen
class Ending:
    """How the target ended. `returncode` is the exit code, or the negated number of the signal that ended it."""

    returncode: int
    wall_s: float

    @property
    def exit_code(self) -> int | None:
        return self.returncode if self.returncode >= 0 else None

    @property
    def signal(self) -> str | None:
        if self.returncode >= 0:
            return None
        try:
            return signal.Signals(-self.returncode).name
        except ValueError:  # most real-time signals have no name
            return f"signal {-self.returncode}"

    @property
    def status(self) -> Status:
        # 130: a shell whose command was interrupted
        if self.returncode in (-signal.SIGINT, 128 + signal.SIGINT):
            return "interrupted"
        if self.returncode < 0:
            return "killed"
        return "failed" if self.returncode else "completed"


@frozen
class Beat:
    """Something to do every so many seconds while the target runs; what it raises is nobody's business."""

    every_s: float
    do: Callable[[], None]


def child_environment(run_dir: Path, environ: Mapping[str, str]) -> dict[str, str]:
    """Return `environ` with what makes every Python below follow the run; the same again if it is there already."""
    before = environ.get("PYTHONPATH")
    # An empty entry means the current folder, but an empty variable means none.
    entries = [entry for entry in before.split(os.pathsep) if entry != _BOOT] if before else []
    return {**environ, "MPX_RUN": str(run_dir.absolute()), "PYTHONPATH": os.pathsep.join([_BOOT, *entries])}


def supervise(
    target: Target,
    run_dir: Path,
    environ: Mapping[str, str],
    *,
    beat: Beat | None = None,
    meanwhile: Callable[[], None] | None = None,
) -> Ending:
    """Run the target and return how it ended; `meanwhile` is called once, when it has started.

    Signals that would end this process stay held back when it returns: `mirror` lets go of them.

    Raises:
        LaunchError: The target could not be started.
    """
    # What we were started with ignored (`nohup`, a background job of sh) stays so, for us and for the child.
    held = {number for number in _HELD if signal.getsignal(number) != signal.SIG_IGN}
    # A parent may have left it ignored, and then the system keeps no status of a child.
    signal.signal(signal.SIGCHLD, lambda *_: None)
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, held | {signal.SIGCHLD})
    witness = Witness(held)
    started = time.monotonic()
    try:
        child = subprocess.Popen(
            target.argv,
            env=child_environment(run_dir, environ),
            close_fds=False,  # as a shell would: `train.py <(zcat data.gz)` hands over an open file
            preexec_fn=_prepare_child(held, mask),  # noqa: PLW1509 - there is one thread
        )
    except OSError as error:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        raise _cannot_start(target, error) from None
    due = time.monotonic() + beat.every_s if beat else None
    if meanwhile is not None:
        meanwhile()
    while child.poll() is None:
        if beat is not None and due is not None and time.monotonic() >= due:
            due = time.monotonic() + beat.every_s
            with suppress(Exception):
                beat.do()
        number = _next_signal(held | {signal.SIGCHLD}, until=due)
        if number in held and not _has_reached_all(number, witness):
            child.send_signal(number)
    return Ending(child.returncode, time.monotonic() - started)


def mirror(ending: Ending) -> NoReturn:
    """End this process as the target ended: with its exit code, or by the same signal."""
    _flush()
    if ending.returncode >= 0:
        # Without Python's own exit, which turns a reader of our report that has left (`2>&1 | head`) into code 120.
        os._exit(ending.returncode)
    number = -ending.returncode
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the child has left the core dump worth having
    if number not in (signal.SIGKILL, signal.SIGSTOP):
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
    os.kill(os.getpid(), number)
    os._exit(128 + number)  # the process that starts a PID namespace survives its own signals


def replace(target: Target, environ: Mapping[str, str]) -> NoReturn:
    """Become the target, keeping the process id: nobody stays to supervise or to report."""
    _flush()
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)  # Python ignores them, and ignored signals survive an exec
    try:
        os.execve(target.argv[0], target.argv, environ)  # noqa: S606
    except OSError as error:
        raise _cannot_start(target, error) from None


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):
            stream.flush()


def _prepare_child(held: set[signal.Signals], mask: set[signal.Signals | int]) -> Callable[[], None]:
    """Return what the child does between fork and exec: take signals again, and not outlive us on its device."""
    parent = os.getpid()
    # Imports and lookups happen here, before the fork.
    set_option = ctypes.CDLL(None).prctl if sys.platform == "linux" else None

    def prepare() -> None:
        for number in held:
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        if set_option is not None:
            set_option(_PR_SET_PDEATHSIG, signal.SIGTERM)
            if os.getppid() != parent:
                os.kill(os.getpid(), signal.SIGTERM)

    return prepare


def _next_signal(numbers: set[signal.Signals], *, until: float | None) -> int:
    """Wait for a signal and return its number.

    At the time `until` the answer is 0, which is no signal; macOS cannot wait that way, and answers at the next one.
    """
    if until is None or sys.platform == "darwin":
        return signal.sigwait(numbers)
    waited = signal.sigtimedwait(numbers, max(0.0, until - time.monotonic()))
    return 0 if waited is None else waited.si_signo


def _has_reached_all(number: int, witness: Witness) -> bool:
    """Tell whether the child has this signal already, and take what came of the same meanwhile for one with it.

    Where nobody can tell, Ctrl-C is not passed on: a script that never hears of it can be interrupted again, one that
    hears of it twice is interrupted in its clean-up.
    """
    seen = witness.saw(number)
    if number in signal.sigpending():
        signal.sigwait({number})
    return number in _FROM_KEYBOARD if seen is None else seen


def _cannot_start(target: Target, error: OSError) -> LaunchError:
    if isinstance(error, FileNotFoundError):
        return LaunchError(
            f"cannot start `{target.argv[0]}`: it, or the interpreter in its first line, does not exist",
            exit_code=NOT_FOUND,
        )
    hint = None
    if error.errno == errno.ENOEXEC:
        hint = f"a script without a `#!` line needs its interpreter named: `mpx run -- sh {target.argv[0]}`"
    return LaunchError(
        f"cannot start `{target.argv[0]}`: {error.strerror}", hint=hint, exit_code=NOT_EXECUTABLE
    )
