"""Functions that a script wants in another type, by decorator, by name and for a stretch of code."""

import importlib
import types

import pytest
import torch
from torch import nn

LEVELS = ("O1", "O2", "O3")
HALF = torch.float16


class Asks(nn.Module):
    """Notes the types that a function gets and gives inside the model."""

    def __init__(self, function):
        super().__init__()
        self.layer, self.function = nn.Linear(4, 4), function
        self.seen = None

    def forward(self, x):
        x = self.layer(x)
        y = self.function(x, other=[x.float()])
        self.seen = y
        return self.layer(x).float()


def types_of(x, other):
    return x.dtype, other[0].dtype


def seen(function):
    model = Asks(function)
    model(torch.randn(2, 4)).sum().backward()
    return model.seen


@pytest.mark.parametrize("level", LEVELS)
def test_a_decorated_function_gets_the_types_that_its_author_wants(apex_at, level):
    with apex_at(level) as (apex, _):
        assert seen(types_of) == (HALF, torch.float32)
        assert seen(apex.amp.float_function(types_of)) == (torch.float32, torch.float32)
        assert seen(apex.amp.half_function(types_of)) == (HALF, HALF)
        assert seen(apex.amp.promote_function(types_of)) == (torch.float32, torch.float32)
        assert apex.amp.promote_function(lambda x: x.dtype)(torch.ones(1, dtype=HALF)) is HALF


def test_a_decorated_function_outside_of_a_model_is_fp32_as_all_is_there(apex_at):
    one = torch.ones(1)
    with apex_at("O1") as (apex, _):
        assert apex.amp.half_function(types_of)(one, other=[one]) == (torch.float32, torch.float32)


def test_what_runs_inside_a_float_function_is_fp32(apex_at):
    with apex_at("O1") as (apex, _):
        layer = nn.Linear(4, 4)
        assert seen(lambda x, other: (layer(x).dtype,))[0] is HALF
        assert seen(apex.amp.float_function(lambda x, other: (layer(x).dtype,)))[0] is torch.float32


@pytest.mark.parametrize("decorator", ["float_function", "half_function", "promote_function"])
def test_at_level_0_a_decorated_function_is_left_alone(apex_at, decorator):
    mixed = (torch.ones(1, dtype=HALF), torch.ones(1))
    with apex_at("O0") as (apex, _):
        decorated = getattr(apex.amp, decorator)(types_of)
        assert decorated(mixed[0], other=[mixed[1]]) == (HALF, torch.float32)
        assert decorated.__name__ == "types_of"


def test_gradients_pass_through_a_decorated_function(apex_at):
    with apex_at("O1") as (apex, _):
        model = Asks(apex.amp.float_function(lambda x, other: x * 2))
        model.forward = types.MethodType(lambda self, x: self.function(self.layer(x), other=[x]), model)
        model(torch.ones(1, 4)).sum().div(16).backward()
        assert model.layer.bias.grad.equal(torch.full((4,), 1 / 8))


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_function_of_torch_can_be_registered_by_name(apex_at, level, fingerprint):
    def sigmoid(x, other):
        return (torch.sigmoid(x).dtype,)

    before = fingerprint()
    with apex_at(level) as (apex, recorded):
        assert seen(sigmoid) == (HALF,)
        apex.amp.register_float_function(torch, "sigmoid")
        assert seen(sigmoid) == (torch.float32,)
        apex.amp.register_half_function(torch.nn.functional, "softplus")
        assert seen(lambda x, other: (nn.functional.softplus(other[0]).dtype,)) == (HALF,)
        apex.amp.register_promote_function(torch, "add")
        assert recorded.substituted("apex-register-sigmoid")
    assert fingerprint() == before


def test_a_function_of_torch_that_cannot_be_had_otherwise_is_told(apex_at):
    with apex_at("O1") as (apex, recorded):
        apex.amp.register_float_function(torch.Tensor, "index_put_")
        (row,) = [row for row in recorded.summary["substitutions"] if row["id"] == "apex-register-index_put_"]
        assert "which it does not get: `torch.Tensor.index_put_` writes into its argument" in row["text"]
        with pytest.raises(ValueError, match="no function `nothing`"):
            apex.amp.register_float_function(torch, "nothing")


def test_a_function_of_another_module_is_replaced_there(apex_at):
    kernels = types.ModuleType("kernels")
    kernels.convolve = types_of
    with apex_at("O1") as (apex, _):
        apex.amp.register_half_function(kernels, "convolve")
        assert seen(kernels.convolve) == (HALF, HALF)


@pytest.mark.parametrize("level", LEVELS)
def test_disable_casts_computes_in_fp32_inside_and_out_of_a_model(apex_at, level):
    with apex_at(level) as (apex, _):
        layer = nn.Linear(4, 4)
        double = layer.weight.double() @ torch.ones(4).double() + layer.bias.double()
        layer(torch.ones(4))  # at O3 the weights are half from here on
        with apex.amp.disable_casts():
            found = layer(torch.ones(4))
        assert ((found - double).abs().max() < 1e-6) == (level != "O3")
        assert (layer(torch.ones(4)) - double).abs().max() > 1e-6

        def inside(x, other):
            with apex.amp.disable_casts():
                return (torch.mm(other[0], other[0].T).dtype,)

        assert seen(inside) == (torch.float32,)


def test_lists_are_not_there_and_say_what_is(apex_at):
    with apex_at("O1") as (apex, _):
        with pytest.raises(AttributeError, match="--half-op NAME"):
            _ = apex.amp.lists
        with pytest.raises(ImportError, match="--half-op NAME"):
            importlib.import_module("mpx.apex.amp.lists")
        with pytest.raises(AttributeError, match="no attribute 'nothing'"):
            _ = apex.amp.nothing
