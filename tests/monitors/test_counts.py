"""Calls, passes, steps, time and memory: counted right, and in a bounded space."""

import itertools

import pytest
import torch

from mpx.monitors import Pass, PeakMemory, Progress, Seen, Step, Throughput, throughput

ONE_PASS = Pass(1, 0, Seen("train.py:1", 1.0, loss_finite=True), None)


def sgd():
    return torch.optim.SGD([torch.zeros(1)], lr=0.1)


def test_steps_are_counted_for_each_optimizer_and_in_total():
    monitor = Progress()
    one, two, other = sgd(), sgd(), torch.optim.Adam([torch.zeros(1)])
    for optimizer, skipped in [(one, False), (one, True), (two, True), (other, False), (one, False)]:
        monitor.asked_to_step(optimizer)
        monitor.stepped(Step(skipped=skipped))
    monitor.called(torch.nn.ReLU())
    monitor.passed(ONE_PASS)
    assert monitor.snapshot() == {
        "forwards": 1,
        "backwards": 1,
        "steps": {"attempted": 5, "applied": 3, "skipped": 2},
        "optimizers": [
            {"name": "SGD", "attempted": 3, "applied": 2, "skipped": 1},
            {"name": "SGD 2", "attempted": 1, "applied": 0, "skipped": 1},
            {"name": "Adam", "attempted": 1, "applied": 1, "skipped": 0},
        ],
        "longest_skip_run": 2,
    }
    assert monitor.attempted == 5


def test_an_optimizer_for_every_epoch_does_not_grow_the_record_without_end():
    monitor = Progress()
    for _ in range(100):
        monitor.asked_to_step(sgd())
        monitor.stepped(Step(skipped=False))
    snapshot = monitor.snapshot()
    assert len(snapshot["optimizers"]) == 8
    assert snapshot["steps"]["attempted"] == 100


def test_an_optimizer_is_not_kept_alive():
    import gc
    import weakref

    monitor, optimizer = Progress(), sgd()
    monitor.asked_to_step(optimizer)
    monitor.stepped(Step(skipped=False))
    gone = weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert gone() is None
    assert monitor.snapshot()["steps"]["attempted"] == 1


@pytest.fixture
def clock(monkeypatch):
    """Time that goes on by what a test says."""

    class Clock:
        now = 100.0

        def perf_counter(self):
            return self.now

    clock = Clock()
    monkeypatch.setattr(throughput, "time", clock)
    return clock


def test_time_is_from_step_to_step_without_the_first_ones(clock):
    monitor = Throughput(8)
    for took in [9.0, 9.0, 0.1, 0.1, 0.1, 0.1, 0.6]:
        clock.now += took
        monitor.asked_to_step(sgd())
    measured = monitor.snapshot()["throughput"]
    assert measured["steps_per_s"] == pytest.approx(5.0)
    assert measured["step_ms"]["median"] == pytest.approx(100.0)
    assert measured["step_ms"]["p95"] == pytest.approx(600.0)
    assert [step for step, _ in measured["history"]] == [3, 4, 5, 6, 7]


def test_nothing_is_said_of_a_run_too_short_to_tell(clock):
    monitor = Throughput(8)
    for _ in range(2):
        monitor.asked_to_step(sgd())
    assert monitor.snapshot() == {"throughput": None}


def test_time_is_kept_in_a_bounded_space(clock):
    monitor = Throughput(8)
    optimizer = sgd()
    for _ in range(5000):
        clock.now += 0.5
        monitor.asked_to_step(optimizer)
    measured = monitor.snapshot()["throughput"]
    assert measured["steps_per_s"] == pytest.approx(2.0)
    assert len(measured["history"]) <= 8


def test_memory_is_asked_for_when_a_snapshot_is_due():
    asked = itertools.count(1)
    monitor = PeakMemory(8, lambda: ("cpu", 1000 * next(asked)))
    step = Step(skipped=False)
    for _ in range(3):
        monitor.stepped(step)
        monitor.stepped(step)
        last = monitor.snapshot()
    assert last == {
        "memory": {"peak_bytes": 3000, "device": "cpu", "history": [[2, 1000], [4, 2000], [6, 3000]]}
    }


def test_memory_of_this_process_is_a_plausible_number(at_level):
    with at_level("O0") as recorded:
        memory = recorded.summary["memory"]
    assert 50e6 < memory["peak_bytes"] < 1e12
