"""The laws of the scaler, for any settings and any history."""

import math
from dataclasses import replace

from hypothesis import assume, given
from hypothesis import strategies as st

from mpx.loss_scale import LossScale, initial
from mpx.presets.policy import LossScale as Settings

HISTORIES = st.lists(st.booleans(), max_size=200)


def powers_of_two(least, most):
    return st.integers(least, most).map(lambda exponent: 2.0**exponent)


@st.composite
def settings_of(draw, mode):
    low, init, high = sorted(draw(st.lists(powers_of_two(-24, 24), min_size=3, max_size=3)))
    return Settings(
        mode=mode,
        init=init,
        growth_factor=draw(powers_of_two(1, 3)),
        backoff_factor=draw(powers_of_two(-3, -1)),
        growth_interval=draw(st.integers(1, 20)),
        min=low,
        max=high,
    )


DYNAMIC = settings_of("dynamic")


def after(state, history):
    for finite in history:
        state = state.after(finite=finite)
    return state


@given(DYNAMIC, HISTORIES)
def test_the_scale_is_a_power_of_two_within_its_bounds_after_any_history(numbers, history):
    state = initial(numbers)
    for finite in history:
        state = state.after(finite=finite)
        assert numbers.min <= state.scale <= numbers.max
        assert math.frexp(state.scale)[0] == 0.5
        assert 0 <= state.clean < numbers.growth_interval


@given(settings_of("static") | settings_of("none"), HISTORIES)
def test_a_scale_that_is_not_dynamic_never_moves(numbers, history):
    begin = initial(numbers)
    assert after(begin, history) is begin
    assert begin.scale == (numbers.init if numbers.mode == "static" else 1.0)
    assert not begin.can_fall


@given(DYNAMIC)
def test_it_grows_after_exactly_the_interval_of_clean_passes(numbers):
    assume(numbers.init * numbers.growth_factor <= numbers.max)
    almost = after(initial(numbers), [True] * (numbers.growth_interval - 1))
    assert almost.scale == numbers.init
    grown = almost.after(finite=True)
    assert grown.scale == numbers.init * numbers.growth_factor
    assert grown.clean == 0


@given(DYNAMIC, st.integers(0, 19))
def test_an_overflow_begins_the_count_of_clean_passes_anew(numbers, clean_before):
    assume(clean_before < numbers.growth_interval)
    state = after(initial(numbers), [True] * clean_before).after(finite=False)
    assert state.clean == 0
    assert after(state, [True] * (numbers.growth_interval - 1)).scale == state.scale


@given(DYNAMIC)
def test_each_overflow_lowers_it_by_the_factor_down_to_the_floor_and_no_further(numbers):
    state = initial(numbers)
    while state.can_fall:
        lower = state.after(finite=False)
        assert lower.scale == max(state.scale * numbers.backoff_factor, numbers.min) < state.scale
        state = lower
    assert state.scale == numbers.min
    assert state.after(finite=False).scale == numbers.min


@given(DYNAMIC, st.integers(0, 1000))
def test_it_leaves_the_floor_after_one_interval_however_long_it_was_there(numbers, overflows):
    assume(numbers.min < numbers.max)
    floored = after(initial(replace(numbers, init=numbers.min)), [False] * overflows)
    recovered = after(floored, [True] * numbers.growth_interval)
    assert recovered.scale == min(numbers.min * numbers.growth_factor, numbers.max)


@given(DYNAMIC, HISTORIES, HISTORIES)
def test_a_restored_scaler_goes_on_as_the_one_that_was_exported(numbers, before, later):
    saved = after(initial(numbers), before)
    restored = initial(numbers).restore_state(saved.export_state())
    assert restored == saved
    assert after(restored, later) == after(saved, later)


@given(DYNAMIC, st.floats(allow_nan=True, allow_infinity=True), st.integers(0, 10**6))
def test_a_foreign_state_is_brought_to_a_power_of_two_within_the_bounds(numbers, scale, clean):
    """A checkpoint of torch's GradScaler may hold any number; 0 is where that one ends."""
    state = initial(numbers).restore_state({"scale": scale, "clean": clean})
    assert numbers.min <= state.scale <= numbers.max
    assert math.frexp(state.scale)[0] == 0.5
    if numbers.min <= scale < numbers.max:
        assert state.scale <= scale < 2 * state.scale


@given(settings_of("static"), st.floats(1, 1e9))
def test_a_static_scale_is_the_presets_whatever_a_checkpoint_says(numbers, scale):
    begin = initial(numbers)
    assert begin.restore_state({"scale": scale, "clean": 3}) is begin


@given(DYNAMIC | settings_of("static"), powers_of_two(-20, 20), HISTORIES)
def test_a_ceiling_of_its_own_holds_from_then_on(numbers, ceiling, history):
    state = initial(numbers).at_most(ceiling)
    assert state.scale == min(numbers.init, ceiling)
    assert after(state, history).scale <= ceiling


@given(DYNAMIC)
def test_a_ceiling_that_is_out_of_reach_changes_nothing(numbers):
    begin = initial(numbers)
    assert begin.at_most(math.inf) is begin
    assert begin.at_most(numbers.max) is begin


def test_a_scaler_is_a_value():
    numbers = Settings(
        mode="dynamic", init=8.0, growth_factor=2.0, backoff_factor=0.5, growth_interval=2, min=1.0, max=16.0
    )
    state = LossScale(8.0, 1, numbers)
    assert state.after(finite=True) == LossScale(16.0, 0, numbers)
    assert state == LossScale(8.0, 1, numbers)
