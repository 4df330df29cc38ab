"""When a process ends its script: the counts that it asks, without a process."""

from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest

from mpx.engine.budget import ABORTED, Budget
from mpx.presets import Override, resolve


@dataclass
class Seen:
    loss_finite: bool = True
    number: float | None = None


@dataclass
class Pass:
    kind: str | None = None
    seen: Seen = field(default_factory=Seen)


@dataclass
class Step:
    skipped: bool = False


class Scales:
    in_force = True
    latest = SimpleNamespace(scale=65536.0)


@pytest.fixture
def budget(tmp_path):
    """Return a maker of budgets, with the events that the last one wrote as `events`."""

    def make(*abort_on, max_steps=0, scales=None):
        asked = [Override("abort_on", list(abort_on)), Override("max_steps", max_steps)]
        policy = resolve("O1", overrides=asked, cwd=tmp_path).policy
        make.events = []
        return Budget(
            policy,
            scales or Scales(),
            emit=lambda event, **fields: make.events.append({"event": event, **fields}),
            peak_bytes=lambda: 3 * 2**30,
        )

    return make


def train(budget, *steps):
    """Take steps: `.` is applied, `s` skipped for an overflow, `n` for its loss. Return how many, and the exit code."""
    kinds = {"s": "backward_inf", "n": "loss_nan"}
    number = 0
    try:
        for step in "".join(steps):
            number += 1
            budget.passed(Pass(kinds.get(step)))
            budget.stepped(Step(skipped=step != "."))
    except SystemExit as end:
        return number, end.code
    return None


@pytest.mark.parametrize(
    ("gate", "history", "ends"),
    [
        ("overflow_rate>50%", "s.ss..", 1),
        ("overflow_rate>50% after 2", "ss..s.ss", None),
        ("overflow_rate>50% after 2", "..sss", 3),
        ("skipped_steps>2", ".s.s.s.", 6),
        ("skipped_steps>1 after 3", "sss.s.s", 7),
        ("consecutive_skips>=3", "ss.ss.sss", 9),
        ("nonfinite_loss", "..n", 3),
        ("nonfinite_loss after 4", "n...n", 5),
        ("steps>=4", ".....", 4),
        ("peak_memory>2GiB", ".", 1),
        ("peak_memory>4GiB", "....", None),
        ("scale_floor", "....", None),
    ],
)
def test_ends_in_the_pass_or_step_in_which_it_becomes_true(budget, gate, history, ends):
    ended = train(budget(gate), history)
    assert ended == (None if ends is None else (ends, ABORTED))


def test_the_floor_is_that_of_the_preset(budget):
    scales = Scales()
    scales.latest = SimpleNamespace(scale=2.0**-14)
    assert train(budget("scale_floor", scales=scales), ".") == (1, ABORTED)


def test_the_loss_is_that_of_the_last_pass(budget):
    one = budget("final_loss>10")
    one.passed(Pass(seen=Seen(number=9.0)))
    one.passed(Pass(seen=Seen()))  # several roots
    with pytest.raises(SystemExit):
        one.passed(Pass(seen=Seen(number=11.0)))


def test_a_loss_that_is_no_number_is_within_no_bound(budget):
    with pytest.raises(SystemExit):
        budget("final_loss>10").passed(Pass("loss_nan", Seen(loss_finite=False)))


def test_a_budget_ends_after_its_last_step_and_again_at_every_later_one(budget, capsys):
    one = budget(max_steps=3)
    assert train(one, ".s.....") == (3, 0)
    assert train(one, ".") == (1, 0)
    assert [event["reason"] for event in budget.events] == ["max-steps"]
    assert capsys.readouterr().err.count("step budget reached") == 1


@pytest.mark.parametrize(
    ("gates", "most", "asks"), [((), 0, False), ((), 3, False), (("skipped_steps>2",), 0, True)]
)
def test_verdicts_are_wanted_at_once_only_where_an_expression_is_to_end_the_script(budget, gates, most, asks):
    """A number of steps is known without them: an accelerator need not be waited for."""
    assert budget(*gates, max_steps=most).asks is asks


def test_a_budget_counts_steps_of_which_nobody_knows_yet_whether_they_are_applied(budget):
    one = budget(max_steps=2)
    one.attempted()
    with pytest.raises(SystemExit):
        one.attempted()
    assert budget.events[0]["step"] == 2


def test_without_limits_nothing_is_counted(budget):
    assert train(budget(), "." * 100 + "n" * 100) is None
