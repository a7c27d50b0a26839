"""How much a parameter matters, with limits that tell a search of many trials from one of few."""

import random

from lockstep.tune.record.journal import SearchRecord
from lockstep.tune.results.importance import LEAST, importances
from lockstep.tune.results.result import SearchResult
from lockstep.tune.results.summary import show
from lockstep.tune.search import Choice, Float, Space
from made_trials import trial

SPACE = Space.of(
    {"matters": Float(0, 1), "little": Float(0, 1), "not": Choice("a", "b", opens={"a": {"in": Float(0, 1)}})}
)


def record_of(count):
    draw = random.Random(0)
    trials = []
    for number in range(count):
        point = SPACE.snap([draw.random(), draw.random(), draw.random() * 2, draw.random()])
        params = SPACE.params(point)
        trials.append(trial(number, [params["matters"] ** 2 + 0.1 * params["little"]], point=point, params=params))
    return SearchRecord(SPACE.to_json(), {}, tuple(trials), ())


def test_what_matters_comes_first_and_more_trials_tell_more_surely():
    few, many = importances(record_of(40)), importances(record_of(2000))
    assert many[0].name == "matters"
    assert {one.name for one in many} == {"matters", "little", "not", "in"}
    assert abs(sum(one.share for one in many) - 1) < 1e-9
    assert all(one.low <= one.high for one in few)
    assert many[0].low > max(one.high for one in many[1:])
    width = {one.name: one.high - one.low for one in few}
    assert width["matters"] > many[0].high - many[0].low
    assert importances(record_of(40)) == few


def test_they_are_shown_where_there_are_enough_trials():
    record = record_of(30)
    assert "importance for the loss" in show(record)
    assert SearchResult(record).to_json()["importances"][0]["name"] == "matters"
    assert importances(record_of(LEAST - 1)) == ()
    assert "importance" not in show(record_of(LEAST - 1))
