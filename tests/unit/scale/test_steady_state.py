"""Where a warm-up ends, and medians with intervals."""

import statistics

from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.scale.steady_state import median_interval, timing, warm_up

DURATIONS = st.lists(st.floats(1e-5, 10.0), min_size=1, max_size=60)


@given(DURATIONS)
def test_at_most_half_is_warm_up_whatever_the_unit(durations):
    found = warm_up(durations)
    assert 0 <= found.steps <= len(durations) // 2
    assert warm_up([2.0**10 * duration for duration in durations]).steady == found.steady


@given(
    st.integers(0, 8),
    st.integers(12, 40),
    st.floats(1.5, 50.0),
    st.floats(1e-4, 1.0),
    st.lists(st.floats(0.97, 1.03), min_size=48, max_size=48),
)
def test_slow_first_steps_are_cut_off_and_no_more(slow, steady, factor, usual, noise):
    durations = [usual * factor] * slow + [usual * each for each in noise[:steady]]
    found = warm_up(durations)
    assert found.steps >= slow
    assert statistics.median(durations[found.steps :]) < 1.04 * usual


def test_constant_durations_have_no_warm_up():
    assert warm_up([0.1] * 20).steps == 0
    assert warm_up([0.3, 0.1]).steps == 0


def test_a_series_that_goes_on_changing_is_not_steady():
    assert not warm_up([2.0 * 0.8**step for step in range(20)]).steady


def test_one_hiccup_late_hides_no_warm_up_and_makes_none():
    durations = [0.1 + 0.001 * (step % 3) for step in range(30)]
    assert warm_up([*durations, 40.0]).steps < 5
    assert warm_up([0.2, 0.2, 0.2, 0.2, 0.2, 0.2, *durations, 40.0]).steps >= 6


@settings(max_examples=8)  # of some ten milliseconds each
@given(st.lists(DURATIONS, min_size=1, max_size=4), st.floats(0.1, 10.0))
def test_the_median_lies_in_its_interval_and_both_among_the_durations(rounds, unit):
    found, every = median_interval(rounds), [each for one in rounds for each in one]
    assert min(every) <= found.low <= found.median <= found.high <= max(every)
    assert found == median_interval(rounds), "the same durations, another interval"
    scaled = median_interval([[unit * each for each in one] for one in rounds])
    assert abs(scaled.high - unit * found.high) <= 1e-9 * scaled.high


def test_rounds_that_differ_make_the_interval_wide():
    alike, apart = [[1.0, 1.01] * 10, [1.0, 1.01] * 10], [[1.0, 1.01] * 10, [2.0, 2.01] * 10]
    assert median_interval(alike).half_width < 0.02
    assert median_interval(apart).half_width > 0.2


@given(DURATIONS)
def test_deciles_are_in_order(durations):
    found = timing(durations)
    assert found.p10_s <= found.median_s <= found.p90_s
    assert timing([]).median_s == 0
