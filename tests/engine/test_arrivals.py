"""What is fetched from an accelerator is gone on with in order, and never waited for unless somebody asks."""

import dataclasses
import threading

import pytest
import torch

from mpx.engine.arrivals import MOST_ON_THEIR_WAY, Arrivals
from mpx.engine.devices import DEVICES


@pytest.fixture
def arriving(monkeypatch):
    """Let numbers of the CPU be fetched; return the list of those that somebody has asked for."""
    asked = []

    def fetch(tensor):
        values = tensor.tolist()
        return lambda: asked.extend(values) or values

    monkeypatch.setitem(DEVICES, "cpu", dataclasses.replace(DEVICES["cpu"], fetch=fetch))
    return asked


def add(arrivals, done, *names):
    for name in names:
        arrivals.add(torch.tensor([float(name)]), done.extend)


def test_what_follows_is_done_two_passes_later_in_the_order_of_the_questions(arriving):
    arrivals, done = Arrivals(), []
    seen = []
    for number in range(5):
        arrivals.begin_pass()
        seen.append(list(done))
        add(arrivals, done, number, number + 0.5)
    assert seen == [[], [], [0, 0.5], [0, 0.5, 1, 1.5], [0, 0.5, 1, 1.5, 2, 2.5]]
    assert arriving == done


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
        arrivals.begin_pass()
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


def test_what_is_asked_for_without_a_pass_does_not_grow_without_end(arriving):
    arrivals, done = Arrivals(), []
    add(arrivals, done, *range(MOST_ON_THEIR_WAY + 3))
    assert done == list(range(MOST_ON_THEIR_WAY + 1))


def test_numbers_of_a_device_that_nobody_waits_for_are_there_at_once():
    done = []
    Arrivals().add(torch.ones(2), done.extend)
    assert done == [1, 1]


def test_a_thread_waits_for_what_another_has_begun_to_go_on_with():
    arrivals, done = Arrivals(), []
    begun, goes_on = threading.Event(), threading.Event()

    def fetch(tensor):
        def arrived():
            begun.set()
            goes_on.wait(10)
            return tensor.tolist()

        return arrived

    def other():
        begun.wait(10)
        arrivals.begin_pass()
        arrivals.wait()
        done.append("after it")

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(DEVICES, "cpu", dataclasses.replace(DEVICES["cpu"], fetch=fetch))
        add(arrivals, done, 1)
    threads = [threading.Thread(target=target) for target in (arrivals.wait, other)]
    for thread in threads:
        thread.start()
    begun.wait(10)
    threads[1].join(0.2)
    goes_on.set()
    for thread in threads:
        thread.join(10)
    assert done == [1.0, "after it"]
