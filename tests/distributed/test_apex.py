"""Apex's DDP and amp on several ranks: they compute what torch's DDP does under mpx, and agree."""

import pytest

pytestmark = [pytest.mark.dist]


@pytest.fixture(scope="module")
def run(runs):
    words = ("run", "-O", "O2", "--set", "loss_scale.init=1024", "--", *runs.torchrun)
    return runs.start(*runs.mpx, *words, runs.scripts / "apex_ranks.py").result().succeeded()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_trains_as_with_torchs_ddp_and_without_amp(run, rank):
    told = run.of_rank(rank)
    assert told["apex"] == told["plain"]
    assert len(set(told["apex"]["losses"])) == 6
    assert told["apex"]["keys"][0] == "module.layers.0.weight"


def test_the_ranks_have_the_same_weights_and_scale(run):
    one, other = run.of_rank(0), run.of_rank(1)
    assert one["apex"]["weights"] == other["apex"]["weights"]
    assert one["apex"]["losses"] != other["apex"]["losses"]
    assert one["amp"] == other["amp"] == {"loss_scaler0": {"loss_scale": 1024.0, "unskipped": 12}}
    assert "Warning" not in run.stderr


def test_every_rank_tells_of_it(run):
    told = {row["id"] for row in run.record["substitutions"]}
    assert {"apex-amp", "apex-parallel", "apex-asks-O1"} <= told
    assert [rank["steps"]["applied"] for rank in run.record["ranks"]] == [12, 12]
