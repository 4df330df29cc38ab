"""O1 computes what a script rewritten with `torch.autocast` and `torch.amp.GradScaler` computes, step by step.

Where torch's list for the CPU and ours treat the operations alike, the losses are equal to the last bit. Ours keeps
more operations in FP32 there, as torch's list for CUDA does: for each of them the first loss is FP32's own, which the
rewritten script misses. What a CPU computes in FP32 because its half kernels are slow is compared apart: those kernels
round as they like. The rewritten script keeps no casts of weights, as we do: else a weight of several uses has its
gradient added up in half.
"""

import itertools
import json
import math

import pytest
import torch

COMMON = ("linear", "perceptron", "batch norm", "dropout", "cat", "embedding", "recurrent")
SLOW = {"convolution": "conv2d", "attention": "scaled_dot_product_attention"}
WIDE = (
    *("softmax", "log_softmax", "layer_norm", "exp", "log", "pow", "sum", "cumsum", "norm", "logsumexp"),
    *("softplus", "var"),
)
OUT_OF_RANGE = ("large pow", "large exp", "large sum")
GROUPS = ("common", "wide", "out of range")
STEPS = 8
# of the half types, where oneDNN has kernels that add up in FP32
INSTRUCTIONS = {"float16": ("avx512_fp16", "avx_ne_convert"), "bfloat16": ("avx512_bw", "avx_ne_convert")}


@pytest.fixture(scope="session")
def runs(processes, all_of):
    started = {"plain": processes.plain("plain_loop.py", *GROUPS, "slow")}
    for half in ("float16", "bfloat16"):
        options = f"-O O1 --dtype {half} --set loss_scale.growth_interval=5"
        torchs_kernels = f"{options} --set slow_kernel_ratio=1e9 --out run"
        started[half, "hand"] = processes.plain("plain_loop_with_amp.py", half, *GROUPS, "slow")
        started[half, "ours"] = processes.mpx(torchs_kernels, "plain_loop.py", *GROUPS)
        started[half, "ours, rerouted"] = processes.mpx(options, "plain_loop.py", "slow")
    return all_of(started)


@pytest.fixture(scope="session")
def losses(runs):
    """Losses by run and model; the loss scale after each step where the script printed it."""

    def read(outcome):
        found: dict[str, list[float]] = {}
        for line in outcome.succeeded().lines:
            name, _, loss, *_ = line.split("|")
            found.setdefault(name, []).append(float(loss))
        return found

    return {key: read(outcome) for key, outcome in runs.items()}


@pytest.fixture(params=["float16", "bfloat16"])
def half(request):
    return request.param


def test_every_model_is_compared(losses):
    assert set(losses["plain"]) == {*COMMON, *SLOW, *WIDE, *OUT_OF_RANGE}
    assert set(losses["float16", "ours"]) == {*COMMON, *WIDE, *OUT_OF_RANGE}
    assert {len(values) for found in losses.values() for values in found.values()} == {STEPS}


@pytest.mark.parametrize("model", COMMON)
def test_losses_are_those_of_the_rewritten_script_to_the_bit(losses, half, model):
    assert losses[half, "ours"][model] == losses[half, "hand"][model]
    assert losses[half, "ours"][model] != losses["plain"][model]  # it is a half type that both computed in


def test_the_loss_scale_moves_as_gradscalers(runs):
    """Up and down: the first model's loss is loud, and the scale may grow after 5 clean steps."""
    printed = [line.split("|") for line in runs["float16", "hand"].lines]
    theirs = [float(scale) for name, _, _, scale in printed if name in COMMON]
    (scaler,) = json.loads((runs["float16", "ours"].folder / "run" / "run.json").read_text())["scalers"]
    changes = {int(backward): scale for backward, scale in scaler["history"]}
    ours = [changes[0]]
    for backward in range(1, len(theirs) + 1):
        ours.append(changes.get(backward, ours[-1]))
    assert ours[1:] == theirs
    moves = [b / a for a, b in itertools.pairwise(ours)]
    assert {0.5, 1.0, 2.0} == set(moves)


@pytest.mark.parametrize("model", SLOW)
def test_what_is_computed_in_float32_for_its_speed_differs_by_rounding_only(losses, half, model):
    ours, hand = losses[half, "ours, rerouted"][model], losses[half, "hand"][model]
    assert ours == pytest.approx(hand, rel=2**-7 if half == "bfloat16" else 2**-10)
    if any(torch.cpu.get_capabilities().get(name) for name in INSTRUCTIONS[half]):
        assert ours[0] == hand[0]  # the forward pass is the half kernel's own


@pytest.mark.parametrize("model", WIDE)
def test_the_first_loss_is_that_of_float32_where_our_list_is_stricter(losses, half, model):
    """Before it the product is exact in every type, so what is left is the rounding of this operation."""
    assert losses[half, "ours"][model][0] == losses["plain"][model][0]
    assert losses[half, "hand"][model][0] != losses["plain"][model][0]
    assert losses[half, "ours"][model] == pytest.approx(losses["plain"][model], rel=0.25)


@pytest.mark.parametrize("model", OUT_OF_RANGE)
def test_what_float16_cannot_hold_stays_finite(losses, model):
    assert losses["float16", "ours"][model][0] == losses["plain"][model][0]
    assert not math.isfinite(losses["float16", "hand"][model][0])
    assert all(map(math.isfinite, losses["float16", "ours"][model]))
