"""Trials that users give by hand, or bring from other searches: each is evaluated once, whatever is killed."""

import random

import pytest
from test_kills import DEADLINE_S, ends, kill_something

import lockstep
from lockstep.cli.main import main
from lockstep.errors import SettingError
from lockstep.tune import Choice, Float, Int, enqueue, load
from searches import search_quickly, started
from waiting import wait_until

SPACE = {
    "x": Float(-1, 1),
    "n": Int(0, 3),
    "kind": Choice("a", ("b", 2), None, opens={"a": {"momentum": Float(0, 0.9)}}),
}


def loss_of(params):
    return params["x"] ** 2 + params["n"]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def given(result):
    return {trial.number: dict(trial.params) for trial in result.trials if trial.operator == "enqueued"}


def test_what_is_enqueued_comes_first_and_the_algorithm_chooses_the_rest():
    wanted = [{"x": 0.5, "n": 2, "kind": ("b", 2)}, {"x": -0.25, "kind": "a"}]
    result = lockstep.tune(loss_of, SPACE, trials=6, enqueue=wanted, run_dir="a")
    found = given(result)
    assert found[0] == wanted[0]
    assert {**found[1], **wanted[1]} == found[1]
    assert found[1].keys() == {"x", "n", "kind", "momentum"}
    assert list(found) == [0, 1]
    # Those of before are not enqueued again when the search is resumed; what is new comes next.
    result = lockstep.tune(loss_of, SPACE, trials=9, enqueue=[*wanted, {"x": 0.0}], run_dir="a", resume=True)
    assert list(given(result)) == [0, 1, 6]
    assert given(result)[6]["x"] == pytest.approx(0.0, abs=1e-15)
    again = lockstep.tune(loss_of, SPACE, trials=9, enqueue=[*wanted, {"x": 0.0}], run_dir="b")
    assert list(given(again)) == [0, 1, 2]


@pytest.mark.parametrize(
    ("params", "why"),
    [
        ({"y": 1}, "the space has no y"),
        ({"x": 2.0}, "no number from -1 to 1"),
        ({"momentum": 0.5}, "momentum exists only with kind='a'; give that"),
        ({"momentum": 0.5, "kind": None}, "momentum exists only with kind='a'"),
    ],
)
def test_what_cannot_be_evaluated_is_refused_before_the_search_begins(params, why, tmp_path):
    with pytest.raises(SettingError, match=why):
        lockstep.tune(loss_of, SPACE, trials=3, enqueue=[params], run_dir="a")
    assert not (tmp_path / "a").exists()
    with pytest.raises(SettingError, match="enqueue gives 2 trials"):
        lockstep.tune(loss_of, SPACE, trials=1, enqueue=[{}, {}], run_dir="a")


def test_the_command_line_enqueues_into_a_search_that_is_resumed(capfd):
    lockstep.tune(loss_of, SPACE, trials=2, run_dir="a")
    assert main(["tune", "--enqueue", "x=0.5,kind=('b', 2),n=1", "--enqueue", "kind=None", "a"]) == 0
    assert (
        "trial 2 will have x=0.5,kind=('b', 2),n=1, once the search is resumed with --trials 3"
        in capfd.readouterr().err
    )
    result = lockstep.tune(loss_of, SPACE, trials=5, run_dir="a", resume=True)
    assert given(result)[2] == {"x": 0.5, "n": 1, "kind": ("b", 2)}
    assert given(result)[3]["kind"] is None
    assert list(given(result)) == [2, 3]
    assert main(["tune", "--enqueue", "kind=c", "a"]) == 2
    assert "'c' is none of its values" in capfd.readouterr().err


def test_what_is_enqueued_while_workers_are_killed_is_evaluated_once(tmp_path):
    run_dir, choose, trials = tmp_path / "search", random.Random(3), 60
    wanted = [index / 64 for index in range(12)]
    options = {"workers": 2, "retries": 10**6, "enqueue": [{"x": x} for x in wanted[:4]]}
    driver = started(search_quickly, run_dir, trials, **options)
    for index in (4, 6, 8, 10):
        count = len(ends(run_dir))
        wait_until(lambda c=count, d=driver: len(ends(run_dir)) > c or d.exitcode is not None, deadline_s=DEADLINE_S)
        enqueue(run_dir, [{"x": x} for x in wanted[index : index + 2]])
        kill_something(driver, choose)
    driver.join(DEADLINE_S)
    while driver.exitcode != 0:
        driver = started(search_quickly, run_dir, trials, resume=True, **options)
        driver.join(DEADLINE_S)
    # What found all trials claimed has waited for this.
    driver = started(search_quickly, run_dir, trials + 12, resume=True, **options)
    driver.join(DEADLINE_S)
    found = given(load(run_dir))
    assert sorted(params["x"] for params in found.values()) == pytest.approx(wanted, abs=1e-12)
    assert list(found)[:4] == [0, 1, 2, 3]
