"""O2: modules that do something of their own with their parameters go on doing it, on FP32 ones if need be."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune, spectral_norm, weight_norm

from .layers import Layer, LazyLayer

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


def test_tied_weights_share_one_copy_and_one_gradient(level_2):
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(16, 8), Layer(8, 16, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, ids: Tensor) -> Tensor:
            self.shared = self.head.weight is self.embed.weight
            return self.head(self.embed(ids))

    torch.manual_seed(0)
    reference, ids = Tied(), torch.arange(8)
    F.cross_entropy(reference(ids), ids).backward()
    with level_2():
        model = copy.deepcopy(reference)
        model.zero_grad()
        F.cross_entropy(model(ids), ids).backward()
        assert model.shared
        assert model.head.weight is model.embed.weight
        assert near(model.embed.weight.grad, reference.embed.weight.grad)


NORMED = {
    "weight_norm": lambda: weight_norm(Layer(8, 8)),
    "spectral_norm": lambda: spectral_norm(Layer(8, 8)),
    "pruned": lambda: prune.l1_unstructured(Layer(8, 8), "weight", amount=0.5),
    "parametrized weight_norm": lambda: parametrizations.weight_norm(Layer(8, 8)),
    "parametrized spectral_norm": lambda: parametrizations.spectral_norm(Layer(8, 8)),
    "orthogonal": lambda: parametrizations.orthogonal(Layer(8, 8)),
}


@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated")
@pytest.mark.parametrize("make", NORMED.values(), ids=NORMED.keys())
def test_weights_that_are_made_of_others_before_each_call_train(make, level_2):
    torch.manual_seed(0)
    reference = nn.Sequential(Layer(8, 8), make())
    state = copy.deepcopy(reference.state_dict())
    losses = [step(reference, optimizer=torch.optim.SGD(reference.parameters(), lr=0.1)) for _ in range(3)]
    with level_2():
        model = nn.Sequential(Layer(8, 8), make())
        model.load_state_dict(state)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        found = [step(model, optimizer=optimizer) for _ in range(3)]
        assert found == pytest.approx(losses, rel=5e-3)
        assert types(model) == {torch.float32}
        assert {b.dtype for b in model.buffers()} <= {torch.float32}
        assert model[1].weight.dtype is torch.float32  # as the script finds it: an attribute, not a parameter


@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")
def test_lazy_modules_get_their_shapes_and_then_their_copies(level_2):
    with level_2():
        model = nn.Sequential(LazyLayer(8), nn.LazyBatchNorm1d(), LazyLayer(4))
        assert model(batch()).dtype is torch.float32
        assert isinstance(model[0].weight, nn.Parameter)
        seen = []
        model[0].register_forward_pre_hook(lambda module, _: seen.append(module.weight.dtype))
        step(model)
        assert seen == [HALF]
        assert model[0].weight.grad.dtype is torch.float32


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_train_as_in_float32(kind, level_2):
    torch.manual_seed(0)
    reference = kind(8, 8, num_layers=2)
    x = torch.randn(5, 3, 8)
    reference(x)[0].square().mean().backward()
    with level_2():
        model = copy.deepcopy(reference)
        model.zero_grad()
        model(x)[0].square().mean().backward()
    for mine, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        assert near(mine.grad, theirs.grad)


def test_embeddings_with_sparse_gradients_or_a_maximal_norm_keep_what_they_do(level_2):
    with level_2():
        sparse = nn.Sequential(nn.Embedding(9, 4, sparse=True), Layer(4, 2))
        sparse(torch.tensor([1, 3])).sum().backward()
        assert sparse[0].weight.grad.is_sparse
        assert sparse[0].weight.grad.dtype is torch.float32
        bounded = nn.Sequential(nn.Embedding(9, 4, max_norm=0.5), Layer(4, 2))
        bounded(torch.arange(9)).sum().backward()
        assert bounded[0].weight.norm(dim=1).max() <= 0.5 + 1e-6


def test_frozen_parameters_are_half_inside_too_and_may_be_thawed(level_2):
    with level_2():
        model = network()
        model[0].requires_grad_(requires_grad=False)
        step(model)
        assert model[0].weight.grad is None
        assert model[4].weight.grad is not None
        model[0].requires_grad_()
        step(model)
        assert model[0].weight.grad is not None
        assert model[0].seen == [HALF, HALF]


def test_buffers_stay_float32_and_moving_ones_move(level_2):
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = Layer(8, 8)
            self.register_buffer("table", torch.arange(4000.0))
            self.register_buffer("mean", torch.ones(8))

        def forward(self, x: Tensor) -> Tensor:
            out = self.linear(x)
            self.mean.mul_(0.9999).add_(0.0001 * out.detach().float().mean(0))
            self.seen = self.table.dtype, self.table[-1].item()
            return out

    with level_2():
        model = Counts()
        step(model)
        assert model.seen == (torch.float32, 3999.0)  # 4000 in float16
        assert model.mean.dtype is torch.float32
        assert not torch.equal(model.mean, torch.ones(8))


def test_doubles_and_halves_of_the_script_are_left_alone(level_2):
    with level_2():
        double = Layer(8, 8).double()
        assert double(batch().double()).dtype is torch.float64
        half = Layer(8, 8).half()
        assert half(batch().half()).dtype is HALF


def test_what_stays_float32_is_told_once_for_each_kind_of_module(level_2):
    class Codes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.rnn, self.linear = nn.BatchNorm1d(8), nn.GRU(8, 8), Layer(8, 8)
            self.register_buffer("codebook", torch.ones(4, 8))
            self.register_buffer("count", torch.zeros(4, dtype=torch.int64))

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(self.rnn(self.norm(x))[0] + self.codebook[0])

    with level_2() as recorded:
        for _ in range(2):
            model = Codes()
            for _ in range(3):
                step(model)
        told = recorded.summary["substitutions"]
    rows = {row["id"]: (row["text"], row["count"]) for row in told if not row["id"].startswith("op:")}
    assert rows == {
        "buffers:Codes": ("buffers of `Codes` stay FP32 (codebook)", 2),
        "weights:GRU": (
            "weights of `GRU` stay FP32: a half copy would not reach all that it does with them",
            2,
        ),
    }
