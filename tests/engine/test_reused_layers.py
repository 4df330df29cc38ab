"""A layer that a call uses again keeps its casts for some uses, and nobody can tell by its numbers."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import forward_ad

from mpx.engine import reused

from .layers import Model, again, copies_of_a_weight

HALVES = ["float16", "bfloat16"]
LEVELS = ["O1", "O2"]


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.usefixtures("kernels")
def test_a_layer_of_many_uses_keeps_few_copies_of_its_weight(level, half, at_half):
    """One of the first use, which cannot know of others, and one for each 16 of the others."""
    with at_half(level, half):
        layer = nn.Linear(24, 40)
        for _ in range(3):  # calls in which casts are compared
            copies_of_a_weight(layer, uses=2)
        assert copies_of_a_weight(layer, uses=81) == 6
        assert copies_of_a_weight(layer, uses=2) == 2


def test_a_small_layer_casts_at_each_use(at_half, monkeypatch):
    monkeypatch.setattr(reused, "LARGE", 1000)
    with at_half("O1", "bfloat16"):
        assert copies_of_a_weight(nn.Linear(24, 40), uses=20) == 20
        assert copies_of_a_weight(nn.Linear(25, 40), uses=20) < 20


def test_a_cell_in_a_loop_keeps_few_copies_of_its_weights(at_half):
    kept = set()

    def loop(layers, x):
        hidden = state = torch.zeros(3, 24)
        for _ in range(33):
            hidden, state = layers[0](x, (hidden, state))
        return hidden

    def pack(tensor):
        if tensor.numel() == 24 * 96 and tensor.dtype is torch.bfloat16:
            kept.add(tensor.untyped_storage().data_ptr())
        return tensor

    with at_half("O1", "bfloat16"):
        model, x = Model(loop, nn.LSTMCell(24, 24)), torch.randn(3, 24, requires_grad=True)
        for _ in range(3):
            model(x).sum().backward()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            model(x).sum().backward()
    # of two weights: of the first use, of the state no gradient is asked there, and of twice sixteen
    assert len(kept) == 1 + 2 * 2


@pytest.mark.parametrize("half", HALVES)
def test_the_gradient_of_a_weight_that_many_layers_share_is_summed_in_float32(half, at_half):
    """The gradient of the bias is 4 for each use. In BF16 a sum of so many stops at a third."""
    layers = [nn.Linear(8, 8) for _ in range(64)]
    for layer in layers:
        layer.weight, layer.bias = layers[0].weight, layers[0].bias
    with at_half("O1", half):
        model = Model(partial(again, uses=17), *layers)
        (model(torch.ones(4, 8)) / (17 * 64)).backward()
    torch.testing.assert_close(layers[0].bias.grad, torch.full((8,), 4.0), rtol=2**-6, atol=0.0)


@pytest.mark.parametrize("half", HALVES)
def test_a_gradient_of_many_uses_has_a_gradient_of_its_own(half, at_half):
    """Of the square of 20 w: its derivatives by w are 800 w and 800, exact in half."""
    with at_half("O1", half):
        layer = nn.Linear(1, 1, bias=False)
        nn.init.constant_(layer.weight, 1 / 64)

        def forward(layers, x):
            return sum(layers[0](x).float() for _ in range(20)).square().sum()

        (first,) = torch.autograd.grad(
            Model(forward, layer)(torch.ones(1, 1)), layer.weight, create_graph=True
        )
        assert first.item() == 12.5
        (second,) = torch.autograd.grad(first.sum(), layer.weight)
    assert second.item() == 800


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("level", LEVELS)
def test_a_write_without_a_trace_that_begins_late_is_old_for_sixteen_uses_at_most(level, half, at_half):
    """After the calls in which kept casts are compared. An identity that is doubled on its way."""
    written = False

    def forward(layers, x):
        results = []
        for use in range(40):
            results.append(layers[0](x).float().mean())
            if written and use == 10:
                layers[0].weight.data.mul_(2)
        return torch.stack(results)

    with at_half(level, half):
        layer = nn.Linear(1, 1, bias=False)
        nn.init.ones_(layer.weight)
        model = Model(forward, layer)
        for _ in range(reused.COMPARED_CALLS):
            model(torch.ones(1, 1)).sum().backward()
        written = True
        found = model(torch.ones(1, 1))
    assert found[:11].eq(1).all()
    assert found[11 + reused.MOST :].eq(2).all()


# ------------------------------------------------------------------ uses without this graph


def without_a_graph(layer, x):
    with torch.no_grad():
        layer(x)


def for_inference(layer, x):
    with torch.inference_mode():
        layer(x)


def in_a_transform(layer, x):
    torch.func.grad(lambda x: layer(x).float().sum())(x)


def mapped(layer, x):
    torch.func.vmap(layer)(x)


def often_mapped(layer, x):
    torch.func.vmap(lambda row: sum(layer(row) for _ in range(40)))(x)


def with_a_tangent(layer, x):
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, torch.ones_like(x))
        tangent = forward_ad.unpack_dual(sum(layer(dual) for _ in range(40))).tangent
    torch.testing.assert_close(tangent.float(), 40 * layer.weight.sum(1).expand(2, 4), rtol=0.05, atol=0.2)


@pytest.mark.parametrize(
    "otherwise", [without_a_graph, for_inference, in_a_transform, mapped, often_mapped, with_a_tangent]
)
@pytest.mark.filterwarnings(
    "ignore:`torch.jit.script` is deprecated:DeprecationWarning"
)  # torch warns as it makes its first dual
@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.usefixtures("kernels")
def test_a_use_without_this_graph_leaves_nothing_to_the_next(otherwise, level, half, at_half):
    def forward(layers, x):
        before = layers[0](x)
        otherwise(layers[0], x)
        return before + layers[0](x) + layers[0](x)

    with at_half(level, half):
        model = Model(forward, nn.Linear(4, 4))
        model(torch.ones(2, 4)).sum().backward()
    assert model.layers[0].weight.grad.eq(6).all()  # two rows, three uses
    assert model.layers[0].bias.grad.eq(6).all()


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("where", ["forward", "hook", "hook of all modules"])
@pytest.mark.usefixtures("kernels")
def test_what_looks_at_a_weight_without_a_graph_takes_no_gradient_away(where, half, at_half):
    layer = nn.Linear(4, 4)
    own = layer.forward

    def look(*_):
        with torch.no_grad():
            F.linear(torch.ones(2, 4), layer.weight)

    def looks_first(x):
        look()
        return own(x)

    with at_half("O1", half):
        handle = None
        if where == "forward":
            layer.forward = looks_first
        elif where == "hook":
            layer.register_forward_pre_hook(look)
        else:
            handle = nn.modules.module.register_module_forward_pre_hook(look)
        try:
            Model(again, layer)(torch.ones(2, 4)).backward()
        finally:
            if handle is not None:
                handle.remove()
    assert layer.weight.grad.eq(12).all()  # two rows, six uses


# ------------------------------------------------------------------ writes, of what the version of no layer tells


def doubled_by_another(layers, x):
    """Of two layers that share a weight one is used, the weight is written, and the other is used."""
    one, other = layers
    found = [one(x), one(x)]
    with torch.no_grad():
        one.weight.mul_(2)
    return [found[0], other(x) / 2, other(x) / 2]


def written_by_a_hook(layers, x):
    count = 0

    def write(*_):
        nonlocal count
        count += 1
        with torch.no_grad():
            layers[0].weight.mul_(2)

    handle = layers[0].register_forward_pre_hook(write)
    found = [layers[0](x) / 2**count for _ in range(6)]
    handle.remove()
    return found


def functional(layers, x):
    given = {"weight": layers[0].weight.detach().clone()}
    found = []
    for number in range(5):
        found.append(torch.func.functional_call(layers[0], given, (x,)) / 2**number)
        given["weight"].data.mul_(2)
    return found


@pytest.mark.parametrize("forward", [doubled_by_another, written_by_a_hook, functional])
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("half", HALVES)
@pytest.mark.usefixtures("kernels")
def test_a_use_after_a_write_is_of_what_was_written(forward, level, half, at_half):
    """Exactly: twice a half number is one."""
    with at_half(level, half):
        layers = [nn.Linear(4, 4) for _ in range(2)]
        for layer in layers:
            nn.init.zeros_(layer.bias)
            layer.weight = layers[0].weight
        model = Model(forward, *layers)
        for _ in range(5):  # in the first calls casts are compared, later only versions
            with torch.no_grad():
                layers[0].weight.copy_(torch.linspace(0.1, 1, 16).view(4, 4))
            first, *others = model(torch.ones(2, 4))
            for other in others:
                assert torch.equal(first, other)


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.usefixtures("kernels")
def test_a_write_shows_also_when_casts_are_compared_no_more(half, at_half):
    writes = False

    def forward(layers, x):
        found = [layers[0](x) for _ in range(3)]
        if writes:
            with torch.no_grad():
                layers[0].weight.mul_(2)
        return [*found, layers[0](x)]

    with at_half("O1", half):
        model = Model(forward, nn.Linear(4, 4, bias=False))
        for _ in range(5):
            model(torch.ones(2, 4))
        writes = True
        first, *_, last = model(torch.ones(2, 4))
    assert torch.equal(last, 2 * first)


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.usefixtures("kernels")
def test_an_input_that_is_a_leaf_is_no_weight(half, at_half):
    x = torch.ones(2, 4, requires_grad=True)

    def forward(layers, x):
        found = []
        for number in range(5):
            found.append(layers[0](x).float() / 2**number)
            with torch.no_grad():
                x.mul_(2)
        return found

    with at_half("O1", half):
        layer = nn.Linear(4, 4, bias=False).requires_grad_(False)
        first, *others = Model(forward, layer)(x)
    assert all(torch.equal(first, other) for other in others)
