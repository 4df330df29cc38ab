"""The scale on a device comes from the same verdicts to the same scales as the host's."""

import random
from pathlib import Path

import pytest
import torch

from mpx.engine.device_scale import DeviceScale
from mpx.loss_scale import initial
from mpx.presets import Override, resolve

CPU = torch.device("cpu")


def settings(**numbers):
    overrides = [Override(f"loss_scale.{name}", value) for name, value in numbers.items()]
    return resolve("O1", overrides=overrides, cwd=Path(__file__).parent).policy.loss_scale


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(
    "numbers",
    [
        {"init": 2.0**16, "growth_interval": 1},
        {"init": 2.0**-10, "growth_interval": 3, "growth_factor": 4.0},
        {"init": 2.0**23, "growth_interval": 2, "backoff_factor": 0.25},
    ],
)
def test_it_moves_as_the_state_machine_does(numbers, seed):
    choose = random.Random(seed)
    state = initial(settings(**numbers))
    device = DeviceScale(state, CPU)
    seen = set()
    # the weights drift, so that the walk meets the floor and the ceiling
    for number in range(600):
        bad = 0.8 if number // 150 % 2 else 0.1
        kind = choose.choices(["clean", "overflowed", "unknown", "both"], [1 - bad, bad, 0.2, 0.1])[0]
        if kind in ("clean", "overflowed"):
            state = state.after(finite=kind == "clean")
        overflowed, unknown = kind in ("overflowed", "both"), kind in ("unknown", "both")
        device.move(torch.tensor(overflowed), torch.tensor(unknown))
        assert device.scale.item() == state.scale, (number, kind)
        seen.add(state.scale)
    assert {state.settings.min, state.settings.max} <= seen


def test_one_that_had_been_clean_for_longer_than_this_run_asks_grows_at_once():
    state = initial(settings(growth_interval=3)).restore_state({"scale": 4.0, "clean": 10})
    device = DeviceScale(state, CPU)
    device.move(torch.tensor(False), torch.tensor(False))
    assert device.scale.item() == state.after(finite=True).scale == 8.0


def test_a_static_scale_stays():
    device = DeviceScale(initial(settings(mode="static", init=512.0)), CPU)
    device.move(torch.tensor(True), torch.tensor(False))
    assert device.scale.item() == 512.0
