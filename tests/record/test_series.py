"""Series stay within their room, keep both ends, and their statistics are those of the stream."""

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpx.record import Durations, Thinned

TEN_MILLION = 10_000_000


def thinned(count: int, capacity: int) -> Thinned:
    series = Thinned(capacity)
    for x in range(count):
        series.append(x, 10 * x)
    return series


@given(count=st.integers(0, 3000), capacity=st.integers(4, 65))
def test_a_thinned_series_keeps_its_ends_in_order_and_within_capacity(count, capacity):
    xs, ys = thinned(count, capacity).to_lists()
    assert len(xs) <= capacity
    assert xs == sorted(set(xs))
    assert ys == [10 * x for x in xs]
    if count:
        assert xs[0] == 0
        assert xs[-1] == count - 1


@given(count=st.integers(1, 3000), capacity=st.integers(4, 65))
def test_kept_points_lie_on_an_even_grid_but_for_the_last(count, capacity):
    xs, _ = thinned(count, capacity).to_lists()
    gaps = {b - a for a, b in itertools.pairwise(xs[:-1])}
    assert len(gaps) <= 1
    if gaps and len(xs) > 2:
        assert xs[-1] - xs[-2] <= gaps.pop()


@given(count=st.integers(0, 60))
def test_a_series_that_fits_is_kept_whole(count):
    assert thinned(count, 64).to_lists()[0] == list(range(count))


@given(count=st.integers(4096, 20_000))
def test_no_more_than_half_of_the_room_is_ever_unused(count):
    assert len(thinned(count, 64)) >= 31


def test_what_was_returned_does_not_change_later():
    series = thinned(3, 8)
    xs, _ = series.to_lists()
    series.append(3, 30)
    assert xs == [0, 1, 2]


def test_ten_million_points_fit():
    xs, _ = thinned(TEN_MILLION, 512).to_lists()
    assert 255 <= len(xs) <= 512
    assert (xs[0], xs[-1]) == (0, TEN_MILLION - 1)


def test_ten_million_durations_fit_and_their_quantiles_are_right():
    durations = Durations(512)
    for i in range(TEN_MILLION):
        durations.append(float(i))
    assert durations.count == TEN_MILLION
    assert 256 <= len(durations) <= 512
    # One of each block is kept, so of an increasing stream a quantile is off by two blocks at most.
    block = 2 * TEN_MILLION / 256
    assert durations.median() == pytest.approx(0.50 * TEN_MILLION, abs=block)
    assert durations.p95() == pytest.approx(0.95 * TEN_MILLION, abs=block)


@given(st.lists(st.floats(0, 1e3), min_size=1, max_size=64))
def test_a_sample_that_fits_has_exact_quantiles(values):
    durations = Durations(64)
    for value in values:
        durations.append(value)
    assert durations.median() == sorted(values)[(len(values) + 1) // 2 - 1]
    assert durations.quantile(1.0) == max(values)
    assert durations.quantile(0.0) == min(values)
    assert durations.total == pytest.approx(sum(values))


@pytest.mark.parametrize("period", [2, 4, 8, 64])
@pytest.mark.parametrize("count", [600, 200_000])  # just after the first halving, and after many
def test_a_periodic_loop_does_not_alias(period, count):
    """Every `period`-th step is slow, as with gradient accumulation: the sample sees its share of them."""
    durations = Durations(512)
    for i in range(count):
        durations.append(100.0 if i % period == 0 else 1.0)
    slow = sum(value == 100.0 for value in durations._kept) / len(durations)
    assert slow == pytest.approx(1 / period, abs=0.09)  # 4 sigma of a share measured on 256 samples or more


def test_the_sample_is_reproducible_and_draws_no_number_of_the_scripts():
    def run() -> list[float]:
        durations = Durations(16)
        for i in range(1000):
            durations.append(float(i))
        return durations._kept

    random.seed(1)
    state = random.getstate()
    assert run() == run()
    assert random.getstate() == state


def test_an_empty_sample_has_no_quantile():
    assert Durations(8).median() is None
    assert Durations(8).p95() is None
    assert Thinned(8).to_lists() == ([], [])


@pytest.mark.parametrize("series", [Thinned, Durations])
def test_a_capacity_that_cannot_work_is_refused(series):
    with pytest.raises(ValueError, match="at least 4"):
        series(3)
