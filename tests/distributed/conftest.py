"""Runs of several ranks on the CPU, over gloo, each started once a session however many tests look at it."""

import itertools
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
SCRIPTS = ROOT / "tests" / "scripts"
MPX = (sys.executable, "-m", "mpx")
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
# The ranks of a run that hangs would wait for each other for half an hour.
DEADLINE_S = 240
# A rank may abort when it has done its work and exits: a thread of gloo's outlives `destroy_process_group` under DDP.
# In plain torchrun of torch 2.13 up to half of the short runs do so. mpx gives these threads time, which a busy machine
# may make too short: such a run is repeated, and a session with several of them fails.
ABORTED_AT_EXIT = "terminate called without an active exception"
MOST_ABORTED = 3


@dataclass(frozen=True)
class Outcome:
    returncode: int
    stdout: str
    stderr: str
    folder: Path

    @property
    def run(self) -> Path:
        (run,) = (path for path in self.folder.glob(".mpx/runs/*") if not path.is_symlink())
        return run

    @property
    def record(self) -> dict:
        """The record as `mpx report` makes it: where there is no supervisor nobody has written it yet."""
        text = subprocess.run(
            [*MPX, "report", self.run, "--format", "json"],
            check=True,
            capture_output=True,
            cwd=self.folder,
            timeout=DEADLINE_S,
        )
        return json.loads(text.stdout)

    @property
    def last_snapshots(self) -> dict[int, dict]:
        """The last snapshot of each rank that trained."""
        found = {}
        for shard in sorted((self.run / "events").glob("*.jsonl")):
            events = [json.loads(line) for line in shard.read_text().splitlines()]
            snapshots = [event for event in events if event["event"] == "snapshot"]
            rank = next((event["rank"] for event in events if event["event"] == "start"), None)
            if snapshots and snapshots[-1]["backwards"]:
                found[rank] = snapshots[-1]
        return found

    def of_rank(self, rank: int) -> dict:
        """What `ranks.py` wrote."""
        return json.loads((self.folder / f"{rank}.json").read_text())

    def succeeded(self) -> "Outcome":
        assert self.returncode == 0, self.stderr
        return self


class Runs:
    scripts, mpx, torchrun = SCRIPTS, MPX, TORCHRUN

    def __init__(self, folder: Path, pool: ThreadPoolExecutor):
        self._folder, self._pool, self._started, self._names = folder, pool, {}, itertools.count()
        self._aborted = 0
        outside = ("MPX_", "PYTHON", "RANK", "SLURM_", "TORCHELASTIC_", "OMP_", "NO_COLOR", "FORCE_COLOR")
        self._environ = {key: value for key, value in os.environ.items() if not key.startswith(outside)}
        self._environ |= {"OMP_NUM_THREADS": "1", "COLUMNS": "100"}
        # In the agent's store a second attempt finds the gloo addresses of the first, and on a busy machine it dials
        # them (torch 2.13, without mpx as well): each attempt gets a store of its own.
        self._environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"

    def start(self, *command):
        """Return the command's outcome to come; of the same command the same."""
        words = tuple(map(str, command))
        if words not in self._started:
            self._started[words] = self._pool.submit(self._run, words)
        return self._started[words]

    def _run(self, words):
        while True:
            outcome = self._run_once(words)
            aborted = outcome.returncode != 0 and ABORTED_AT_EXIT in outcome.stderr
            self._aborted += aborted
            if not aborted or self._aborted > MOST_ABORTED:
                return outcome

    def _run_once(self, words):
        folder = self._folder / f"{next(self._names):02d}"
        folder.mkdir()
        done = subprocess.run(
            words,
            cwd=folder,
            env=self._environ,
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
            check=False,
        )
        return Outcome(done.returncode, done.stdout, done.stderr, folder)


@pytest.fixture(scope="session")
def runs(tmp_path_factory):
    with ThreadPoolExecutor(1) as pool:  # each is several processes already
        yield Runs(tmp_path_factory.mktemp("distributed"), pool)
        pool.shutdown(cancel_futures=True)
