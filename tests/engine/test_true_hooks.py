"""Hooks of the script see true gradients, amid a pass that works on scaled ones, and what they make of them counts.

Each case differentiates a little and returns tensors; the laws are in conftest.py.
"""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

CASES = {}
LEVELS = ("O1", "O2")


def case(function):
    CASES[function.__name__] = function
    return function


def perceptron():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))


def batch(seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(6, 8, generator=generator), torch.randint(4, (6,), generator=generator)


def loss_of(model, seed=1):
    x, y = batch(seed)
    return F.cross_entropy(model(x), y)


def grads_of(model):
    return [parameter.grad for parameter in model.parameters()]


def write_three_times(grad):
    grad.mul_(3)


def forget(parameter):
    parameter.grad = None


def double(parameter):
    parameter.grad.mul_(2)


@case
def hooks_on_leaves():
    model = perceptron()
    seen = []
    model[0].weight.register_hook(seen.append)
    model[0].bias.register_hook(lambda grad: 2 * grad)
    model[2].weight.register_hook(write_three_times)
    loss_of(model).backward()
    return [*seen, *grads_of(model)]


@case
def hooks_on_activations():
    model = perceptron()
    seen = []
    x, y = batch()

    def look(module, inputs, output):
        output.register_hook(seen.append)
        output.register_hook(lambda grad: grad.clamp(-0.05, 0.05))

    model[1].register_forward_hook(look)
    F.cross_entropy(model(x), y).backward()
    return [*seen, *grads_of(model)]


@case
def hooks_on_modules():
    """Half activations have their gradients in FP32 there: they may be too small for the half type."""
    model = perceptron()
    seen = []
    x, y = batch()
    model[0].register_full_backward_hook(lambda module, inward, outward: seen.extend(outward))
    model[2].register_full_backward_pre_hook(lambda module, outward: (outward[0] * 2,))
    model[1].register_full_backward_hook(lambda module, inward, outward: (inward[0].clamp(-0.1, 0.1),))
    F.cross_entropy(model(x.requires_grad_()), y).backward()
    return [*seen, *grads_of(model)]


@case
def hooks_on_many_gradients():
    model = perceptron()
    seen = []
    torch.autograd.graph.register_multi_grad_hook(list(model.parameters()), seen.extend)
    loss_of(model).backward()
    return seen


@case
def hooks_after_accumulation():
    model = perceptron()
    seen = {
        parameter: [] for parameter in model.parameters()
    }  # the order among parameters is the engine's affair
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: seen[p].append(p.grad.clone()))
        parameter.register_post_accumulate_grad_hook(double)
    for seed in range(2):
        loss_of(model, seed).backward()
    return [*(grad for grads in seen.values() for grad in grads), *grads_of(model)]


@case
def gradients_that_a_hook_puts_away():
    """The script holds the tensors, onto which the second pass accumulates before the hook sees them."""
    model = perceptron()
    loss_of(model, 1).backward()
    held = grads_of(model)
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(forget)
    loss_of(model, 2).backward()
    assert all(grad is None for grad in grads_of(model))
    return held


@case
def an_optimizer_in_the_backward_pass():
    model = perceptron()
    optimizers = {p: torch.optim.SGD([p], lr=0.1, momentum=0.9) for p in model.parameters()}

    def step(parameter):
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step)
    for seed in range(3):
        loss_of(model, seed).backward()
    assert all(grad is None for grad in grads_of(model))
    return list(model.parameters())


def look(module, inward, outward):
    seen.append(outward[0])


seen = []


@pytest.mark.parametrize("again", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
@pytest.mark.parametrize("level", LEVELS)
def test_a_module_with_a_hook_is_copied_and_pickled_with_it(at_level, level, again):
    seen.clear()
    with at_level(level, "loss_scale=1024"):
        model = nn.Linear(8, 4)
        model.register_full_backward_hook(look)
        other = again(model)
        other(batch()[0].requires_grad_()).sum().backward()
        (hook,) = other._backward_hooks.values()
    if again is copy.deepcopy:
        assert seen[0].unique().tolist() == [1.0]
    else:
        assert hook is look  # as it is loaded without us


@pytest.mark.parametrize("half", ["float16", "bfloat16"])
@pytest.mark.parametrize("level", LEVELS)
def test_what_they_see_is_float32s_within_the_rounding_of_half(far_from_float32, level, half):
    assert far_from_float32(CASES, level, half) == []


@pytest.mark.parametrize("level", LEVELS)
def test_what_they_see_is_identical_at_every_scale(different_by_scale, level):
    assert different_by_scale(CASES, level) == []
