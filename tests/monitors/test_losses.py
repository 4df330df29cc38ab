"""The curve of each loss: true, whatever its scale, and bounded, however long the run."""

import pytest
import torch
from torch import nn

from mpx.monitors import Losses, Pass, Seen


def passed(monitor, number, loss, site="train.py:1"):
    seen = Seen(site, 1024.0, loss_finite=True, number=loss)
    monitor.passed(Pass(number, 0, seen, None))


def test_what_is_one_number_is_recorded_by_call_site():
    monitor = Losses(16)
    passed(monitor, 1, 0.5)
    passed(monitor, 2, 0.25, site="train.py:2")
    passed(monitor, 3, None)  # several roots, or a vector
    passed(monitor, 4, 0.125)
    assert monitor.snapshot()["losses"] == [
        {"site": "train.py:1", "backward": [1, 4], "value": [0.5, 0.125]},
        {"site": "train.py:2", "backward": [2], "value": [0.25]},
    ]


def test_a_loss_is_one_real_number_of_any_type_and_shape(at_level):
    leaf = torch.ones(2, requires_grad=True)
    with at_level("O0") as recorded:
        (leaf.sum() * 0.25).reshape(1, 1).backward()
        (leaf.half() * 0.125).sum().backward()
        torch.autograd.backward([leaf.sum(), leaf.prod()])  # several roots
        (leaf * 2).backward(torch.ones(2))
        losses = recorded.summary["losses"]
    assert [curve["value"] for curve in losses] == [[0.5], [0.25]]


def test_a_long_run_keeps_its_first_and_last_loss_and_a_bounded_number_between():
    monitor = Losses(16)
    for number in range(1, 10_001):
        passed(monitor, number, float(number))
    (curve,) = monitor.snapshot()["losses"]
    assert len(curve["value"]) <= 16
    assert (curve["value"][0], curve["value"][-1]) == (1.0, 10_000.0)


def test_a_script_that_is_written_as_it_runs_does_not_grow_the_record_without_end():
    monitor = Losses(4)
    for number in range(1000):
        passed(monitor, number, 1.0, site=f"<cell {number}>:1")
    assert len(monitor.snapshot()["losses"]) == 64


def test_losses_that_are_not_finite_are_counted():
    monitor = Losses(4)
    for loss in (1.0, torch.nan, -torch.inf):
        passed(monitor, 1, loss)
    assert monitor.snapshot()["nonfinite_losses"] == 2


@pytest.mark.parametrize("scale", ["none", "2**24"])
@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
def test_the_values_are_those_that_the_script_sees(at_level, level, scale):
    settings = (
        ["loss_scale.mode=static", f"loss_scale.init={scale}"] if scale != "none" and level != "O0" else []
    )
    with at_level(level, *settings) as recorded:
        torch.manual_seed(0)
        model = nn.Linear(4, 1)
        seen = []
        for _ in range(3):
            loss = model(torch.randn(2, 4)).square().sum() * 1e-8
            loss.backward()
            seen.append(loss.item())
        (curve,) = recorded.summary["losses"]
    assert curve["value"] == seen
    assert curve["backward"] == [1, 2, 3]
