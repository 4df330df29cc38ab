"""Each overflow is an event with its place, up to a number; all are counted."""

import torch

from mpx.monitors import Overflows, Pass, Seen


def passed(monitor, number, kind, *, module=None, overflowed=(), value=2.0):
    finite = kind == "backward_inf"
    seen = Seen("train.py:1", 64.0, loss_finite=finite, overflowed=overflowed, number=value)
    one = Pass(number, number - 1, seen, kind, module)
    monitor.passed(one)
    if kind is not None:
        monitor.went_wrong(one)


def make():
    events = []
    monitor = Overflows(
        lambda leaves: ("net.0", f"net.0.weight of {len(leaves)}"), lambda name, **f: events.append((name, f))
    )
    return monitor, events


def test_a_clean_pass_is_no_event():
    monitor, events = make()
    passed(monitor, 1, None)
    assert events == []
    assert monitor.snapshot() == {"overflow_counts": {"loss_nan": 0, "forward_inf": 0, "backward_inf": 0}}


def test_an_event_says_when_where_and_at_what_scale():
    monitor, events = make()
    leaf = torch.ones(1, requires_grad=True)
    passed(monitor, 3, "backward_inf", overflowed=(leaf, leaf))
    passed(monitor, 4, "forward_inf", module="net.1", value=torch.inf)
    common = {"scale": 64.0, "site": "train.py:1"}
    assert events == [
        (
            "overflow",
            {
                **common,
                "backward": 3,
                "step": 2,
                "kind": "backward_inf",
                "module": "net.0",
                "parameter": "net.0.weight of 2",
                "value": 2.0,
            },
        ),
        (
            "overflow",
            {
                **common,
                "backward": 4,
                "step": 3,
                "kind": "forward_inf",
                "module": "net.1",
                "parameter": None,
                "value": torch.inf,
            },
        ),
    ]


def test_a_run_of_any_length_writes_a_bounded_number_of_events_and_counts_the_rest():
    monitor, events = make()
    for number in range(1, 1001):
        passed(monitor, number, "backward_inf" if number % 2 else "loss_nan", value=torch.nan)
    assert len(events) == 200
    assert monitor.snapshot()["overflow_counts"] == {"loss_nan": 500, "forward_inf": 0, "backward_inf": 500}
