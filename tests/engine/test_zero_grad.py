"""`Optimizer.zero_grad` leaves out the mark for profilers where none runs, and does all else that torch's does."""

import pytest
import torch
from torch import nn
from torch.autograd import profiler

from tests.engine.updates import give_gradients, parameters

LEVELS = ["O0", "O1", "O2", "O3"]


@pytest.mark.parametrize("level", LEVELS)
def test_gradients_are_none_afterwards(level, at_level):
    with at_level(level):
        trained = parameters()
        optimizer = torch.optim.SGD([{"params": trained[:2]}, {"params": trained[2:]}], lr=0.1)
        give_gradients(trained[1:], 0)
        optimizer.zero_grad()
        assert [parameter.grad for parameter in trained] == [None] * len(trained)
        optimizer.zero_grad(set_to_none=True)


@pytest.mark.parametrize("falsy", [False, 0])
def test_gradients_that_are_to_stay_are_zeroed_in_place(falsy, at_level):
    with at_level("O1"):
        trained = parameters()
        give_gradients(trained, 0)
        grads = [parameter.grad for parameter in trained]
        torch.optim.Adam(trained).zero_grad(falsy)
        assert all(parameter.grad is grad for parameter, grad in zip(trained, grads, strict=True))
        assert not any(grad.count_nonzero() for grad in grads)


def test_a_profiler_sees_it(at_level):
    with at_level("O1"):
        optimizer = torch.optim.Adam(parameters())
        with profiler.profile() as profile:
            optimizer.zero_grad()
    assert "Optimizer.zero_grad#Adam.zero_grad" in {event.name for event in profile.function_events}


@pytest.mark.parametrize("level", LEVELS)
def test_without_a_profiler_there_is_no_mark(level, at_level, monkeypatch):
    marks = []
    monkeypatch.setattr(profiler, "record_function", lambda name: marks.append(name) or pytest.fail("marked"))
    with at_level(level):
        trained = parameters()
        optimizer = torch.optim.SGD(trained, lr=0.1)
        give_gradients(trained, 0)
        optimizer.zero_grad()
    assert not marks


class Counting(torch.optim.SGD):
    """Adds to what torch does."""

    def __init__(self, params):
        super().__init__(params, lr=0.1)
        self.zeroed = 0

    def zero_grad(self, **options):
        self.zeroed += 1
        super().zero_grad(**options)


def test_a_class_may_add_to_it(at_level):
    with at_level("O1"):
        trained = parameters()
        optimizer = Counting(trained)
        give_gradients(trained, 0)
        optimizer.zero_grad()
        assert optimizer.zeroed == 1
        assert all(parameter.grad is None for parameter in trained)


class Unprepared(torch.optim.Optimizer):
    """Never calls the `__init__` of torch."""

    def __init__(self, params):
        self.param_groups, self.defaults = [{"params": params}], {}


def test_an_optimizer_that_torch_has_not_prepared_is_prepared_by_it(at_level):
    with at_level("O1"):
        optimizer = Unprepared([nn.Parameter(torch.ones(2))])
        optimizer.zero_grad()
        assert optimizer._zero_grad_profile_name == "Optimizer.zero_grad#Unprepared.zero_grad"


def test_it_is_torchs_again_after_the_session(at_level):
    before = torch.optim.Optimizer.__dict__["zero_grad"]
    with at_level("O1"):
        assert torch.optim.Optimizer.zero_grad is not before
        assert torch.optim.Optimizer.zero_grad.__doc__ == before.__doc__
    assert torch.optim.Optimizer.zero_grad is before
