"""What only a GPU can show: how often a step waits for it, and that every level trains on it."""

import warnings
from contextlib import contextmanager

import pytest
import torch
import torch.nn.functional as F
from torch import nn

pytestmark = pytest.mark.gpu


def stepper(**options):
    """Return a training step on the GPU, which returns its loss there."""
    torch.manual_seed(0)
    layers = nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 4)
    model = nn.Sequential(*layers).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, **options)
    x, y = torch.randn(16, 1, 8, 8, device="cuda"), torch.randint(0, 4, (16,), device="cuda")

    def step():
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


@contextmanager
def told_of_waits(how):
    """Let torch say of each wait for the GPU that there was one: "warn" or "error"."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode(how)
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def losses(**options):
    step = stepper(**options)
    return torch.stack([step() for _ in range(20)]).tolist()


@pytest.mark.parametrize(
    ("level", "waits"), [("O0", 0), ("O1", 1), ("O2", 1), ("O1-bf16", 0), ("O2-bf16", 0)]
)
def test_a_step_waits_for_the_device_once_at_most(level, waits, at_level):
    with at_level(level):
        step = stepper()
        for _ in range(5):
            step()
        with warnings.catch_warnings(record=True) as heard, told_of_waits("warn"):
            warnings.simplefilter("always")
            for _ in range(10):
                step()
    assert sum("synchroniz" in str(one.message) for one in heard) <= 10 * waits


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O1-bf16", "O2-bf16"])
def test_a_step_with_a_fused_optimizer_waits_for_nothing(level, at_level):
    with at_level(level, *([] if "bf16" in level or level == "O0" else ["loss_scale.init=256"])):
        step = stepper(fused=True)
        for _ in range(5):
            step()
        with told_of_waits("error"):
            for _ in range(100):
                step()


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_the_training_of_a_fused_optimizer_is_that_of_one_that_is_waited_for(level, at_level):
    """Through overflows, which the device decides about in the one and the host in the other."""
    settings = "loss_scale.init=2**24", "loss_scale.growth_interval=3"
    found = []
    for more in ((), ("abort_on=[consecutive_skips>1000]",)):  # which asks for each verdict at once
        with at_level(level, *settings, *more) as recorded:
            seen = losses(fused=True)
            recorded.session.catch_up()
            found.append((seen, recorded.summary["steps"], recorded.summary["scalers"]))
    assert found[0][1]["skipped"] > 0
    assert found[0] == found[1]


@pytest.mark.parametrize("level", ["O1", "O2", "O1-bf16", "O2-bf16"])
def test_losses_are_near_those_of_float32(level, at_level):
    reference = losses()
    with at_level(level, "monitors.gradients=false" if "bf16" in level else "loss_scale.init=256"):
        found = losses()
    # the rounding of a half type in 20 steps
    assert found == pytest.approx(reference, rel=0.1, abs=0.02)
