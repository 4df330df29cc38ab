"""O2: what a forward pass writes to its parameters reaches the FP32 ones, in any of the ways that scripts have."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from .layers import Layer

HALF = torch.float16


class Spy(nn.Linear):
    """A linear layer that notes the type of its weight in each call."""

    def __init__(self, *shape: int) -> None:
        super().__init__(*shape)
        self.seen: list[torch.dtype] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(self.weight.dtype)
        return super().forward(x)


def batch(seed: int = 1) -> Tensor:
    return torch.randn(6, 8, generator=torch.Generator().manual_seed(seed))


def step(model: nn.Module, x: Tensor | None = None, optimizer: torch.optim.Optimizer | None = None) -> float:
    loss = model(batch() if x is None else x).square().mean()
    loss.backward()
    if optimizer is not None:
        optimizer.step()
        optimizer.zero_grad()
    return loss.item()


def types(model: nn.Module) -> set[torch.dtype]:
    return {p.dtype for p in model.parameters()}


def near(value: Tensor, exact: Tensor) -> bool:
    """Whether a half computation gave this, from one of FP32."""
    return torch.allclose(value, exact, rtol=5e-3, atol=5e-3)


@pytest.fixture
def level_2(at_level):
    """Return a context manager for O2 with a scale that nothing here overflows at."""
    return lambda *settings: at_level("O2", "loss_scale.init=64", *settings)


class Writes(nn.Module):
    """Moves a parameter in its forward pass, in one of the ways that scripts have."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.linear = Layer(8, 8)
        self.center = nn.Parameter(torch.ones(8), requires_grad=False)
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        out = self.linear(x) + self.center
        with torch.no_grad():
            if self.how == "in place":
                self.center.mul_(0.999)
            elif self.how == ".data in place":
                self.center.data.mul_(0.999)
            elif self.how == ".data assigned":
                self.center.data = self.center.data * 0.999
            elif self.how == "assigned":
                self.center = nn.Parameter(self.center * 0.999, requires_grad=False)
            elif self.how == "augmented":
                self.center *= 0.999
        return out


@pytest.mark.parametrize("how", ["in place", ".data in place", ".data assigned", "assigned", "augmented"])
def test_what_a_forward_pass_writes_is_kept_and_not_rounded_away(how, level_2):
    """A factor of 0.999 moves a half number near 1 by one step of its grid, and a half number of 0.99 not at all."""
    with level_2() as recorded:
        model = Writes(how)
        for _ in range(20):
            step(model)
        assert model.center.dtype is torch.float32
        assert model.center[0].item() == pytest.approx(0.999**20, abs=6e-4)  # the first write was a half one
        assert recorded.substituted("written:Writes.center")
        assert isinstance(model._parameters["center"], nn.Parameter)


def test_what_a_forward_pass_leaves_alone_keeps_every_bit(level_2):
    with level_2():
        model = Writes("in place")
        own = model.linear.weight.clone()
        model.center.data = torch.rand(8)
        center = model.center.clone()
        model.how = "nothing"
        step(model)
        assert torch.equal(model.center, center)
        assert torch.equal(model.linear.weight, own)


def test_a_write_to_some_numbers_keeps_every_bit_of_the_others(level_2):
    class WritesOne(Writes):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                self.center[0] = 7
            return self.linear(x) + self.center

    with level_2():
        model = WritesOne("")
        model.center.data = torch.rand(8)
        others = model.center[1:].clone()
        step(model)
        assert model.center[0] == 7
        assert torch.equal(model.center[1:], others)


def test_a_parameter_that_the_forward_makes_anew_is_the_one_that_stays(level_2):
    class Renews(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(8, 8))
            self.made: list[nn.Parameter] = []

        def forward(self, x: Tensor) -> Tensor:
            self.weight = nn.Parameter(torch.full((8, 8), 2.0))
            self.made.append(self.weight)
            return x @ self.weight

    with level_2():
        model = Renews()
        step(model)
        assert model.weight is model.made[-1]
        assert model.weight.dtype is torch.float32
        assert model.weight.grad is not None


def test_parameters_may_come_and_go_in_a_forward_pass(level_2):
    class Grows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.old = Layer(8, 8), nn.Parameter(torch.ones(8))

        def forward(self, x: Tensor) -> Tensor:
            if not hasattr(self, "second"):
                self.second = Spy(8, 8)
                x = x * self.old
                del self.old
            return self.second(self.first(x))

    with level_2():
        model = Grows()
        step(model)
        step(model)
        assert [name for name, _ in model.named_parameters()] == [
            "first.weight",
            "first.bias",
            "second.weight",
            "second.bias",
        ]
        assert model.second.seen == [HALF, HALF]
        assert types(model) == {torch.float32}


@pytest.mark.parametrize("between", ["function", "island", "nothing"])
def test_a_write_through_data_is_found_whatever_comes_after_it_in_the_call(at_level, between):
    """It leaves no trace; and what comes after it withdraws the copies, where nobody computes gradients."""

    class Runs(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, act):
            return act(x)

        @staticmethod
        def backward(ctx, grad):
            return grad, None

    class Halves(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.ones(4))
            self.out = Layer(4, 4)

        def forward(self, x):
            self.w.data.mul_(0.5)
            with torch.no_grad():
                if between == "function":
                    Runs.apply(x, torch.relu)
                elif between == "island":
                    with torch.autocast("cpu", enabled=False):
                        x + 1
            return self.out(x * self.w)

    with at_level("O2", "loss_scale.init=64"):
        model, x = Halves(), torch.randn(2, 4)
        for step in range(1, 4):
            model(x).sum().backward()
            assert torch.equal(model.w.detach(), torch.full((4,), 0.5**step))
            assert model.out.weight.grad is not None
            assert model.w.grad is not None
            model.zero_grad()
