"""Processes that a script starts by itself are followed: one report, and every step in it."""

import pytest

pytestmark = [pytest.mark.dist]

WAYS = [
    "os.fork",
    "fork",
    pytest.param("mp.spawn", marks=pytest.mark.slow),
    pytest.param("forkserver", marks=pytest.mark.slow),
]


@pytest.fixture(scope="session")
def hogwild(runs):
    script = runs.scripts / "hogwild.py"
    return lambda way: runs.start(*runs.mpx, "run", "-O", "O1", script, way).result().succeeded()


@pytest.mark.parametrize("way", WAYS)
def test_every_step_of_every_child_is_counted(hogwild, way):
    record = hogwild(way).record
    steps = sorted(process["steps"]["attempted"] for process in record["processes"] if process["trained"])
    assert steps == [3, 4]
    assert record["steps"]["attempted"] == 7


@pytest.mark.parametrize("way", WAYS)
def test_the_shared_weights_are_trained_in_place(hogwild, way):
    assert hogwild(way).stdout == "the shared weights moved: True, ['torch.float32']\n"


@pytest.mark.parametrize("way", WAYS)
def test_there_is_one_report(hogwild, way):
    assert sum(line.startswith("mpx  O1") for line in hogwild(way).stderr.splitlines()) == 1
