"""Processes that a script starts: those that train are followed and counted, those that prepare data are left alone."""

import re
from functools import partial

import pytest

FAMILIES = [
    pytest.param("fork first", id="fork after training"),
    pytest.param("fork", id="fork", marks=pytest.mark.slow),
    pytest.param("spawn", id="spawn", marks=pytest.mark.slow),
    pytest.param("forkserver first", id="forkserver after training", marks=pytest.mark.slow),
]


@pytest.fixture(scope="session")
def family(processes):
    """A script that trains in children, 3 steps and 4, and, when it is to train first, 5 itself."""
    return lambda words: processes.mpx("-O O1", "family.py", *words.split()).result().succeeded()


@pytest.mark.parametrize("words", FAMILIES)
def test_every_process_that_trains_is_counted_once(family, words):
    run = family(words)
    expected = sorted([3, 4, 5] if "first" in words else [3, 4])
    record = run.record
    trained = [process for process in record["processes"] if process["trained"]]
    assert sorted(process["steps"]["applied"] for process in trained) == expected
    assert sorted(process["forwards"] for process in trained) == [steps + 1 for steps in expected]
    assert record["steps"] == {"attempted": sum(expected), "applied": sum(expected), "skipped": 0}
    assert len({process["pid"] for process in trained}) == len(expected)
    assert all(process["ended"] for process in record["processes"])


@pytest.mark.parametrize("words", FAMILIES)
def test_every_process_that_trains_does_so_at_the_level(family, words):
    told = [line for line in family(words).lines if line.startswith("trained")]
    assert len(told) == (3 if "first" in words else 2)
    assert all(line.endswith("half True") for line in told)


@pytest.mark.parametrize("words", FAMILIES)
def test_a_process_that_does_nothing_leaves_nothing(family, words):
    """But for the script's own, which is the run."""
    run = family(words)
    assert "idle" in run.lines
    others = [process["forwards"] for process in run.record["processes"] if not process["trained"]]
    # The child that calls a model; and the script, where it only starts others.
    assert sorted(others) == ([1] if "first" in words else [0, 1])
    assert len(list((run.run / "events").iterdir())) == 1 + len(run.record["processes"])


def test_one_report_for_all(family):
    run = family("fork first")
    assert sum(bool(re.match("mpx  O", line)) for line in run.stderr.splitlines()) == 1
    assert any("4 processes worked" in line for line in run.report)


@pytest.fixture(scope="session")
def loading(processes, as_asked):
    asked = {"plain": processes.plain("workers.py"), "O1": processes.mpx("-O O1", "workers.py")}
    return as_asked({**asked, "O2": partial(processes.mpx, "-O O2", "workers.py")})


levels = pytest.mark.parametrize("level", ["O1", pytest.param("O2", marks=pytest.mark.slow)])


@levels
def test_workers_of_a_data_loader_prepare_what_they_prepare_under_python(loading, level):
    assert loading[level].succeeded().lines == loading["plain"].succeeded().lines
    assert [line.split()[:2] for line in loading["plain"].lines] == [
        [method, "torch.float32"] for method in ("fork", "spawn", "forkserver")
    ]


@levels
def test_workers_of_a_data_loader_leave_no_trace(loading, level):
    run = loading[level]
    (process,) = run.record["processes"]
    assert (process["trained"], process["forwards"]) == (True, 9)
    assert (
        len(list((run.run / "events").iterdir())) == 2
    )  # the process that trains, and the one that supervises it
    assert run.stderr.splitlines() == run.report
