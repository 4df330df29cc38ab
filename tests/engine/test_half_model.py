"""O3: weights that really are half, by whatever path they come to be, and optimizers that survive it."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from mpx.engine.half_model import HalfModel
from mpx.engine.module_rules import ModuleRules
from mpx.presets import resolve

HALF = torch.float16


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.LayerNorm(8), nn.Linear(8, 4))


def batch() -> Tensor:
    return torch.randn(6, 8, generator=torch.Generator().manual_seed(1))


def step(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> float:
    loss = model(batch()).square().mean()
    loss.backward()
    if optimizer is not None:
        optimizer.step()
        optimizer.zero_grad()
    return loss.item()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def types(model: nn.Module) -> set[torch.dtype]:
    return {p.dtype for p in model.parameters()}


# ------------------------------------------------------------------ conversion


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("first", ["optimizer", "call", "backward"])
def test_the_script_s_own_parameters_become_half_whatever_comes_first(first, dtype, at_level):
    with at_level("O3", f"dtype={dtype}"):
        model = network()
        own = list(model.parameters())
        if first == "optimizer":
            optimizer = sgd(model)
            assert types(model) == {getattr(torch, dtype)}
        elif first == "call":
            assert model(batch()).dtype is torch.float32
            optimizer = sgd(model)
        else:
            step(model)
            model.zero_grad()
            optimizer = sgd(model)
        losses = [step(model, optimizer) for _ in range(5)]
        assert all(now is then for now, then in zip(model.parameters(), own, strict=True))
        assert types(model) == {getattr(torch, dtype)}
        assert losses[-1] < losses[0]


def test_optimizer_or_call_first_train_the_same(at_level):
    results = []
    for optimizer_first in (True, False):
        with at_level("O3"):
            model = network()
            early = sgd(model) if optimizer_first else None
            model.eval()(batch())
            model.train()
            optimizer = early or sgd(model)
            results.append([step(model, optimizer) for _ in range(3)])
    assert results[0] == results[1]


def test_gradients_that_a_parameter_has_already_are_converted_with_it(at_level):
    model = network()
    step(model)
    before = [p.grad.clone() for p in model.parameters()]
    with at_level("O3"):
        sgd(model)
        for p, grad in zip(model.parameters(), before, strict=True):
            assert p.grad.dtype is HALF
            assert torch.equal(p.grad, grad.half())


def test_buffers_are_half_and_counters_count(at_level):
    with at_level("O3"):
        model = network()
        step(model)
        norm = model[1]
        assert norm.running_mean.dtype is norm.running_var.dtype is HALF
        assert norm.num_batches_tracked.item() == 1
        before = norm.running_mean.clone()
        step(model)
        assert not torch.equal(norm.running_mean, before)


@pytest.mark.parametrize(
    "kind", [nn.BatchNorm1d, lambda n: nn.InstanceNorm1d(n, affine=True, track_running_stats=True)]
)
def test_a_norm_that_meets_the_script_s_float32_batch_works_and_moves(kind, at_level):
    """The first layer of many networks on tables: half statistics, half parameters, an FP32 input."""
    torch.manual_seed(0)
    with at_level("O3"):
        model = kind(8)
        x = torch.randn(16, 8, 5) + 3
        out = model(x)
        assert out.dtype is torch.float32
        assert torch.allclose(out.mean((0, 2)), torch.zeros(8), atol=0.02)
        assert torch.allclose(model.running_mean.float(), torch.full((8,), 0.3), atol=0.06)
        out.sum().backward()
        assert model.bias.grad.dtype is HALF


@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")
def test_lazy_modules_are_converted_when_they_have_a_shape(at_level):
    with at_level("O3"):
        model = nn.Sequential(nn.LazyLinear(8), nn.ReLU(), nn.LazyLinear(4))
        model(batch())
        model(batch())
        assert types(model) == {HALF}
        assert step(model, sgd(model)) > 0


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_recurrent_layers_are_half_and_train(kind, dtype, at_level):
    torch.manual_seed(0)
    x = torch.randn(5, 3, 8)
    reference = kind(8, 8)
    reference(x)[0].square().mean().backward()
    with at_level("O3", f"dtype={dtype}"):
        model = copy.deepcopy(reference)
        model.zero_grad()
        optimizer = sgd(model)
        model(x)[0].square().mean().backward()
        assert types(model) == {getattr(torch, dtype)}
        rel = 1e-2 if dtype == "float16" else 6e-2
        for mine, theirs in zip(model.parameters(), reference.parameters(), strict=True):
            assert float((mine.grad.float() - theirs.grad).norm()) <= rel * float(theirs.grad.norm())
        optimizer.step()


def test_tied_and_parametrized_weights_are_converted_once(at_level):
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(8, 8), nn.Linear(8, 8, bias=False)
            self.head.weight = self.embed.weight
            self.normed = parametrizations.weight_norm(nn.Linear(8, 8))

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.normed(x + self.embed.weight[0]))

    with at_level("O3"):
        model = Tied()
        optimizer = sgd(model)
        step(model, optimizer)
        assert model.head.weight is model.embed.weight
        assert types(model) == {HALF}


def test_a_group_that_is_added_later_is_half_as_well(at_level):
    with at_level("O3"):
        model, later = network(), nn.Linear(4, 4)
        optimizer = sgd(model)
        optimizer.add_param_group({"params": later.parameters()})
        assert types(later) == {HALF}


def test_a_float32_checkpoint_loads_and_is_cast(at_level):
    plain = network()
    state = plain.state_dict()
    with at_level("O3"):
        model = nn.Sequential(*(copy.deepcopy(layer) for layer in plain))
        sgd(model)
        model.load_state_dict(state)
        assert types(model) == {HALF}
        assert torch.equal(model[0].weight, state["0.weight"].half())
        assert {v.dtype for v in model.state_dict().values() if v.is_floating_point()} <= {
            HALF,
            torch.float32,
        }


def test_doubles_are_left_alone(at_level):
    with at_level("O3"):
        model = nn.Linear(8, 8).double()
        sgd(model)
        assert model(batch().double()).dtype is torch.float64
        assert types(model) == {torch.float64}


# ------------------------------------------------------------------ what stays FP32


@pytest.mark.parametrize("first", ["optimizer", "call"])
@pytest.mark.parametrize(
    ("setting", "kept"),
    [
        ("keep_batchnorm_fp32=true", ["1.weight", "1.bias"]),
        ("fp32_modules=[LayerNorm]", ["3.weight", "3.bias"]),
        ("fp32_modules=['4']", ["4.weight", "4.bias"]),
        ("fp32_modules=['?']", [f"{i}.{name}" for i in (0, 1, 3, 4) for name in ("weight", "bias")]),
    ],
)
def test_what_the_preset_keeps_in_float32_keeps_every_bit(setting, kept, first, at_level):
    plain = dict(network().named_parameters())
    with at_level("O3", setting):
        model = network()
        if first == "optimizer":
            sgd(model)
        else:
            model(batch())
        step(model)
        wide = {name: p for name, p in model.named_parameters() if p.dtype is torch.float32}
        assert sorted(wide) == sorted(kept)
        assert all(torch.equal(p, plain[name]) for name, p in wide.items())
        assert all(p.grad.dtype is p.dtype for p in model.parameters())


def test_a_refused_region_finds_float32_numbers_of_half_weights(tmp_path):
    rules = ModuleRules(resolve("O3", overrides=[], cwd=tmp_path).policy)
    half_model = HalfModel(HALF, rules)
    model = network()
    own = model[0].weight
    with half_model.hold(model, list(model.modules())):
        assert own.dtype is HALF
        with half_model.withdrawn():
            inside = model[0].weight
            assert inside.dtype is torch.float32
            assert torch.equal(inside, own.float())
            F.linear(batch(), inside).sum().backward()
        assert model[0].weight is own
    assert own.grad.dtype is HALF


# ------------------------------------------------------------------ optimizers


def settings_of(optimizer: torch.optim.Optimizer, key: str) -> list[object]:
    return [group[key] for group in optimizer.param_groups]


def test_an_eps_that_is_zero_in_half_is_raised_and_told(at_level):
    with at_level("O3") as recorded:
        model, other = network(), nn.Linear(4, 4)
        groups = [{"params": model.parameters()}, {"params": other.parameters(), "eps": 1e-3}]
        optimizer = torch.optim.Adam(groups, lr=1e-2)
        assert settings_of(optimizer, "eps") == [1e-4, 1e-3]
        assert [step(model, optimizer) for _ in range(3)][-1] < 10
        assert all(torch.isfinite(p).all() for p in model.parameters())
        (told,) = (row["text"] for row in recorded.summary["substitutions"] if row["id"] == "eps:Adam")
    assert told == "eps of Adam raised from 1e-08 to 0.0001: it is lost in half state"


@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
def test_no_other_level_touches_an_optimizer(level, at_level):
    with at_level(level) as recorded:
        model = network()
        optimizer = torch.optim.Adam(model.parameters(), fused=True)
        step(model, optimizer)
        assert settings_of(optimizer, "eps") == [1e-8]
        assert settings_of(optimizer, "fused") == [True]
        assert not [
            row for row in recorded.summary["substitutions"] if row["id"].startswith(("eps", "fused"))
        ]


def test_an_optimizer_of_float32_parameters_is_left_alone_at_level_3(at_level):
    with at_level("O3", "fp32_modules=[Linear]"):
        model = nn.Linear(4, 4)
        optimizer = torch.optim.Adam(model.parameters(), fused=True)
        assert settings_of(optimizer, "eps") == [1e-8]
        assert settings_of(optimizer, "fused") == [True]


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW])
def test_a_fused_optimizer_updates_every_half_weight(kind, at_level):
    """torch 2.13's fused SGD on the CPU leaves full vectors of half weights as they are."""
    with at_level("O3") as recorded:
        model = nn.Linear(64, 64)
        optimizer = kind(model.parameters(), lr=0.5, fused=True)
        before = model.weight.clone()
        (model(torch.ones(1, 64)).sum() * 4).backward()
        optimizer.step()
        assert not (model.weight == before).any()
        assert recorded.substituted(f"fused:{kind.__name__}")


def test_an_eps_that_the_script_sets_later_is_raised_before_the_step(at_level):
    with at_level("O3"):
        model = network()
        optimizer = torch.optim.Adam(model.parameters())
        optimizer.param_groups[0]["eps"] = 1e-9
        step(model, optimizer)
        assert settings_of(optimizer, "eps") == [1e-4]


def test_guards_are_the_preset_s_to_set(at_level):
    with at_level("O3", "optimizer.min_eps=1e-6", "optimizer.unfuse=false"):
        optimizer = torch.optim.Adam(network().parameters(), fused=True)
        assert settings_of(optimizer, "eps") == [1e-6]
        assert settings_of(optimizer, "fused") == [True]


def test_a_model_may_be_called_inside_a_transform_first(at_level):
    """Where nothing can be converted: per-sample gradients before there is an optimizer."""
    with at_level("O3", "dtype=bfloat16"):
        model = nn.Linear(4, 2)
        weights = {name: p.detach() for name, p in model.named_parameters()}

        def loss(parameters, x):
            return torch.func.functional_call(model, parameters, (x,)).square().sum()

        slopes = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(weights, torch.ones(3, 4))
        assert slopes["weight"].shape == (3, 2, 4)
        assert torch.func.jacrev(model)(torch.ones(4)).shape == (2, 4)
        assert model.weight.dtype is torch.float32
        model(torch.ones(1, 4))
        assert model.weight.dtype is torch.bfloat16
