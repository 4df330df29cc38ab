"""Ops computed in FP32 inside because their half kernel is slow give what that kernel gives, or better."""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mpx.engine.devices import DEVICES
from mpx.engine.reroutes import matrix_product, pieces, products

from .reroute_cases import (
    ABLE,
    ALL_CASES,
    BROADCAST,
    CASES,
    CONVOLUTIONS,
    HALF,
    MADE_OF_PRODUCTS,
    PRODUCTS,
    UNABLE,
    Attention,
    Convolution,
    leaves,
    run,
    substituted,
)

ULP = (
    2.0**-10
)  # of float16, relative; a sum in FP32 is off by far less, so a gradient is off by its last rounding
ROUNDING = {"rtol": ULP, "atol": 1e-4}


pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")


@pytest.fixture(params=["whole", "in pieces"])
def session(request, at_level, monkeypatch):
    """Return a context manager: a session without loss scaling, and a function that opens a region in it."""
    monkeypatch.setattr(products, "FEW", 0)
    if request.param == "in pieces":  # what only large tensors are
        monkeypatch.setattr(pieces, "PIECE", 1)
        monkeypatch.setattr(matrix_product, "LEAST", 1)

    @contextmanager
    def enter(*settings, level="O1", capabilities=ABLE):
        monkeypatch.setitem(DEVICES, "cpu", replace(DEVICES["cpu"], capabilities=lambda: capabilities))
        with at_level(level, "loss_scale=1", *settings) as recorded:
            yield recorded, lambda: recorded.session.region.autocast("cpu")

    return enter


@pytest.mark.parametrize("name", CASES)
def test_the_result_is_the_half_kernels_and_gradients_are_exact_up_to_their_last_rounding(name, session):
    case = CASES[name]
    with session() as (recorded, region):
        out, grads = run(case, HALF, region())
        assert substituted(recorded, case)
        _, from_float32 = run(case, torch.float32, region())
    plain_out, plain_grads = run(case, HALF)
    assert torch.equal(out, plain_out)
    _, exact = run(case, torch.float64)
    by_half_kernel = (
        1 if isinstance(case, Convolution) else 0
    )  # the input's: as good as the CPU at hand adds up
    for number, (grad, plain, reference) in enumerate(zip(grads, plain_grads, exact, strict=True)):
        assert grad.dtype is HALF
        assert grad.shape == plain.shape
        if number >= by_half_kernel:
            torch.testing.assert_close(grad.double(), reference, **ROUNDING)
        torch.testing.assert_close(grad, plain, rtol=8 * ULP, atol=4e-2)
    for wide, grad in zip(from_float32, grads, strict=True):
        assert wide.dtype is torch.float32  # of an FP32 input, through its cast
        assert torch.equal(wide, grad.float())


@pytest.mark.parametrize("name", ALL_CASES)
def test_without_half_instructions_everything_is_exact_up_to_its_last_rounding(name, session):
    case = ALL_CASES[name]
    with session(capabilities=UNABLE) as (recorded, region):
        out, grads = run(case, HALF, region())
        assert substituted(recorded, case)
        _, from_float32 = run(case, torch.float32, region())
    exact_out, exact = run(case, torch.float64)
    assert out.dtype is HALF
    torch.testing.assert_close(out.double(), exact_out, **ROUNDING)
    # the gradient of a broadcast operand is a sum over the batch, by autograd, of half numbers
    rounding = {"rtol": 4 * ULP, "atol": 4e-3} if name in BROADCAST else ROUNDING
    for grad, reference in zip(grads, exact, strict=True):
        assert grad.dtype is HALF
        torch.testing.assert_close(grad.double(), reference, **rounding)
    for wide, grad in zip(from_float32, grads, strict=True):
        assert wide.dtype is torch.float32
        assert torch.equal(wide, grad.float())


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("name", ["conv2d", "sdpa", "linear", "matmul, broadcast"])
def test_inference_without_half_instructions_is_exact_up_to_its_last_rounding(name, context, session):
    case = ALL_CASES[name]
    with session(capabilities=UNABLE) as (recorded, region), context():
        with region():
            out = case(*case.inputs(torch.float32))
        assert substituted(recorded, case)
    assert out.dtype is HALF
    torch.testing.assert_close(out.double(), case(*case.inputs(torch.float64)), **ROUNDING)


@pytest.mark.parametrize("given", ["dropout", "trained mask"])
def test_attention_without_half_instructions_keeps_dropout_and_trained_masks(given, session):
    case = Attention({"dropout_p": 0.5}) if given == "dropout" else Attention(mask="float")

    def attend(dtype: torch.dtype, region: Any = None) -> list[Tensor]:
        inputs = case.inputs(dtype)
        wanted = [t.requires_grad_() for t in inputs]
        torch.manual_seed(0)
        with region or nullcontext():
            out = case(*inputs)
        return [out, *torch.autograd.grad(out.float().sum(), wanted)]

    with session(capabilities=UNABLE) as (recorded, region):
        ours = attend(HALF, region())
        assert substituted(recorded, case)
    for mine, reference in zip(ours, attend(torch.float32), strict=True):  # the same numbers are dropped
        torch.testing.assert_close(mine.float(), reference, **ROUNDING)


IN_SOME_DIRECTION = ["conv2d", "conv2d, unbatched", "conv_transpose2d", "sdpa", "sdpa, float mask"]


@pytest.mark.parametrize(
    ("name", "capabilities"),
    [
        *((name, ABLE) for name in IN_SOME_DIRECTION),
        *((name, UNABLE) for name in [*IN_SOME_DIRECTION, *PRODUCTS] if name not in MADE_OF_PRODUCTS),
    ],
)
def test_what_is_saved_for_the_backward_pass_is_half(name, capabilities, session):
    case, saved = ALL_CASES[name], []
    inputs = case.inputs(HALF)
    leaves(case, inputs)
    keep = torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.dtype) or t, lambda t: t)
    with session(capabilities=capabilities) as (recorded, region), region(), keep:
        case(*inputs)
        assert substituted(recorded, case)
    assert set(saved) == {HALF}


# torch itself cannot differentiate its fused attention twice; in three dimensions it takes another path
@pytest.mark.parametrize("capabilities", [ABLE, UNABLE])
@pytest.mark.parametrize("name", [*CONVOLUTIONS, "sdpa, three dimensions", *PRODUCTS])
def test_a_double_backward_is_that_of_float32(name, capabilities, session):
    """A gradient penalty: the gradient of the squared size of the input's gradient."""
    case = ALL_CASES[name]

    def penalty(dtype: torch.dtype, region: Any = None) -> list[Tensor]:
        inputs = case.inputs(dtype)
        wanted = leaves(case, inputs)
        with region or nullcontext():
            out = case(*inputs)
        (grad,) = torch.autograd.grad(out.float().square().sum() / out.numel(), wanted[0], create_graph=True)
        grads = torch.autograd.grad(grad.float().square().sum(), wanted, allow_unused=True)
        return [torch.zeros_like(t) if g is None else g for t, g in zip(wanted, grads, strict=True)]

    with session(capabilities=capabilities) as (_, region):
        ours = penalty(HALF, region())
    for grad, expected in zip(ours, penalty(torch.float32), strict=True):
        assert float((grad.float() - expected).norm() / expected.norm().clamp_min(1e-3)) < 1e-2


def test_the_weights_of_a_frozen_layer_need_no_reroute(session):
    case = CONVOLUTIONS["conv2d"]
    x, weight, bias = case.inputs(HALF)
    with session() as (recorded, region):
        with region():
            out = case(x.requires_grad_(), weight, bias.requires_grad_())
        assert not substituted(recorded, case)
    assert out.requires_grad


class Stops(torch.autograd.Function):
    """Lets no gradient through: None, as an unused branch has none."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return None


@pytest.mark.parametrize("capabilities", [ABLE, UNABLE])
@pytest.mark.parametrize("name", [*CONVOLUTIONS, "sdpa, three dimensions", *PRODUCTS])
def test_where_no_gradient_flows_there_are_none_instead_of_zeros(name, capabilities, session):
    """With zeros an optimizer with decay or momentum would move the weights."""
    case = ALL_CASES[name]
    inputs = case.inputs(HALF)
    wanted = leaves(case, inputs)
    with session(capabilities=capabilities) as (_, region):
        with region():
            out = case(*inputs)
        Stops.apply(out).float().sum().backward()
    assert [leaf.grad for leaf in wanted] == [None] * len(wanted)


@pytest.mark.parametrize(("name", "only"), [("conv2d", 1), ("conv2d, no bias", 1), ("sdpa", 0), ("sdpa", 2)])
def test_only_what_requires_a_gradient_gets_one(name, only, session):
    case = CASES[name]
    inputs = case.inputs(HALF)
    inputs[only].requires_grad_()
    with session() as (recorded, region):
        with region():
            out = case(*inputs)
        out.float().sum().backward()
        assert substituted(recorded, case)
    assert [t is not None and t.grad is not None for t in inputs] == [i == only for i in range(len(inputs))]


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("name", ["conv2d", "sdpa"])
def test_inference_needs_no_reroute(name, context, session):
    case = CASES[name]
    with session() as (recorded, region), context():
        with region():
            out = case(*case.inputs(torch.float32))
        assert out.dtype is HALF
        assert not substituted(recorded, case)


@pytest.mark.parametrize("given", ["dropout", "trained mask"])
def test_attention_with_dropout_or_a_trained_mask_is_left_to_torch(given, session):
    case = Attention({"dropout_p": 0.5}) if given == "dropout" else Attention(mask="float")
    inputs = case.inputs(HALF)
    wanted = [t.requires_grad_() for t in inputs]

    def attend(region: Any = None) -> list[Tensor]:
        torch.manual_seed(0)
        with region or nullcontext():
            out = case(*inputs)
        return [out, *torch.autograd.grad(out.float().sum(), wanted)]

    plain = attend()
    with session() as (recorded, region):
        ours = attend(region())
        assert not substituted(recorded, case)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(ours, plain, strict=True))


def test_attention_to_what_is_no_matrix_is_refused_by_torch(session):
    vector = torch.ones(8, requires_grad=True)
    with (
        session("dtype=bfloat16") as (_, region),
        region(),
        pytest.raises(RuntimeError, match="2 dimensional"),
    ):
        torch.nn.functional.scaled_dot_product_attention(vector, vector, vector)


@pytest.mark.parametrize(("half", "keys", "rerouted"), [
    ("bfloat16", 143, True),
    ("bfloat16", 144, False),
    ("float16", 143, True),
    ("float16", 144, True),
])  # fmt: skip
def test_attention_to_many_keys_has_a_bf16_kernel_that_is_not_slow(half, keys, rerouted, session):
    case = Attention(q=(1, 2, 5, 64), k=(1, 2, keys, 64), v=(1, 2, keys, 64))
    exact, exact_grads = run(case, torch.float64)
    with session(f"dtype={half}") as (recorded, region):
        out, grads = run(case, torch.float32, region())
        assert bool(substituted(recorded, case)) is rerouted
    assert out.dtype is getattr(torch, half)
    of_half = torch.finfo(out.dtype).eps
    for found, true in zip([out, *grads], [exact, *exact_grads], strict=True):
        # inputs, results and what is between them are rounded once or twice each
        torch.testing.assert_close(
            found.double(), true, rtol=8 * of_half, atol=8 * of_half * true.abs().max().item()
        )


@pytest.mark.parametrize("name", ["conv2d", "sdpa"])
def test_no_kernel_is_slow_enough_for_a_preset_that_says_so(name, session):
    with session("slow_kernel_ratio=1e9") as (recorded, region):
        out, _ = run(CASES[name], HALF, region())
        assert not substituted(recorded, CASES[name])
    assert out.dtype is HALF


def test_the_substitution_names_direction_type_and_device(session):
    with session() as (recorded, region):
        for name in ("conv2d", "sdpa"):
            run(CASES[name], HALF, region())
        texts = {row["id"]: row["text"] for row in recorded.summary["substitutions"]}
    assert texts["op:conv2d"] == "conv2d: slow float16 kernel on this cpu, weight gradient computed in FP32"
    sdpa = "scaled_dot_product_attention"
    assert texts[f"op:{sdpa}"] == f"{sdpa}: slow float16 kernel on this cpu, backward computed in FP32"


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:There is a performance drop")
@pytest.mark.parametrize(
    "name",
    [
        "conv2d",
        "conv1d, same, even kernel",
        "conv_transpose2d",
        "sdpa",
        "sdpa, causal",
        "linear",
        "matmul, broadcast",
    ],
)
@pytest.mark.parametrize("capabilities", [ABLE, UNABLE])
@pytest.mark.parametrize("few", [0, 1000])
def test_transforms_of_torch_func_go_through(name, capabilities, few, session, monkeypatch):
    case = ALL_CASES[name]
    x, *others = case.inputs(HALF)

    def loss(x: Tensor) -> Tensor:
        return case(x, *others).float().square().mean()

    (reference,) = torch.autograd.grad(loss(x.requires_grad_()), x)
    x = x.detach()
    with session(capabilities=capabilities) as (_, region), region():
        monkeypatch.setattr(products, "FEW", few)
        of_one = torch.func.grad(loss)(x)
        of_batch = torch.func.vmap(torch.func.grad(loss))(torch.stack([x, x]))[1]
    torch.testing.assert_close(of_one, reference, rtol=8 * ULP, atol=1e-3)
    torch.testing.assert_close(of_batch, reference, rtol=8 * ULP, atol=1e-3)


@pytest.mark.parametrize("capabilities", [ABLE, UNABLE])
@pytest.mark.parametrize("transform", ["grad", "vjp"])
def test_a_transform_of_torch_func_may_be_around_the_model(transform, capabilities, session):
    """There the FP32 product inside an op meets autocast once more."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)), torch.randn(4, 8)

    def gradient() -> Tensor:
        def loss(x: Tensor) -> Tensor:
            return model(x).float().square().mean()

        if transform == "grad":
            return torch.func.grad(loss)(x)
        value, back = torch.func.vjp(loss, x)
        return back(torch.ones_like(value))[0]

    exact = gradient()
    with session(capabilities=capabilities):
        found = gradient()
    assert (exact - found).norm() <= 8 * ULP * exact.norm()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_forward_mode_differentiation_goes_through(session):
    x, *others = CONVOLUTIONS["conv2d"].inputs(HALF)

    def loss(x: Tensor) -> Tensor:
        return CONVOLUTIONS["conv2d"](x, *others).float().square().mean()

    (gradient,) = torch.autograd.grad(loss(x.requires_grad_()), x)
    x = x.detach()
    with session() as (_, region), region():
        _, derivative = torch.func.jvp(loss, (x,), (x,))
    torch.testing.assert_close(derivative, (gradient.float() * x.float()).sum(), rtol=2e-2, atol=0)


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_a_small_network_trains_at_every_level_as_in_float32(level, at_level):
    def network() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.ConvTranspose2d(4, 2, 2, 2), nn.Flatten(), nn.Linear(128, 1)
        )  # fmt: skip

    def losses(model: nn.Module) -> list[float]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        x, y = (
            torch.randn(8, 1, 4, 4, generator=torch.Generator().manual_seed(1)),
            torch.linspace(-1, 1, 8)[:, None],
        )
        found = []
        for _ in range(10):
            loss = F.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
        return found

    reference = losses(network())
    with at_level(level, "loss_scale.init=256"):
        assert losses(network()) == pytest.approx(reference, rel=2e-2)
    assert reference[-1] < reference[0] / 2
