"""A rank that dies: nobody hangs, the report names it, torchrun shows why, and a restart is an attempt."""

import pytest

pytestmark = [pytest.mark.dist, pytest.mark.slow]


@pytest.fixture(scope="session")
def raised(runs):
    return runs.start(*runs.mpx, "run", "-O", "O1", "--nproc", 2, runs.scripts / "dies.py", "raise").result()


@pytest.fixture(scope="session")
def killed(runs):
    command = (*runs.torchrun, "--max-restarts", 1, runs.scripts / "dies.py", "kill")
    return runs.start(*runs.mpx, "run", "-O", "O1", "--", *command).result()


def findings(run, name):
    return [finding for finding in run.record["findings"] if finding["id"] == name]


def test_the_exit_code_is_the_launchers(raised, killed):
    assert raised.returncode == 1
    assert killed.returncode == 0  # the second attempt was well


def test_torchrun_shows_the_traceback_of_a_script_without_record(raised):
    summary = raised.stderr.partition("Root Cause")[2]
    assert "ValueError: rank 1 gives up" in summary
    assert "mpx/" not in summary.partition("=====")[0]


def test_the_rank_that_failed_by_itself_is_named_and_no_other(raised, killed):
    (one,) = findings(raised, "rank-died")
    assert one["text"].startswith("rank 1 (pid ")
    assert "exit code 1" in one["text"]
    (one,) = findings(killed, "rank-died")
    assert one["text"].startswith("rank 1 (pid ")
    assert "killed by SIGKILL" in one["text"]
    assert "started again" in one["text"]


def test_a_restart_is_an_attempt(killed):
    assert {(row["rank"], row["attempt"]) for row in killed.record["ranks"]} == {
        (0, 0),
        (1, 0),
        (0, 1),
        (1, 1),
    }
    assert findings(killed, "restarted")
    assert not findings(killed, "scale_desync")
