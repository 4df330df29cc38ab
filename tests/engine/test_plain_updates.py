"""Steps that torch's fused kernels would get wrong, or that the script has a hand in, are left to torch to the bit."""

import contextlib
import itertools
from importlib import import_module

import numpy as np
import pytest
import torch
from torch import nn

from tests.engine.updates import give_gradients, outcome, parameters, snapshot


@pytest.fixture
def as_torch_does(at_level):
    """Return a function that runs another plainly and at O1, and wants the same to the bit, and nothing fused."""

    def compare(run):
        plain, _ = outcome(run)
        with at_level("O1"):
            found, calls = outcome(run)
        assert not calls
        if isinstance(plain, type):
            assert found is plain
        else:
            assert all(torch.equal(a, b) for a, b in zip(found, plain, strict=True))

    return compare


def stepped(kind, settings):
    trained = parameters()
    optimizer = kind(trained, **{"lr": 0.05} | settings)
    for seed in range(3):
        give_gradients(trained, seed)
        optimizer.step()
    return snapshot(trained)


def transposed():
    return [nn.Parameter(torch.randn(5, 7).t())]


def channels_last():
    return [nn.Parameter(torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last))]


def view():
    return [torch.randn(6, 8)[:, ::2].requires_grad_()]


def doubles():
    return parameters(torch.float64)


class Marked(torch.Tensor):
    """A subclass: what its operations mean is its own."""


def subclass():
    return [torch.randn(3, 4).as_subclass(Marked).requires_grad_()]


def complex_numbers():
    return [nn.Parameter(torch.randn(3, 4, dtype=torch.complex64))]


def negative_view():
    return [torch._neg_view(torch.randn(3, 4)).requires_grad_()]


@pytest.mark.parametrize(
    "made",
    [transposed, channels_last, view, doubles, subclass, complex_numbers, negative_view],
    ids=lambda made: made.__name__,
)
@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.SGD], ids=lambda kind: kind.__name__)
def test_parameters_that_lie_otherwise_are_updated_as_torch_does(kind, made, as_torch_does):
    def run():
        torch.manual_seed(0)
        trained = made()
        optimizer = kind(trained, lr=0.05, **({"momentum": 0.9} if kind is torch.optim.SGD else {}))
        for _ in range(3):
            for parameter in trained:
                parameter.grad = torch.randn_like(parameter)
            optimizer.step()
        return snapshot(trained)

    as_torch_does(run)


def gradient_in_another_order(trained, optimizer):
    trained[2].grad = trained[2].grad.to(memory_format=torch.channels_last)


def gradient_negated(trained, optimizer):
    trained[0].grad = torch._neg_view(trained[0].grad)


def gradient_without_storage(trained, optimizer):
    trained[0].grad = torch._efficientzerotensor(7, 5)


def gradient_with_a_graph(trained, optimizer):
    trained[0].grad.requires_grad_()


def gradient_of_another_shape(trained, optimizer):
    trained[0].data = torch.ones(900, 5)


def mean(optimizer):
    return "exp_avg" if isinstance(optimizer, torch.optim.Adam) else "momentum_buffer"


def state_in_another_order(trained, optimizer):
    state = optimizer.state[trained[0]]
    state[mean(optimizer)] = state[mean(optimizer)].t().contiguous().t()


def state_of_another_type(trained, optimizer):
    state = optimizer.state[trained[0]]
    state[mean(optimizer)] = state[mean(optimizer)].double()


def state_of_another_shape(trained, optimizer):
    state = optimizer.state[trained[0]]
    state[mean(optimizer)] = state[mean(optimizer)][:1].clone()


def state_that_is_lost(trained, optimizer):
    del optimizer.state[trained[0]]


def weight_that_has_grown(trained, optimizer):
    trained[0].data = torch.cat([trained[0].data, torch.ones(900, 5)])
    trained[0].grad = torch.ones(907, 5)


def weight_given_twice(trained, optimizer):
    optimizer.param_groups[0]["params"].append(trained[0])


def looked_at_before(trained, optimizer):
    optimizer.register_step_pre_hook(lambda optimizer, *_: seen.append(optimizer.param_groups[0]["fused"]))


def looked_at_after(trained, optimizer):
    optimizer.register_step_post_hook(lambda optimizer, *_: seen.append(optimizer.param_groups[0]["fused"]))


seen = []
CHANGES = [
    gradient_in_another_order,
    gradient_negated,
    gradient_without_storage,
    gradient_with_a_graph,
    gradient_of_another_shape,
    state_in_another_order,
    state_of_another_type,
    state_of_another_shape,
    weight_that_has_grown,
    weight_given_twice,
    looked_at_before,
    looked_at_after,
]


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        *itertools.product((torch.optim.Adam, torch.optim.SGD), CHANGES),
        (torch.optim.SGD, state_that_is_lost),  # Adam begins each parameter for itself
    ],
    ids=lambda one: one.__name__,
)
def test_after_such_a_change_a_step_is_torchs_own(kind, change, as_torch_does):
    """The kernel would read past the end of a gradient or a state, or take it in the wrong order, or raise."""

    def run():
        seen.clear()
        trained = parameters()
        optimizer = kind(trained, lr=0.05, **({"momentum": 0.9} if kind is torch.optim.SGD else {}))
        (group,) = optimizer.param_groups
        group["fused"] = False  # so that both begin alike, to the bit
        give_gradients(trained, 0)
        optimizer.step()
        group["fused"] = None
        give_gradients(trained, 1)
        change(trained, optimizer)
        optimizer.step()
        assert seen in ([], [None])
        return snapshot(trained)

    as_torch_does(run)


def rate_as_a_tensor(trained, optimizer):
    optimizer.param_groups[0]["lr"] = torch.tensor(0.05)


def plainly(trained, optimizer):
    optimizer.param_groups[0]["foreach"] = False


def of_new_kind(trained, optimizer):
    optimizer.__class__ = Signs


def betas_in_their_list(trained, optimizer):
    optimizer.param_groups[0]["betas"][0] = torch.tensor(0.9)


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        *itertools.product((torch.optim.Adam, torch.optim.SGD), [*CHANGES, rate_as_a_tensor, plainly]),
        *((torch.optim.Adam, change) for change in (of_new_kind, betas_in_their_list)),
        (torch.optim.SGD, state_that_is_lost),
    ],
    ids=lambda one: one.__name__,
)
def test_such_a_change_is_noticed_between_fused_steps(kind, change, at_level, monkeypatch):
    """What served the last time is not asked again in full."""
    updates = []
    for kernel in (torch._fused_adam_, torch._fused_sgd_):

        def counted(parameters, *args, _kernel=kernel, **options):
            updates.append(isinstance(parameters[0], nn.Parameter))
            return _kernel(parameters, *args, **options)

        monkeypatch.setattr(torch, kernel.__name__, counted)
    with at_level("O1"):
        trained = parameters()
        optimizer = kind(trained, lr=0.05, **({"momentum": 0.9} if kind is torch.optim.SGD else {}))
        (group,) = optimizer.param_groups
        group.update({"betas": [0.9, 0.99]} if "betas" in group else {})
        for step in range(4):
            give_gradients(trained, step)
            optimizer.step()
        assert sum(updates) == 3  # torch began the state
        give_gradients(trained, 4)
        change(trained, optimizer)
        with contextlib.suppress(RuntimeError):  # torch refuses some of them
            optimizer.step()
        assert sum(updates) == 3


def test_a_count_of_steps_that_parameters_share_is_counted_as_torch_does(as_torch_does):
    def run():
        trained = parameters()
        optimizer = torch.optim.Adam(trained, lr=0.05)
        count = torch.tensor(0.0)
        for parameter in trained:
            zeros = torch.zeros_like(parameter)
            optimizer.state[parameter] = {
                "step": count,
                "exp_avg": zeros.clone(),
                "exp_avg_sq": zeros.clone(),
            }
        give_gradients(trained, 0)
        optimizer.step()
        return snapshot(trained)

    as_torch_does(run)


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        (torch.optim.Adam, {"foreach": False}),
        (torch.optim.Adam, {"foreach": True}),
        (torch.optim.Adam, {"fused": False}),
        (torch.optim.Adam, {"lr": torch.tensor(0.05)}),
        (torch.optim.Adam, {"lr": np.float64(0.05)}),
        (torch.optim.Adam, {"lr": 1e39}),
        (torch.optim.Adam, {"betas": (torch.tensor(0.9), torch.tensor(0.99)), "lr": torch.tensor(0.1)}),
        (torch.optim.Adam, {"amsgrad": 1}),
        (torch.optim.Adam, {"amsgrad": True}),
        (torch.optim.Adam, {"maximize": 1}),
        (torch.optim.Adam, {"capturable": True}),
        (torch.optim.Adam, {"weight_decay": True}),
        (torch.optim.SGD, {"momentum": 0.9, "foreach": True}),
        (torch.optim.SGD, {"momentum": 0.9, "nesterov": 1}),
        (torch.optim.SGD, {"momentum": 0.9, "dampening": np.float32(0.5)}),
        (torch.optim.SGD, {}),
        (torch.optim.Adagrad, {}),
        (torch.optim.RMSprop, {}),
        (torch.optim.NAdam, {}),
    ],
)
def test_other_options_and_classes_are_torchs(kind, settings, as_torch_does):
    as_torch_does(lambda: stepped(kind, settings))


def test_an_option_that_torch_refuses_at_its_use_is_refused(as_torch_does):
    def run():
        trained = parameters()
        optimizer = torch.optim.Adam(trained, lr=0.05)
        optimizer.param_groups[0]["betas"] = (1.0, 0.99)
        give_gradients(trained, 0)
        optimizer.step()
        return snapshot(trained)

    as_torch_does(run)


class Signs(torch.optim.Adam):
    """A subclass may mean anything by its step."""


def own_class(monkeypatch):
    return Signs


def own_update(monkeypatch):
    """`_single_tensor_adam` replaced by the script."""

    def signs(params, grads, *state, lr, **options):
        for parameter, grad in zip(params, grads, strict=True):
            parameter.sub_(lr * grad.sign())

    monkeypatch.setattr(import_module("torch.optim.adam"), "_single_tensor_adam", signs)
    return torch.optim.Adam


@pytest.mark.parametrize("own", [own_class, own_update], ids=lambda own: own.__name__)
def test_an_update_that_is_the_scripts_stays_so(own, monkeypatch, as_torch_does):
    kind = own(monkeypatch)
    as_torch_does(lambda: stepped(kind, {}))


def test_a_step_with_a_closure_is_torchs(as_torch_does):
    """The script's code runs inside that step, and may look at the groups."""

    def run():
        trained = parameters()
        optimizer = torch.optim.Adam(trained, lr=0.05)
        optimizer.step(lambda: give_gradients(trained, 0))
        return snapshot(trained)

    as_torch_does(run)


def test_inside_a_transform_a_step_is_torchs(as_torch_does):
    def updated(weight, grad):
        parameter = weight.clone()
        parameter.grad = grad
        torch.optim.SGD([parameter], lr=0.1, momentum=0.9).step()
        return parameter

    as_torch_does(lambda: [torch.vmap(updated)(torch.ones(3, 4), torch.arange(12.0).view(3, 4))])
