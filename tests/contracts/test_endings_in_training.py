"""However training ends, what it had done until then is in the record, with the status of its end."""

import signal
from functools import partial

import pytest

# ending: exit code, status, signal, whether its exit handlers ran
ENDINGS = {
    "return": (0, "completed", None, True),
    "exception": (1, "failed", None, True),
    "exit-3": (3, "failed", None, True),
    "_exit-7": (7, "failed", None, False),
    "SIGTERM": (-signal.SIGTERM, "killed", "SIGTERM", False),
    "SIGKILL": (-signal.SIGKILL, "killed", "SIGKILL", False),
}
SLOW = ("exit-3", "SIGTERM")  # much as one of the others
AT_ONCE = "-O O1 --set flush_interval_s=0.001"


@pytest.fixture(scope="session")
def runs(processes, as_asked):
    asked = {how: partial(processes.mpx, AT_ONCE, "train_then_end.py", how) for how in ENDINGS}
    asked |= {how: start() for how, start in asked.items() if how not in SLOW}
    asked["plain"] = processes.plain("train_then_end.py", "exception")
    asked["killed at once"] = processes.mpx("-O O1", "train_then_end.py", "SIGKILL")
    return as_asked(asked)


every_ending = pytest.mark.parametrize(
    "how", [pytest.param(how, marks=[pytest.mark.slow] if how in SLOW else []) for how in ENDINGS]
)


@every_ending
def test_the_record_has_the_status_and_the_steps_until_then(runs, how):
    run, (code, status, number, cleanly) = runs[how], ENDINGS[how]
    record = run.record
    assert run.returncode == code, run.stderr
    assert (record["status"], record["signal"]) == (status, number)
    assert record["exit_code"] == (None if number else code)
    printed = sum(line.startswith("step") for line in run.lines)
    assert printed == (12 if how == "return" else 10)
    steps = record["steps"]
    assert steps["applied"] + steps["skipped"] == steps["attempted"]
    assert steps["skipped"] > 0
    if cleanly:
        assert (record["backwards"], steps["attempted"]) == (printed, printed)
    else:  # what was flushed last: no step is lost but those since
        assert printed - 2 <= steps["attempted"] <= record["backwards"] <= printed
    (process,) = record["processes"]
    assert (process["trained"], process["ended"]) == (True, cleanly)


@every_ending
def test_the_report_stands_on_stderr_after_what_the_script_said(runs, how):
    run = runs[how]
    assert run.report
    assert run.stderr.endswith("\n".join(run.report) + "\n")
    told = {"completed": f"exit code {run.returncode}", "failed": f"exit code {run.returncode}"}
    expected = told.get(ENDINGS[how][1], f"killed by {ENDINGS[how][2]}")
    assert expected in run.report[0]


def test_a_traceback_is_that_of_python(runs):
    ours, plain = runs["exception"], runs["plain"]
    assert "mat1 and mat2 shapes cannot be multiplied" in plain.stderr
    assert ours.stderr == plain.stderr + "\n".join(ours.report) + "\n"


def test_a_run_that_is_killed_before_its_first_flush_is_not_told_as_one_that_did_nothing(runs):
    run = runs["killed at once"]
    assert run.returncode == -signal.SIGKILL
    assert len(run.record["processes"]) == 1
    told = " ".join(finding["text"] for finding in run.record["findings"])
    assert "nothing was trained" not in told
    assert "nothing ran in mixed precision" not in told
    assert "SIGKILL" in told
