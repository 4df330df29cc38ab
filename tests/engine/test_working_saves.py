"""O2: what a script saves, loads or copies in the middle of a call are its own FP32 parameters."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from .layers import Layer


class Tied(nn.Module):
    """Has a trained, a tied and a frozen weight and running statistics, and asks for something in its forward pass."""

    def __init__(self, ask: Callable[[Tied], Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = Layer(8, 8), Layer(8, 8)
        self.frozen = Layer(8, 8).requires_grad_(False)
        self.norm = nn.BatchNorm1d(8)
        self.second.weight = self.first.weight
        self.ask = ask

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.frozen(self.first(x)))
        ANSWERS.append(self.ask(self))
        return self.second(x)


ANSWERS: list[Any] = []  # an attribute of the module would be made FP32 after the call


def saved(model: Tied) -> Any:
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    return torch.load(file)


ASKS: dict[str, Callable[[Tied], Any]] = {
    "state_dict": lambda model: model.state_dict(),
    "parameters in a state_dict": lambda model: model.state_dict(keep_vars=True),
    "deepcopy of a state_dict": lambda model: copy.deepcopy(model.state_dict()),
    "deepcopy of parameters in one": lambda model: copy.deepcopy(model.state_dict(keep_vars=True)),
    "torch.save": saved,
    "deepcopy of modules": lambda model: copy.deepcopy(nn.ModuleDict(model.named_children())).state_dict(),
    "deepcopy of parameters": lambda model: copy.deepcopy(dict(model.named_parameters())),
    "pickle": lambda model: pickle.loads(pickle.dumps(model.first)).state_dict(prefix="first."),
}


@pytest.mark.parametrize("ask", ASKS)
def test_they_are_float32_and_as_without_a_session(ask: str, at_level: Any) -> None:
    x = torch.randn(4, 8)
    model = Tied(ASKS[ask])
    with at_level("O2", "loss_scale.init=64"):
        model(x).square().mean().backward()
    found = ANSWERS.pop()
    own = model.state_dict(keep_vars=True)
    assert found
    for name, value in found.items():
        plain = own[name]
        assert value.dtype is plain.dtype
        assert value.is_leaf
        assert torch.equal(value, plain)
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)


def test_a_deepcopy_is_tied_as_its_model_and_trains(at_level: Any) -> None:
    model = Tied(lambda model: copy.deepcopy(nn.ModuleList([model.first, model.frozen, model.second])))
    with at_level("O2", "loss_scale.init=64"):
        model(torch.randn(4, 8))
        first, frozen, second = twin = ANSWERS.pop()
        assert first.weight is second.weight
        assert first.weight is not model.first.weight
        nn.Sequential(*twin)(torch.randn(4, 8)).square().mean().backward()
    assert first.weight.grad is not None
    assert isinstance(frozen.weight, nn.Parameter)
    assert frozen.weight.grad is None
    assert model.first.weight.grad is None


def test_what_is_loaded_is_not_rounded_and_serves_the_rest_of_the_call(at_level: Any) -> None:
    thirds = {"weight": torch.full((8, 8), 1 / 3), "bias": torch.zeros(8)}
    model = Tied(lambda model: model.second.load_state_dict(thirds))
    with at_level("O2"), torch.no_grad():
        out = model(torch.randn(4, 8))
    ANSWERS.clear()
    assert torch.equal(model.second.weight, thirds["weight"])
    assert torch.equal(out[:, 0], out[:, 1])
