"""What a backward pass leaves in `.grad`, or `torch.autograd.grad` returns, is the true gradient, at any scale.

Each case differentiates a little and returns tensors; the laws are in conftest.py.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

# torch warns of the cycle that a gradient with a graph makes; the cases break it
pytestmark = pytest.mark.filterwarnings("ignore:Using backward\\(\\) with create_graph=True:UserWarning")

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


@case
def one_pass():
    model = perceptron()
    loss_of(model).backward()
    return grads_of(model)


@case
def accumulation_without_zeroing():
    model = perceptron()
    for seed in range(3):
        (loss_of(model, seed) / 3).backward()
    return grads_of(model)


@case
def gradients_zeroed_in_place():
    model = perceptron()
    seen = []
    for seed in range(3):
        model.zero_grad(set_to_none=False)
        loss_of(model, seed).backward()
        seen += [grad.clone() for grad in grads_of(model)]
    return seen


@case
def gradients_set_to_none():
    model = perceptron()
    seen = []
    for seed in range(3):
        model.zero_grad()
        loss_of(model, seed).backward()
        seen += grads_of(model)
    return seen


@case
def clipping_by_norm():
    model = perceptron()
    loss_of(model).backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.05)
    return [norm, *grads_of(model)]


@case
def clipping_by_value():
    model = perceptron()
    loss_of(model).backward()
    nn.utils.clip_grad_value_(model.parameters(), 0.2)
    return grads_of(model)


@case
def clipping_between_accumulations():
    model = perceptron()
    for seed in range(2):
        loss_of(model, seed).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.05)
    return grads_of(model)


@case
def one_graph_twice():
    model = perceptron()
    loss = loss_of(model)
    loss.backward(retain_graph=True)
    once = [grad.clone() for grad in grads_of(model)]
    loss.backward()
    return once + grads_of(model)


@case
def only_some_inputs():
    model = perceptron()
    loss_of(model).backward(inputs=list(model[2].parameters()))
    assert all(parameter.grad is None for parameter in model[0].parameters())
    return grads_of(model[2])


@case
def an_input_that_is_no_leaf():
    model = perceptron()
    x, y = batch()
    logits = model(x)
    F.cross_entropy(logits, y).backward(inputs=[logits])
    return [logits.grad]


@case
def a_gradient_for_a_loss_of_many_numbers():
    model = perceptron()
    x, y = batch()
    F.cross_entropy(model(x), y, reduction="none").backward(gradient=torch.linspace(-1, 1, 6))
    return grads_of(model)


@case
def several_roots():
    model = perceptron()
    torch.autograd.backward([loss_of(model, 1), loss_of(model, 2)], [None, torch.tensor(0.5)])
    return grads_of(model)


@case
def a_loss_to_be_maximized():
    model = perceptron()
    (-loss_of(model)).backward()
    return grads_of(model)


@case
def a_loss_in_a_box():
    """`[1]` is the shape of a loss as older scripts make it; WGAN gives its sign as the gradient."""
    model = perceptron()
    loss_of(model).reshape(1).backward(torch.tensor([-1.0]))
    return grads_of(model)


@case
def autograd_grad():
    model = perceptron()
    return torch.autograd.grad(loss_of(model), list(model.parameters()))


@case
def autograd_grad_with_unused_and_retained():
    model = perceptron()
    unused = torch.ones(2, requires_grad=True)
    loss = loss_of(model)
    first = torch.autograd.grad(loss, [*model.parameters(), unused], retain_graph=True, allow_unused=True)
    assert first[-1] is None
    return [*first[:-1], *torch.autograd.grad(loss, list(model.parameters()))]


@case
def autograd_grad_in_a_batch():
    model = perceptron()
    losses = torch.stack([loss_of(model, 1), loss_of(model, 2)])
    return torch.autograd.grad(losses, list(model.parameters()), torch.eye(2), is_grads_batched=True)


@case
def gradient_penalty():
    """The norm of a gradient is part of the loss: WGAN-GP, PINNs, MAML."""
    model = perceptron()
    x = batch()[0].requires_grad_()
    out = model(x)
    (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    penalty = ((slope.norm(dim=1) - 1) ** 2).mean()
    (out.mean() + 10 * penalty).backward()
    return [penalty.detach(), slope.detach(), *grads_of(model)]


@case
def backward_with_a_graph_of_its_own():
    model = perceptron()
    loss_of(model).backward(create_graph=True)
    first = grads_of(model)
    assert all(grad.requires_grad for grad in first)
    second = torch.autograd.grad(sum((grad**2).sum() for grad in first), list(model.parameters()))
    model.zero_grad()
    return [grad.detach() for grad in first] + list(second)


@case
def accumulation_onto_gradients_with_graphs():
    model = perceptron()
    loss_of(model, 1).backward(create_graph=True)
    earlier = [grad.detach().clone() for grad in grads_of(model)]
    held = grads_of(model)
    loss_of(model, 2).backward(create_graph=True)
    seen = [grad.detach().clone() for grad in grads_of(model)]
    assert all(
        torch.equal(a, b) for a, b in zip(held, earlier, strict=True)
    )  # the script's own tensors stay true
    model.zero_grad()
    return earlier + seen


@case
def gradients_that_the_script_holds_while_they_are_replaced():
    """Torch puts another tensor in the place of one onto which it accumulates with a graph."""
    model = perceptron()
    loss_of(model, 1).backward()
    held = grads_of(model)
    loss_of(model, 2).backward(create_graph=True)
    seen = [grad.detach() for grad in grads_of(model)]
    model.zero_grad()
    return [*held, *seen]


@pytest.mark.parametrize("half", ["float16", "bfloat16"])
@pytest.mark.parametrize("level", LEVELS)
def test_gradients_are_those_of_float32_within_the_rounding_of_half(far_from_float32, level, half):
    assert far_from_float32(CASES, level, half) == []


@pytest.mark.parametrize("level", LEVELS)
def test_gradients_are_identical_at_every_scale(different_by_scale, level):
    assert different_by_scale(CASES, level) == []


@pytest.mark.parametrize("level", LEVELS)
def test_a_small_loss_at_a_large_scale_is_the_large_loss_at_scale_one(at_level, level):
    """FP16: what the engine computes is the product of both, so it is the same to the last bit."""
    results = []
    for scale in (1.0, 2.0**8, 2.0**16, 2.0**24):
        mode = "none" if scale == 1 else "static"
        with at_level(level, f"loss_scale.mode={mode}", f"loss_scale.init={scale:.0f}"):
            model = perceptron()
            for seed in range(2):
                (loss_of(model, seed) * (256 / scale)).backward()
            results.append([grad * scale for grad in grads_of(model)])
    for found in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found, results[0], strict=True))
