"""The language of gates: what is read is what was meant, and what is not understood is told where and why."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpx.gates import MEASURES, GateError, parse_gate
from mpx.gates.measures import UNITS


@pytest.mark.parametrize(
    ("text", "name", "symbol", "bound", "run", "after"),
    [
        ("overflow_rate>5%", "overflow_rate", ">", 0.05, None, 0),
        ("overflow_rate > 0.05", "overflow_rate", ">", 0.05, None, 0),
        ("peak_memory>8GiB", "peak_memory", ">", 8 * 2**30, None, 0),
        ("peak_memory >= 1.5 GB", "peak_memory", ">=", 1.5e9, None, 0),
        ("step_time>40ms", "step_time", ">", 40.0, None, 0),
        ("step_time>1.5s after 10", "step_time", ">", 1500.0, None, 10),
        ("nonfinite_loss", "nonfinite_loss", ">", 0.0, None, 0),
        ("nonfinite_loss after: 1_000", "nonfinite_loss", ">", 0.0, None, 1000),
        ("skipped_steps>2 after 100", "skipped_steps", ">", 2.0, None, 100),
        ("  steps   !=  50  ", "steps", "!=", 50.0, None, 0),
        ("final_loss>-1e-3", "final_loss", ">", -0.001, None, 0),
        ("loss_delta_vs(latest)>2%", "loss_delta_vs", ">", 0.02, "latest", 0),
        ("loss_delta_vs( runs/a b ) > 2%", "loss_delta_vs", ">", 0.02, "runs/a b", 0),
        ("half_flops_share<50%", "half_flops_share", "<", 0.5, None, 0),
    ],
)
def test_reads(text, name, symbol, bound, run, after):
    gate = parse_gate(text)
    assert (gate.measure.name, gate.symbol, gate.run, gate.after) == (name, symbol, run, after)
    assert gate.bound == pytest.approx(bound, rel=1e-15)


@pytest.mark.parametrize(
    ("text", "position", "says"),
    [
        ("", 0, "begins with a name"),
        ("5%", 0, "begins with a name"),
        ("overflow_rat>5%", 0, "did you mean `overflow_rate`?"),
        ("rubbish>5%", 0, "`final_loss`"),
        ("peak_memory>8", 12, "`8GiB`"),
        ("peak_memory>8gib", 13, "did you mean `8GiB`?"),
        ("peak_memory>8ms", 13, "no unit of `peak_memory`"),
        ("step_time>40", 10, "`40ms`"),
        ("steps<50%", 8, "has no unit"),
        ("steps<1.5", 6, "whole number"),
        ("overflow_rate>5", 14, "did you mean `5%`?"),
        ("overflow_rate>", 14, "`5%`"),
        ("steps=>3", 5, "did you mean `>=`?"),
        ("steps=3", 5, "did you mean `==`?"),
        ("scale_floor>1", 11, "write `scale_floor` alone"),
        ("final_loss", 10, "compared with nothing"),
        ("final_loss>2 after 3", 13, "cannot be left out"),
        ("nonfinite_loss after", 20, "number of steps"),
        ("nonfinite_loss after 1.5", 22, "not part"),
        ("loss_delta_vs>3%", 13, "loss_delta_vs(RUN)"),
        ("loss_delta_vs()>3%", 13, "empty"),
        ("steps(latest)>3", 5, "no other run"),
        ("nonfinite_loss and scale_floor", 15, "compared with nothing"),
        ("overflow_rate>5% please", 17, "not part"),
    ],
)
def test_what_is_no_expression_is_told_with_its_place(text, position, says):
    with pytest.raises(GateError) as caught:
        parse_gate(text)
    error = caught.value
    assert error.position == position
    assert says in " ".join(filter(None, (error.what, error.expected, error.suggestion)))


@pytest.mark.parametrize("name", [name for name, measure in MEASURES.items() if not measure.live])
def test_what_only_the_end_knows_cannot_end_a_run(name):
    text = {"step_time": "step_time>1ms", "half_flops_share": "half_flops_share<1%"}.get(name, name)
    with pytest.raises(GateError, match="when the run has ended"):
        parse_gate(text, live=True)


@pytest.mark.parametrize("measure", MEASURES.values(), ids=MEASURES)
def test_every_measure_is_understood_with_each_of_its_units(measure):
    run = "(latest)" if measure.of_run else ""
    for unit, factor in UNITS[measure.kind].items():
        assert parse_gate(f"{measure.name}{run}>1{unit}").bound == factor
    if measure.bare:
        assert parse_gate(measure.name).is_true_of(1.0)
        assert not parse_gate(measure.name).is_true_of(0.0)


@given(st.text(max_size=30) | st.from_regex(r"[a-z_]{1,14}[<>=]{1,2}[0-9.]{1,4}[%A-Za-z]{0,3}"))
def test_any_text_is_a_gate_or_an_error_within_it(text):
    try:
        gate = parse_gate(text)
    except GateError as error:
        position = error.position
    else:
        position = 0
        assert parse_gate(gate.text) == gate
    assert 0 <= position <= len(text)


@given(st.floats(allow_nan=False), st.sampled_from([">", ">=", "<", "<=", "==", "!="]))
def test_a_comparison_is_pythons(value, symbol):
    assert parse_gate(f"final_loss{symbol}2.5").is_true_of(value) == eval(f"value {symbol} 2.5")


def test_a_value_that_is_no_number_is_within_no_bound():
    assert parse_gate("final_loss>2.5").is_true_of(math.nan)
    assert parse_gate("final_loss<2.5").is_true_of(math.nan)
