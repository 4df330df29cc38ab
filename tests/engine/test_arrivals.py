"""What is fetched from an accelerator is gone on with in order, and never waited for unless somebody asks."""

import dataclasses

import pytest
import torch

from mpx.engine.arrivals import MOST_ON_THEIR_WAY, Arrivals
from mpx.engine.devices import DEVICES


@pytest.fixture
def arriving(monkeypatch):
    """Let numbers of the CPU arrive when a test says so; return the set of those that have."""
    here = set()

    class Copy:
        def __init__(self, tensor):
            self.values = tensor.tolist()

        def ready(self):
            return self.values[0] in here

        def numbers(self):
            return self.values

    monkeypatch.setitem(DEVICES, "cpu", dataclasses.replace(DEVICES["cpu"], fetch=Copy))
    return here


def add(arrivals, done, *names):
    for name in names:
        arrivals.add(torch.tensor([float(name)]), done.extend)


def test_what_follows_is_done_in_the_order_of_the_questions(arriving):
    arrivals, done = Arrivals(), []
    add(arrivals, done, 1, 2, 3)
    arriving.update({2, 3})
    arrivals.take()
    assert done == []
    arriving.add(1)
    arrivals.take()
    assert done == [1, 2, 3]
    assert not arrivals


def test_what_has_no_number_keeps_its_place(arriving):
    arrivals, done = Arrivals(), []
    arrivals.add(None, lambda _: done.append("at once"))
    add(arrivals, done, 1)
    arrivals.add(None, lambda _: done.append("after it"))
    assert done == ["at once"]
    arrivals.wait()
    assert done == ["at once", 1, "after it"]


def test_a_wait_inside_what_follows_does_not_run_ahead_of_it(arriving):
    arrivals, done = Arrivals(), []

    def first(numbers):
        arrivals.wait()
        arrivals.take()
        done.extend(numbers)

    arrivals.add(torch.tensor([1.0]), first)
    add(arrivals, done, 2)
    arrivals.wait()
    assert done == [1, 2]


def test_an_error_reaches_the_one_who_asks_and_leaves_the_rest(arriving):
    arrivals, done = Arrivals(), []
    arrivals.add(torch.tensor([1.0]), lambda _: 1 / 0)
    add(arrivals, done, 2)
    with pytest.raises(ZeroDivisionError):
        arrivals.wait()
    arrivals.wait()
    assert done == [2]


def test_a_host_that_is_far_ahead_waits_for_the_oldest(arriving):
    arrivals, done = Arrivals(), []
    add(arrivals, done, *range(MOST_ON_THEIR_WAY + 3))
    assert done == [0, 1, 2]


def test_numbers_of_a_device_that_nobody_waits_for_are_there_at_once():
    done = []
    Arrivals().add(torch.ones(2), done.extend)
    assert done == [1, 1]
