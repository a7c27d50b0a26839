"""When a search ends: without improvement, and what is evaluated again then."""

import sys

import pytest

import lockstep
from lockstep.cli.main import main
from lockstep.errors import SettingError
from lockstep.tune import Float, load
from lockstep.tune.results.summary import show
from searches import started
from waiting import DEADLINE_S

LINE = {"x": Float(0, 1)}


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def on_command_line(*words):
    process = started(lambda: sys.exit(main(["tune", *words])))
    process.join(DEADLINE_S)
    return process.exitcode


class Falling:
    """An objective whose losses are those of a list, one after the other."""

    def __init__(self, *losses):
        self.losses = list(losses)

    def __call__(self, params):
        return self.losses.pop(0)


def test_a_search_ends_where_it_improves_no_more_and_goes_on_with_more_patience():
    losses = [5.0, 4.0, 4.0, 3.999, 3.998, 1.0, 2.0, 2.0, 2.0, 2.0, 2.0]
    whole = lockstep.tune(Falling(*losses), LINE, trials=100, patience=4, run_dir="a")
    assert len(whole.trials) == 10  # 1.0, and four that are not better
    assert "ended: no improvement in 4 trials" in show(whole.record)
    early = lockstep.tune(Falling(*losses), LINE, trials=100, patience=3, min_improvement=0.01, run_dir="b")
    assert len(early.trials) == 5
    assert "no improvement of more than 0.01 of the loss in 3 trials" in show(early.record)
    assert "last improvement: trial 4, from 3.999 to 3.998" in show(early.record)
    same = lockstep.tune(Falling(), LINE, trials=100, patience=3, min_improvement=0.01, run_dir="b", resume=True)
    assert len(same.trials) == 5
    more = lockstep.tune(Falling(*losses[5:]), LINE, trials=100, patience=4, run_dir="b", resume=True)
    assert len(more.trials) == 10
    with pytest.raises(SettingError, match="patience=3 asks when the loss has improved"):
        lockstep.tune(Falling(), LINE, patience=3, objectives=2)
    with pytest.raises(SettingError, match="min_improvement=-1"):
        lockstep.tune(Falling(), LINE, min_improvement=-1)


SCRIPT = """
import sys, time
import lockstep
from lockstep.tune import Float

def objective(params):
    time.sleep(0.01)
    return float(sys.argv[1]) if len(sys.argv) > 1 else params["x"]

if __name__ == "__main__":
    result = lockstep.tune(objective, {"x": Float(0, 1)}, trials=300, seed=2)
    print("best of", len(result.trials))
"""


def test_several_workers_end_together_where_nothing_improves(tmp_path, capfd):
    (tmp_path / "search.py").write_text(SCRIPT)
    assert on_command_line("--workers", "2", "--patience", "10", "--run-dir", "a", "search.py", "1.0") == 0
    # What the other worker evaluated then was finished.
    ended = len(load("a").trials)
    assert 11 <= ended <= 13
    assert f"best of {ended}" in capfd.readouterr().out
    again = ("--resume", "--workers", "2", "--patience", "20", "--run-dir", "a", "search.py", "1.0")
    assert on_command_line(*again) == 0
    assert 21 <= len(load("a").trials) <= 23
