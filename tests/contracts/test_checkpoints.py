"""A checkpoint is the script's own: FP32, with plain python's keys; and a run that goes on from it is the same run."""

import itertools
import json

import pytest

LEVELS = ("O1", "O2")
# So that the scale, which finds its range first, also grows before the checkpoint (after 11 steps) and after it.
MOVING = "--set loss_scale.growth_interval=3 --out run"


@pytest.fixture(scope="session")
def started(processes):
    whole = ("--middle", "middle.pt", "--end", "end.pt")
    runs = {"plain": processes.plain("resumable.py", *whole)}
    for level in LEVELS:
        runs[level] = processes.mpx(f"-O {level} {MOVING}", "resumable.py", *whole)
    middle = {name: future.result().succeeded().folder / "middle.pt" for name, future in runs.items()}
    for level in LEVELS:
        rest = ("--resume", middle[level], "--end", "end.pt")
        runs[level, "resumed"] = processes.mpx(f"-O {level} {MOVING}", "resumable.py", *rest)
        runs[level, "without mpx"] = processes.without_mpx("resumable.py", *rest)
        rest = ("--resume", middle["plain"], "--end", "end.pt")
        runs[level, "from plain"] = processes.mpx(f"-O {level} {MOVING}", "resumable.py", *rest)
    runs["plain", "resumed"] = processes.plain("resumable.py", "--resume", middle["plain"], "--end", "end.pt")
    return runs


@pytest.fixture(scope="session")
def runs(started, all_of):
    return all_of(started)


@pytest.fixture(scope="session")
def load(runs):
    import torch

    return lambda name, when: torch.load(runs[name].folder / f"{when}.pt")


@pytest.fixture(params=LEVELS)
def level(request):
    return request.param


def losses(outcome):
    return [line for line in outcome.succeeded().lines if line.startswith("step")]


def scaler(outcome):
    (found,) = json.loads((outcome.folder / "run" / "run.json").read_text())["scalers"]
    return found


def test_a_run_that_is_resumed_is_the_run_that_was_not_interrupted(runs, level):
    whole, resumed = runs[level], runs[level, "resumed"]
    assert losses(resumed) == losses(whole)[11:]
    assert resumed.lines[-1] == whole.lines[-1]  # every bit of the weights
    assert resumed.lines[-1].startswith("RESULT")


def test_the_scaler_is_resumed_with_the_rest(runs, load, level, identical):
    history = scaler(runs[level])["history"]
    (middle,) = load(level, "middle")["optimizer"]["mpx"]["loss_scales"].values()
    before = [scale for backward, scale in history if backward <= 11]
    after = [[backward - 11, scale] for backward, scale in history if backward > 11]
    moves = {later / earlier for earlier, later in itertools.pairwise(before)}
    assert moves == {0.5, 2.0}  # it had moved both ways when the checkpoint was written,
    assert len(after) >= 2  # and moves on
    assert middle["scale"] == before[-1]
    assert middle["clean"] > 0
    resumed = scaler(runs[level, "resumed"])
    assert [entry for entry in resumed["history"] if entry[0] > 0] == after
    assert resumed["final"] == scaler(runs[level])["final"]
    assert identical(load((level, "resumed"), "end"), load(level, "end"))


@pytest.mark.parametrize("when", ["middle", "end"])
def test_a_checkpoint_is_float32_and_has_plain_keys(load, level, when):
    ours, plain = load(level, when), load("plain", when)
    assert list(ours) == list(plain)
    assert list(ours["model"]) == list(plain["model"])
    assert shapes(ours["model"]) == shapes(plain["model"])
    assert set(ours["optimizer"]) == {*plain["optimizer"], "mpx"}
    assert shapes(ours["optimizer"]["state"]) == shapes(plain["optimizer"]["state"])
    # The learning rates of both are at the same place of their schedules.
    assert ours["optimizer"]["param_groups"] == plain["optimizer"]["param_groups"]
    assert ours["schedule"] == plain["schedule"]


def shapes(tree):
    if isinstance(tree, dict):
        return {key: shapes(value) for key, value in tree.items()}
    return (tree.dtype, tree.shape)


def test_the_weights_are_no_widened_half_copies(load, level):
    weights = load(level, "end")["model"]["0.weight"]
    assert (weights == weights.half().float()).float().mean() < 0.2


def test_it_loads_in_plain_python_without_mpx(runs, level):
    """Plain python goes on from it, in an environment that has no mpx."""
    alone, ours = runs[level, "without mpx"].succeeded(), runs[level, "resumed"]
    assert len(losses(alone)) == 13
    first, theirs = (float(losses(run)[0].split()[-1]) for run in (alone, ours))
    assert first == pytest.approx(theirs, rel=0.01)
    assert alone.stderr == ""


def test_a_plain_checkpoint_goes_on_under_mpx(runs, level):
    ours, plain = runs[level, "from plain"], runs["plain", "resumed"]
    assert losses(plain) == losses(runs["plain"])[11:]  # the script itself resumes well
    first, theirs = (float(losses(run)[0].split()[-1]) for run in (ours, plain))
    assert first == pytest.approx(theirs, rel=0.01)
    assert len(losses(ours)) == 13
