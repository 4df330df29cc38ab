"""Modules that the preset names compute in FP32 at every level, by class or by path, however they are called."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import Tensor, nn

from mpx.engine.module_rules import ModuleRules
from mpx.presets import Override, resolve

HALF = torch.float16
LEVELS = pytest.mark.parametrize("level", ["O1", "O2", "O3"])


class Spy(nn.Linear):
    """Notes the types of its input, weight and result."""

    def __init__(self) -> None:
        super().__init__(8, 8)
        self.seen: list[tuple[torch.dtype, ...]] = []

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        self.seen.append((x.dtype, self.weight.dtype, out.dtype))
        return out


FULL = (torch.float32,) * 3


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Spy(), Spy()

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x)) @ torch.eye(8)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head, self.mix = Block(), Spy(), nn.Parameter(torch.eye(8))

    def forward(self, x: Tensor) -> Tensor:
        mixed = self.head(self.body(x)) @ self.mix
        self.mixed = mixed.dtype
        return mixed

    def decode(self, z: Tensor) -> Tensor:
        return self.head(z)


def train(model: nn.Module) -> None:
    model(torch.randn(4, 8)).sum().backward()


def computed_in_float32(model: Model) -> list[str]:
    layers = {"body.first": model.body.first, "body.second": model.body.second, "head": model.head}
    return [name for name, layer in layers.items() if layer.seen and set(layer.seen) == {FULL}]


@LEVELS
@pytest.mark.parametrize(
    ("patterns", "named"),
    [
        ("[head]", ["head"]),
        ("['*.second']", ["body.second"]),
        ("['body.*']", ["body.first", "body.second"]),
        ("[body]", ["body.first", "body.second"]),
        ("[Block]", ["body.first", "body.second"]),
        ("[Linear]", ["body.first", "body.second", "head"]),  # a subclass is one, too
        ("[Spy, nothing]", ["body.first", "body.second", "head"]),
        ("[Model]", ["body.first", "body.second", "head"]),
        ("['*.nothing']", []),
    ],
)
def test_modules_are_named_by_class_or_by_path_and_with_them_all_inside(level, patterns, named, at_level):
    with at_level(level, f"fp32_modules={patterns}"):
        model = Model()
        train(model)
        assert computed_in_float32(model) == named
        assert model.mixed is (torch.float32 if patterns == "[Model]" else HALF)
        kept = {f"{name}.{p}" for name in named for p in ("weight", "bias")}
        expected = {
            name: torch.float32 if level != "O3" or name in kept else HALF
            for name, _ in model.named_parameters()
        }
        if patterns == "[Model]":
            expected["mix"] = torch.float32
        assert {name: p.dtype for name, p in model.named_parameters()} == expected
        assert all(p.grad.dtype is p.dtype for p in model.parameters())


@LEVELS
def test_what_is_left_of_a_preset_s_level_is_half(level, at_level):
    with at_level(level, "fp32_modules=[head]"):
        model = Model()
        train(model)
    assert model.body.first.seen[0][2] is HALF
    assert model.body.second.seen[0][0] is HALF


@LEVELS
def test_a_named_module_that_is_called_on_its_own_is_float32(level, at_level):
    with at_level(level, "fp32_modules=[head]"):
        model = Model()
        model.decode(torch.randn(2, 8))  # the model itself has never been called
        assert model.head.seen == [FULL]
        train(model)
        model.head(torch.randn(2, 8))
        assert model.head.seen == [FULL] * 3


@LEVELS
def test_a_path_is_the_user_s_whatever_wraps_the_model(level, at_level):
    class DistributedDataParallel(nn.Module):
        def __init__(self, module: nn.Module) -> None:
            super().__init__()
            self.module = module

        def forward(self, x: Tensor) -> Tensor:
            return self.module(x)

    with at_level(level, "fp32_modules=[head, 'body.first']"):
        model = Model()
        train(DistributedDataParallel(model))
        assert computed_in_float32(model) == ["body.first", "head"]


@LEVELS
def test_a_layer_that_is_called_before_it_has_a_parent_is_named_by_its_later_path(level, at_level):
    with at_level(level, "fp32_modules=['*.second']"):
        second = Spy()
        second(torch.randn(2, 8))  # asked for its output size, as scripts of convolutions do
        second.seen.clear()
        model = Model()
        model.body.second = second
        if level != "O3":  # where the weight is half by now
            train(model)
            assert second.seen == [FULL]


@LEVELS
def test_modules_that_are_added_later_are_named_too(level, at_level):
    with at_level(level, "fp32_modules=['*.extra']"):
        model = Model()
        train(model)
        model.body.extra = Spy()
        model.body.register_forward_hook(lambda body, args, out: body.extra(out))
        train(model)
        assert model.body.extra.seen == [FULL]


def test_modules_in_a_list_inside_a_named_one_are_float32_as_well(at_level):
    class Listed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.own, self.layers = Spy(), [Spy(), Spy()]

        def forward(self, x: Tensor) -> Tensor:
            for layer in (self.own, *self.layers):
                x = layer(x)
            return x

    for level in ("O1", "O2"):
        with at_level(level, "fp32_modules=[Listed]"):
            model = nn.Sequential(nn.Linear(8, 8), Listed())
            train(model)
            assert {kind for layer in (model[1].own, *model[1].layers) for kind in layer.seen} == {FULL}


def test_a_weight_handed_to_a_named_module_is_float32_there(at_level):
    class Head(nn.Module):
        def forward(self, x: Tensor, weight: Tensor) -> Tensor:
            self.seen = x.dtype, weight.dtype
            return x @ weight.T

    class Ties(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(8, 8), Head()

        def forward(self, ids: Tensor) -> Tensor:
            return self.head(self.embed(ids), self.embed.weight)

    for level in ("O1", "O2", "O3"):
        with at_level(level, "fp32_modules=[Head]"):
            model = Ties()
            model(torch.arange(4)).sum().backward()
            assert model.head.seen == (torch.float32, torch.float32)
            assert model.embed.weight.grad.dtype is model.embed.weight.dtype


def rules(tmp_path, *patterns: str) -> ModuleRules:
    override = Override("fp32_modules", f"[{', '.join(patterns)}]", origin="test")
    return ModuleRules(resolve("O2", overrides=[override], cwd=tmp_path).policy)


def test_a_module_that_dies_is_forgotten(tmp_path):
    known = rules(tmp_path, "Spy")
    for _ in range(3):
        known.learn(Model())
    gc.collect()
    tables = (known._keeps, known._named, known._roots, known._alive)
    assert [len(table) for table in tables] == [0] * 4


def test_a_tree_that_is_known_is_not_looked_at_again(tmp_path, monkeypatch):
    known, model = rules(tmp_path, "'*.head'"), Model()
    known.learn(model)
    monkeypatch.setattr(nn.Module, "named_modules", lambda *args, **kwargs: pytest.fail("looked again"))
    known.learn(model)


def test_a_module_can_be_named_while_it_trains(tmp_path):
    known, model = rules(tmp_path), Model()
    known.learn(model)
    assert not known.computes_float32(model.body)
    known.name(model.body)
    assert known.computes_float32(model.body.first)
    assert known.keeps_float32(model.body.first)
    assert not known.computes_float32(model.head)
