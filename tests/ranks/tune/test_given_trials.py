"""Trials that users give by hand, or bring from other searches: each is evaluated once, whatever is killed."""

import os
import random
import sys
from pathlib import Path

import pytest
from test_kills import DEADLINE_S, ends, kill_something

import lockstep
from lockstep.cli.main import main
from lockstep.errors import SettingError
from lockstep.tune import Choice, Float, Int, draw_pictures, enqueue, load
from lockstep.tune.results.summary import show
from lockstep.tune.search.algorithms import ALGORITHM_WORDS
from searches import exit_code_of, search_quickly, started
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
    while exit_code_of(driver) != 0:
        driver = started(search_quickly, run_dir, trials, resume=True, **options)
    # What found all trials claimed has waited for this.
    driver = started(search_quickly, run_dir, trials + 12, resume=True, **options)
    driver.join()
    found = given(load(run_dir))
    assert sorted(params["x"] for params in found.values()) == pytest.approx(wanted, abs=1e-12)
    assert list(found)[:4] == [0, 1, 2, 3]


NEW = {"x": Float(-0.5, 0.5), "kind": Choice(None, ("b", 2)), "momentum": Float(0, 0.9)}


def told(result):
    return [(trial.number, trial.point, trial.losses, trial.operator, trial.parents) for trial in result.trials]


def new_loss_of(params):
    return params["x"] ** 2 + params["momentum"]


def test_a_search_begins_from_what_another_has_found(capfd):
    old = lockstep.tune(loss_of, SPACE, trials=60, algorithm="random", run_dir="old")
    fits = [t for t in old.trials if abs(t.params["x"]) <= 0.5 and t.params["kind"] != "a"]
    others = {"warm_start": "old:momentum=0.25", "algorithm": "propulate"}
    whole = lockstep.tune(new_loss_of, NEW, trials=9, run_dir="a", **others)
    said = capfd.readouterr().err
    assert f"old:momentum=0.25: {len(fits)} trials (not " in said
    assert "kind is not in the new space" in said
    assert "x is not in the new space" in said
    assert [trial.number for trial in whole.trials] == list(range(9))
    assert whole.counts["done"] == 9
    # Bred from the beginning, from individuals with negative numbers: else the first eight are uniform points.
    assert sum(trial.operator == "uniform" for trial in whole.trials) < 5
    assert any(parent < 0 for trial in whole.trials for parent in trial.parents)
    assert f"known from {os.path.abspath('old:momentum=0.25')}: {len(fits)} trials" in show(whole.record, 300)
    # Killed after any trial it goes on with the same, also where the other search is gone.
    lockstep.tune(new_loss_of, NEW, trials=3, run_dir="b", **others)
    Path("old").rename("gone")
    parts = lockstep.tune(new_loss_of, NEW, trials=9, run_dir="b", algorithm="propulate", resume=True)
    assert told(parts) == told(whole)
    assert len(draw_pictures(whole.record, "pictures")) > 3
    with pytest.raises(SettingError, match="is asked to go on with those of"):
        lockstep.tune(new_loss_of, NEW, trials=9, run_dir="b", warm_start="gone", resume=True)


@pytest.mark.parametrize("algorithm", [name for name in ALGORITHM_WORDS if name != "optuna-cma-es"])
def test_every_algorithm_takes_what_others_have_found(algorithm):
    space = {"x": Float(-1, 1), "y": Float(-1, 1)}
    lockstep.tune(lambda p: p["x"] ** 2 + p["y"] ** 2, space, trials=30, algorithm="random", run_dir="old")
    found = lockstep.tune(
        lambda p: p["x"] ** 2 + p["y"] ** 2, space, trials=15, algorithm=algorithm, warm_start=["old"], run_dir="a"
    )
    assert found.counts["done"] == 15


def test_what_cannot_be_begun_from_is_refused(tmp_path):
    (tmp_path / "empty").mkdir()
    for source, why in (("nowhere", "no such directory"), ("empty", "holds no search")):
        with pytest.raises(SettingError, match=why):
            lockstep.tune(loss_of, SPACE, trials=1, warm_start=source, run_dir=f"from-{source}")
    with pytest.raises(SettingError, match=r"momentum.*did you mean|no number from 0 to 0.9"):
        lockstep.tune(loss_of, SPACE, trials=1, warm_start="empty:momentum=7", run_dir="a")


SCRIPT = """
import lockstep
from lockstep.tune import Float

if __name__ == "__main__":
    lockstep.tune(lambda p: p["x"] ** 2, {"x": Float(-1, 1)}, trials=5)
"""


def on_command_line(*words):
    sys.exit(main(["tune", *words]))


def test_the_command_line_begins_from_other_searches(tmp_path, capfd):
    (tmp_path / "search.py").write_text(SCRIPT)
    lockstep.tune(lambda p: p["x"] ** 2, {"x": Float(-2, 2)}, trials=40, algorithm="random", run_dir="old")
    options = ("--workers", "2", "--algorithm", "propulate", "--run-dir", "a")
    search = started(on_command_line, *options, "--from", "old", "search.py")
    assert exit_code_of(search) == 0
    assert f"known from {tmp_path / 'old'}: " in capfd.readouterr().err
    assert any(parent < 0 for trial in load("a").trials for parent in trial.parents)
    again = started(on_command_line, *options, "--resume", "--trials", "9", "--from", "old", "search.py")
    assert exit_code_of(again) == 0
    assert len(load("a").trials) == 9
