"""Scripts in real processes: the same one under plain python and under `mpx run`."""

import fcntl
import json
import os
import pty
import select
import subprocess
import sys
import termios
from dataclasses import dataclass
from pathlib import Path

import pytest

MPX = [sys.executable, "-m", "mpx", "run"]
# No process here computes for long; one that hangs must not hang the suite.
DEADLINE_S = 60


@dataclass(frozen=True)
class Outcome:
    """What a shell would see of a command, and the directories of runs that it left."""

    returncode: int
    stdout: bytes
    stderr: bytes
    runs: list[Path]

    @property
    def text(self) -> str:
        return self.stderr.decode(errors="replace")

    @property
    def record(self) -> dict:
        (run,) = self.runs
        return json.loads((run / "run.json").read_text())


class Shell:
    """Starts commands in one working folder, in an environment that no outer run or setting reaches into."""

    scripts = Path(__file__).parent.parent / "scripts"

    def __init__(self, cwd: Path):
        self.cwd = cwd
        outside = ("MPX_", "PYTHON", "RANK", "SLURM_", "TORCHELASTIC_")
        self.environ = {key: value for key, value in os.environ.items() if not key.startswith(outside)}

    def popen(self, command, **options):
        environ = self.environ | options.pop("env", {})
        return subprocess.Popen(
            list(map(str, command)), cwd=options.pop("cwd", self.cwd), env=environ, **options
        )

    def line(self, process) -> bytes:
        """Return the next line of the standard output of a process that was started with `bufsize=0`."""
        ready, _, _ = select.select([process.stdout], [], [], DEADLINE_S)
        assert ready, "nothing comes"
        return process.stdout.readline()

    def run(self, command, *, stdin=b"", **options) -> Outcome:
        before = self.runs()
        pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        process = self.popen(command, **(pipes | options))
        try:
            stdout, stderr = process.communicate(stdin, timeout=DEADLINE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
        return Outcome(
            process.returncode, stdout, stderr or b"", [run for run in self.runs() if run not in before]
        )

    def python(self, *words, **options) -> Outcome:
        return self.run([sys.executable, *words], **options)

    def mpx(self, *words, **options) -> Outcome:
        return self.run([*MPX, *words], **options)

    def runs(self) -> list[Path]:
        return sorted(path for path in self.cwd.glob(".mpx/runs/*") if not path.is_symlink())

    def script(self, name: str, text: str | bytes) -> Path:
        path = self.cwd / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return path


class Terminal:
    """A command that leads the session of a terminal of its own, as one that a user types."""

    def __init__(self, shell: Shell, command):
        self.keyboard, end = pty.openpty()

        def own_the_terminal():
            fcntl.ioctl(end, termios.TIOCSCTTY, 0)

        self.process = shell.popen(
            command, stdin=end, stdout=end, stderr=end, start_new_session=True, preexec_fn=own_the_terminal
        )
        os.close(end)
        self.screen = b""

    def type(self, keys: bytes):
        os.write(self.keyboard, keys)

    def read(self, until: bytes | None = None) -> bytes:
        """Return the screen once it shows `until`, or when nobody writes on it any more."""
        while until is None or until not in self.screen:
            ready, _, _ = select.select([self.keyboard], [], [], DEADLINE_S)
            assert ready, self.screen
            try:
                read = os.read(self.keyboard, 65536)
            except OSError:  # so says Linux when all have closed the other end
                break
            self.screen += read
        return self.screen


@pytest.fixture
def shell(tmp_path):
    return Shell(tmp_path)


@pytest.fixture(scope="module")
def shared_shell(tmp_path_factory):
    """A folder for all tests of a file; each names its record with `--out`."""
    return Shell(tmp_path_factory.mktemp("shared"))


@pytest.fixture
def terminal(shell):
    started = []

    def start(command):
        started.append(Terminal(shell, command))
        return started[-1]

    yield start
    for one in started:
        one.process.kill()
        one.process.wait()
        os.close(one.keyboard)
