"""`mpx run -- accelerate launch`: two ranks of accelerate's, one report, one verdict."""

import shutil
import sys
from pathlib import Path

import pytest

FOUND = shutil.which("accelerate", path=str(Path(sys.executable).parent)) or shutil.which("accelerate")
pytestmark = [
    pytest.mark.dist,
    pytest.mark.skipif(FOUND is None, reason="accelerate is not installed: `pip install accelerate`"),
]


@pytest.fixture(scope="module")
def run(runs):
    launch = (FOUND, "launch", "--multi_gpu", "--num_processes", 2, "--num_machines", 1)
    plain = ("--mixed_precision", "no", "--dynamo_backend", "no")
    options = ("-O", "O2", "--set", "loss_scale.init=1024")
    command = (*runs.mpx, "run", *options, "--", *launch, *plain, runs.scripts / "accelerated.py")
    return runs.start(*command).result().succeeded()


def test_both_ranks_are_in_one_report(run):
    assert [rank["rank"] for rank in run.record["ranks"]] == [0, 1]
    assert sum(line.startswith("mpx  O2") for line in run.stderr.splitlines()) == 1
    assert "accelerate: accelerated.py" in run.stderr


def test_ranks_skip_the_same_step_and_end_with_the_same_weights(run):
    first, second = run.of_rank(0), run.of_rank(1)
    assert first["moved"] == second["moved"] == [True, True, False, True, True, True]
    assert first["weights"] == second["weights"]
    assert first["losses"] != second["losses"]
    assert run.record["desyncs"] == []
