"""What one rank alone sees reaches the others in the next gradients that they share, and moves all scales together."""

import pytest

pytestmark = [pytest.mark.dist, pytest.mark.slow]


@pytest.fixture(scope="session")
def outside(runs):
    options = ("-O", "O1", "--set", "loss_scale.init=1024", "--nproc", 2)
    return runs.start(*runs.mpx, "run", *options, runs.scripts / "outside.py").result().succeeded()


def test_the_step_is_taken_by_all_without_the_overflow_and_the_next_is_skipped_by_all(outside):
    steps = [1, 1, 1, 0, 1, 1, 0]  # and the last, whose loss is NaN on one rank
    assert outside.stdout == f"{steps} {steps} True\n"


def test_the_scale_falls_for_the_overflow_and_not_for_the_loss(outside):
    first, second = (outside.last_snapshots[rank] for rank in (0, 1))
    histories = [[scaler["history"] for scaler in snapshot["scalers"]] for snapshot in (first, second)]
    assert histories[0] == histories[1]
    assert [point for history in histories[0] for point in history if point[1] < 512] == []
    assert [4, 512.0] in histories[0][0]
    assert first["overflow_counts"]["loss_nan"] == second["overflow_counts"]["loss_nan"] == 1
