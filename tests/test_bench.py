"""`scripts/bench.py` prints and writes ratios of what it measured; no test of it asks for times."""

import json
import re
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parent.parent / "scripts"
pytestmark = pytest.mark.slow
PHASES = ["zero_grad", "forward", "loss", "backward", "step"]


@pytest.fixture
def bench(tmp_path):
    """Return a function: what the benchmark prints and writes with these options."""

    def run(*options):
        done = subprocess.run(
            [sys.executable, str(SCRIPTS / "bench.py"), *options, "--json", str(tmp_path / "bench.json")],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout, json.loads((tmp_path / "bench.json").read_text())

    return run


def test_ratios_are_those_of_the_processes_that_took_turns(bench):
    printed, found = bench("--workloads", "mlp", "--levels", "O0,O1-bf16", "--rounds", "2")
    rounds = found["rounds"]["mlp"]
    assert [[*one] for one in rounds] == [["plain", "hand-bfloat16", "O0", "O1-bf16"]] * 2
    rows = {row["spelling"]: row for row in found["rows"]}
    for name, base, figure, written in (
        ("O0", "plain", "step_ms", rows["O0"]["plain"]),
        ("hand-bfloat16", "plain", "step_ms", rows["hand-bfloat16"]["plain"]),
        ("O1-bf16", "hand-bfloat16", "step_ms", rows["O1-bf16"]["by_hand"]),
        ("O1-bf16", "hand-bfloat16", "peak_mib", rows["O1-bf16"]["memory"]),
    ):
        ratios = [one[name][figure] / one[base][figure] for one in rounds]
        assert written == {"median": statistics.median(ratios), "min": min(ratios), "max": max(ratios)}
        assert re.search(rf"{name} .* {written['median']:.2f} \({min(ratios):.2f} to ", printed)
    assert "by_hand" not in rows["O0"]
    assert len(found["start_up_ms"]) == 7
    for name, ms in found["start_up_ms"].items():
        assert ms["min"] <= ms["median"] <= ms["max"]
        assert f"{name} " in printed


@pytest.mark.parametrize("workload", ["mlp", "gan"])
def test_each_part_of_a_step_is_timed(bench, workload):
    printed, found = bench("--workloads", workload, "--levels", "O2-bf16", "--rounds", "1", "--phases")
    of = found["phases_us"][workload]
    assert list(of) == ["plain", "hand-bfloat16", "O2-bf16"]
    assert all(list(parts) == PHASES and all(us > 0 for us in parts.values()) for parts in of.values())
    assert printed.splitlines()[0].split() == [workload, *PHASES, "sum", "of", "plain"]
