"""Autocast regions of the script: what it keeps in FP32 stays so, what it wants in half gets the level's type."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from .layers import Layer


def network():
    torch.manual_seed(0)
    return nn.Sequential(Layer(8, 16), nn.ReLU(), Layer(16, 4))


def batch():
    return torch.randn(6, 8, generator=torch.Generator().manual_seed(0))


class Island(nn.Module):
    """Computes one layer in a region that the script keeps in FP32."""

    def __init__(self, wrap):
        super().__init__()
        torch.manual_seed(0)
        self.front, self.core, self.back = Layer(8, 8), Layer(8, 8), Layer(8, 4)
        self.wrap, self.seen = wrap, set()

    def inside(self, x):
        with torch.autocast("cpu", enabled=False):
            out = self.wrap(self.core, x.float())
            self.seen.add((out.dtype, self.core.weight.dtype))
        return out

    def forward(self, x):
        return self.back(self.inside(self.front(x)))


def once(function, x):
    return function(x)


def reentrant(function, x):
    return checkpoint(function, x, use_reentrant=True)


def not_reentrant(function, x):
    return checkpoint(function, x, use_reentrant=False)


WRAPS = pytest.mark.parametrize("wrap", [once, reentrant, not_reentrant])


@WRAPS
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_region_that_the_script_keeps_in_float32_is_float32(at_level, level, wrap):
    """Also when checkpointing computes a part of it again in the backward pass."""
    x = batch()
    plain = Island(once)
    expected = plain(x)
    expected.sum().backward()
    with at_level(level, "loss_scale=256"):
        model = Island(wrap)
        out = model(x)
        out.sum().backward()
    assert model.seen == {(torch.float32, torch.float32)}
    assert not torch.equal(out, expected)
    for ours, true in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(ours.grad, true.grad, atol=0.02)


@WRAPS
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_it_is_so_inside_what_checkpointing_computes_again(at_level, level, wrap):
    with at_level(level):
        model = Island(once)
        hidden = model.front(batch())
        wrap(model.inside, hidden).sum().backward()
    assert model.seen <= {(torch.float32, torch.float32)}


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_it_is_so_around_a_whole_model_of_a_script_that_uses_amp(at_level, level):
    x = batch()
    expected = network()(x)
    with at_level(level):
        model = network()
        with torch.autocast("cpu"):
            assert not torch.equal(model(x), expected)
        with torch.autocast("cpu", enabled=False):
            assert torch.equal(model(x), expected)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_an_enabled_region_inside_has_our_half_type(at_level, level):
    seen = []

    class Inner(nn.Linear):
        def forward(self, x):
            with torch.autocast("cpu", enabled=False), torch.autocast("cpu", dtype=torch.bfloat16):
                seen.append((x @ x.T).dtype)
            with torch.autocast("cpu"):
                seen.append((x @ x.T).dtype)
            return super().forward(x)

    with at_level(level) as recorded:
        Inner(8, 4)(batch())
        with torch.autocast("cpu", dtype=torch.bfloat16):
            x = batch()
            seen.append((x @ x.T).dtype)
        told = {row["id"]: row["text"] for row in recorded.summary["substitutions"]}
    assert seen == [torch.float16] * 3
    assert "bfloat16 became float16" in told["script-autocast"]


def test_a_region_is_entered_again_inside_itself(at_level):
    with at_level("O1"):
        region = torch.autocast("cpu", enabled=False)

        @region
        def down(n):
            return torch.is_autocast_enabled("cpu") or (n > 0 and down(n - 1))

        assert not down(3)


class InFloat32(torch.autograd.Function):
    """Its author wants FP32 inside; it reads a weight where its module keeps it."""

    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu", cast_inputs=torch.float32)
    def forward(ctx, x, module):
        return (x @ module.weight.T).sum() * x

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")
    def backward(ctx, grad):
        return grad, None


class AsAround(torch.autograd.Function):
    """Its author wants in the backward pass what there was in the forward pass."""

    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu")
    def forward(ctx, x, module):
        return x.clone()

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")
    def backward(ctx, grad):
        ctx.autocast = torch.is_autocast_enabled("cpu")
        return grad * ctx.autocast, None


@pytest.mark.parametrize("function", [InFloat32, AsAround])
@pytest.mark.parametrize("amp", ["takeover", "keep"])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_decorated_function_is_no_amp_of_the_script(at_level, level, amp, function):
    class Uses(nn.Linear):
        def forward(self, x):
            return function.apply(super().forward(x), self)

    with at_level(level, f"script_amp={amp}", "loss_scale=16") as recorded:
        model = Uses(4, 4)
        for _ in range(2):
            model(batch()[:, :4]).sum().backward()
        assert model.weight.grad.abs().sum() > 0
        assert not recorded.summary["saw_script_amp"]
        assert recorded.summary["backwards"] == 2
        assert len(recorded.summary["scalers"]) == 1  # nobody stood back


class OpensItself(torch.autograd.Function):
    """Multiplies in a region of its author's, who saves what comes in: no decorator takes care of the types."""

    @staticmethod
    @torch.autocast("cpu", enabled=False)
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight.T

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return grad @ weight, grad.T @ x


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_function_under_autocast_as_a_decorator_runs_in_float32(at_level, level):
    class Uses(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.weight = Layer(4, 4), nn.Parameter(torch.ones(4, 4))

        def forward(self, x):
            out = OpensItself.apply(self.first(x), self.weight)
            self.inside = out.dtype
            return out

    with at_level(level, "loss_scale=16"):
        model = Uses()
        model(batch()[:, :4]).sum().backward()
        assert model.inside is torch.float32
        assert model.weight.grad.abs().sum() > 0
