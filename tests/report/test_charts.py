"""The charts: axes that hold their values, and a chart for everything that a record has a history of."""

import math
import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpx.record import RunRecord
from mpx.record.fold import fold
from mpx.record.parts import (
    Exponents,
    Gradients,
    LossCurve,
    Memory,
    Overflow,
    Scaler,
    Steps,
    Throughput,
    Underflow,
)
from mpx.record.shards import read_shard
from mpx.report.charts import charts, draw
from mpx.report.charts.axes import KINDS, counted
from mpx.report.charts.draw import HEIGHT, MARKS, WIDTH
from mpx.report.charts.plot import pairs

EVENTS = Path(__file__).parent.parent / "golden" / "events"
SIZES = st.floats(1e-30, 1e30) | st.integers(1, 2**50).map(float)


def record_of(run: str) -> RunRecord:
    return fold(read_shard(EVENTS / f"{run}.jsonl"))


def the(record: RunRecord, name: str):
    (chart,) = (chart for chart in charts(record) if chart.id == name)
    return chart


@pytest.mark.parametrize("kind", sorted(set(KINDS) - {"rows"}))
@given(values=st.lists(SIZES, max_size=20))
def test_an_axis_holds_its_values_and_its_ticks_rise(kind, values):
    scale = KINDS[kind](values)
    assert all(-1e-6 <= scale.at(value) <= 1 + 1e-6 for value in [*values, *scale.ticks])
    assert all(low < high for low, high in pairwise(scale.ticks))
    assert 1 <= len(scale.ticks) <= 10


@given(st.floats(-1e3, 1e3), st.floats(0, 1e12))
def test_what_is_counted_has_whole_ticks_within_the_axis(begin, size):
    scale = counted(begin, begin + size)
    assert all(tick.is_integer() and 0 <= scale.at(tick) <= 1 for tick in scale.ticks)
    assert 1 <= len(scale.ticks) <= 10


@given(st.lists(st.floats(allow_nan=True, allow_infinity=True), max_size=9))
def test_any_losses_can_be_drawn(values):
    record = RunRecord(losses=[LossCurve("t.py:1", list(range(1, len(values) + 1)), values)])
    for chart in charts(record):
        assert "nan" not in re.sub(r">[^<]*<", "><", draw(chart))


@given(st.lists(st.tuples(st.integers(0, 99), st.floats(allow_nan=True, allow_infinity=True)), max_size=9))
def test_any_history_of_a_scale_can_be_drawn(history):
    scaler = Scaler("t.py:1", 1.0, 1.0, 1.0, 1.0, history=[list(map(float, point)) for point in history])
    for chart in charts(RunRecord(backwards=100, scalers=[scaler])):
        assert "nan" not in re.sub(r">[^<]*<", "><", draw(chart))


def test_a_history_is_read_by_rising_x_and_without_what_is_no_number():
    history = [[0, 4.0], [5, math.inf], [7, 2.0], [0, 1.0], [9]]
    assert pairs(history) == ((0, 4.0), (7, 2.0), (7, 1.0))


@pytest.mark.parametrize(
    ("run", "names"),
    [
        ("normal", ["loss", "loss-scale", "overflows", "gradients", "step-time", "memory"]),
        ("bfloat16", ["loss", "gradients"]),
        ("inference", []),
        ("nothing", []),
    ],
)
def test_a_page_has_the_charts_that_the_record_has_something_for(run, names):
    record = record_of(run)
    assert [chart.id for chart in charts(record)] == names


def test_everything_lies_within_the_picture():
    for path in EVENTS.glob("*.jsonl"):
        for chart in charts(record_of(path.stem)):
            picture = draw(chart)
            height = float(re.search(r'viewBox="0 0 760 (\d+)"', picture)[1])
            for at, limit in (("[xc]?x[12]?", WIDTH), ("[c]?y[12]?", max(height, HEIGHT))):
                for value in re.findall(rf' {at}="(-?[\d.]+)"', picture):
                    assert 0 <= float(value) <= limit


def test_what_moved_the_scale_is_marked():
    chart = the(record_of("probing"), "loss-scale")
    kinds = {mark.kind for mark in chart.plot.marks}
    assert {"raised", "lowered", "skipped"} <= kinds <= set(MARKS)
    assert "raised" in chart.summary


def test_every_skip_of_the_run_is_marked_where_it_was():
    record = record_of("normal")
    chart = the(record, "loss-scale")
    skipped = [(mark.x, mark.y) for mark in chart.plot.marks if mark.kind == "skipped"]
    assert skipped == [(item.backward, item.scale) for item in record.overflows]


def test_each_loss_has_its_line_and_a_loss_that_is_lost_breaks_it():
    losses = [
        LossCurve("gan.py:1", [1, 2, 3], [1.0, math.nan, 2.0]),
        LossCurve("gan.py:2", [1, 2], [3.0, 4.0]),
    ]
    chart = the(RunRecord(losses=losses), "loss")
    assert [line.name for line in chart.plot.lines] == ["gan.py:1", "gan.py:2"]
    assert [mark.x for mark in chart.plot.marks] == [2.0]
    first = re.search(r'class="line s0" d="([^"]*)"', draw(chart))[1]
    assert first.count("M") == 2


def test_a_loss_that_falls_over_powers_of_ten_is_drawn_over_them():
    falling = RunRecord(losses=[LossCurve("t.py:1", [1, 2, 3], [100.0, 1.0, 0.001])])
    assert the(falling, "loss").plot.y.kind == "decimal"


def test_places_beyond_the_room_are_one_row():
    events = [Overflow("backward_inf", n, n, 1.0, f"net.{n}", f"net.{n}.weight") for n in range(1, 40)]
    chart = the(RunRecord(backwards=50, overflows=events), "overflows")
    assert len(chart.plot.y.names) == 12
    assert chart.plot.y.names[-1] == "other places"
    assert len(chart.plot.marks) == 39
    assert len(chart.table) == 40


def test_the_cost_is_drawn_from_zero():
    record = replace(
        RunRecord(steps=Steps(9, 9)),
        throughput=Throughput(1.0, history=[[3, 10.0], [9, 11.0]]),
        memory=Memory(2**30, "cpu", history=[[0, 2.0**29], [9, 2.0**30]]),
    )
    time, memory = draw(the(record, "step-time")), draw(the(record, "memory"))
    assert ">0 ms<" in time
    assert ">0 B<" in memory
    assert ">1 GiB<" in memory


def test_the_sizes_of_gradients_stand_beside_what_the_type_can_hold():
    sizes = Exponents(-40, -9, [1] * 32)
    known = Gradients(7, "float16", sizes, underflow=Underflow(0.5, 0.125), scale=2.0**12)
    chart = the(RunRecord(gradients=known), "gradients")
    assert sum(bar.y for bar in chart.plot.bars) == pytest.approx(1.0)
    assert [edge.x for edge in chart.plot.edges] == [-25.0, -37.0]
    assert "50.0 % would be 0 in float16 without a loss scale, 12.5 % with it" in chart.summary
    beyond = the(RunRecord(gradients=replace(known, half="bfloat16", scale=1.0)), "gradients")
    assert beyond.plot.edges == ()
