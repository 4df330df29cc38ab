"""O2: however a module is called, copied or interrupted, it works on half copies and nobody else sees them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

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


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Spy(8, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.LayerNorm(8), Spy(8, 4))


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


# ------------------------------------------------------------------ calls


def test_a_submodule_may_be_called_on_its_own(level_2):
    with level_2():
        model = network()
        out = model[0](batch())
        assert out.dtype is torch.float32
        assert model[0].seen == [HALF]
        assert model[4].seen == []
        out.sum().backward()
        assert model[0].weight.grad is not None


def test_a_method_that_is_not_a_call_works_by_the_layers_that_it_calls(level_2):
    class Coder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.decoder, self.scale = Spy(8, 8), nn.Parameter(torch.ones(8))

        def decode(self, z: Tensor) -> Tensor:
            return self.decoder(z) * self.scale

    with level_2():
        model = Coder()
        out = model.decode(batch())
        out.sum().backward()
        assert out.dtype is torch.float32
        assert model.decoder.seen == [HALF]
        assert model.scale.grad.dtype is torch.float32


def test_a_model_inside_another_s_forward_and_modules_in_a_plain_list(level_2):
    class Uses(nn.Module):
        def __init__(self, listed: list[nn.Module]) -> None:
            super().__init__()
            self.own, self.listed = Spy(8, 8), listed  # parameters of a plain list are nobody's

        def forward(self, x: Tensor) -> Tensor:
            for layer in (self.own, *self.listed):
                x = layer(x)
            return x

    with level_2():
        listed = [Spy(8, 8), network()]
        model = Uses(listed)
        step(model)
        assert listed[0].seen == listed[1][0].seen == [HALF]
        assert all(p.grad is not None for layer in listed for p in layer.parameters())
        assert {dtype for layer in listed for dtype in types(layer)} == {torch.float32}


def test_functional_call_trains_the_parameters_that_it_is_given(level_2):
    with level_2():
        model = network()
        own = list(model.parameters())
        given = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
        out = torch.func.functional_call(model, given, (batch(),))
        out.square().mean().backward()
        assert model[0].seen == [HALF]
        assert all(p.grad is not None for p in given.values())
        assert all(p.grad is None for p in own)
        assert all(now is then for now, then in zip(model.parameters(), own, strict=True))


def test_an_exception_in_the_forward_puts_everything_back(level_2):
    class Fails(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Spy(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            self.inner(x)
            raise ValueError("of the script")

    with level_2():
        model = Fails()
        own = list(model.parameters())
        for _ in range(2):
            with pytest.raises(ValueError, match="of the script"):
                model(batch())
            assert all(now is then for now, then in zip(model.parameters(), own, strict=True))
        assert not torch.is_autocast_enabled("cpu")
        assert step(model.inner) > 0


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_inference_gives_float32_near_that_of_float32(context, level_2):
    model = network().eval()
    with context():
        reference = model(batch())
    with level_2(), context():
        out = model(batch())
    assert out.dtype is torch.float32
    assert near(out, reference)
    assert types(model) == {torch.float32}


def test_training_goes_on_after_an_evaluation_without_gradients(level_2):
    with level_2():
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses = []
        for _ in range(4):
            losses.append(step(model, optimizer=optimizer))
            with torch.no_grad():
                model(batch(2))
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < losses[0]


# ------------------------------------------------------------------ regions that the script refuses


@pytest.mark.parametrize("device", ["cpu", torch.device("cpu").type])
def test_a_region_that_the_script_refuses_sees_the_float32_weights(device, level_2):
    class Careful(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.exact, self.last = Spy(8, 8), Spy(8, 8), Spy(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            h = self.first(x)
            with torch.autocast(device, enabled=False):
                h = self.exact(h.float())
                self.direct = (h @ self.exact.weight.T).dtype
                self.is_own = self.exact.weight is own[2]
            return self.last(h)

    with level_2():
        model = Careful()
        own = list(model.parameters())
        step(model)
        assert (model.first.seen, model.exact.seen, model.last.seen) == ([HALF], [torch.float32], [HALF])
        assert model.direct is torch.float32
        assert model.is_own
        assert all(p.grad is not None for p in own)


def test_a_weight_that_changes_in_such_a_region_is_changed_for_the_rest_of_the_call(level_2):
    class Rescales(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = Layer(8, 8, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            before = self.linear(x)
            with torch.autocast("cpu", enabled=False), torch.no_grad():
                self.linear.weight.mul_(2)
            return torch.stack([before, self.linear(x)])

    with level_2(), torch.no_grad():
        model = Rescales()
        weight = model.linear.weight.clone()
        before, after = model(batch())
        assert near(after, 2 * before)
        assert torch.equal(model.linear.weight, 2 * weight)


# ------------------------------------------------------------------ the backward pass


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_activation_checkpointing_recomputes_on_the_same_copies(reentrant, dtype, level_2):
    class Blocks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.blocks = nn.ModuleList([Spy(8, 8) for _ in range(2)])
            self.scale = nn.Parameter(torch.ones(8))

        def block(self, layer: nn.Module, x: Tensor) -> Tensor:
            return torch.tanh(layer(x)) * self.scale  # a parameter beside those of modules that are called

        def forward(self, x: Tensor, *, keep: bool) -> Tensor:
            for layer in self.blocks:
                x = (
                    self.block(layer, x)
                    if keep
                    else checkpoint(self.block, layer, x, use_reentrant=reentrant)
                )
            return x

    with level_2(f"dtype={dtype}"):
        kept, recomputed = Blocks(), Blocks()
        for model, keep in ((kept, True), (recomputed, False)):
            model(batch().requires_grad_(), keep=keep).square().mean().backward()
        assert {dtype for layer in recomputed.blocks for dtype in layer.seen} == {getattr(torch, dtype)}
        assert [len(layer.seen) for layer in recomputed.blocks] == [2, 2]
        for mine, theirs in zip(recomputed.parameters(), kept.parameters(), strict=True):
            # re-entrant: each block has a backward pass of its own, and their gradients meet in FP32
            rounding = torch.finfo(getattr(torch, dtype)).eps if reentrant else 0
            torch.testing.assert_close(mine.grad, theirs.grad, rtol=rounding, atol=0)
        assert types(recomputed) == {torch.float32}


def test_overlapping_roots_keep_their_parameters_apart(level_2):
    with level_2():
        model = network()
        model[0].requires_grad_(requires_grad=False)
        loss = model(batch()).square().mean() + model[0](batch()).sum() + model[4](batch()).square().mean()
        own = list(model.parameters())
        loss.backward()
        assert all(now is then for now, then in zip(model.parameters(), own, strict=True))
        assert types(model) == {torch.float32}


def test_an_optimizer_step_inside_a_call_is_seen_by_what_follows_in_it(level_2):
    class TrainsItself(nn.Module):
        """As a training step that is a method of a wrapped module: manual optimization."""

        def __init__(self) -> None:
            super().__init__()
            self.linear = Layer(8, 1, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            optimizer = torch.optim.SGD([own], lr=1.0)
            first = self.linear(x)
            first.sum().backward()
            optimizer.step()
            return torch.stack([first, self.linear(x)])

    with level_2():
        model = TrainsItself()
        own = model.linear.weight
        x = batch()
        before, after = model(x)
        expected = before - (x @ x.sum(0))[:, None]
        assert torch.allclose(after, expected, rtol=1e-2, atol=0.3)
        assert model.linear.weight is own
        assert own.dtype is torch.float32
