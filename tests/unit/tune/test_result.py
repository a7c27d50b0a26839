"""What a search says of itself: the best, counts, failures, tables, in words and as JSON."""

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.errors import UsageError
from lockstep.tune.record.journal import SearchRecord
from lockstep.tune.results.result import SearchResult
from lockstep.tune.results.summary import show
from lockstep.tune.search.pareto import front_of
from made_trials import trial

VECTORS = st.integers(1, 3).flatmap(
    lambda size: st.lists(st.tuples(*[st.integers(0, 4).map(float)] * size), max_size=25)
)


def record_of(*trials, **settings):
    return SearchRecord({}, settings, tuple(trials), ())


def dominates(one, other):
    return all(a <= b for a, b in zip(one, other, strict=True)) and one != other


@given(vectors=VECTORS)
def test_the_front_is_what_nobody_dominates(vectors):
    expected = [i for i, one in enumerate(vectors) if not any(dominates(other, one) for other in vectors)]
    assert front_of(vectors) == expected


TRIALS = st.lists(
    st.tuples(
        st.sampled_from(["done", "stopped", "failed", "running"]),
        st.one_of(st.floats(-5, 5), st.just(math.inf)),
        st.integers(0, 2),
        st.sampled_from([0.0, 0.0, 1.0]),
    ),
    max_size=20,
)


@given(trials=TRIALS, n=st.integers(1, 6))
def test_the_top_is_the_beginning_of_all_trials_sorted(trials, n):
    result = SearchResult(
        record_of(
            *(trial(i, [loss], state, island=isle, violation=v) for i, (state, loss, isle, v) in enumerate(trials))
        )
    )
    ranked = sorted(
        (one for one in result.trials if one.losses),
        key=lambda one: (one.violation, one.state == "stopped" and not one.converged, one.loss, one.number),
    )
    assert list(result.top(n)) == ranked[:n]
    for island, top in result.top_by_island(n).items():
        assert list(top) == list(result.top(n, island=island)) == [one for one in ranked if one.island == island][:n]
    assert sum(result.counts.values()) == len(trials)
    assert sum(len(one.numbers) for one in result.failures) == result.counts["failed"]
    assert json.loads(json.dumps(result.to_json(n), allow_nan=False))["counts"] == dict(result.counts)
    assert all(len(line) <= 60 for line in show(result.record, width=60).splitlines())


def test_a_search_in_words():
    record = record_of(
        trial(0, [3.0, 0.5], params={"lr": 0.0123456789, "act": "relu"}, island=1),
        trial(1, [2.0], "stopped", params={"lr": 0.1, "act": "tanh"}),
        trial(2, [], "failed", reason="out of memory on rank 1"),
        trial(3, [], "failed", reason="out of memory on rank 1"),
        trial(4, [1.0], "running"),
        trial(5, [], "failed", reason="a rank was killed"),
        trials=10,
    )
    said = show(record)
    assert [failure.numbers for failure in SearchResult(record).failures] == [(2, 3), (5,)]
    assert said.startswith("6 of 10 trials: 1 running, 1 done, 1 stopped early, 3 failed | 6.0 s | ")
    assert "best: trial 0, loss 0.5, island 1\n  lr   0.0123457\n  act  relu\n" in said
    assert "island 0: the best of 5 trials\n" in said
    assert "out of memory on rank 1 (2 trials: 2, 3)" in said


def test_a_search_with_two_objectives_shows_its_front():
    record = record_of(
        trial(0, losses=(1.0, 2.0)),
        trial(1, losses=(2.0, 1.0)),
        trial(2, losses=(2.0, 2.0)),
        trial(3, losses=(0.0, 0.0), violation=2.0),
    )
    result = SearchResult(record)
    assert [one.number for one in result.pareto_front] == [0, 1]
    assert result.best.number == 0  # the one with lower losses is outside of the constraints
    assert "Pareto front: 2 trials" in show(record)


def test_a_search_without_a_loss_says_why():
    result = SearchResult(record_of(trial(0, [], "failed", reason="no such file")))
    with pytest.raises(UsageError, match="1 x no such file"):
        _ = result.best
    assert "0 trials" in show(record_of())


def test_the_table_has_one_row_for_each_trial_with_and_without_pandas(monkeypatch):
    result = SearchResult(record_of(trial(0, [1.0], params={"lr": 0.1}), trial(1, [], "failed", params={"k": 3})))
    frame = result.table()
    assert list(frame["loss"].isna()) == [False, True]
    assert list(frame["number"]) == [0, 1]
    monkeypatch.setitem(__import__("sys").modules, "pandas", None)
    rows = result.table()
    assert rows == result.rows()
    assert rows[0]["params.lr"] == 0.1
    assert rows[0].keys() == rows[1].keys() == set(frame.columns)
