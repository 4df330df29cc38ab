"""What FP32 masters and a loss scale are for, in the numbers of Micikevicius et al. (2018, section 3)."""

import pytest
import torch
from torch import nn


def weight_after_small_updates(updates=1000):
    """Descend along a slope of -1 from a weight of 1, by 1e-4 each time."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    for _ in range(updates):
        optimizer.zero_grad()
        (-model(torch.ones(1, 1))).backward()
        optimizer.step()
    return model.weight.item()


@pytest.mark.parametrize("half", ["float16", "bfloat16"])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_small_updates_arrive_in_full_where_the_weights_are_float32(at_level, level, half):
    plain = weight_after_small_updates()
    assert plain == pytest.approx(1.1, rel=1e-4)
    with at_level(level, f"dtype={half}", "loss_scale=1024"):
        assert weight_after_small_updates() == plain


@pytest.mark.parametrize("half", ["float16", "bfloat16"])
def test_small_updates_vanish_where_they_are_half(at_level, half):
    with at_level("O3", f"dtype={half}"):
        assert weight_after_small_updates() == 1.0


def small_gradient():
    """Return the gradient of a weight whose true gradient is 1e-8."""
    model = nn.Linear(1, 1, bias=False)
    (model(torch.ones(1, 1)) * 1e-8).sum().backward()
    return model.weight.grad.item()


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_small_gradient_is_zero_in_float16_and_survives_with_a_scale(at_level, level):
    with at_level(level, "loss_scale.mode=none"):
        assert small_gradient() == 0.0
    with at_level(level, "loss_scale=4096"):
        assert small_gradient() == pytest.approx(
            9.997e-09, rel=1e-4
        )  # 687 * 2**-24 / 4096: a subnormal number
    with at_level(level):
        assert small_gradient() == pytest.approx(1e-8, rel=2**-11)
    with at_level(level, "dtype=bfloat16"):
        assert small_gradient() == pytest.approx(1e-8, rel=2**-8)
