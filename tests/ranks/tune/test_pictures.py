"""The pictures of a search: their numbers are right, and they are whole files."""

import csv
import json
import subprocess
import sys
from xml.etree import ElementTree

import pytest

from lockstep.tune.pictures import (
    IMPORTANCE,
    OPTUNA_TITLES,
    PICTURES,
    descent,
    draw_pictures,
    progress,
    timeline,
)
from lockstep.tune.record.journal import SearchRecord
from made_trials import trial
from simulated_search import SPACE, simulated_search


@pytest.fixture(scope="module")
def record():
    return simulated_search(trials=60, islands=2, workers=3)


def record_of(*trials, moves=()):
    return SearchRecord(SPACE.to_json(), {}, tuple(trials), moves)


def point_of(**params):
    whole = {"layers": 5, "activation": "relu", "lr": 0.01, "optimizer": "adam", **params}
    return {"params": whole, "point": SPACE.point(whole)}


def test_each_picture_is_a_whole_svg_with_its_numbers_beside_it(record, tmp_path):
    paths = draw_pictures(record, tmp_path / "pictures")
    assert len(paths) == 3 * (len(PICTURES) + 1) + len(OPTUNA_TITLES)
    assert all(ElementTree.parse(path) for path in paths if path.suffix == ".svg")
    for picture in (*PICTURES, IMPORTANCE):
        svg, table, numbers = (tmp_path / "pictures" / f"{picture.name}.{kind}" for kind in ("svg", "csv", "json"))
        assert ElementTree.parse(svg).getroot().tag == "{http://www.w3.org/2000/svg}svg"
        content = json.loads(numbers.read_text())
        assert content["method"]
        with table.open(newline="") as file:
            assert len(list(csv.DictReader(file))) == len(content["rows"]) == len(picture.rows(record)) > 0


@pytest.mark.parametrize(
    "trials",
    [
        (),
        (trial(0, [], "failed", **point_of()), trial(1, [], "running", **point_of())),
        (trial(0, [float("inf")], **point_of()), trial(1, [-1.0], **point_of(layers=3))),
    ],
    ids=["none", "no loss", "infinite"],
)
def test_a_search_that_has_hardly_begun_has_pictures_too(trials, tmp_path):
    for path in draw_pictures(record_of(*trials), tmp_path):
        assert path.stat().st_size > 0


def test_best_so_far_never_rises_and_rank_hours_add_up(record):
    rows = progress.rows(record)
    best = [row["best_so_far"] for row in rows]
    assert best == sorted(best, reverse=True)
    assert best[-1] == min(one.loss for one in record.trials if one.losses)
    assert [row["at_s"] for row in rows] == sorted(row["at_s"] for row in rows)
    assert rows[-1]["rank_hours"] == pytest.approx(sum(one.run_s * one.ranks for one in record.trials) / 3600)


def test_a_trial_outside_of_the_constraints_is_not_the_best_so_far():
    rows = progress.rows(record_of(trial(0, [1.0]), trial(1, [0.1], violation=1.0)))
    assert [row["best_so_far"] for row in rows] == [1.0, 1.0]


def test_the_timeline_shows_idle_gaps_and_only_what_ran():
    went_on = trial(1, began=10.0, ended=100.0)  # was cut by a stop of the search, and ran 20 s of the 90
    record = record_of(trial(0, began=0.0, ended=4.0), trial(2, [1.0] * 5, "running", began=3.0, worker=1), went_on)
    object.__setattr__(went_on, "run_s", 20.0)
    first, second, other = timeline.rows(record)
    assert (first["began_s"], first["ended_s"], first["idle_s"]) == (0.0, 4.0, 0.0)
    assert (second["began_s"], second["ended_s"], second["idle_s"]) == (80.0, 100.0, 76.0)
    assert (other["worker"], other["began_s"], other["ended_s"]) == (1, 3.0, 100.0)


def test_the_line_of_descent_is_that_of_the_best_and_moves_stand_between_births(record):
    rows = descent.rows(record)
    births = {row["place"]: row for row in rows if row["kind"] == "birth"}
    best = min((one for one in record.trials if one.losses), key=lambda one: one.loss)
    assert births[best.number]["ancestor_of_best"]
    for row in births.values():
        if row["ancestor_of_best"]:
            assert all(births[int(parent)]["ancestor_of_best"] for parent in row["parents"].split())
    moves = [row for row in rows if row["kind"] == "copy"]
    assert len(moves) == len(record.moves) > 0
    assert all(0 < move["place"] <= len(births) for move in moves)


def test_what_optuna_draws_is_drawn_by_it_and_left_out_without_it(record, tmp_path, monkeypatch):
    names = {f"{name}.svg" for name in OPTUNA_TITLES}
    assert names <= {path.name for path in draw_pictures(record, tmp_path)}
    drawn = (tmp_path / "parallel_coordinates.svg").read_text(), (tmp_path / "importance.svg").read_text()
    assert all(name in text for text in drawn for name in ("layers", "activation", "lr", "optimizer"))
    monkeypatch.setattr("lockstep.tune.pictures.has_optuna", lambda: False)
    assert not names & {path.name for path in draw_pictures(record, tmp_path / "without")}


def test_matplotlib_is_loaded_only_to_draw():
    code = "import sys, lockstep.tune.pictures; assert not {'matplotlib', 'rich', 'optuna', 'torch'} & set(sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
