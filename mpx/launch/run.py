"""One run: its directory, the target's start and end, and what is written about them."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from mpx import __version__
from mpx.errors import LaunchError
from mpx.launch.placement import is_first_rank
from mpx.launch.supervise import Beat, Ending, child_environment, replace, supervise
from mpx.launch.target import Target
from mpx.record import RunDirectory
from mpx.values import frozen

__all__ = ["Order", "check_ops", "run_as_rank", "run_supervised"]


@frozen
class Order:
    """What is to run, and how. `word` is the target as the user wrote it, `command` the whole command line."""

    target: Target
    word: str
    command: tuple[str, ...]
    preset: Mapping[str, Any]
    origin: Mapping[str, str]
    op_groups: Mapping[str, Mapping[str, Any]]
    notices: tuple[str, ...]

    @property
    def level(self) -> str:
        """The name of the preset."""
        return str(self.preset["name"])

    def write_to(self, run: RunDirectory) -> None:
        """Write what every process of the run has to know."""
        run.write_op_groups(self.op_groups)
        run.write_preset(self.preset, self.origin)


def check_ops(names: Sequence[str], environ: Mapping[str, str]) -> None:
    """End with a refusal if the installed torch has no such operations.

    It is asked in a process of its own (2 s), so only about names that the shipped lists do not have.
    """
    if not names:
        return
    command = [sys.executable, "-m", "mpx.engine.check_ops", *names]
    quiet = {**environ, "MPX_DISABLE": "1", "PYTHONSAFEPATH": "1"}
    done = subprocess.run(command, env=quiet, stdout=subprocess.DEVNULL, check=False)
    if done.returncode:
        sys.exit(done.returncode)  # it has said on stderr what is wrong


def run_supervised(
    order: Order,
    run: RunDirectory,
    environ: Mapping[str, str],
    *,
    beat: Beat | None = None,
    meanwhile: Callable[[], None] | None = None,
) -> Ending:
    """Run the target to its end; the run directory then has everything but the record.

    `beat` and `meanwhile` are those of `supervise`.

    Raises:
        LaunchError: The target could not be started.
    """
    shard = run.shard("supervisor")
    shard.write(_described(order, run))
    try:
        ending = supervise(order.target, run.path, environ, beat=beat, meanwhile=meanwhile)
    except LaunchError as error:
        shard.write(
            {"event": "exit", "exit_code": error.exit_code, "signal": None, "status": "failed", "wall_s": 0.0}
        )
        raise
    shard.write(
        {
            "event": "exit",
            "exit_code": ending.exit_code,
            "signal": ending.signal,
            "status": ending.status,
            "wall_s": ending.wall_s,
        }
    )
    return ending


def run_as_rank(order: Order, run: RunDirectory, environ: Mapping[str, str]) -> NoReturn:
    """Become the target, as one of the ranks that share `run`.

    Raises:
        LaunchError: The target could not be started.
    """
    if is_first_rank(environ):
        run.shard(f"first-rank-{os.getpid()}").write(_described(order, run))
    replace(order.target, child_environment(run.path, environ))


def _described(order: Order, run: RunDirectory) -> dict[str, Any]:
    return {
        "event": "run",
        "mpx": __version__,
        "python": platform.python_version(),
        "command": list(order.command),
        "script": order.word,
        "target_kind": order.target.kind,
        "preset": dict(order.preset),
        "origin": dict(order.origin),
        "cwd": os.getcwd(),
        "host": platform.node(),
        "started": time.strftime("%Y-%m-%dT%H:%M:%S+00:00", time.gmtime()),
        "notices": [*order.notices, *([run.notice] if run.notice else [])],
    }
