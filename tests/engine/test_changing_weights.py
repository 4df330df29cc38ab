"""A weight that changes during a call is used as it is then; one of many uses gets their whole gradient."""

from itertools import product

import pytest
import torch
from torch import nn

from .layers import Layer

pytestmark = pytest.mark.usefixtures("all_are_large")
HALVES = ["float16", "bfloat16"]
SEED = ["loss_scale=1024"]
USES = 4  # of a layer in one call: from the second on its cast would be kept


def written_in_place(weight):
    with torch.no_grad():
        weight.mul_(2)


def written_as_data(weight):
    weight.data.mul_(2)


def written_through_a_view(weight):
    weight.detach()[:].mul_(2)


def given_new_data(weight):
    weight.data = weight.detach() * 2


def written_through_numpy(weight):
    weight.detach().numpy()[:] *= 2


def written_in_its_storage(weight):
    weight.untyped_storage().copy_((weight.detach() * 2).untyped_storage())


class WrittenAsHeldData:
    """Asks for the data once, and writes into it again and again, also in later calls."""

    def __init__(self):
        self.held = None

    def __call__(self, weight):
        self.held = weight.data if self.held is None else self.held
        self.held.mul_(2)


CHANGES = [written_in_place, written_as_data, written_through_a_view, given_new_data, written_in_its_storage]
# What holds a copy at O2 shows that copy in a call, and not its memory in the next.
IN_THE_PARAMETER = [written_through_numpy, WrittenAsHeldData]


class Doubles(nn.Module):
    """Returns what a layer makes of its input, again and again, with a weight that doubles each time."""

    def __init__(self, layer, change):
        super().__init__()
        self.layer, self.change = layer, change

    def forward(self, x):
        found = []
        for _ in range(USES):
            found.append(self.layer(x))
            self.change(self.layer.weight)
        return found


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize(
    ("kind", "change"),
    [*product([nn.Linear, Layer], CHANGES), *((nn.Linear, change) for change in IN_THE_PARAMETER)],
)
def test_a_weight_that_the_forward_doubles_gives_twice_the_result(kind, change, level, half, at_level):
    """Exactly: twice a half number is one."""
    with at_level(level, f"dtype={half}"):
        torch.manual_seed(0)
        model = Doubles(kind(4, 4, bias=False), change)
        model.change = change() if change is WrittenAsHeldData else change
        for _ in range(5):
            with torch.no_grad():
                model.layer.weight.copy_(torch.linspace(0.1, 1, 16).view(4, 4))
            first, *others = model(torch.ones(2, 4))
            for number, found in enumerate(others, 1):
                assert torch.equal(found, 2**number * first)


class StepsInside(nn.Module):
    """Trains itself, three steps a call."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
        self.optimizer = torch.optim.SGD(self.body.parameters(), lr=0.1)

    def forward(self, x):
        losses = []
        for _ in range(3):
            self.optimizer.zero_grad()
            loss = (self.body(x) - 1).square().mean()
            loss.backward()
            losses.append(loss.detach())
            self.optimizer.step()
        return torch.stack(losses)


class StepsByHand(StepsInside):
    """Does so without an optimizer, as scripts of old do, through tensors that it has held from the start."""

    def __init__(self):
        super().__init__()
        self.held = [p.data for p in self.body.parameters()]

    def forward(self, x):
        losses = []
        for _ in range(3):
            grads = torch.autograd.grad(
                loss := (self.body(x) - 1).square().mean(), list(self.body.parameters())
            )
            losses.append(loss.detach())
            for weight, grad in zip(self.held, grads, strict=True):
                weight.sub_(grad, alpha=0.1)
        return torch.stack(losses)


def losses_of_two_calls(kind):
    model = kind()
    x = torch.linspace(-1, 1, 32).view(4, 8)
    return torch.stack([model(x), model(x)]).flatten()


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize(("kind", "level"), [(StepsInside, "O1"), (StepsInside, "O2"), (StepsByHand, "O1")])
def test_a_step_inside_a_call_is_in_the_next_loss(kind, level, half, at_level):
    plain = losses_of_two_calls(kind)
    assert plain[2] < 0.9 * plain[0]  # old weights would show
    with at_level(level, f"dtype={half}", *(SEED if half == "float16" else [])):
        found = losses_of_two_calls(kind)
    # a bfloat16 number has 8 bits: outputs near 1 are off by up to 2**-8, and these losses by twice that
    torch.testing.assert_close(found, plain, rtol=0.03, atol=0.0 if half == "float16" else 2**-7)


class Loop(nn.Module):
    """Returns the mean of what a layer makes of its input each time."""

    def __init__(self, layer, uses):
        super().__init__()
        self.layer, self.uses = layer, uses

    def forward(self, x):
        return sum(self.layer(x).float().sum() for _ in range(self.uses)) / self.uses


@pytest.mark.parametrize("half", HALVES)
def test_the_gradient_of_a_weight_of_a_thousand_uses_is_added_up_in_float32(half, at_level):
    """The gradient of the bias is 4, the number of rows. In half such a sum stands still once a part is lost in it."""
    with at_level("O1", f"dtype={half}", *(SEED if half == "float16" else [])):
        model = Loop(nn.Linear(8, 8), uses=1000)
        model(torch.ones(4, 8)).backward()
        bias, weight = model.layer.bias.grad, model.layer.weight.grad
    # each part is 4 / 1000 rounded to half, all are rounded alike, and 16 of them are added in half
    tolerance = 2**-6 if half == "bfloat16" else 2**-8
    torch.testing.assert_close(bias, torch.full_like(bias, 4.0), rtol=tolerance, atol=0.0)
    torch.testing.assert_close(weight, torch.full_like(weight, 4.0), rtol=tolerance, atol=0.0)
