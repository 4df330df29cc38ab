"""A whole run on a device that the host does not wait for: its numbers, and those of its report, are the same."""

import pytest

SAME = ("steps", "scalers", "losses", "overflow_counts", "optimizers", "substitutions")


def overflows(outcome):
    return [{**row, "process": None, "t": None} for row in outcome.record["overflows"]]


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O1-bf16"])
def test_a_run_on_one_is_that_on_a_device_that_is_waited_for(shell, level):
    words = ["--opt-level", level, "--set", "loss_scale.init=2**24", shell.scripts / "fused_optimizer.py"]
    here = shell.mpx(*words)
    ahead = shell.mpx(*words, env={"PYTHONPATH": str(shell.scripts / "accelerator")})
    assert ahead.stdout == here.stdout
    assert ahead.record["steps"]["attempted"] == 40
    assert (ahead.record["steps"]["skipped"] > 0) is (level in ("O1", "O2"))
    for part in SAME:
        assert ahead.record[part] == here.record[part], part
    assert overflows(ahead) == overflows(here)
    assert (shell.cwd / "fetched").exists()
