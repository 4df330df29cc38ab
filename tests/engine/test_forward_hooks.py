"""What a script takes out of the middle of a model, by forward hooks and by attributes, is FP32 to it."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

HALVES = ("float16", "bfloat16")


@pytest.fixture(params=("O1", "O2"))
def level(request):
    return request.param


@pytest.fixture(params=HALVES)
def half(request):
    return request.param


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))


def batch():
    x = torch.randn(16, 8, generator=torch.Generator().manual_seed(1))
    return x, x[:, :4].argmax(1)


def close(found, expected):
    torch.testing.assert_close(found, expected, rtol=0.02, atol=0.02 * expected.abs().max().item())


def test_hooks_are_given_float32_and_compute_in_it(at_level, level, half):
    """Products of activations that are infinite in FP16, as a Gram matrix or a factor of K-FAC may be."""
    seen = {}

    def factors():
        model, (x, _) = network(), batch()
        model[2].register_forward_pre_hook(lambda m, args: seen.update(input=args[0].t() @ args[0] * 1e6))
        model[0].register_forward_hook(lambda m, args, out: seen.update(output=out @ m.weight * 1e6))
        model[1].register_forward_hook(
            lambda m, args, kwargs, out: seen.update(kept=out, none=kwargs), with_kwargs=True
        )
        model(x)
        return {name: seen[name].detach() for name in ("input", "output", "kept")}

    expected = factors()
    with at_level(level, f"dtype={half}"):
        for name, found in factors().items():
            assert found.dtype is torch.float32
            close(found, expected[name])
        torch.linalg.eigh(seen["input"])  # which has no half kernel


def test_the_model_goes_on_in_half_behind_a_hook_that_only_looks(at_level, level, half):
    inside = []

    class Looks(nn.Module):
        def forward(self, x):
            inside.append(x.dtype)
            return x

    with at_level(level, f"dtype={half}"):
        model = nn.Sequential(nn.Linear(8, 8), Looks())
        model[0].register_forward_hook(lambda m, args, out: None)
        model[1].register_forward_pre_hook(lambda m, args: None)
        model(torch.ones(2, 8))
    assert inside == [getattr(torch, half)]


def edited(kind):
    """Train a step of a model whose hook edits what it is given, in place or by what it returns."""
    model, (x, y) = network(), batch()
    if kind == "output in place":
        model[0].register_forward_hook(lambda m, args, out: _halve(out))
    elif kind == "input in place":
        model[1].register_forward_pre_hook(lambda m, args: _halve(args[0]))
    elif kind == "output":
        model[0].register_forward_hook(lambda m, args, out: out * 0.5)
    elif kind == "input":
        model[2].register_forward_pre_hook(lambda m, args: (args[0] * 0.5,))
    else:
        model[1].register_forward_pre_hook(lambda m, args, kwargs: _halve(args[0]), with_kwargs=True)
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    return loss.detach(), model[0].weight.grad


def _halve(tensor):
    tensor.mul_(0.5)


KINDS = ("output in place", "input in place", "output", "input", "input in place, with keywords")


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_hook_edits_or_returns_is_what_the_model_goes_on_with(at_level, level, half, kind):
    expected = edited(kind)
    with at_level(level, f"dtype={half}", "loss_scale.init=1024"):
        for found, plain in zip(edited(kind), expected, strict=True):
            close(found, plain)


def saliency():
    """Take the gradient of what a hook kept, in three ways."""
    model, (x, y) = network(), batch()
    kept, seen = [], []

    def keep(module, args, out):
        out.retain_grad()
        out.register_hook(seen.append)
        kept.append(out)

    model[0].register_forward_hook(keep)
    F.cross_entropy(model(x), y).backward()
    (asked,) = torch.autograd.grad(F.cross_entropy(model(x), y), kept[1])
    return kept[0].grad, seen[0], asked


def test_the_gradient_of_what_a_hook_kept_is_that_of_the_activation(at_level, level, half):
    expected = saliency()
    with at_level(level, f"dtype={half}", "loss_scale.init=1024"):
        for found, plain in zip(saliency(), expected, strict=True):
            assert found.dtype is torch.float32
            close(found, plain)


def count(module, args, out):
    module.count = getattr(module, "count", 0) + 1


def test_a_hooked_model_is_copied_pickled_and_rid_of_its_hook(at_level, level):
    with at_level(level):
        model = network()
        handle = model.register_forward_hook(count)
        twin, loaded = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
        for one in (model, twin, loaded):
            one(torch.ones(2, 8))
            assert one.count == 1
        assert next(iter(loaded._forward_hooks.values())) is count  # plain python can load it
        handle.remove()
        model(torch.ones(2, 8))
        assert model.count == 1


class Notes(nn.Module):
    """Leaves things on the side."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = nn.Linear(8, 16), nn.Linear(16, 4)
        self.own = torch.ones(2, dtype=torch.float16)
        self.history = []

    def forward(self, x):
        self.code = self.body(x)
        self.pair = {"code": self.code, "name": "text"}
        self.history.append(self.code.detach().mean(0))
        return self.head(torch.tanh(self.code))


def side_losses():
    model, (x, y) = Notes(), batch()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    mix = torch.randn(16, 16, generator=torch.Generator().manual_seed(2))
    for _ in range(6):  # beyond the calls that are searched
        out = model(x)
        for tensor in (model.code, model.pair["code"], *model.history):
            assert tensor.dtype is torch.float32
        large = (500 * model.code).square().sum() * 1e-7  # infinite in FP16
        loss = F.cross_entropy(out, y) + large + (model.code @ mix).square().mean() + model.history[-1].std()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    (slope,) = torch.autograd.grad(model(x).sum(), model.code)
    assert model.own.dtype is torch.float16
    return loss.detach(), slope, torch.stack(model.history)


def test_what_a_forward_pass_leaves_in_attributes_is_float32(at_level, level, half):
    expected = side_losses()
    with at_level(level, f"dtype={half}", "loss_scale.init=1024"):
        for found, plain in zip(side_losses(), expected, strict=True):
            close(found, plain)


@pytest.mark.parametrize("when", ["inside", "afterwards"])
def test_an_attribute_that_keeps_its_gradient_has_it_after_the_pass(at_level, level, half, when):
    """As Grad-CAM takes it: `self.features.retain_grad()` in the forward pass, or once it is over."""

    class Remembers(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = network()

        def forward(self, x):
            self.features = self.net[1](self.net[0](x))
            if when == "inside":
                self.features.retain_grad()
            return self.net[2](self.features)

    def gradient():
        model, (x, y) = Remembers(), batch()
        out = model(x)
        if when == "afterwards":
            model.features.retain_grad()
        F.cross_entropy(out, y).backward()
        return model.features.grad

    expected = gradient()
    with at_level(level, f"dtype={half}", "loss_scale=1"):
        close(gradient().float(), expected)
