"""Ranks that share gradients skip the same steps, at the same scale, and end with the same weights."""

import sys

import pytest
import torch

pytestmark = [pytest.mark.dist, pytest.mark.slow]

# `join` last: a rank that had run out of data has made fewer passes, and numbers them on from there.
WAYS = ["plain", "no_sync", "unused", "bucket_view", "static_graph", "fsdp", "fsdp_no_sync", "join"]
BAD_STEP = 2
LEVELS = ["O1", "O2", "O1 bfloat16", "O2 bfloat16", "O1 sent in half"]
HALF_LEVELS = ["O1", "O2", "O1 sent in half"]


@pytest.fixture(scope="session")
def trained(runs):
    """Each level, and FP32, by another way to start ranks."""
    script = (runs.scripts / "ranks.py", *WAYS)
    scale = ("--set", "loss_scale.init=1024")
    talkative = ("--set", "collapse.after=1")
    bf16 = ("--dtype", "bfloat16")
    half, brain = (("--set", f"ddp.comm_dtype={dtype}") for dtype in ("float16", "bfloat16"))
    shell = runs.scripts / "train.sh"
    started = {
        "FP32": runs.start(*runs.torchrun, *script),
        "O1": runs.start(*runs.mpx, "run", "-O", "O1", *scale, *talkative, "--", *runs.torchrun, *script),
        "O2": runs.start(*runs.torchrun, "-m", "mpx", "run", "-O", "O2", *scale, *script),
        "O1 bfloat16": runs.start(*runs.mpx, "run", "-O", "O1", *bf16, *brain, "--nproc", 2, *script),
        "O2 bfloat16": runs.start(
            *runs.mpx, "run", "-O", "O2", *bf16, "--", "bash", shell, sys.executable, *script
        ),
        "O3": runs.start(*runs.mpx, "run", "-O", "O3", "--nproc", 2, *script),
        "O1 sent in half": runs.start(*runs.mpx, "run", "-O", "O1", *scale, *half, "--nproc", 2, *script),
    }
    return lambda level: started[level].result().succeeded()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("kind", ["clean", "overflow"])
def test_the_weights_are_those_of_the_other_rank(trained, level, way, kind):
    first, second = (trained(level).of_rank(rank)[way][kind]["weights"] for rank in (0, 1))
    assert first == second


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("level", LEVELS)
def test_the_weights_are_near_those_of_float32(trained, level, way):
    ours, reference = (trained(name).of_rank(0)[way]["clean"]["weights"] for name in (level, "FP32"))
    rounding = 2e-4 if "bfloat16" not in level else 2e-3
    assert 0 < max(abs(a - b) for a, b in zip(ours, reference, strict=True)) < rounding


@pytest.mark.parametrize("way", WAYS)
def test_half_weights_are_those_of_the_other_rank_too(trained, way):
    first, second = (torch.tensor(trained("O3").of_rank(rank)[way]["clean"]["weights"]) for rank in (0, 1))
    reference = torch.tensor(trained("FP32").of_rank(0)[way]["clean"]["weights"])
    assert torch.equal(first, second)
    assert torch.equal(first, first.half().float())
    assert (first - reference).abs().max() < 4e-3


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("level", HALF_LEVELS)
def test_an_overflow_on_one_rank_skips_the_step_on_all(trained, level, way):
    for rank in (0, 1):
        moved = trained(level).of_rank(rank)[way]["overflow"]["moved"]
        assert [step for step, did in enumerate(moved) if not did] == [BAD_STEP]


@pytest.mark.parametrize("level", HALF_LEVELS)
def test_the_scale_is_the_same_on_all_at_every_pass(trained, level):
    first, second = (trained(level).last_snapshots[rank]["scalers"] for rank in (0, 1))
    (one,), (other,) = first, second
    assert one["history"][:-1] == other["history"][:-1]  # the last change is in `join`
    assert one["history"][-1][1] == other["history"][-1][1] == 1024 / 2 ** len(WAYS)
    assert one["overflows"] == other["overflows"] == len(WAYS)


def test_what_every_rank_would_say_is_said_once(trained):
    said = [line for line in trained("O1").stderr.splitlines() if "in a row were not finite" in line]
    assert said
    assert len(said) == len(set(said))


@pytest.mark.parametrize("level", LEVELS)
def test_there_is_one_record_and_it_knows_both_ranks(trained, level):
    run = trained(level)
    trained_ranks = [process["rank"] for process in run.record["processes"] if process["trained"]]
    assert sorted(trained_ranks) == [0, 1]
    reports = [line for line in run.stderr.splitlines() if line.startswith("mpx  O")]
    assert len(reports) == (0 if level == "O2" else 1)  # below torchrun there is nobody to write one


@pytest.mark.parametrize("level", ["O1 bfloat16", "O1 sent in half"])
def test_fully_shard_keeps_its_reduction_and_the_report_tells_of_it(trained, level):
    told = {item["id"] for item in trained(level).record["substitutions"]}
    assert "fsdp-reduction" in told
    communication = trained(level).record["communication"]
    assert communication["full_bytes"] == 2 * communication["bytes"] > 0


@pytest.mark.parametrize("level", ["O2", "O2 bfloat16"])
def test_fully_shard_is_told_the_level_and_the_report_tells_of_it(trained, level):
    told = {item["id"]: item["count"] for item in trained(level).record["substitutions"]}
    assert told["fsdp-policy"] == 3 * 2 * 2  # modules, ways, runs of each
