"""Gates, budgets and aborts in real processes: what the script gets to do, and what a shell gets to see."""

import re

import pytest

SMALL = "-q -O O1"


@pytest.fixture(scope="session")
def runs(processes, all_of, tmp_path_factory):
    summary = tmp_path_factory.mktemp("github") / "summary.md"
    started = {
        "budget": processes.mpx(f"{SMALL} --max-steps 5", "limited.py", "plain"),
        "budget of a module": processes.start(
            (*processes.command, *SMALL.split(), "--max-steps", "5", "-m", "limited", "plain"),
            PYTHONPATH=str(processes.scripts),
        ),
        "budget, stubborn": processes.mpx(f"{SMALL} --max-steps 5", "limited.py", "stubborn"),
        "budget, thread": processes.mpx(f"{SMALL} --max-steps 5", "limited.py", "thread"),
        "budget, child": processes.mpx(f"{SMALL} --max-steps 5", "limited.py", "child"),
        "abort": processes.mpx(f"{SMALL} --abort-on nonfinite_loss", "limited.py", "plain", "7"),
        "abort, stubborn": processes.mpx(f"{SMALL} --abort-on nonfinite_loss", "limited.py", "stubborn", "7"),
        "gates hold": processes.mpx(
            f"{SMALL} --fail-on steps<40 --fail-on nonfinite_loss", "limited.py", "plain"
        ),
        "gate fails": processes.mpx(
            "-O O1 --fail-on nonfinite_loss --fail-on steps>100",
            "limited.py",
            "plain",
            "7",
            GITHUB_STEP_SUMMARY=str(summary),
        ),
        "script fails": processes.mpx(f"{SMALL} --fail-on steps<100", "limited.py", "fail"),
    }
    done = all_of(started)
    done["summary"] = summary.read_text()
    return done


@pytest.mark.parametrize("name", ["budget", "budget of a module"])
def test_a_budget_ends_the_script_as_sys_exit_would(processes, runs, name):
    run = runs[name].succeeded()
    # `done` counts finished iterations: the fifth step itself is the end
    assert run.lines == ["plain cleaned up after 4", "said goodbye"]
    assert "Traceback" not in run.stderr
    record = run.record
    assert record["steps"]["attempted"] == 5
    assert (record["status"], record["exit_code"]) == ("completed", 0)
    assert (record["stopped"]["reason"], record["stopped"]["step"]) == ("max-steps", 5)
    assert "step-budget" in [finding["id"] for finding in record["findings"]]
    assert "mpx: step budget reached: 5 optimizer steps" in run.stderr


def test_a_script_that_catches_everything_takes_no_further_step_unnoticed(runs):
    run = runs["budget, stubborn"].succeeded()
    assert run.lines.count("survived SystemExit") == 3
    assert run.lines[-2:] == ["went on to the end", "said goodbye"]
    assert run.stderr.count("step budget reached") == 1


def test_in_a_thread_the_thread_ends(runs):
    run = runs["budget, thread"].succeeded()
    assert run.lines == ["thread cleaned up after 4", "went on to the end", "said goodbye"]
    assert "Traceback" not in run.stderr


def test_a_child_process_ends_well(runs):
    assert "child ended with 0" in runs["budget, child"].succeeded().lines


def test_an_abort_ends_the_script_at_once_with_96(runs):
    run = runs["abort"]
    assert run.returncode == 96
    assert run.lines == ["plain cleaned up after 7", "said goodbye"]
    assert run.record["stopped"]["reason"] == "abort-on"
    assert "`nonfinite_loss` is true" in run.record["stopped"]["text"]
    assert "`nonfinite_loss` is true" in run.stderr
    assert "Traceback" not in run.stderr
    ids = [finding["id"] for finding in run.record["findings"]]
    assert ids[0] == "aborted"
    assert "failed" not in ids


def test_a_script_that_hides_an_abort_does_not_succeed(runs):
    assert runs["abort, stubborn"].returncode == 96
    assert runs["abort, stubborn"].record["exit_code"] == 0


def test_gates_that_hold_change_nothing(runs):
    run = runs["gates hold"].succeeded()
    assert [verdict["passed"] for verdict in run.record["gates"]] == [True, True]


def test_a_gate_that_fails_is_96_and_told(runs):
    run = runs["gate fails"]
    assert run.returncode == 96
    assert [(verdict["gate"], verdict["passed"]) for verdict in run.record["gates"]] == [
        ("nonfinite_loss", False),
        ("steps>100", True),
    ]
    assert "1 of 2 gates failed: `nonfinite_loss`" in " ".join(run.stderr.split())
    assert len(run.report) <= 18 + 3  # the report, annotations and the line that names the exit code


def test_the_job_on_github_shows_it(runs):
    assert re.search(
        r"^::error title=mpx O1 .*limited\.py::1 of 2 gates failed", runs["gate fails"].stderr, re.MULTILINE
    )
    assert "nonfinite" in runs["summary"]
    assert runs["summary"].startswith("### mpx: O1")


def test_the_exit_code_of_a_script_that_failed_is_its_own(runs):
    run = runs["script fails"]
    assert run.returncode == 3
    assert not run.record["gates"][0]["passed"]


def test_a_finished_run_is_judged_again(processes, runs):
    python, *mpx, _ = processes.command
    told = processes.start(
        (python, *mpx, "report", "-q", "--fail-on", "steps<100"), cwd=runs["gates hold"].folder
    ).result()
    assert told.returncode == 96
    held = processes.start(
        (python, *mpx, "report", "-q", "--fail-on", "steps>100"), cwd=runs["gates hold"].folder
    ).result()
    assert held.returncode == 0


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ("--fail-on overflow_rat>5%", "did you mean `overflow_rate`?"),
        ("--fail-on loss_delta_vs(none)>5%", "no run `none`"),
        ("--abort-on step_time>5ms", "--fail-on"),
        ("--max-steps many", "whole number"),
    ],
)
def test_a_mistake_is_told_before_the_script_starts(processes, options, says):
    run = processes.mpx(options, "limited.py", "plain").result()
    assert run.returncode == 2
    assert says in run.stderr
    assert run.lines == []
    assert run.runs == []
