"""A report names what its reader knows: the path of a module, or the variable of the script."""

import sys
from types import ModuleType

import pytest
import torch
from torch import nn

from mpx.engine.leaves import Leaves
from mpx.engine.names import Names


@pytest.fixture
def script(monkeypatch):
    """The script's main module."""
    main = ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", main)
    return main


@pytest.fixture
def leaves():
    return Leaves(scaled=True)


@pytest.fixture
def names(leaves):
    return Names(leaves)


def called(leaves, root):
    leaves.saw_root(root)
    return root


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x):
        return self.attention(x) * self.scale


def test_a_part_is_its_path(script, leaves, names):
    block = called(leaves, Block())
    assert names.of_module(block.attention[1]) == "attention.1"
    assert names.of_parameter(block.attention[1].weight) == ("attention.1", "attention.1.weight")


def test_an_outermost_module_is_the_variable_of_the_script(script, leaves, names):
    script.net = called(leaves, Block())
    assert names.of_module(script.net) == "net"
    assert names.of_parameter(script.net.scale) == ("net", "net.scale")


def test_without_a_variable_it_is_its_own_text(script, leaves, names):
    layer = called(leaves, nn.Linear(4, 2))
    assert names.of_module(layer) == "Linear(in_features=4, out_features=2, bias=True)"
    assert names.of_parameter(layer.bias)[1].endswith(".bias")


def test_a_text_that_is_long_or_fails_is_the_class(script, leaves, names):
    class Wordy(nn.Module):
        def extra_repr(self):
            return "x" * 100

    class Failing(nn.Module):
        def extra_repr(self):
            return str(self.set_in_forward)

    assert names.of_module(called(leaves, Wordy())) == "Wordy"
    assert names.of_module(called(leaves, Failing())) == "Failing"


def test_a_tensor_that_no_module_owns_is_its_variable_or_its_shape(script, names):
    script.image, unnamed = torch.ones(3, requires_grad=True), torch.ones(2, 5, requires_grad=True)
    assert names.of_parameter(script.image) == (None, "image")
    assert names.of_parameter(unnamed) == (None, "tensor of shape [2, 5]")


def test_private_names_of_the_script_are_not_used(script, leaves, names):
    script._net = called(leaves, Block())
    assert names.of_module(script._net) == "Block()"


def test_of_several_overflows_the_one_nearest_to_the_loss_is_named(script, leaves, names):
    """The pass goes from the loss to the input: what was built and called last it reaches first."""
    script.encoder, script.decoder = called(leaves, Block()), called(leaves, Block())
    everything = [*script.decoder.parameters(), *script.encoder.parameters()]
    assert names.of_nearest_to_loss(everything) == ("attention.1", "attention.1.bias")
    assert names.of_nearest_to_loss([script.encoder.scale, script.decoder.scale]) == (
        "decoder",
        "decoder.scale",
    )
    loose = torch.ones(1, requires_grad=True)
    assert names.of_nearest_to_loss([loose, script.encoder.scale]) == ("encoder", "encoder.scale")
    assert names.of_nearest_to_loss([loose]) == (None, "tensor of shape [1]")


def test_a_module_that_is_gone_is_no_obstacle(script, leaves, names):
    called(leaves, Block())
    assert leaves.roots() == []
    assert names.of_module(nn.ReLU()) == "ReLU()"


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_an_overflow_is_told_with_its_module_and_parameter(at_level, level):
    with at_level(level) as recorded:
        model = Block()
        model.attention[0].weight.register_hook(lambda grad: grad * torch.inf)
        model.attention[1].weight.register_hook(lambda grad: grad * torch.inf)
        (model(torch.ones(2, 4)).sum() * 2**-8).backward()
        (event,) = recorded.of("overflow")
    assert (event["module"], event["parameter"]) == ("attention.1", "attention.1.weight")
    assert event["site"].startswith("test_names.py:")
