"""Laws of the stopping rules, and of how stopped trials rank."""

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.errors import SettingError
from lockstep.tune.stopping import (
    STOPPING_WORDS,
    AnyOf,
    DynamicSurrogate,
    EndedCurves,
    Median,
    NeverStops,
    OtherTrials,
    Patience,
    StaticSurrogate,
    SuccessiveHalving,
    make_stopping,
    order_at_equal_budget,
)
from made_trials import trial

LOSS = st.one_of(st.floats(-5, 5), st.integers(-3, 3).map(float), st.just(math.nan), st.just(math.inf))
CURVE = st.lists(LOSS, min_size=1, max_size=12)
STATE = st.sampled_from(["running", "done", "stopped", "failed"])
RULES = (
    Patience(2),
    Median(warmup=1, trials=2),
    SuccessiveHalving(2),
    SuccessiveHalving(3, 2),
    StaticSurrogate(),
    DynamicSurrogate(warmup=1, trials=2),
    AnyOf((Patience(3), SuccessiveHalving(4))),
)


@st.composite
def searches(draw, curve=CURVE, state=STATE):
    """A running trial and what is known of others."""
    others = draw(st.lists(st.tuples(curve, state), max_size=9))
    point = st.tuples(st.floats(0, 1), st.integers(0, 2).map(float))
    return trial(0, draw(curve), "running", point=draw(point)), [
        trial(number, losses, state, point=draw(point)) for number, (losses, state) in enumerate(others, 1)
    ]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: type(rule).__name__)
@settings(max_examples=40)
@given(search=searches(), seed=st.integers(0, 99))
def test_the_order_of_the_others_does_not_matter_and_equal_questions_have_equal_answers(rule, search, seed):
    mine, others = search
    shuffled = random.Random(seed).sample(others, len(others))
    assert rule.stops(mine, others) == rule.stops(mine, shuffled) == rule.stops(mine, others)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: type(rule).__name__)
@settings(max_examples=40)
@given(search=searches(), data=st.data())
def test_what_was_sorted_as_trials_ended_gives_the_same_answers(rule, search, data):
    mine, others = search
    waiting = [one for one in others if one.state != "running"]
    curves, running = EndedCurves(), [one for one in others if one.state == "running"]
    while True:
        known = [one for one in others if one not in waiting]
        assert rule.stops(mine, OtherTrials(curves, running, lambda known=known: known)) == rule.stops(mine, known)
        if not waiting:
            break
        count = data.draw(st.integers(1, len(waiting)))
        curves.add(waiting[:count])
        del waiting[:count]


@given(search=searches(), patience=st.integers(1, 6))
def test_patience_by_definition(search, patience):
    mine, others = search
    losses = [math.inf if math.isnan(report.loss) else report.loss for report in mine.reports]
    first_best = losses.index(min(losses))
    waited = len(losses) - 1 - first_best
    assert bool(Patience(patience).stops(mine, others)) == (waited >= patience)


def test_patience_counts_only_improvements_that_are_large_enough():
    assert Patience(2, min_delta=0.1).stops(trial(0, [1.0, 0.95, 0.94]), [])
    assert not Patience(2, min_delta=0.1).stops(trial(0, [1.0, 0.95, 0.85]), [])


@given(search=searches(), eta=st.integers(2, 4), first=st.integers(1, 3))
def test_at_a_rung_as_many_go_on_as_successive_halving_says(search, eta, first):
    mine, others = search
    rule, budget = SuccessiveHalving(eta, first), len(mine.reports)
    reason = rule.stops(mine, others)
    rungs = [first * eta**power for power in range(8)]
    value = lambda one: math.inf if math.isnan(one.reports[budget - 1].loss) else one.reports[budget - 1].loss  # noqa: E731
    here = [one for one in others if len(one.reports) >= budget and one.state != "failed"]
    better = sum(value(one) < value(mine) for one in here)
    if reason:
        assert budget in rungs
        assert better >= (len(here) + 1) // eta >= 1  # so the best at a rung is never stopped
    elif budget in rungs and len(here) + 1 >= eta:
        assert better < (len(here) + 1) // eta


@given(search=searches(), better=st.floats(0, 3))
def test_whoever_is_better_is_not_stopped_where_the_worse_one_goes_on(search, better):
    mine, others = search
    improved = trial(0, [report.loss - better for report in mine.reports], "running", point=mine.point)
    for rule in (SuccessiveHalving(3), Median(1, 2), StaticSurrogate()):
        if not rule.stops(mine, others):
            assert not rule.stops(improved, others)


@given(search=searches())
def test_losses_beyond_the_trials_own_budget_decide_nothing(search):
    mine, others = search
    budget = len(mine.reports)
    longer = [
        trial(
            other.number,
            [report.loss for report in other.reports] + [-100.0] * (len(other.reports) >= budget),
            other.state,
            losses=other.losses,
            point=other.point,
        )
        for other in others
    ]
    for rule in (SuccessiveHalving(2), Median(0, 1), StaticSurrogate()):
        assert rule.stops(mine, others) == rule.stops(mine, longer)


def test_the_median_rule_by_a_case_worked_by_hand():
    others = [trial(number, [level] * 4) for number, level in enumerate((1.0, 2.0, 3.0, 4.0, 5.0), 1)]
    rule = Median(warmup=2, trials=5)
    assert not rule.stops(trial(0, [9.0, 9.0], "running"), others)  # within the warm-up
    assert not rule.stops(trial(0, [9.0, 9.0, 3.0], "running"), others)
    assert rule.stops(trial(0, [9.0, 9.0, 3.1], "running"), others)
    assert not rule.stops(trial(0, [9.0, 9.0, 3.1], "running"), others[1:])  # too few others
    assert not rule.stops(trial(0, [9.0] * 5, "running"), others)  # nobody else has come as far


@given(search=searches(state=st.sampled_from(["done", "stopped"])), margin=st.floats(0.1, 1))
def test_the_best_curve_itself_is_never_stopped_by_the_static_surrogate(search, margin):
    _, others = search
    done = [one for one in others if one.state == "done" and not math.isnan(one.losses[0])]
    if done:
        best = min(done, key=lambda one: (one.losses[0], one.number))
        for budget in range(1, len(best.reports) + 1):
            again = trial(0, [report.loss for report in best.reports[:budget]], "running")
            assert not StaticSurrogate(margin).stops(again, others)


def test_the_static_surrogate_keeps_the_better_measure_and_never_a_stopped_one():
    """Each of these went wrong in the rule that it is modelled on."""
    good, bad, stopped = trial(1, [2.0, 1.0]), trial(2, [9.0, 9.0]), trial(3, [0.1], "stopped")
    rule = StaticSurrogate(margin=0.8)
    assert not rule.stops(trial(0, [2.4], "running"), [good, bad, stopped])
    assert rule.stops(trial(0, [2.6], "running"), [bad, good])
    negative = trial(1, [-2.0, -3.0])
    assert not rule.stops(trial(0, [-2.0], "running"), [negative])
    assert not rule.stops(trial(0, [-1.6], "running"), [negative])
    assert rule.stops(trial(0, [-1.4], "running"), [negative])


def curve(asymptote, reports, height=1.0):
    return [asymptote + height * 0.5**step for step in range(reports)]


def test_the_dynamic_surrogate_tells_a_hopeless_trial_from_a_promising_one():
    others = [trial(number, curve(0.2 + number / 10, 12), point=(number / 10, 0.0)) for number in range(1, 9)]
    rule = DynamicSurrogate()
    hopeless, promising = curve(3.0, 4), curve(0.1, 4)
    assert rule.stops(trial(0, hopeless, "running", point=(0.9, 0.0)), others)
    assert not rule.stops(trial(0, promising, "running", point=(0.05, 0.0)), others)
    assert not rule.stops(trial(0, hopeless, "running", point=(0.9, 0.0)), others[:3])  # too few to judge by
    assert not rule.stops(trial(0, hopeless[:2], "running", point=(0.9, 0.0)), others)  # warm-up


@settings(max_examples=25)
@given(search=searches(curve=st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=70)))
def test_the_dynamic_surrogate_answers_on_any_curve(search):
    assert isinstance(DynamicSurrogate(trials=2).stops(*search), str)


@given(search=searches())
def test_any_of_stops_where_one_of_its_rules_does(search):
    rules = (Patience(2), SuccessiveHalving(2), Median(1, 2))
    reasons = [rule.stops(*search) for rule in rules]
    assert AnyOf(rules).stops(*search) == next(filter(None, reasons), "")
    assert not NeverStops().stops(*search)


def test_words_become_rules():
    assert make_stopping("asha:eta=4,min=2") == SuccessiveHalving(4, 2)
    assert make_stopping("patience:7") == Patience(7)
    assert make_stopping("patience:7,min_delta=1e-3") == Patience(7, 1e-3)
    assert make_stopping("static") == StaticSurrogate()
    assert make_stopping("patience:5 or median:warmup=3") == AnyOf((Patience(5), Median(3)))
    assert make_stopping(None) == make_stopping("none") == make_stopping("") == NeverStops()
    rule = Median()
    assert make_stopping(rule) is rule
    assert {make_stopping(word).__class__ for word in STOPPING_WORDS} == set(STOPPING_WORDS.values())


@pytest.mark.parametrize(
    ("word", "says"),
    [
        ("asah", "did you mean asha"),
        ("asha:tea=3", "asha has no option tea; did you mean eta"),
        ("asha:eta=x", "whole number"),
        ("asha:eta=1", "eta from 2"),
        ("asha:3,3", "no option 3; it has eta, min"),
        ("asha:3,eta=3", "each option once"),
        ("patience:0", "from 1"),
        ("median:trials=0", "from 1"),
        ("static:0", "above 0"),
        ("dynamic:1.5", "between 0 and 1"),
        (7, "stops"),
    ],
)
def test_what_no_rule_can_be_made_of_is_refused_with_the_way_out(word, says):
    with pytest.raises(SettingError, match=says):
        make_stopping(word)


@given(search=searches(curve=st.lists(st.floats(-5, 5), min_size=1, max_size=8)), seed=st.integers(0, 99))
def test_a_stopped_trial_takes_the_place_that_it_had_at_its_own_budget(search, seed):
    _, others = search
    order = order_at_equal_budget(others)
    assert order == order_at_equal_budget(random.Random(seed).sample(others, len(others)))
    assert {one.number for one in order} == {one.number for one in others if one.state in ("done", "stopped")}
    done = [one for one in order if one.state == "done"]
    assert [one.losses[0] for one in done] == sorted(one.losses[0] for one in done)
    for place, one in enumerate(order):
        if one.state == "stopped":
            budget, own = len(one.reports), min(report.loss for report in one.reports)
            ahead = sum(other.state == "done" for other in order[:place])
            assert ahead == sum(min(report.loss for report in other.reports[:budget]) < own for other in done)


def test_a_low_loss_early_on_does_not_beat_full_training_that_was_lower_still_by_then():
    full = [trial(1, [3.0, 1.0, 0.5]), trial(2, [4.0, 3.0, 2.0])]
    worse_by_then = trial(3, [3.5], "stopped")
    better_by_then = trial(4, [2.9], "stopped")
    assert [one.number for one in order_at_equal_budget([*full, worse_by_then, better_by_then])] == [4, 1, 3, 2]
