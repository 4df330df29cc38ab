"""A weight that changes during a call is used as it is then; one of many uses gets their whole gradient."""

import pytest
import torch
from torch import nn

HALVES = ["float16", "bfloat16"]
SEED = ["loss_scale=1024"]


def written_in_place(weight):
    with torch.no_grad():
        weight.mul_(2)


def written_as_data(weight):
    weight.data.mul_(2)


class Twice(nn.Module):
    """Returns what a layer makes of its input, before and after a change of its weight."""

    def __init__(self, change):
        super().__init__()
        self.layer, self.change = nn.Linear(4, 4, bias=False), change

    def forward(self, x):
        before = self.layer(x)
        self.change(self.layer.weight)
        return before, self.layer(x)


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("change", [written_in_place, written_as_data])
def test_a_weight_that_the_forward_doubles_gives_twice_the_result(change, level, half, at_level):
    """Exactly: twice a half number is one."""
    with at_level(level, f"dtype={half}"):
        torch.manual_seed(0)
        model = Twice(change)
        for _ in range(3):
            before, after = model(torch.ones(2, 4))
            assert torch.equal(after, 2 * before)


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


def losses_of_two_calls():
    model = StepsInside()
    x = torch.linspace(-1, 1, 32).view(4, 8)
    return torch.stack([model(x), model(x)]).flatten()


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_step_inside_a_call_is_in_the_next_loss(level, half, at_level):
    plain = losses_of_two_calls()
    assert plain[2] < 0.9 * plain[0]  # old weights would show
    with at_level(level, f"dtype={half}", *(SEED if half == "float16" else [])):
        found = losses_of_two_calls()
    # a bfloat16 number has 8 bits: outputs near 1 are off by up to 2**-8, and these losses by twice that
    torch.testing.assert_close(found, plain, rtol=0.03, atol=0.0 if half == "float16" else 2**-7)


@pytest.mark.parametrize("half", HALVES)
def test_the_gradient_of_a_weight_of_a_thousand_uses_is_added_up_in_float32(half, at_level):
    """The gradient of the bias is 4, the number of rows. In half such a sum stands still once a part is lost in it."""
    uses = 1000

    class Loop(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x):
            total = 0.0
            for _ in range(uses):
                total = total + self.layer(x).float().sum()
            return total / uses

    with at_level("O1", f"dtype={half}", *(SEED if half == "float16" else [])):
        model = Loop()
        model(torch.ones(4, 8)).backward()
        bias, weight = model.layer.bias.grad, model.layer.weight.grad
    # each part is 4 / 1000 rounded to half, and all are rounded alike
    torch.testing.assert_close(bias, torch.full_like(bias, 4.0), rtol=2**-8, atol=0.0)
    torch.testing.assert_close(weight, torch.full_like(weight, 4.0), rtol=2**-8, atol=0.0)
