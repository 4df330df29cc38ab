"""Passes whose verdict is on its way from an accelerator: the same training as where each is waited for, and no wait.

The accelerator is this CPU, which is made to look like one: a number that is asked for is there once so many others
have been asked for.
"""

import dataclasses
import gc
import math
import threading
import weakref
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import distributed, nn
from torch.utils._python_dispatch import TorchDispatchMode

from mpx.engine.devices import DEVICES
from mpx.engine.judge import CollapseError
from tests.engine.exchanges import EXCHANGES
from tests.engine.loops import LOOPS, batches, small_model, usual
from tests.engine.test_costs import Reads

EVERY_LOOP = LOOPS | EXCHANGES


@pytest.fixture
def accelerator(monkeypatch):
    """Return a function that makes the CPU a device so many fetches behind; `waits` counts those waited for."""
    made = SimpleNamespace(waits=0, fetches=0)

    def make(behind=1):
        def fetch(tensor):
            made.fetches += 1
            values, number = tensor.tolist(), made.fetches

            def arrived():
                made.waits += made.fetches - number < behind
                return values

            return arrived

        monkeypatch.setitem(DEVICES, "cpu", dataclasses.replace(DEVICES["cpu"], fetch=fetch))
        return made

    return make


TROUBLED = (
    "loss_scale.init=2**24",
    "loss_scale.growth_interval=3",
)  # overflows at first, and again and again
COUNTED = (
    "scalers", "losses", "nonfinite_losses", "overflow_counts", "backwards", "steps", "optimizers", "longest_skip_run",
    "substitutions",
)  # fmt: skip


def trained(script, at_level, level, settings):
    """Return what a script saw, what became of its model, and what the record says.

    Without the fused updates of a CPU: an accelerator's parameters never get them.
    """
    with at_level(level, "optimizer.fuse=false", *settings) as recorded:
        run = script()
        model = next(run)
        seen = list(run)
        weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        recorded.session.catch_up()
        summary = recorded.summary
        events = [event for event in recorded.events if event["event"] != "snapshot"]
    return seen, weights, summary, events


@pytest.mark.parametrize("level", ["O1", "O2", "O1-bf16", "O0"])
@pytest.mark.parametrize("name", EVERY_LOOP)
def test_the_training_is_that_of_one_that_waits(name, level, accelerator, at_level):
    settings = TROUBLED if level in ("O1", "O2") else ()
    expected = trained(EVERY_LOOP[name], at_level, level, settings)
    accelerator()
    seen, weights, summary, events = trained(EVERY_LOOP[name], at_level, level, settings)
    assert repr(seen) == repr(expected[0])  # NaN is NaN
    torch.testing.assert_close(weights, expected[1], rtol=0, atol=0, equal_nan=True)
    # a sample that was taken of a pass which turns out to have overflowed is made up for by a later one
    same = COUNTED if settings else (*COUNTED, "gradients")
    for part in same:
        assert repr(summary.get(part)) == repr(expected[2].get(part)), part
    assert repr(events) == repr(expected[3])


def steps_of(optimizer, *, clip=False, micro_batches=1, set_to_none=True):
    """Return a function that takes a training step and looks at nothing."""
    model = small_model(norm=True)
    own = optimizer(model.parameters())
    x, y = torch.ones(6, 4), torch.zeros(6, 2)

    def step():
        own.zero_grad(set_to_none=set_to_none)
        for _ in range(micro_batches):
            F.mse_loss(model(x), y).backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        own.step()

    return step


def fused_adam(parameters):
    return torch.optim.Adam(parameters, lr=1e-4, fused=True)


def fused_sgd(parameters):
    return torch.optim.SGD(parameters, lr=1e-4, momentum=0.9, fused=True)


def test_an_overflow_costs_no_wait(accelerator, at_level):
    device = accelerator()
    with at_level("O1", *TROUBLED) as recorded:
        run = usual()()
        next(run)
        for _ in run:
            pass
        overflows = recorded.summary["overflow_counts"]["backward_inf"]
        waits = device.waits
    assert overflows > 5
    assert waits == 0


def test_a_model_that_the_script_forgets_is_not_kept_for_what_is_on_its_way(accelerator, at_level):
    accelerator()
    with at_level("O1", "loss_scale.init=256") as recorded:
        model = small_model(norm=True)
        own = fused_adam(model.parameters())
        for x, y in batches(4):
            own.zero_grad()
            F.mse_loss(model(x), y).backward()
            own.step()
        gone = [weakref.ref(one) for one in (model, own, *model.parameters())]
        del model, own
        gc.collect()
        assert [one() for one in gone] == [None] * len(gone)
        recorded.session.catch_up()
        assert recorded.summary["steps"] == {"attempted": 4, "applied": 4, "skipped": 0}


class Operations(TorchDispatchMode):
    """Counts what is asked of a device, without what only looks at a tensor in another way."""

    def __init__(self):
        super().__init__()
        self.number = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.number += not func.is_view and func.namespace == "aten"
        return func(*args, **(kwargs or {}))


def operations_of_a_step(layers):
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(layers)))
    own = fused_adam(model.parameters())

    def step():
        own.zero_grad()
        model(torch.ones(2, 4)).square().mean().backward()
        own.step()

    for _ in range(20):
        step()
    with Operations() as operations:
        step()
    return operations.number


def test_what_is_asked_of_a_device_instead_does_not_grow_with_the_model(accelerator, at_level):
    settings = "loss_scale.init=256", "monitors.gradients=false"
    with at_level("O1", *settings):
        waiting = [operations_of_a_step(layers) for layers in (2, 20)]
    accelerator()
    with at_level("O1", *settings):
        ahead = [operations_of_a_step(layers) for layers in (2, 20)]
    more = [one - other for one, other in zip(ahead, waiting, strict=True)]
    assert 0 < more[0] == more[1] <= 24


def waits_of_ten_steps(device, **step):
    """Return how many numbers of a device ten steps waited for."""
    step = steps_of(**step)
    for _ in range(30):  # the search for the scale, too
        step()
    device.waits = 0
    with Reads() as reads:
        for _ in range(10):
            step()
    return device.waits + reads.number


@pytest.mark.parametrize(
    "step",
    [
        {"optimizer": fused_adam},
        {"optimizer": fused_sgd},
        {"optimizer": fused_adam, "clip": True},
        {"optimizer": fused_adam, "micro_batches": 3},
        {"optimizer": fused_adam, "set_to_none": False},
    ],
)
@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O1-bf16", "O2-bf16"])
def test_a_step_with_a_fused_optimizer_waits_for_nothing(level, step, accelerator, at_level):
    device = accelerator(1)
    with at_level(
        level, *(("loss_scale.init=256", "loss_scale.growth_interval=30") if level in ("O1", "O2") else ())
    ):
        assert waits_of_ten_steps(device, **step) == 0


@pytest.mark.parametrize(("level", "waits"), [("O0", False), ("O1", True), ("O2", True), ("O1-bf16", False)])
def test_a_step_with_another_optimizer_waits_where_it_may_be_skipped(level, waits, accelerator, at_level):
    device = accelerator(1)
    with at_level(level):
        found = waits_of_ten_steps(device, optimizer=lambda p: torch.optim.SGD(p, lr=1e-4))
    assert (found > 0) is waits


@pytest.mark.parametrize(
    ("settings", "waits"),
    [((), False), (("max_steps=1000",), False), (("abort_on=[consecutive_skips>50]",), True)],
)
def test_a_run_that_is_to_end_by_what_it_shows_waits(settings, waits, accelerator, at_level):
    device = accelerator(1)
    with at_level("O1", *settings):
        assert (waits_of_ten_steps(device, optimizer=fused_adam) > 0) is waits


def replicated(bad):
    """Return a loop that trains a replica, in a process group of this process alone, with or without a bad batch."""

    def train():
        distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
        try:
            model = small_model()
            yield model
            replica = nn.parallel.DistributedDataParallel(model)
            own = torch.optim.SGD(model.parameters(), lr=0.01)
            for number, (x, y) in enumerate(batches(20)):
                with replica.no_sync() if number % 3 else nullcontext():
                    F.mse_loss(replica(x), y * (math.nan if bad and number == 7 else 1)).backward()
                if number % 3 == 0:
                    own.step()
                    own.zero_grad()
        finally:
            distributed.destroy_process_group()

    return train


@pytest.mark.parametrize("bad", [False, True])
@pytest.mark.parametrize("level", ["O0", "O1", "O1-bf16", "O2-bf16"])
def test_a_replica_trains_as_one_that_waits_and_in_bf16_without_a_wait(level, bad, accelerator, at_level):
    expected = trained(replicated(bad), at_level, level, ())
    device = accelerator(1)
    _, weights, summary, events = trained(replicated(bad), at_level, level, ())
    torch.testing.assert_close(weights, expected[1], rtol=0, atol=0, equal_nan=True)
    assert repr(events) == repr(expected[3])
    for part in (*COUNTED, "shared_passes"):
        assert repr(summary.get(part)) == repr(expected[2].get(part)), part
    if level != "O1" and not bad:
        assert device.waits <= 2  # the last pass and step, when the run is over


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_threads_at_one_call_site_do_not_move_the_scale_of_a_pass_that_runs(level, accelerator, at_level):
    accelerator()
    one, other = small_model(), small_model()

    def true_gradients(model, inside=lambda: None):
        model.zero_grad()
        output = model(torch.ones(2, 4))
        output.register_hook(lambda grad: inside())
        output.sum().backward()
        return [parameter.grad for parameter in model.parameters()]

    def elsewhere():
        thread = threading.Thread(target=true_gradients, args=(other,))
        thread.start()
        thread.join()

    with at_level(level, "loss_scale.init=256", "loss_scale.growth_interval=1"):
        for model in (one, other):
            true_gradients(model)
        expected = [grad.clone() for grad in true_gradients(one)]
        torch.testing.assert_close(true_gradients(one, elsewhere), expected, rtol=0, atol=0)


def test_an_infinite_statistic_of_a_clean_pass_is_kept_as_where_it_is_waited_for(accelerator, at_level):
    def train():
        model = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 2))
        yield model
        own = fused_adam(model.parameters())
        for number, (x, y) in enumerate(batches(10)):
            own.zero_grad()
            F.mse_loss(model(x * (1e30 if number == 5 else 1)), y).backward()
            own.step()

    torch.manual_seed(0)
    _, expected, *_ = trained(train, at_level, "O1", ())
    accelerator(1)
    torch.manual_seed(0)
    _, weights, *_ = trained(train, at_level, "O1", ())
    torch.testing.assert_close(weights, expected, rtol=0, atol=0, equal_nan=True)


def test_a_run_that_collapses_is_ended_all_the_same(accelerator, at_level):
    accelerator(3)
    taken = []

    def train():
        model = small_model()
        own = fused_adam(model.parameters())
        for number in range(50):
            own.zero_grad()
            (model(torch.ones(2, 4)).sum() * math.nan).backward()
            own.step()
            taken.append(number)

    with at_level("O1", "collapse.action=stop", "collapse.after=5"), pytest.raises(CollapseError):
        train()
    assert len(taken) == pytest.approx(5, abs=3)


def test_what_is_on_its_way_is_in_the_last_record_and_not_in_an_earlier_one(accelerator, at_level):
    accelerator()
    with at_level("O1", "loss_scale.init=256") as recorded:
        step = steps_of(fused_adam)
        for _ in range(9):
            step()
        early = recorded.summary["backwards"]
        recorded.session.catch_up()
        assert early < recorded.summary["backwards"] == recorded.summary["steps"]["applied"] == 9


def test_a_device_that_has_failed_costs_its_last_verdicts_and_nothing_else(monkeypatch, at_level):
    def fetch(tensor):
        def arrived():
            raise RuntimeError("an illegal memory access was encountered")

        return arrived

    monkeypatch.setitem(DEVICES, "cpu", dataclasses.replace(DEVICES["cpu"], fetch=fetch))
    with at_level("O1-bf16") as recorded:
        step = steps_of(fused_adam)
        for _ in range(3):
            step()
        recorded.session.catch_up()
        assert recorded.summary["backwards"] < 3
    assert any("illegal memory access" in event.get("text", "") for event in recorded.events)
