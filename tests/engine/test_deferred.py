"""Passes whose verdict is on its way from an accelerator: the same training as where each is waited for, and no wait.

The accelerator is this CPU, which is made to look like one: a number that is asked for arrives when it has been looked
for so many times.
"""

import dataclasses
import math
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from mpx.engine.devices import DEVICES
from mpx.engine.judge import CollapseError
from tests.engine.test_costs import Reads

NEVER = 10**9


@pytest.fixture
def accelerator(monkeypatch):
    """Return a function that lets numbers arrive after so many looks; `waits` counts those that were waited for."""
    made = SimpleNamespace(waits=0)

    class Copy:
        def __init__(self, tensor, looks):
            self.tensor, self.looks = tensor.clone(), looks

        def ready(self):
            self.looks -= 1
            return self.looks < 0

        def numbers(self):
            made.waits += self.looks >= 0
            return self.tensor.tolist()

    def make(looks):
        row = dataclasses.replace(DEVICES["cpu"], fetch=lambda tensor: Copy(tensor, looks))
        monkeypatch.setitem(DEVICES, "cpu", row)
        return made

    return make


def small_model(*, norm=False):
    torch.manual_seed(0)
    layers = [nn.Linear(4, 8), nn.BatchNorm1d(8)] if norm else [nn.Linear(4, 8)]
    return nn.Sequential(*layers, nn.ReLU(), nn.Linear(8, 2))


def batches(number, size=6):
    generator = torch.Generator().manual_seed(1)
    for _ in range(number):
        yield torch.randn(size, 4, generator=generator), torch.randn(size, 2, generator=generator)


def usual(optimizer=lambda p: torch.optim.Adam(p, lr=0.01, fused=True), **options):
    def train():
        model = small_model(**options)
        yield model
        own = optimizer(model.parameters())
        for x, y in batches(30):
            own.zero_grad()
            loss = F.mse_loss(model(x), y)
            loss.backward()
            own.step()
            yield loss.item()

    return train


def clipped(clip):
    def train():
        model = small_model()
        yield model
        own = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
        for x, y in batches(30):
            own.zero_grad()
            F.mse_loss(model(x), y).backward()
            yield clip(list(model.parameters()))
            own.step()

    return train


def accumulated(*, set_to_none=True, steps=30, between=lambda model: None):
    def train():
        model = small_model()
        yield model
        own = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, fused=True)
        for number, (x, y) in enumerate(batches(steps)):
            F.mse_loss(model(x), y).backward()
            between(model)
            if number % 3 == 2:
                own.step()
                own.zero_grad(set_to_none=set_to_none)

    return train


def never_zeroed():
    model = small_model()
    yield model
    own = torch.optim.SGD(model.parameters(), lr=1e-4, fused=True)
    for x, y in batches(30):
        F.mse_loss(model(x), y).backward()
        own.step()


def two_players(set_to_none):
    def train():
        model = nn.ModuleList([small_model(), small_model()])
        yield model
        players = [torch.optim.Adam(part.parameters(), lr=0.01, fused=True) for part in model]
        for x, y in batches(30):
            players[0].zero_grad(set_to_none=set_to_none)
            F.mse_loss(model[0](x), y).backward()
            players[0].step()
            players[1].zero_grad(set_to_none=set_to_none)
            # also fills the gradients of the first player, which only its own `zero_grad` drops
            (100 * F.mse_loss(model[0](model[1](x).repeat(1, 2)), y)).backward()
            players[1].step()

    return train


def clipped_together():
    model = nn.ModuleList([small_model(), small_model()])
    yield model
    players = [torch.optim.SGD(part.parameters(), lr=0.01, fused=True) for part in model]
    for x, y in batches(30):
        model.zero_grad()
        F.mse_loss(model[0](x), y).backward()
        (1000 * F.mse_loss(model[1](x), y)).backward()
        yield nn.utils.clip_grad_norm_(model.parameters(), 1.0).item()
        for player in players:
            player.step()


def learnt_input():
    model = small_model()
    yield model
    own = torch.optim.Adam(model.parameters(), lr=0.01, fused=True)
    for x, y in batches(30):
        own.zero_grad()
        x.requires_grad_()
        F.mse_loss(model(x), y).backward()
        yield x.grad.sum().item()
        own.step()


def bad_batches():
    model = small_model(norm=True)
    yield model
    own = torch.optim.Adam(model.parameters(), lr=0.01, fused=True)
    for number, (x, y) in enumerate(batches(30)):
        own.zero_grad()
        if number % 10 == 7:
            x[0] = math.inf
        F.mse_loss(model(x), y).backward()
        own.step()
        if number % 5 == 4:
            model.eval()
            yield model(torch.ones(2, 4)).sum().item()
            model.train()


def with_a_scaler():
    model = small_model()
    yield model
    own = torch.optim.Adam(model.parameters(), lr=0.01, fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20)
    for number, (x, y) in enumerate(batches(30)):
        own.zero_grad()
        scaler.scale(F.mse_loss(model(x), y)).backward()
        scaler.step(own)
        scaler.update()
        if number % 4 == 0:
            yield scaler.get_scale()
    yield scaler.state_dict()["scale"]


def with_checkpoints():
    model = small_model()
    yield model
    own = torch.optim.Adam(model.parameters(), lr=0.01, fused=True)
    for number, (x, y) in enumerate(batches(30)):
        own.zero_grad()
        F.mse_loss(model(x), y).backward()
        own.step()
        if number % 7 == 6:
            state = own.state_dict()
            yield repr(state["mpx"]) if "mpx" in state else ""
            own.load_state_dict(state)


def with_hooks(*, waiting):
    def train():
        model = small_model()
        yield model
        seen = []
        model[0].weight.register_hook(lambda grad: seen.append(grad.sum().item()))
        if waiting:
            model[2].bias.register_post_accumulate_grad_hook(lambda leaf: seen.append(leaf.grad.sum().item()))
        model[2].register_full_backward_hook(lambda module, ins, outs: seen.append(outs[0].sum().item()))
        own = torch.optim.Adam(model.parameters(), lr=0.01, fused=True)
        for x, y in batches(30):
            own.zero_grad()
            F.mse_loss(model(x), y).backward()
            own.step()
        yield from seen

    return train


def replaced():
    model = small_model()
    yield model
    own = torch.optim.Adam(model.parameters(), lr=0.01, fused=True)
    for x, y in batches(30):
        own.zero_grad()
        F.mse_loss(model(x), y).backward()
        for parameter in model[0].parameters():
            parameter.grad = parameter.grad * 0.5
        own.step()


def dropped_by_hand():
    model = small_model()
    yield model
    own = torch.optim.Adam(model.parameters(), lr=0.01, fused=True)
    for x, y in batches(30):
        own.zero_grad(set_to_none=False)
        F.mse_loss(model(x), y).backward()
        if not all(parameter.grad.isfinite().all() for parameter in model.parameters()):
            own.zero_grad(set_to_none=False)
        own.step()


def penalised():
    model = small_model()
    yield model
    own = torch.optim.Adam(model.parameters(), lr=0.01, fused=True)
    for x, y in batches(12):
        own.zero_grad()
        x.requires_grad_()
        loss = F.mse_loss(model(x), y)
        (slope,) = torch.autograd.grad(loss, x, create_graph=True)
        (loss + slope.square().sum()).backward()
        own.step()
        yield loss.item()


def with_a_closure():
    model = small_model()
    yield model
    own = torch.optim.Adam(model.parameters(), lr=0.01, fused=True)
    for x, y in batches(30):

        def closure(x=x, y=y):
            own.zero_grad()
            loss = F.mse_loss(model(x), y)
            loss.backward()
            return loss

        yield own.step(closure).item()


def with_a_later_optimizer():
    model = small_model()
    yield model
    optimizers = [torch.optim.Adam(model[0].parameters(), lr=0.01, fused=True)]
    for number, (x, y) in enumerate(batches(30)):
        if number == 10:
            optimizers.append(torch.optim.RMSprop(model[2].parameters(), lr=0.01))
        model.zero_grad()
        F.mse_loss(model(x), y).backward()
        for optimizer in optimizers:
            optimizer.step()


def stepped_twice():
    model = small_model()
    yield model
    own = torch.optim.SGD(model.parameters(), lr=0.01, fused=True)
    for x, y in batches(30):
        own.zero_grad()
        F.mse_loss(model(x), y).backward()
        own.step()
        own.step()


def failing_pass():
    model = small_model()
    yield model
    own = torch.optim.Adam(model.parameters(), lr=0.01, fused=True)
    for number, (x, y) in enumerate(batches(30)):
        own.zero_grad()
        output = model(x)
        if number % 5 == 3:
            output.register_hook(lambda grad: 1 / 0)
        try:
            F.mse_loss(output, y).backward()
        except ZeroDivisionError:
            continue
        own.step()


def adagrad(parameters):
    return torch.optim.Adagrad(parameters, lr=0.01, fused=True)


SCRIPTS = {
    "Adam": usual(),
    "AdamW with amsgrad": usual(lambda p: torch.optim.AdamW(p, lr=0.01, amsgrad=True, fused=True)),
    "SGD": usual(lambda p: torch.optim.SGD(p, lr=0.01, fused=True)),
    "SGD with momentum": usual(
        lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, nesterov=True, fused=True)
    ),
    "Adagrad": usual(adagrad),
    "not fused": usual(lambda p: torch.optim.Adam(p, lr=0.01)),
    "BatchNorm": usual(norm=True),
    "clipped by norm": clipped(lambda p: nn.utils.clip_grad_norm_(p, 0.1).item()),
    "clipped by value": clipped(lambda p: nn.utils.clip_grad_value_(p, 0.01)),
    "accumulated": accumulated(),
    "accumulated and zeroed": accumulated(set_to_none=False),
    "accumulated and clipped": accumulated(
        between=lambda model: nn.utils.clip_grad_value_(model.parameters(), 0.01)
    ),
    "never zeroed": never_zeroed,
    "two players": two_players(set_to_none=True),
    "two players, zeroed": two_players(set_to_none=False),
    "clipped together": clipped_together,
    "learnt input": learnt_input,
    "bad batches": bad_batches,
    "GradScaler": with_a_scaler,
    "checkpoints": with_checkpoints,
    "hooks": with_hooks(waiting=False),
    "hooks that step": with_hooks(waiting=True),
    "replaced": replaced,
    "dropped by hand": dropped_by_hand,
    "gradient penalty": penalised,
    "closure": with_a_closure,
    "later optimizer": with_a_later_optimizer,
    "stepped twice": stepped_twice,
    "failing pass": failing_pass,
}
TROUBLED = (
    "loss_scale.init=2**24",
    "loss_scale.growth_interval=3",
)  # overflows at first, and again and again
COUNTED = (
    "scalers", "losses", "nonfinite_losses", "overflow_counts", "backwards", "steps", "optimizers", "longest_skip_run",
    "substitutions",
)  # fmt: skip


def trained(script, at_level, level, settings):
    """Return what a script saw, what became of its model, and what the record says."""
    with at_level(level, *settings) as recorded:
        run = script()
        model = next(run)
        seen = list(run)
        weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        recorded.session.catch_up()
        summary = recorded.summary
        events = [event for event in recorded.events if event["event"] != "snapshot"]
    return seen, weights, summary, events


@pytest.mark.parametrize("looks", [0, 1, 5, NEVER])
@pytest.mark.parametrize("level", ["O1", "O2", "O1-bf16", "O0"])
@pytest.mark.parametrize("name", SCRIPTS)
def test_the_training_is_that_of_one_that_waits(name, level, looks, accelerator, at_level):
    settings = TROUBLED if level in ("O1", "O2") else ()
    expected = trained(SCRIPTS[name], at_level, level, settings)
    accelerator(looks)
    seen, weights, summary, events = trained(SCRIPTS[name], at_level, level, settings)
    assert repr(seen) == repr(expected[0])  # NaN is NaN
    torch.testing.assert_close(weights, expected[1], rtol=0, atol=0, equal_nan=True)
    # a sample that was taken of a pass which turns out to have overflowed is not made up for
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


def test_an_overflow_costs_no_more_waits_than_there_are_overflows(accelerator, at_level):
    """Once it is known, the host looks at gradients that are left, as where it waits for each pass."""
    device = accelerator(1)
    with at_level("O1", *TROUBLED) as recorded:
        run = usual()()
        next(run)
        for _ in run:
            pass
        overflows = recorded.summary["overflow_counts"]["backward_inf"]
    assert 0 < device.waits <= 1 + overflows


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
    accelerator(NEVER)
    with at_level("O1", "loss_scale.init=256") as recorded:
        step = steps_of(fused_adam)
        for _ in range(9):
            step()
        early = recorded.summary["backwards"]
        recorded.session.catch_up()
        assert early < recorded.summary["backwards"] == recorded.summary["steps"]["applied"] == 9


def test_a_device_that_has_failed_costs_its_last_verdicts_and_nothing_else(monkeypatch, at_level):
    class Lost:
        def __init__(self, tensor):
            pass

        def ready(self):
            return False

        def numbers(self):
            raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setitem(DEVICES, "cpu", dataclasses.replace(DEVICES["cpu"], fetch=Lost))
    with at_level("O1-bf16") as recorded:
        step = steps_of(fused_adam)
        for _ in range(3):
            step()
        recorded.session.catch_up()
        assert recorded.summary["backwards"] < 3
    assert any("illegal memory access" in event.get("text", "") for event in recorded.events)
