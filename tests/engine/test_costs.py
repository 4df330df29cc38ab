"""What mpx costs, counted and not timed: reads that wait for the device, Python calls a step, and bytes."""

import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

SCRIPTS = Path(__file__).parents[2] / "scripts"


class Reads(TorchDispatchMode):
    """Counts what would wait for an accelerator: a number that is read from a tensor."""

    def __init__(self):
        super().__init__()
        self.number = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.number += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def perceptron(layers):
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(4, 4) for _ in range(layers)))


def stepper(model, optimizer):
    x = torch.linspace(-1, 1, 8).view(2, 4)

    def step():
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    return step


def reads_a_step(layers):
    model = perceptron(layers)
    step = stepper(model, torch.optim.SGD(model.parameters(), lr=0.01, fused=True))
    for _ in range(5):
        step()
    with Reads() as reads:
        for _ in range(10):
            step()
    return reads.number / 10


@pytest.mark.parametrize("layers", [2, 20])
@pytest.mark.parametrize(
    ("level", "most"),
    [("O0", 1), ("O1", 2), ("O2", 2), ("O1-bf16", 2)],
)
def test_a_step_reads_two_numbers_whatever_the_model(level, most, layers, at_level):
    """The loss, which is in host memory here, and one flag of all gradients."""
    assert reads_a_step(layers) == 0
    with at_level(level, "loss_scale.init=256" if level in ("O1", "O2") else "monitors.gradients=false"):
        assert reads_a_step(layers) <= most


def calls_of(step):
    """Return how many Python functions of mpx a step enters."""
    count = 0

    def profile(frame, event, _):
        nonlocal count
        count += event == "call" and "/mpx/" in frame.f_code.co_filename

    sys.setprofile(profile)
    try:
        step()
    finally:
        sys.setprofile(None)
    return count


@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
def test_a_step_costs_the_same_however_long_the_run(level, at_level):
    with at_level(level, "loss_scale.init=256", "monitors.gradients=false"):
        model = perceptron(4)
        step = stepper(model, torch.optim.SGD(model.parameters(), lr=0.01))
        for _ in range(20):
            step()
        early = calls_of(step)
        for _ in range(400):
            step()
        assert calls_of(step) == early > 0


@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
def test_a_step_costs_in_proportion_to_the_parameters(level, at_level):
    """The cost of the second hundred of layers is that of the first: linear, and nothing that grows faster."""
    costs = []
    for layers in (100, 200, 300):
        with at_level(level, "loss_scale.init=256", "monitors.gradients=false"):
            model = perceptron(layers)
            step = stepper(model, torch.optim.SGD(model.parameters(), lr=1e-4))
            for _ in range(5):
                step()
            costs.append(calls_of(step))
    first, second = costs[1] - costs[0], costs[2] - costs[1]
    assert second == pytest.approx(first, rel=0.02)
    # a layer has a module and two parameters: at O0 the call of the module is all there is
    assert first / 100 <= {"O0": 1, "O1": 9, "O2": 26}[level]


def saved_bytes(model, tokens, region=None):
    """Return the bytes that a forward pass saves for the backward pass, without weights and copies of weights."""
    shapes = {tuple(sorted(p.shape)) for p in model.parameters()}
    saved, kept = {}, []

    def pack(tensor):
        if tuple(sorted(tensor.shape)) not in shapes:
            storage = tensor.untyped_storage()
            saved[storage.data_ptr()] = storage.nbytes()
            kept.append(tensor)  # an address may not be used twice
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        if region is None:
            model(tokens[:, :-1], tokens[:, 1:])
        else:
            with region:
                model(tokens[:, :-1], tokens[:, 1:])
    return sum(saved.values())


def test_a_transformer_saves_half_as_much_at_o2_and_less_than_autocast_at_o1(at_level, monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPTS))
    from train_gpt import GPT

    torch.manual_seed(0)
    model = GPT(vocab=96, context=64, layers=4, heads=4, channels=128, dropout=0.0)
    tokens = torch.randint(0, 96, (7, 65))  # 448 rows: no activation has the shape of a weight
    plain = saved_bytes(model, tokens)
    by_hand = saved_bytes(model, tokens, torch.autocast("cpu", dtype=torch.float16))
    with at_level("O1"):
        assert saved_bytes(model, tokens) <= by_hand
    with at_level("O2"):
        assert saved_bytes(model, tokens) <= 0.52 * plain


BYTES = {"O0": 16, "O1": 16, "O2": 16, "O3": 8}  # of weight, gradient and two moments, for one parameter


@pytest.mark.parametrize("level", BYTES)
def test_weights_gradients_and_optimizer_state_take_what_arithmetic_says(level, at_level):
    with at_level(level, "loss_scale=1"):
        model = nn.Linear(8, 8)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
        F.mse_loss(model(torch.ones(2, 8)), torch.zeros(2, 8)).backward()
        optimizer.step()
        held = [*model.parameters(), *(p.grad for p in model.parameters())]
        held += [optimizer.state[p][key] for p in model.parameters() for key in ("exp_avg", "exp_avg_sq")]
        number = sum(p.numel() for p in model.parameters())
        assert sum(t.numel() * t.element_size() for t in held) == BYTES[level] * number
