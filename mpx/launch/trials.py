"""The same target several times, each an `mpx run` of its own: what a comparison is made of."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from mpx.errors import RecordError
from mpx.values import frozen

__all__ = ["Plan", "Turn", "run_turn", "turns"]


@frozen
class Plan:
    """What to run: `words` is all of `mpx run` from the target's options on (`-m`, `--as`, `--`, target, arguments)."""

    levels: tuple[str, ...]
    repeat: int
    words: tuple[str, ...]
    max_steps: int
    folder: Path


@frozen
class Turn:
    """One run: its record goes to `record`, what the script prints into files beside it."""

    level: str
    number: int
    record: Path

    @property
    def stdout(self) -> Path:
        return self.record.with_name(f"{self.record.name}.stdout.txt")

    @property
    def stderr(self) -> Path:
        return self.record.with_name(f"{self.record.name}.stderr.txt")


def turns(plan: Plan) -> Iterator[Turn]:
    """Yield the runs in turn, A B C A B C: what changes on the machine meanwhile meets every level alike."""
    for number in range(1, plan.repeat + 1):
        for position, level in enumerate(plan.levels, 1):
            name = Path(level).stem if level.endswith((".yaml", ".yml")) else level
            yield Turn(level, number, plan.folder / f"{number}-{position}-{name}")


def run_turn(plan: Plan, turn: Turn, environ: Mapping[str, str]) -> int:
    """Run the target at the turn's level to its end and return the exit code, negative for a signal.

    Raises:
        RecordError: The files for what the script prints cannot be written.
    """
    options = ["-qq", "--ci", "off", "--out", str(turn.record), "--opt-level", turn.level]
    if plan.max_steps:
        options += ["--max-steps", str(plan.max_steps)]
    # Where the interpreter can be told so, a folder called `mpx` beside the script is not taken for ours.
    safely = ["-P"] if sys.version_info >= (3, 11) else []
    command: Sequence[str] = [sys.executable, *safely, "-m", "mpx", "run", *options, *plan.words]
    try:
        with turn.stdout.open("wb") as out, turn.stderr.open("wb") as err:
            process = subprocess.Popen(command, env=_environment(environ), stdout=out, stderr=err)
            return _wait(process)
    except OSError as error:
        raise RecordError(f"cannot write beside `{turn.record}`: {error.strerror or error}") from None


def _environment(environ: Mapping[str, str]) -> dict[str, str]:
    # A comparison inside a run is no part of that run.
    return {name: value for name, value in environ.items() if name != "MPX_RUN"}


def _wait(process: subprocess.Popen[bytes]) -> int:
    try:
        return process.wait()
    except KeyboardInterrupt:
        process.wait()  # the terminal has told it too
        raise
    finally:
        if process.poll() is None:
            os.kill(process.pid, 15)
