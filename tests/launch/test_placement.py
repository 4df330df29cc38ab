"""`mpx run` switched off, inside another `mpx run`, and as a rank of a launcher."""

import json
import os
import sys

import pytest

from mpx.launch.placement import is_first_rank, rank_key

MPX = [sys.executable, "-m", "mpx", "run"]
TELLS = """
import json, os, sys
print(json.dumps({
    "pid": os.getpid(), "run": os.environ.get("MPX_RUN"), "pythonpath": os.environ.get("PYTHONPATH"),
    "followed": any(type(f).__name__ == "TorchFinder" for f in sys.meta_path), "argv": sys.argv[1:],
}), flush=True)
"""


@pytest.fixture
def tells(shell):
    return shell.script("tells.py", TELLS)


def test_disabled_it_becomes_the_target(shell, tells):
    with shell.popen(
        [*MPX, "-O", "O1", tells, "x"], env={"MPX_DISABLE": "1"}, stdout=-1, stderr=-1
    ) as process:
        stdout, stderr = process.communicate()
    assert json.loads(stdout) == {
        "pid": process.pid,
        "run": None,
        "pythonpath": None,
        "followed": False,
        "argv": ["x"],
    }
    assert stderr == b"mpx: off, because MPX_DISABLE is set\n"
    assert not (shell.cwd / ".mpx").exists()


def test_disabled_below_a_run_a_process_is_not_followed(shell, tells):
    ours = shell.mpx("-qq", "-O", "O0", "--", "env", "MPX_DISABLE=1", sys.executable, tells)
    assert json.loads(ours.stdout)["followed"] is False


def test_disabled_it_cannot_promise_to_instrument(shell, tells):
    ours = shell.mpx("--require-instrumented", tells, env={"MPX_DISABLE": "1"})
    assert (ours.returncode, ours.stdout) == (2, b"")


def test_zero_does_not_disable(shell, tells):
    assert (
        json.loads(shell.mpx("-qq", "-O", "O0", tells, env={"MPX_DISABLE": "0"}).stdout)["followed"] is True
    )


@pytest.mark.parametrize("inner", [[], ["-O", "O2"], ["-O", "O2", "--dtype", "float16"]], ids=str)
def test_inside_a_run_it_joins(shell, tells, inner):
    ours = shell.mpx("-qq", "-O", "O2", "--", *MPX, *inner, tells)
    seen = json.loads(ours.stdout)
    assert ours.returncode == 0, ours.text
    assert seen["followed"] is True
    assert [seen["run"]] == [str(run) for run in ours.runs]
    assert seen["pythonpath"].count("boot") == 1


@pytest.mark.parametrize(
    ("inner", "differing"),
    [(["-O", "O1"], "cast_model_type"), (["--dtype", "bfloat16", "-O", "O2"], "`dtype`")],
)
def test_inside_a_run_another_precision_is_refused(shell, tells, inner, differing):
    ours = shell.mpx("-q", "-O", "O2", "--", *MPX, *inner, tells)
    assert (ours.returncode, ours.stdout) == (2, b"")
    assert "part of a run at `O2`" in ours.text
    assert differing in ours.text
    assert len(ours.runs) == 1


def test_a_run_that_is_gone_is_no_outer_run(shell, tells):
    ours = shell.mpx("-qq", "-O", "O0", tells, env={"MPX_RUN": str(shell.cwd / "gone")})
    assert [json.loads(ours.stdout)["run"]] == [str(run) for run in ours.runs]


@pytest.mark.parametrize(
    "launcher",
    [
        {"TORCHELASTIC_RUN_ID": "an id", "MASTER_PORT": "29500", "WORLD_SIZE": "2"},
        {"TORCHELASTIC_RUN_ID": "none", "MASTER_PORT": "29500", "WORLD_SIZE": "2"},
        {},
    ],
    ids=["torchrun with an id", "torchrun without", "RANK alone"],
)
def test_ranks_become_the_target_and_share_a_run(shell, tells, launcher):
    seen, told = [], b""
    for rank in range(2):
        process = shell.popen(
            [*MPX, "-O", "O2", tells], env=launcher | {"RANK": str(rank)}, stdout=-1, stderr=-1
        )
        with process:
            stdout, stderr = process.communicate()
        seen.append(json.loads(stdout))
        assert seen[-1]["pid"] == process.pid
        told += stderr
    assert seen[0]["run"] == seen[1]["run"] == str(*shell.runs())
    assert all(one["followed"] for one in seen)
    assert told.count(b"mpx: ") == 1
    report = shell.run([sys.executable, "-m", "mpx", "report", "--format", "json", seen[0]["run"]])
    assert json.loads(report.stdout)["preset"]["name"] == "O2"


def test_ranks_share_a_named_run(shell, tells):
    for rank in "10":
        ours = shell.mpx(
            "-qq", "-O", "O0", "--out", "here", tells, env={"RANK": rank, "TORCHELASTIC_RUN_ID": "a"}
        )
        assert json.loads(ours.stdout)["run"] == str(shell.cwd / "here")


def test_a_rank_cannot_promise_to_instrument(shell, tells):
    ours = shell.mpx("--require-instrumented", tells, env={"RANK": "0"})
    assert (ours.returncode, ours.stdout) == (2, b"")
    assert "-- torchrun" in ours.text


def test_jobs_have_keys_of_their_own():
    slurm = {"SLURM_PROCID": "1", "SLURM_JOB_ID": "77", "SLURM_STEP_ID": "3"}
    assert rank_key({}) is None
    assert rank_key({"RANK": "0", "TORCHELASTIC_RUN_ID": "job"}) == "job"
    assert rank_key({"RANK": "0"}) != rank_key({"RANK": "0", "MASTER_PORT": "1"})
    assert str(os.getppid()) in rank_key({"RANK": "0", "TORCHELASTIC_RUN_ID": "none"})
    assert rank_key(slurm) == "77-3"
    assert rank_key({"SLURM_PROCID": "0"}) is not None
    assert not is_first_rank(slurm)
    assert is_first_rank({"RANK": "0"} | slurm)


def test_the_shell_of_a_batch_job_is_no_rank():
    """sbatch sets SLURM_PROCID there too; only srun makes a step."""
    assert rank_key({"SLURM_PROCID": "0", "SLURM_JOB_ID": "77"}) is None
