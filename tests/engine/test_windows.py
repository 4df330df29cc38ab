"""How long an overflow is remembered: for the window of gradients that it is in, and not a pass longer."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

LEVELS = ("O1", "O2")
SCALE = "loss_scale.init=1024"


class Overflow:
    """Turns gradients into infinity when told to: register `overflow.hook` on a tensor."""

    def __init__(self):
        self.now = False

    def hook(self, grad):
        return grad * torch.inf if self.now else grad


@pytest.fixture
def overflow():
    return Overflow()


@pytest.fixture(params=LEVELS)
def level(request):
    return request.param


def network(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


def batch(seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(6, 8, generator=generator), torch.randint(4, (6,), generator=generator)


def loss_of(model, seed=0):
    x, y = batch(seed)
    return F.cross_entropy(model(x), y)


def weights(*models):
    return [parameter.detach().clone() for model in models for parameter in model.parameters()]


def same(first, second):
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def finite(tensors):
    return all(bool(torch.isfinite(tensor).all()) for tensor in tensors)


def test_an_overflow_in_a_window_skips_its_step_and_is_judged_once(at_level, level, overflow):
    model = network()
    model[0].weight.register_hook(overflow.hook)
    with at_level(level, SCALE) as recorded:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for window, bad in enumerate([{2}, set(range(8)), set()]):
            optimizer.zero_grad()
            for micro in range(8):
                overflow.now = micro in bad
                (loss_of(model, micro) / 8).backward()
            before = weights(model)
            optimizer.step()
            assert same(before, weights(model)) == (window < 2)
        (scaler,) = recorded.summary["scalers"]
    assert (scaler["final"], scaler["overflows"]) == (256.0, 2)
    assert len(recorded.of("overflow")) == 2


def test_so_is_one_that_wanders_through_a_window(at_level, level):
    """Each pass of the window overflows in another parameter; the first one has said what there is to say."""
    model = network()
    overflows = [Overflow() for _ in model.parameters()]
    for parameter, one in zip(model.parameters(), overflows, strict=True):
        parameter.register_hook(one.hook)
    with at_level(level, SCALE) as recorded:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for micro in range(4):
            for place, one in enumerate(overflows):
                one.now = place == micro
            loss_of(model, micro).backward()
        optimizer.step()
        (scaler,) = recorded.summary["scalers"]
        assert (scaler["final"], scaler["overflows"]) == (512.0, 1)
        assert recorded.summary["steps"]["skipped"] == 1
        assert len(recorded.of("overflow")) == 1


@pytest.mark.filterwarnings("ignore:Using backward\\(\\) with create_graph=True:UserWarning")
def test_a_window_that_replaces_its_gradients_is_skipped_all_the_same(at_level, level, overflow):
    """A pass with `create_graph` accumulates into other tensors than those that overflowed."""
    model = network()
    model[0].weight.register_hook(overflow.hook)
    with at_level(level, SCALE) as recorded:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        overflow.now = True
        loss_of(model, 0).backward()
        overflow.now = False
        loss_of(model, 1).backward(create_graph=True)
        optimizer.step()
        assert recorded.summary["steps"]["skipped"] == 1
        optimizer.zero_grad()


def forget_by_none(parameter):
    parameter.grad = None


def forget_by_zero(parameter):
    parameter.grad.zero_()


def forget_by_replacement(parameter):
    parameter.grad = torch.zeros_like(parameter.grad)


@pytest.mark.parametrize("forget", [forget_by_none, forget_by_zero, forget_by_replacement])
def test_a_flag_dies_with_its_gradient(at_level, level, overflow, forget):
    model = network()
    model[0].weight.register_hook(overflow.hook)
    with at_level(level, SCALE) as recorded:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        overflow.now = True
        loss_of(model, 0).backward()
        overflow.now = False
        for parameter in model.parameters():
            forget(parameter)
        loss_of(model, 1).backward()
        optimizer.step()
        assert recorded.summary["steps"]["skipped"] == 0


@pytest.mark.parametrize(
    "clip",
    [
        lambda model: nn.utils.clip_grad_norm_(model.parameters(), 1e-3),
        lambda model: nn.utils.clip_grad_value_(model.parameters(), 1e-3),
        lambda model: [parameter.grad.mul_(1e-6) for parameter in model.parameters()],
    ],
    ids=["norm", "value", "by hand"],
)
def test_a_flag_survives_clipping(at_level, level, overflow, clip):
    model = network()
    model[0].weight.register_hook(overflow.hook)
    with at_level(level, SCALE) as recorded:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        overflow.now = True
        loss_of(model).backward()
        clip(model)
        before = weights(model)
        optimizer.step()
        assert recorded.summary["steps"]["skipped"] == 1
        assert same(before, weights(model))


def test_a_gradient_that_is_replaced_by_what_was_made_of_it_is_not_applied(at_level, level, overflow):
    model = network()
    model[0].weight.register_hook(overflow.hook)
    with at_level(level, SCALE) as recorded:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        overflow.now = True
        loss_of(model).backward()
        for parameter in model.parameters():
            parameter.grad = parameter.grad * 0.5
        before = weights(model)
        optimizer.step()
        assert recorded.summary["steps"]["skipped"] == 1
        assert same(before, weights(model))


def test_an_open_window_takes_nothing_from_a_pass_beside_it(at_level, level, overflow):
    """While a model waits for its skip, the gradient of an input is what it is."""
    model = network()
    model[0].weight.register_hook(overflow.hook)
    with at_level(level, SCALE):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        overflow.now = True
        loss_of(model).backward()
        overflow.now = False
        x = torch.ones(3, requires_grad=True)
        x.square().sum().backward()
        assert x.grad.tolist() == [2.0] * 3
        optimizer.step()


def test_a_script_that_never_zeroes_loses_one_step_and_not_all(at_level, level, overflow):
    model = network()
    model[0].weight.register_hook(overflow.hook)
    with at_level(level, SCALE) as recorded:
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        for step in range(4):
            overflow.now = step == 1
            loss_of(model, step).backward()
            optimizer.step()
        assert recorded.summary["steps"] == {"attempted": 4, "applied": 3, "skipped": 1}
    assert finite(weights(model))
