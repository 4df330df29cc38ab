"""Whole runs in real processes, two at a time, each started once however many tests look at it.

Importing torch costs more than anything that these scripts compute, so a command is run once a session: tests that read
different things off the same run share it. What a run wrote lies in a folder of its own.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent.parent
SCRIPTS = ROOT / "tests" / "scripts"
MPX = (sys.executable, "-m", "mpx")
AT_ONCE = 2
# No process here computes for long; one that hangs must not hang the suite.
DEADLINE_S = 300
# An isolated interpreter that reads no .pth file sees torch in the folder that it is given, and no editable mpx: of it
# the folder holds the presets at most, which make an empty namespace of the name.
WITHOUT_MPX = """
import runpy, sys
sys.path.append({folder!r})
try:
    from mpx import __version__
except ImportError:
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")
else:
    sys.exit("mpx is importable here, version " + __version__)
"""


@dataclass(frozen=True)
class Outcome:
    """What a shell sees of a command, and the folder that it ran in."""

    returncode: int
    stdout: bytes
    stderr: str
    folder: Path

    @property
    def lines(self) -> list[str]:
        """What the script printed."""
        return self.stdout.decode().splitlines()

    @property
    def runs(self) -> list[Path]:
        return sorted(path for path in self.folder.glob(".mpx/runs/*") if not path.is_symlink())

    @property
    def run(self) -> Path:
        """The directory of the run, if there is exactly one."""
        (run,) = self.runs
        return run

    @property
    def record(self) -> dict[str, Any]:
        record: dict[str, Any] = json.loads((self.run / "run.json").read_text())
        return record

    @property
    def report(self) -> list[str]:
        """The report on stderr: from its first line to the end."""
        lines = self.stderr.splitlines()
        heads = [number for number, line in enumerate(lines) if re.match(r"mpx  O\d", line)]
        return lines[heads[-1] :] if heads else []

    def succeeded(self) -> Outcome:
        assert self.returncode == 0, self.stderr
        return self


class Processes:
    """Starts commands that differ from each other once, each in a new folder."""

    scripts = SCRIPTS
    command = (*MPX, "run")

    def __init__(self, folder: Path, pool: ThreadPoolExecutor) -> None:
        self._folder, self._pool = folder, pool
        self._started: dict[tuple[Any, ...], Future[Outcome]] = {}
        self._names = itertools.count()
        outside = ("MPX_", "PYTHON", "RANK", "SLURM_", "TORCHELASTIC_", "OMP_", "NO_COLOR", "FORCE_COLOR")
        self.environ = {key: value for key, value in os.environ.items() if not key.startswith(outside)}
        self.environ |= {"OMP_NUM_THREADS": "1", "COLUMNS": "100"}

    def start(self, command: tuple[Any, ...], *, cwd: Path | None = None, **environ: str) -> Future[Outcome]:
        """Return the running command; the one of before when it is the same."""
        words = tuple(map(str, command))
        key = (words, cwd, tuple(sorted(environ.items())))
        if key not in self._started:
            folder = cwd or self._folder / f"{next(self._names):03d}"
            folder.mkdir(exist_ok=True)
            self._started[key] = self._pool.submit(self._run, words, folder, environ)
        return self._started[key]

    def plain(self, script: str | Path, *words: Any, **options: Any) -> Future[Outcome]:
        """Start a script under plain python."""
        return self.start((sys.executable, self.scripts / script, *words), **options)

    def without_mpx(self, script: str | Path, *words: Any) -> Future[Outcome]:
        """Start a script under plain python where mpx cannot be imported."""
        spec = importlib.util.find_spec("torch")
        assert spec is not None
        assert spec.origin is not None
        code = WITHOUT_MPX.format(folder=str(Path(spec.origin).parent.parent))
        return self.start((sys.executable, "-I", "-S", "-c", code, self.scripts / script, *words))

    def mpx(self, options: str, script: str | Path, *words: Any, **more: Any) -> Future[Outcome]:
        """Start `mpx run OPTIONS SCRIPT WORDS`."""
        return self.start((*self.command, *options.split(), self.scripts / script, *words), **more)

    def _run(self, command: tuple[str, ...], folder: Path, environ: Mapping[str, str]) -> Outcome:
        done = subprocess.run(
            command,
            cwd=folder,
            env={**self.environ, **environ},
            capture_output=True,
            timeout=DEADLINE_S,
            check=False,
        )
        return Outcome(done.returncode, done.stdout, done.stderr.decode(errors="replace"), folder)


@pytest.fixture(scope="session")
def processes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Processes]:
    """What starts processes; what nobody waits for any more is not started."""
    with ThreadPoolExecutor(AT_ONCE) as pool:
        yield Processes(tmp_path_factory.mktemp("contracts"), pool)
        pool.shutdown(cancel_futures=True)


@pytest.fixture(scope="session")
def all_of() -> Callable[[dict[Any, Future[Outcome]]], dict[Any, Outcome]]:
    """Wait for started commands by name."""
    return lambda started: {name: future.result() for name, future in started.items()}


class Outcomes(Mapping[Any, Outcome]):
    """What commands came to, by name. A command that only slow tests ask for is given as a function and starts then."""

    def __init__(self, asked: Mapping[Any, Future[Outcome] | Callable[[], Future[Outcome]]]) -> None:
        self._asked = asked

    def __getitem__(self, name: Any) -> Outcome:
        asked = self._asked[name]
        return (asked if isinstance(asked, Future) else asked()).result()

    def __iter__(self) -> Iterator[Any]:
        return iter(self._asked)

    def __len__(self) -> int:
        return len(self._asked)


@pytest.fixture(scope="session")
def as_asked() -> type[Outcomes]:
    """Each outcome as soon as it is there, also of commands that start when they are asked for."""
    return Outcomes


@pytest.fixture(scope="session")
def identical() -> Callable[[Any, Any], bool]:
    """Whether two checkpoints are the same: structure, types and every bit."""

    def same(a: Any, b: Any) -> bool:
        import torch

        if type(a) is not type(b):
            return False
        if isinstance(a, torch.Tensor):
            bits = [tensor.detach().reshape(-1).view(torch.uint8) for tensor in (a, b)]
            return (a.dtype, a.shape) == (b.dtype, b.shape) and torch.equal(*bits)
        if isinstance(a, dict):
            return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
        if isinstance(a, (list, tuple)):
            return len(a) == len(b) and all(map(same, a, b))
        return bool(a == b)

    return same
