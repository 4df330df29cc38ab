"""Monitors are told what they listen to; a fault of one costs that one."""

from __future__ import annotations

from contextlib import contextmanager
from typing import Any

import pytest

from mpx.engine.audience import Audience
from mpx.monitors import Monitor


class Listener(Monitor):
    def __init__(self) -> None:
        self.heard: list[Any] = []

    def passed(self, one: Any) -> None:
        self.heard.append(one)

    def snapshot(self) -> dict[str, Any]:
        return {"heard": len(self.heard)}


class Broken(Listener):
    def passed(self, one: Any) -> None:
        raise ValueError("broken")

    def snapshot(self) -> dict[str, Any]:
        return {"broken": True}


def test_a_monitor_that_raises_is_off_and_the_others_go_on() -> None:
    failures: list[tuple[Monitor, Exception]] = []
    first, broken, last = Listener(), Broken(), Listener()
    audience = Audience([first, broken, last], lambda monitor, error: failures.append((monitor, error)))
    audience.tell("passed", 1)  # type: ignore[arg-type]
    audience.tell("passed", 2)  # type: ignore[arg-type]
    assert first.heard == last.heard == [1, 2]
    assert [monitor for monitor, _ in failures] == [broken]
    assert audience.snapshot() == {"heard": 2}


@pytest.mark.parametrize("count", [0, 1, 3])
def test_contexts_are_entered_and_left_around_a_call(count: int) -> None:
    entered: list[str] = []

    class Around(Monitor):
        @contextmanager
        def around(self, root: Any) -> Any:  # type: ignore[override]
            entered.append("in")
            yield
            entered.append("out")

    audience = Audience([Around() for _ in range(count)], lambda monitor, error: None)
    with audience.around(None):  # type: ignore[arg-type]
        assert entered == ["in"] * count
    assert entered == ["in"] * count + ["out"] * count
