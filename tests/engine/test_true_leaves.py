"""Whatever gets a gradient gets the true one, whoever owns it and whenever the script looks: also from inside a pass.

Each case differentiates a little and returns tensors; the laws are in conftest.py.
"""

import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

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
def leaves_of_another_thread():
    """One thread runs the model, another differentiates: inputs of either call are nobody's parameters."""
    model = perceptron()
    inputs = [batch(seed)[0].requires_grad_() for seed in (1, 2)]
    results = []

    def run(x):
        results.append(model(x).square().sum())

    for x in inputs:
        thread = threading.Thread(target=run, args=(x,))
        thread.start()
        thread.join()
        results[-1].backward()
    return [x.grad for x in inputs]


@case
def leaves_inside_a_reentrant_checkpoint():
    """Of no module that was called and no optimizer; the second pass adds to what the first has left."""
    weight = torch.randn(8, 4, generator=torch.Generator().manual_seed(3)).requires_grad_()
    model = perceptron()
    for seed in (1, 2):
        x, y = batch(seed)
        x.requires_grad_()
        hidden = checkpoint(lambda x: x.mm(weight).tanh(), x, use_reentrant=True)
        (hidden.square().sum() + F.cross_entropy(model(x), y)).backward()
    other = torch.full((4,), 0.5, requires_grad=True)
    other.grad = torch.ones(4)  # from before, and no pass has met it yet
    hidden = checkpoint(lambda x: x * other, batch()[0][:, :4].clone().requires_grad_(), use_reentrant=True)
    hidden.sum().backward()
    return [weight.grad, other.grad]


@case
def retained_gradients():
    model = perceptron()
    x, y = batch()
    logits = model(x)
    logits.retain_grad()
    loss = F.cross_entropy(logits, y)
    loss.retain_grad()
    loss.backward(retain_graph=True)
    once = [logits.grad.clone(), loss.grad.clone()]
    loss.backward()
    return [*once, logits.grad, loss.grad]


@case
def a_root_that_is_gone():
    """Nobody holds the module that was called, only what it was made of."""
    parts = list(perceptron())
    x, y = batch()
    F.cross_entropy(nn.Sequential(*parts)(x), y).backward()
    return grads_of(nn.Sequential(*parts))


@case
def a_root_upstream_that_is_gone():
    """As before, behind a module that is still there."""
    parts, head = list(perceptron()), nn.Linear(4, 4)
    x, y = batch()
    F.cross_entropy(head(nn.Sequential(*parts)(x)), y).backward()
    return [*grads_of(nn.Sequential(*parts)), *grads_of(head)]


@case
def a_part_that_is_replaced_before_the_pass():
    model = perceptron()
    first, x, y = model[0], *batch()
    loss = F.cross_entropy(model(x), y)
    model[0] = nn.Identity()
    loss.backward()
    return grads_of(first)


@case
def parameters_that_a_model_is_lent():
    model = perceptron()
    lent = {name: parameter.detach().clone().requires_grad_() for name, parameter in model.named_parameters()}
    for seed in (1, 2, 3):
        x, y = batch(seed)
        F.cross_entropy(torch.func.functional_call(model, lent, (x,)), y).backward()
    return [parameter.grad for parameter in lent.values()]


class Conditioned(nn.Module):
    """Adds what somebody has put into an attribute."""

    def __init__(self):
        super().__init__()
        self.last = nn.Linear(8, 4)
        self.condition = 0.0

    def forward(self, x):
        return self.last(x) + self.condition


@case
def lent_parameters_behind_an_attribute():
    model, head = perceptron(), Conditioned()
    lent = {name: parameter.detach().clone().requires_grad_() for name, parameter in model.named_parameters()}
    for seed in (1, 2, 3, 4):
        x, y = batch(seed)
        head.condition = torch.func.functional_call(model, lent, (x,))
        F.cross_entropy(head(x), y).backward()
    return [*(parameter.grad for parameter in lent.values()), *grads_of(head)]


@case
def lent_parameters_behind_a_hook():
    model, head = perceptron(), nn.Linear(4, 4)
    lent = {name: parameter.detach().clone().requires_grad_() for name, parameter in model.named_parameters()}
    for seed in (1, 2):
        x, y = batch(seed)
        hidden = torch.func.functional_call(model, lent, (x,))
        cut = hidden.detach().requires_grad_()
        cut.register_hook(hidden.backward)
        F.cross_entropy(head(cut), y).backward()
    return [*(parameter.grad for parameter in lent.values()), *grads_of(head)]


@case
def a_pass_in_a_hook():
    """The gradient of a later part comes to an earlier one by the script's hand (as where activations are cached)."""
    model, head = perceptron(), nn.Linear(4, 4)
    x, y = batch()
    for _ in range(2):
        hidden = model(x)
        cut = hidden.detach().requires_grad_()
        cut.register_hook(hidden.backward)
        F.cross_entropy(head(cut), y).backward()
    return [*grads_of(model), *grads_of(head)]


@case
def a_pass_in_the_hook_of_a_leaf_that_it_adds_to():
    model, other = perceptron(), nn.Linear(8, 4)
    x, y = batch()
    running = []

    def more(leaf):
        if not running:
            running.append(leaf)
            with torch.enable_grad():
                F.cross_entropy(other(x) + leaf, y).backward()
            running.pop()

    model[2].bias.register_post_accumulate_grad_hook(more)
    F.cross_entropy(model(x), y).backward()
    return [*grads_of(model), *grads_of(other)]


@case
def sparse_gradients():
    torch.manual_seed(0)
    table, head = nn.Embedding(10, 8, sparse=True), nn.Linear(8, 4)
    index = torch.tensor([1, 3, 3, 7])
    for _ in range(2):
        F.cross_entropy(head(table(index)), torch.tensor([0, 1, 2, 3])).backward()
    assert table.weight.grad.is_sparse
    return [table.weight.grad.to_dense(), *grads_of(head)]


@case
def double_and_complex_parameters():
    torch.manual_seed(0)
    double = torch.randn(4, dtype=torch.float64, requires_grad=True)
    phase = torch.randn(4, dtype=torch.complex64, requires_grad=True)
    model = perceptron()
    x, y = batch()
    for _ in range(2):
        logits = model(x) * double.float() + (phase * phase.conj()).real + torch.view_as_real(phase).sum()
        F.cross_entropy(logits, y).backward()
    return [double.grad, torch.view_as_real(phase.grad), *grads_of(model)]


@case
def an_adversarial_input():
    model = perceptron()
    x, y = batch()
    x.requires_grad_()
    F.cross_entropy(model(x), y).backward()
    (slope,) = torch.autograd.grad(F.cross_entropy(model(x), y), x)
    return [x.grad, slope]


@case
def a_new_input_for_every_pass():
    model = perceptron()
    seen = []
    for seed in range(5):
        x, y = batch(seed)
        perturbation = torch.zeros_like(x, requires_grad=True)
        F.cross_entropy(model(x + perturbation), y).backward()
        seen.append(perturbation.grad)
    return seen


@case
def something_learnable_before_and_after_the_model():
    torch.manual_seed(0)
    image, temperature = torch.randn(6, 8, requires_grad=True), torch.tensor(0.5, requires_grad=True)
    model = perceptron().requires_grad_(requires_grad=False)
    F.cross_entropy(model(torch.sigmoid(image)) / temperature, batch()[1]).backward()
    return [image.grad, temperature.grad]


@case
def tensors_without_a_module():
    torch.manual_seed(0)
    w1, w2 = torch.randn(8, 16, requires_grad=True), torch.randn(16, 4, requires_grad=True)
    x, y = batch()
    for _ in range(2):
        F.cross_entropy(torch.tanh(x @ w1) @ w2, y).backward()
    return [w1.grad, w2.grad]


class Unregistered(nn.Module):
    """Keeps a tensor and a layer where no optimizer would look for them."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(16, 4)
        self.hidden = [nn.Linear(8, 16)]
        self.gain = [torch.ones(16, requires_grad=True)]

    def forward(self, x):
        return self.head(torch.tanh(self.hidden[0](x)) * self.gain[0])


@case
def tensors_that_a_module_does_not_register():
    torch.manual_seed(0)
    model = Unregistered()
    for seed in range(3):
        loss_of(model, seed).backward()
    return [model.gain[0].grad, *grads_of(model.hidden[0]), *grads_of(model)]


class Checkpointed(nn.Module):
    def __init__(self, *, reentrant):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))
        self.head = nn.Linear(8, 4)
        self.reentrant = reentrant

    def forward(self, x):
        x = x + checkpoint(self.body, x.requires_grad_(), use_reentrant=self.reentrant)
        return self.head(x)


@case
def checkpointing():
    torch.manual_seed(0)
    model = Checkpointed(reentrant=False)
    for seed in range(2):
        loss_of(model, seed).backward()
    return grads_of(model)


@case
def checkpointing_inside_the_backward_pass():
    torch.manual_seed(0)
    model = Checkpointed(reentrant=True)
    for seed in range(2):
        loss_of(model, seed).backward()
    return grads_of(model)


@case
def checkpointing_of_a_whole_model():
    models = [perceptron(), perceptron()]
    x, y = batch()
    x.requires_grad_()
    for _ in range(2):
        for model, use_reentrant in zip(models, [True, False], strict=True):
            F.cross_entropy(checkpoint(model, x, use_reentrant=use_reentrant), y).backward()
    return [x.grad, *grads_of(models[0]), *grads_of(models[1])]


@pytest.mark.parametrize("half", ["float16", "bfloat16"])
@pytest.mark.parametrize("level", LEVELS)
def test_they_are_those_of_float32_within_the_rounding_of_half(far_from_float32, level, half):
    assert far_from_float32(CASES, level, half) == []


@pytest.mark.parametrize("level", LEVELS)
def test_they_are_identical_at_every_scale(different_by_scale, level):
    assert different_by_scale(CASES, level) == []
