"""Optimizers that evaluate closures, wrap others, are subclassed or step twice: each step is guarded, and is one."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

LEVELS = ("O1", "O2")
SCALE = "loss_scale.init=1024"


@pytest.fixture(params=LEVELS)
def level(request):
    return request.param


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))


def loss_of(model, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x, y = torch.randn(6, 8, generator=generator), torch.randint(4, (6,), generator=generator)
    return F.cross_entropy(model(x), y)


def weights(model):
    return [parameter.detach().clone() for parameter in model.parameters()]


def same(first, second):
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


class OverflowAt:
    """Makes the gradient of a parameter infinite at the given backward passes, counted from 0."""

    def __init__(self, parameter, *passes):
        self.passes, self.count = passes, -1
        parameter.register_hook(self.hook)

    def hook(self, grad):
        self.count += 1
        return grad * torch.inf if self.count in self.passes else grad


def closure_of(model, optimizer, seen=None):
    def closure():
        optimizer.zero_grad()
        loss = loss_of(model)
        loss.backward()
        if seen is not None:
            seen.append(loss.item())
        return loss

    return closure


OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "fused Adam": lambda p: torch.optim.Adam(p, lr=0.01, fused=True),
    "LBFGS": lambda p: torch.optim.LBFGS(p, lr=0.5, max_iter=4),
    "LBFGS with line search": lambda p: torch.optim.LBFGS(p, max_iter=4, line_search_fn="strong_wolfe"),
}


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_closure_that_overflows_is_evaluated_again_at_a_lower_scale(at_level, level, kind):
    """So nothing is lost: the run goes on as one in which it did not overflow. LBFGS goes on to small gradients, which
    round a little more at the lower scale."""
    results = {}
    for passes in ((), (0, 1, 3)):
        with at_level(level, SCALE) as recorded:
            model = network()
            optimizer = OPTIMIZERS[kind](model.parameters())
            OverflowAt(model[0].weight, *passes)
            losses = [optimizer.step(closure_of(model, optimizer)) for _ in range(3)]
            results[passes] = [loss.item() for loss in losses], weights(model)
            steps, (scaler,) = recorded.summary["steps"], recorded.summary["scalers"]
        assert steps == {"attempted": 3, "applied": 3, "skipped": 0}
        assert (scaler["overflows"], scaler["final"]) == (len(passes), 1024.0 / 2 ** len(passes))
    clean, mended = results.values()
    assert mended[0] == pytest.approx(clean[0], rel=1e-3)
    assert all(torch.allclose(a, b, atol=1e-3) for a, b in zip(clean[1], mended[1], strict=True))
    assert "LBFGS" in kind or same(clean[1], mended[1])


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_closure_that_goes_on_overflowing_skips_the_step(at_level, level, kind):
    """After moving nothing: also an optimizer that moves weights between evaluations puts them back."""
    with at_level(level, SCALE, "collapse.after=5") as recorded:
        model = network()
        optimizer = OPTIMIZERS[kind](model.parameters())
        OverflowAt(model[0].weight, *range(2, 100))
        optimizer.step(closure_of(model, optimizer))  # LBFGS moves, and overflows at a later evaluation
        optimizer.step(closure_of(model, optimizer))
        before = weights(model)
        evaluated = []
        assert optimizer.step(closure=closure_of(model, optimizer, evaluated)) is None
        assert same(before, weights(model))
        assert len(evaluated) == 6
        assert recorded.summary["steps"]["skipped"] == (3 if "LBFGS" in kind else 1)


def test_a_line_search_that_overflows_leaves_the_weights_where_they_were(at_level, level):
    with at_level(level, SCALE, "collapse.after=2"):
        model = network()
        optimizer = OPTIMIZERS["LBFGS"](model.parameters())
        OverflowAt(model[0].weight, *range(1, 100))
        before = weights(model)
        assert optimizer.step(closure_of(model, optimizer)) is None
        assert same(before, weights(model))


@pytest.mark.parametrize("mode", ["dynamic", "static"])
def test_a_closure_is_evaluated_once_where_a_lower_scale_would_not_help(at_level, level, mode):
    with at_level(level, f"loss_scale.mode={mode}", SCALE) as recorded:
        model = network()
        optimizer = OPTIMIZERS["SGD"](model.parameters())
        evaluated = []
        bad = torch.nan if mode == "dynamic" else 1.0
        OverflowAt(model[0].weight, *range(100 if mode == "static" else 0))

        def closure():
            optimizer.zero_grad()
            loss = loss_of(model) * bad
            loss.backward()
            evaluated.append(loss)
            return loss

        before = weights(model)
        optimizer.step(closure)
        assert len(evaluated) == 1
        assert same(before, weights(model))
        assert recorded.summary["steps"]["skipped"] == 1


def test_an_optimizer_that_steps_inside_a_closure_is_guarded_by_itself(at_level, level):
    with at_level(level, SCALE) as recorded:
        one, two = network(), network()
        outer = OPTIMIZERS["SGD"](one.parameters())
        inner = OPTIMIZERS["Adam"](two.parameters())
        OverflowAt(two[0].weight, 0)
        before = weights(two)

        def closure():
            loss = loss_of(one) + loss_of(two)
            loss.backward()
            inner.step()
            return loss

        outer.step(closure)
        assert same(before, weights(two))
        rows = {row["name"]: row for row in recorded.summary["optimizers"]}
    assert (rows["Adam"]["skipped"], rows["SGD"]["applied"]) == (1, 1)


class Decayed(torch.optim.SGD):
    """Does something of its own around its base's step."""

    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data.mul_(0.99)
        return super().step(closure)


class Lookahead(torch.optim.Optimizer):
    """Shares the groups of the optimizer that it wraps."""

    def __init__(self, base):
        super().__init__(base.param_groups, {})
        self.base = base
        self.param_groups = base.param_groups

    def step(self, closure=None):
        return self.base.step(closure)


class Accelerated(torch.optim.Optimizer):
    """Wraps without initialising its base class, as trainers do."""

    def __init__(self, base):
        self.base = base

    @property
    def param_groups(self):
        return self.base.param_groups

    def zero_grad(self):
        self.base.zero_grad()

    def step(self, closure=None):
        self.base.step(closure)


WRAPPED = {
    "a subclass that calls super().step()": lambda p: Decayed(p, lr=0.1),
    "a wrapper that shares the groups": lambda p: Lookahead(torch.optim.SGD(p, lr=0.1)),
    "a wrapper without super().__init__()": lambda p: Accelerated(torch.optim.SGD(p, lr=0.1)),
}


@pytest.mark.parametrize("kind", WRAPPED)
def test_one_step_is_one_step_however_many_classes_take_part(at_level, level, kind):
    with at_level(level, SCALE) as recorded:
        model = network()
        optimizer = WRAPPED[kind](model.parameters())
        OverflowAt(model[0].weight, 1)
        moved = []
        for step in range(3):
            optimizer.zero_grad()
            loss_of(model, step).backward()
            before = weights(model)
            optimizer.step()
            moved.append(not same(before, weights(model)))
        assert recorded.summary["steps"] == {"attempted": 3, "applied": 2, "skipped": 1}
    assert moved == [True, False, True]


class SAM(torch.optim.Optimizer):
    """Sharpness-aware minimization: up to a worse point, and down from its gradient."""

    def __init__(self, params, lr, rho=0.05):
        super().__init__(params, {"lr": lr, "rho": rho})
        self.base = torch.optim.SGD(self.param_groups, lr=lr)
        self.param_groups = self.base.param_groups

    @torch.no_grad()
    def first_step(self):
        parameters = [p for group in self.param_groups for p in group["params"]]
        norm = torch.stack([p.grad.norm() for p in parameters]).norm()
        for parameter in parameters:
            self.state[parameter]["away"] = away = 0.05 * parameter.grad / (norm + 1e-12)
            parameter.add_(away)
        self.zero_grad()

    @torch.no_grad()
    def second_step(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.sub_(self.state[parameter]["away"])
        self.base.step()
        self.zero_grad()

    @torch.no_grad()
    def step(self, closure):
        self.first_step()
        torch.enable_grad()(closure)()
        self.second_step()


@pytest.mark.parametrize("bad", [(), (2,), (3,), (2, 3)], ids=["clean", "first", "second", "both"])
def test_two_passes_a_step_keep_the_weights_finite(at_level, level, bad):
    """An overflow in the first pass leaves that step without its detour; one in the second skips it."""
    with at_level(level, SCALE) as recorded:
        model = network()
        optimizer = SAM(model.parameters(), lr=0.1)
        OverflowAt(model[0].weight, *bad)
        for step in range(3):
            before = weights(model)
            loss_of(model, step).backward()
            optimizer.first_step()
            loss_of(model, step).backward()
            optimizer.second_step()
            if step == 1 and 3 in bad:
                for now, then in zip(model.parameters(), before, strict=True):
                    torch.testing.assert_close(now.detach(), then)
        assert all(bool(torch.isfinite(parameter).all()) for parameter in model.parameters())
        assert recorded.summary["steps"] == {
            "attempted": 3,
            "applied": 3 - (3 in bad),
            "skipped": int(3 in bad),
        }


@pytest.mark.parametrize("clean", [0, 1], ids=["at its first step", "at a later one"])
def test_two_passes_in_one_step_with_a_closure_put_the_weights_back(at_level, level, clean):
    with at_level(level, SCALE, "collapse.after=2") as recorded:
        model = network()
        optimizer = SAM(model.parameters(), lr=0.1)
        OverflowAt(model[0].weight, *range(1 + 2 * clean, 100))

        def closure():
            loss = loss_of(model)
            loss.backward()
            return loss

        for _ in range(clean):
            closure()
            optimizer.step(closure)
        closure()
        before = weights(model)
        optimizer.step(closure)
        assert same(before, weights(model))
        assert recorded.summary["steps"] == {"attempted": 1 + clean, "applied": clean, "skipped": 1}
