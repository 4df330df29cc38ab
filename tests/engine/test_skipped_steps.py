"""An overflow skips the steps of those optimizers whose gradients it reached, once, and leaves no other trace."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

LEVELS = ("O1", "O2")
SCALE = "loss_scale.init=1024"
ZEROED = "zeroed-gradients"  # how the report learns of it


class Overflow:
    """Turns gradients into infinity when told to: register `overflow.hook` on a tensor."""

    def __init__(self):
        self.now = False

    def hook(self, grad):
        return grad * torch.inf if self.now else grad


@pytest.fixture
def overflow():
    return Overflow()


@pytest.fixture(params=LEVELS)
def level(request):
    return request.param


def network(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


def batch(seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(6, 8, generator=generator), torch.randint(4, (6,), generator=generator)


def loss_of(model, seed=0):
    x, y = batch(seed)
    return F.cross_entropy(model(x), y)


def weights(*models):
    return [parameter.detach().clone() for model in models for parameter in model.parameters()]


def same(first, second):
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def finite(tensors):
    return all(bool(torch.isfinite(tensor).all()) for tensor in tensors)


def test_only_the_optimizer_that_the_infinity_reached_skips(at_level, level, overflow):
    """And everything later is as if that step had been left out of the script."""

    def train(*, injected):
        one, two = network(1), network(2)
        two[0].weight.register_hook(overflow.hook)
        optimizers = [
            torch.optim.Adam(one.parameters()),
            torch.optim.SGD(two.parameters(), lr=0.1, momentum=0.9),
        ]
        for step in range(6):
            overflow.now = injected and step == 2
            for optimizer in optimizers:
                optimizer.zero_grad()
            (loss_of(one, step) + loss_of(two, step)).backward()
            optimizers[0].step()
            if injected or step != 2:
                optimizers[1].step()
        return weights(one, two)

    with at_level(level, SCALE) as recorded:
        found = train(injected=True)
        steps = {row["name"]: row for row in recorded.summary["optimizers"]}
    with at_level(level, SCALE):
        expected = train(injected=False)
    assert steps["Adam"] == {"name": "Adam", "attempted": 6, "applied": 6, "skipped": 0}
    assert steps["SGD"] == {"name": "SGD", "attempted": 6, "applied": 5, "skipped": 1}
    assert same(found, expected)
    (event,) = recorded.of("overflow")
    assert (event["backward"], event["kind"], event["scale"]) == (3, "backward_inf", 1024.0)


def test_what_a_script_mixes_with_an_infinity_is_not_applied(at_level, level, overflow):
    """One mean of all gradients, taken from each: what the infinity did not reach by itself is infinite as well."""
    with at_level(level, SCALE) as recorded:
        first, second = network(), network(seed=1)
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (first, second)]
        parameters = [*first.parameters(), *second.parameters()]
        first[0].weight.register_hook(overflow.hook)
        for overflow.now in (False, True, False):
            before = weights(first, second)
            for optimizer in optimizers:
                optimizer.zero_grad()
            (loss_of(first) + loss_of(second)).backward()
            mean = torch.cat([p.grad.flatten() for p in parameters]).mean()
            for p in parameters:
                p.grad.sub_(mean)
            for optimizer in optimizers:
                optimizer.step()
            assert same(before, weights(first, second)) == overflow.now
        assert finite(parameters)
        assert recorded.summary["steps"]["skipped"] == 2


def test_a_scale_that_is_too_large_falls_until_it_fits(at_level, level):
    model = network()
    with at_level(level) as recorded:  # 2^16
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(8):
            optimizer.zero_grad()
            (10 * loss_of(model, step)).backward()
            optimizer.step()
            assert finite(weights(model))
        (scaler,) = recorded.summary["scalers"]
        steps = recorded.summary["steps"]
    assert 0 < steps["skipped"] == scaler["overflows"] == scaler["backoffs"] < 8
    assert scaler["final"] == 2.0**16 / 2 ** scaler["backoffs"]


def test_stray_gradients_of_a_generator_do_not_skip_its_critic(at_level, level, overflow):
    generator, critic = network(1), nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    skipped = []
    with at_level(level, SCALE) as recorded:
        optimizers = {
            "G": torch.optim.Adam(generator.parameters()),
            "D": torch.optim.SGD(critic.parameters(), lr=0.1),
        }
        for step in range(4):
            noise, real = torch.randn(6, 8), torch.randn(6, 4)
            optimizers["D"].zero_grad()
            F.softplus(-critic(real)).mean().backward()
            fake = generator(noise)
            F.softplus(critic(fake.detach())).mean().backward()
            before = weights(critic)
            optimizers["D"].step()
            skipped.append(("D", same(before, weights(critic))))
            optimizers["G"].zero_grad()
            score = critic(fake)
            overflow.now = step in {1, 2}
            score.register_hook(overflow.hook)  # reaches all of D and G
            F.softplus(-score).mean().backward()
            before = weights(generator)
            optimizers["G"].step()
            skipped.append(("G", same(before, weights(generator))))
        assert len(recorded.summary["scalers"]) == 3
        scales = [scaler["final"] for scaler in recorded.summary["scalers"]]
    assert [name for name, was in skipped if was] == ["G", "G"]
    assert scales == [1024.0, 1024.0, 256.0]


def test_a_step_that_is_tried_again_is_skipped_again(at_level, level, overflow):
    model = network()
    model[0].weight.register_hook(overflow.hook)
    with at_level(level, SCALE) as recorded:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        overflow.now = True
        loss_of(model).backward()
        optimizer.step()
        optimizer.step()
        assert recorded.summary["steps"]["skipped"] == 2


def test_a_parameter_of_two_optimizers_skips_both(at_level, level, overflow):
    model = network()
    model[0].weight.register_hook(overflow.hook)
    with at_level(level, SCALE) as recorded:
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.1), torch.optim.Adam(model[0].parameters())]
        overflow.now = True
        loss_of(model).backward()
        for optimizer in optimizers:
            optimizer.step()
        assert recorded.summary["steps"]["skipped"] == 2


def test_an_update_by_hand_takes_no_infinity_into_the_weights_and_is_told(at_level, level, overflow):
    model = network()
    model[0].weight.register_hook(overflow.hook)
    with at_level(level, SCALE) as recorded:
        overflow.now = True
        loss_of(model).backward()
        before = weights(model)
        for parameter in model.parameters():
            parameter.data.add_(parameter.grad, alpha=-0.1)
        (told,) = (row for row in recorded.summary["substitutions"] if row["id"] == ZEROED)
        assert told["count"] == 1
    moved = [not torch.equal(a, b) for a, b in zip(before, weights(model), strict=True)]
    assert moved == [False] * 4  # the update leaves itself out, as an optimizer's would be
    assert finite(weights(model))


def test_a_script_that_looks_for_infinities_finds_them_in_what_an_optimizer_steps(at_level, level, overflow):
    model = network()
    model[0].weight.register_hook(overflow.hook)
    with at_level(level, SCALE) as recorded:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        overflow.now = True
        loss_of(model).backward()
        assert not torch.isfinite(torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]))
        assert not any(row["id"] == ZEROED for row in recorded.summary["substitutions"])
        del optimizer


def test_a_scheduler_is_not_told_off(at_level, level, overflow):
    """It knows that `step` was called, and says nothing of an order that the script kept."""
    model = network()
    model[0].weight.register_hook(overflow.hook)
    with at_level(level, SCALE) as recorded, warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
        for step in range(3):
            overflow.now = step == 0
            optimizer.zero_grad()
            loss_of(model, step).backward()
            optimizer.step()
            scheduler.step()
        assert recorded.summary["steps"]["skipped"] == 1
    assert scheduler.get_last_lr() == [0.1 / 8]


def test_step_hooks_fire_for_applied_steps_only(at_level, level, overflow):
    model = network()
    model[0].weight.register_hook(overflow.hook)
    fired = []
    with at_level(level, SCALE):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer.register_step_pre_hook(lambda *_: fired.append("before"))
        optimizer.register_step_post_hook(lambda *_: fired.append("after"))
        for step in range(3):
            overflow.now = step == 1
            optimizer.zero_grad()
            loss_of(model, step).backward()
            optimizer.step()
    assert fired == ["before", "after"] * 2


def test_a_step_without_any_gradient_is_no_step(at_level, level):
    model = network()
    with at_level(level) as recorded:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        assert optimizer.step() is None
        assert recorded.summary["steps"]["attempted"] == 0
