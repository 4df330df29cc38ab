"""Casts that layers keep, beside what else goes on: regions, hooks, checkpointing and threads of the script."""

from __future__ import annotations

import gc
import threading
import weakref
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from .layers import Model, again, copies_of_a_weight

HALVES = ["float16", "bfloat16"]
LEVELS = ["O1", "O2"]


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.usefixtures("kernels")
def test_a_region_of_the_script_has_its_own_type(level, half, at_half):
    other = torch.bfloat16 if half == "float16" else torch.float16
    seen = []

    def forward(layers, x):
        for _ in range(3):
            with torch.autocast("cpu", enabled=False):
                seen.append(layers[0](x.float()).dtype)
            with torch.autocast("cpu", dtype=other):
                layers[0](x)
        return layers[0](x)

    with at_half(level, half):
        Model(forward, nn.Linear(4, 4))(torch.ones(2, 4)).sum().backward()
    assert seen == [torch.float32] * 3


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.usefixtures("kernels")
def test_a_frozen_layer_made_for_inference_is_used_as_ever(half, at_half):
    with torch.inference_mode():
        frozen = nn.Linear(4, 4).requires_grad_(requires_grad=False)

    with at_half("O1", half):
        model = Model(lambda layers, x: sum(layers[0](frozen(x).clone()) for _ in range(3)), nn.Linear(4, 4))
        model(torch.ones(2, 4)).sum().backward()
    assert model.layers[0].bias.grad.eq(6).all()


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.usefixtures("kernels")
def test_selective_checkpointing_finds_the_casts_that_it_counted(half, at_half):
    contexts = partial(create_selective_checkpoint_contexts, [torch.ops.aten.mm.default])

    def forward(layers, x):
        def three_times(x):
            return layers[0](layers[0](layers[0](x).tanh()).tanh())

        return checkpoint(three_times, x, use_reentrant=False, context_fn=contexts)

    torch.manual_seed(0)
    reference = Model(forward, nn.Linear(4, 4))
    x = torch.randn(8, 4)
    reference(x).sum().backward()
    with at_half("O1", half):
        torch.manual_seed(0)
        model = Model(forward, nn.Linear(4, 4))
        for _ in range(5):
            model.zero_grad()
            model(x).sum().backward()
    exact, found = reference.layers[0].weight.grad, model.layers[0].weight.grad
    assert (exact - found).norm() <= 8 * torch.finfo(getattr(torch, half)).eps * exact.norm()


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.usefixtures("kernels")
def test_nothing_outlives_the_call(half, at_half):
    with at_half("O1", half):
        model = Model(again, nn.Linear(4, 4))
        own = set(vars(model.layers[0]))
        model(torch.ones(2, 4)).backward()
        assert set(vars(model.layers[0])) == own
        gone = weakref.ref(model.layers[0].weight)
        del model
        gc.collect()
        assert gone() is None


@pytest.mark.parametrize("where", ["forward", "forward of the class", "hook", "hook of all modules"])
def test_what_the_script_writes_in_a_call_of_a_layer_is_written(where, at_half, monkeypatch):
    """A cast in the place of the weight would take it."""
    layer = nn.Linear(4, 4)
    own = nn.Linear.forward

    def write(*_):
        with torch.no_grad():
            layer.weight.mul_(2)

    def writes_first(self, x):
        write()
        return own(self, x)

    with at_half("O1", "bfloat16"):
        handle = None
        if where == "forward":
            layer.forward = partial(writes_first, layer)
        elif where == "forward of the class":
            monkeypatch.setattr(nn.Linear, "forward", writes_first)
        elif where == "hook":
            layer.register_forward_pre_hook(write)
        else:
            handle = nn.modules.module.register_module_forward_pre_hook(
                lambda module, _: write() if module is layer else None
            )
        nn.init.ones_(layer.weight)
        try:
            Model(again, layer)(torch.ones(2, 4))
        finally:
            if handle is not None:
                handle.remove()
    assert layer.weight.eq(2**6).all()


def test_where_other_threads_run_modules_each_use_casts(at_half):
    """They would find the cast in the place of the weight, perhaps where they asked for FP32."""
    with at_half("O1", "bfloat16"):
        layer = nn.Linear(24, 40)
        thread = threading.Thread(target=layer, args=(torch.ones(3, 24),))
        thread.start()
        thread.join()
        for _ in range(3):
            copies_of_a_weight(layer, uses=2)
        assert copies_of_a_weight(layer, uses=20) == 20


@pytest.mark.usefixtures("kernels")
def test_a_layer_that_fails_is_as_it_was(at_half):
    def forward(layers, x):
        layers[0](x)
        with pytest.raises(RuntimeError, match="mat1 and mat2"):
            layers[0](torch.ones(2, 5))
        return layers[0](x)

    with at_half("O1", "bfloat16"):
        model = Model(forward, nn.Linear(4, 4))
        own = set(vars(model.layers[0]))
        model(torch.ones(2, 4)).sum().backward()
        assert set(vars(model.layers[0])) == own


@pytest.mark.parametrize(
    ("level", "asked"),
    [("O1", "ops.float32"), ("O1", "ops.user_float32"), ("O1", "while it runs"), ("O2", "while it runs")],
)
def test_where_products_compute_in_float32_no_weight_is_rounded(asked, level, at_level, all_are_large):
    def train():
        torch.manual_seed(0)
        model, x = (
            Model(lambda layers, x: sum(layers[0](x) for _ in range(4)), nn.Linear(8, 8)),
            torch.randn(4, 8),
        )
        return model(x).detach()

    exact = train()
    named = [] if asked == "while it runs" else [f'{asked}=["linear"]', 'ops.half=["bmm"]']
    with at_level(level, "dtype=bfloat16", *named) as recorded:
        if not named:
            recorded.session.ask_op("linear", "float32")
        assert torch.equal(train(), exact)


def convolution_of_the_script(layer, x, weight, bias):
    with torch.no_grad():
        layer.weight.mul_(2)
    return F.conv2d(x, layer.weight, bias)


@pytest.mark.parametrize("where", ["of the instance", "of the class"])
def test_a_convolution_may_have_another_inside(where, at_half, monkeypatch):
    layer = nn.Conv2d(2, 2, 1)
    if where == "of the class":
        monkeypatch.setattr(nn.Conv2d, "_conv_forward", convolution_of_the_script)
    else:
        layer._conv_forward = partial(convolution_of_the_script, layer)
    nn.init.ones_(layer.weight)
    with at_half("O1", "bfloat16"):
        Model(again, layer)(torch.ones(1, 2, 3, 3))
    assert layer.weight.eq(2**6).all()


class Scales(TorchFunctionMode):
    """Multiplies the weights that it knows by two."""

    def __init__(self, weights):
        super().__init__()
        self.weights = weights

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is LINEAR and any(args[1] is weight for weight in self.weights):
            args = (args[0], args[1] * 2, *args[2:])
        return func(*args, **kwargs or {})


LINEAR = F.linear


@pytest.mark.parametrize("way", ["mode", "replaced function"])
def test_what_stands_between_a_layer_and_its_op_is_given_the_weight(way, at_half, monkeypatch):
    layer = nn.Linear(4, 4, bias=False)
    scales = Scales([layer.weight])

    def forward(layers, x):
        if way == "mode":
            with scales:
                return [layers[0](x) for _ in range(4)]
        return [layers[0](x) for _ in range(4)]

    if way == "replaced function":
        monkeypatch.setattr(F, "linear", lambda *args: scales.__torch_function__(LINEAR, (), args))
    with at_half("O1", "bfloat16"):
        model = Model(forward, layer)
        for _ in range(5):
            first, *others = model(torch.ones(2, 4))
            assert all(torch.equal(first, other) for other in others)
