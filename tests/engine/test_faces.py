"""A result of a model is the tensor inside it to whoever differentiates: hooks, `autograd.grad` and `retain_grad`."""

import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from mpx.engine.widened import inner

HALVES = ("float16", "bfloat16")


class Features(nn.Module):
    """Returns its features beside what it makes of them."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x):
        features = self.body(x)
        return self.head(torch.tanh(features)), features


def losses(logits, features):
    """Return losses that use both, one and the other."""
    y = torch.arange(len(logits)) % 4
    through = F.cross_entropy(logits, y)
    return {
        "beside": through + features.square().mean(),
        "logits": through,
        "features": features.square().mean(),
    }


USES = ("beside", "logits", "features")


def by_grad(loss, features):
    return torch.autograd.grad(loss, features)[0]


def by_retain(loss, features):
    features.retain_grad()
    features.retain_grad()  # which torch allows
    loss.backward(retain_graph=True)
    loss.backward()
    return features.grad / 2


def by_hook(loss, features):
    seen = []
    features.register_hook(seen.append)
    loss.backward()
    return seen[0]


@pytest.fixture(params=("O1", "O2"))
def level(request):
    return request.param


@pytest.mark.parametrize("ask", [by_grad, by_retain, by_hook])
@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("half", HALVES)
def test_the_gradient_of_a_result_is_that_of_all_that_follows_it(at_level, level, half, use, ask):
    x = torch.randn(16, 8, generator=torch.Generator().manual_seed(1))

    def gradient():
        logits, features = Features()(x)
        return ask(losses(logits, features)[use], features)

    expected = gradient()
    with at_level(level, f"dtype={half}", "loss_scale.init=1024"):
        found = gradient()
    assert found.dtype is torch.float32
    torch.testing.assert_close(found, expected, rtol=0.02, atol=0.02 * expected.abs().max().item())


@pytest.mark.parametrize("half", HALVES)
def test_a_hook_on_a_result_changes_what_flows_back(at_level, level, half):
    x = torch.randn(16, 8, generator=torch.Generator().manual_seed(1))

    def weight_gradient():
        model = Features()
        logits, features = model(x)
        features.register_hook(lambda grad: grad * 3)
        losses(logits, features)["beside"].backward()
        return model.body.weight.grad

    expected = weight_gradient()
    with at_level(level, f"dtype={half}", "loss_scale.init=1024"):
        found = weight_gradient()
    torch.testing.assert_close(found, expected, rtol=0.02, atol=0.02 * expected.abs().max().item())


def test_a_small_gradient_of_a_result_does_not_vanish(at_level, level):
    with at_level(level, "dtype=float16", "loss_scale.init=65536"):
        logits, features = Features()(torch.ones(2, 8))
        (gradient,) = torch.autograd.grad(logits.sum() * 1e-8, features)
        assert 0 < gradient.abs().max() < 2.0**-24  # which FP16 does not have


def test_it_can_be_differentiated_again(at_level, level):
    """As the path length penalty of a generator is."""
    x = torch.randn(16, 8, generator=torch.Generator().manual_seed(1))

    def penalty():
        model = Features()
        logits, features = model(x)
        (slope,) = torch.autograd.grad(logits.sum(), features, create_graph=True)
        slope.square().mean().backward()
        return model.body.weight.grad

    expected = penalty()
    with at_level(level, "loss_scale.init=1024"):
        found = penalty()
    torch.testing.assert_close(found, expected, rtol=0.05, atol=0.05 * expected.abs().max().item())


def test_inputs_come_in_every_form_that_torch_takes(at_level, level):
    with at_level(level, "loss_scale.init=1024"):
        model = Features()
        logits, _ = model(torch.ones(2, 8))
        weight, bias = model.head.parameters()
        forms = [
            [weight, bias],
            (weight, bias),
            nn.ParameterList([weight, bias]),
            model.head.parameters(),
            [torch.autograd.graph.get_gradient_edge(weight), bias],
        ]
        for form in forms:
            found = torch.autograd.grad(logits.sum(), form, retain_graph=True)
            assert [g.shape for g in found] == [weight.shape, bias.shape]
        for alone in (bias, torch.autograd.graph.get_gradient_edge(bias)):
            (found,) = torch.autograd.grad(logits.sum(), alone, retain_graph=True)
            assert found.tolist() == [2.0] * 4


def test_what_is_not_in_the_graph_raises_as_in_torch(at_level, level):
    with at_level(level):
        logits, features = Features()(torch.ones(2, 8))
        with pytest.raises(RuntimeError, match="not have been used in the graph"):
            torch.autograd.grad(features.sum(), logits)
        assert torch.autograd.grad(features.sum(), [logits], allow_unused=True) == (None,)


def test_the_graph_of_a_result_is_freed(at_level, level):
    with at_level(level):
        logits, features = Features()(torch.ones(2, 8))
        features.retain_grad()
        features.register_hook(lambda grad: grad * 2)
        held = [weakref.ref(features), weakref.ref(inner(features))]
        del logits, features
        gc.collect()
        assert [tensor() for tensor in held] == [None, None]
