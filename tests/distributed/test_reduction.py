"""Gradients of DDP that are reduced in FP16: their values in closed form, their bytes, and whose hook it is."""

import json

import pytest
import torch

pytestmark = [pytest.mark.dist]

SCALE = 1024.0
INPUTS = [[1 / 3, 60.0, 1e-3, -7.77], [2 / 7, 62.0, -3e-5, 0.1]]
MORE = [[0.7, 1.0, 5e-4, 3.1], [-0.2, 1.0, 1e-7, 9.0]]
PASSES = 5  # that ours reduced: four before another hook came, and the one that overflowed


@pytest.fixture(scope="module")
def run(runs):
    options = ("-O", "O1", "--set", f"loss_scale.init={SCALE:g}", "--set", "ddp.comm_dtype=float16")
    return runs.start(*runs.mpx, "run", *options, "--nproc", 2, runs.scripts / "sent_in_half.py").result()


def sent_in_half(*ranks):
    """What FP16 makes of the mean: each rank's half of it is rounded, and their sum, all times the loss scale."""
    halves = [(torch.tensor(values) * SCALE / 2).half() for values in ranks]
    return (sum(halves[1:], halves[0]).float() / SCALE).tolist()


def test_the_mean_is_that_of_halves_and_a_sum_does_not_overflow(run):
    run.succeeded()
    expected = sent_in_half(*INPUTS)
    assert expected[1] == 61.0
    for rank in (0, 1):
        assert run.of_rank(rank)["mean"] == run.of_rank(rank)["view"] == expected


def test_what_a_window_accumulated_is_rounded_once(run):
    summed = [(torch.tensor(a) + torch.tensor(b)).tolist() for a, b in zip(INPUTS, MORE, strict=True)]
    for rank in (0, 1):
        assert run.of_rank(rank)["accumulated"] == sent_in_half(*summed)


@pytest.mark.parametrize("case", ["early", "late", "builtin", "joined"])
def test_another_hook_wins_and_is_told(run, case):
    exact = (torch.tensor(INPUTS) / 2).sum(0).tolist()
    assert run.of_rank(0)[case] == run.of_rank(1)[case] == exact
    told = {row["id"] for row in run.record["substitutions"]}
    hooks = (
        "`allreduce_hook`",
        "`BuiltinCommHookType.ALLREDUCE`",
        "`join(divide_by_initial_world_size=False)`",
    )
    assert {f"ddp-hook:{hook}" for hook in hooks} <= told


def test_a_join_that_would_be_averaged_over_the_wrong_number_is_refused(run):
    assert "as it has done for this model before" in run.of_rank(0)["joined later"]


def test_what_only_the_cast_makes_infinite_skips_the_step_on_every_rank(run):
    assert [run.of_rank(rank)["moved"] for rank in (0, 1)] == [False, False]
    assert [rank["steps"]["skipped"] for rank in run.record["ranks"]] == [1, 1]
    assert [set(rank["scales"].values()) for rank in run.record["ranks"]] == [{SCALE / 2}] * 2


def test_the_bytes_are_counted_and_the_report_says_so(run):
    assert run.record["communication"] == {
        "dtype": "float16",
        "buckets": PASSES,
        "bytes": PASSES * 4 * 2,
        "full_bytes": PASSES * 4 * 4,
    }
    assert "40 B of gradients reduced in float16 instead of 80 B" in run.stderr


def test_a_pickled_model_knows_nothing_of_mpx(run):
    assert not run.of_rank(0)["pickled with mpx"]
    assert json.loads((run.run / "preset.json").read_text())["preset"]["ddp"] == {"comm_dtype": "float16"}
