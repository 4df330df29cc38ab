"""Tensor parallel, `torch.compile` on either side of DDP, pipeline stages: near FP32, and one verdict for all ranks."""

import pytest

pytestmark = [pytest.mark.dist, pytest.mark.slow]

ONE_MODEL = ["tensor_parallel", "compiled_below", "compiled_above"]
STAGED = ["gpipe", "sharded", "interleaved", "zero_bubble"]
WAYS = [*ONE_MODEL, *STAGED]
BAD_STEP = 2
LEVELS = ["O1", "O2"]


@pytest.fixture(scope="module")
def trained(runs):
    script = (runs.scripts / "parallel.py", *WAYS)
    scale = ("--set", "loss_scale.init=1024")
    started = {"FP32": runs.start(*runs.torchrun, *script)}
    for level in LEVELS:
        started[level] = runs.start(*runs.mpx, "run", "-O", level, *scale, "--nproc", 2, *script)
    return lambda level: started[level].result().succeeded()


@pytest.mark.parametrize("way", ONE_MODEL)
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("kind", ["clean", "overflow"])
def test_the_weights_are_those_of_the_other_rank(trained, level, way, kind):
    first, second = (trained(level).of_rank(rank)[way][kind]["weights"] for rank in (0, 1))
    assert first == second


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("rank", [0, 1])
def test_the_weights_are_near_those_of_float32(trained, level, way, rank):
    ours, reference = (trained(name).of_rank(rank)[way]["clean"]["weights"] for name in (level, "FP32"))
    assert 0 < max(abs(a - b) for a, b in zip(ours, reference, strict=True)) < 2e-4


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("rank", [0, 1])
def test_an_overflow_on_one_rank_skips_the_step_on_all(trained, level, way, rank):
    moved = trained(level).of_rank(rank)[way]["overflow"]["moved"]
    assert [step for step, did in enumerate(moved) if not did] == [BAD_STEP]


@pytest.mark.parametrize("level", LEVELS)
def test_every_pass_was_judged_together_and_no_scale_parted(trained, level):
    record = trained(level).record
    assert record["desyncs"] == []
    for rank in record["ranks"]:
        assert rank["shared_passes"] == rank["backwards"] > 0
        assert rank["steps"]["skipped"] == len(WAYS)


@pytest.mark.parametrize("level", LEVELS)
def test_what_runs_unscaled_in_a_pipeline_is_told(trained, level):
    told = {item["id"]: item for item in trained(level).record["substitutions"]}
    assert "`ScheduleInterleavedZeroBubble`" in told["pipeline-split"]["text"]
    assert told["pipeline-split"]["count"] == 2  # schedules: the clean one and the other
    assert told["pipeline-sharded"]["count"] == 2
    assert "zeroed-gradients" not in told  # the gradient for the stage before is no update by hand
