"""When a search ends: without improvement, and what is evaluated again then."""

import math
import os
import random
import signal
import statistics
import sys
from pathlib import Path

import pytest
import torch
from test_kills import ends, kill_something

import lockstep
from lockstep.cli.main import main
from lockstep.errors import SettingError
from lockstep.trial_contract import current_trial
from lockstep.tune import Float, enqueue, load
from lockstep.tune.results.summary import show
from searches import exit_code_of, search_quickly, started
from waiting import DEADLINE_S, wait_until

LINE = {"x": Float(0, 1)}


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def on_command_line(*words):
    process = started(lambda: sys.exit(main(["tune", *words])))
    return exit_code_of(process)


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
    with pytest.raises(SettingError, match="patience=3 asks which loss is the best"):
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


def lucky(params):
    """Many points are as good as each other, but for luck."""
    return round(params["x"], 1) + 0.3 * torch.rand(1).item()


def test_the_best_are_evaluated_again_with_seeds_that_differ():
    once = lockstep.tune(lucky, LINE, trials=30, run_dir="once")
    result = lockstep.tune(lucky, LINE, trials=30, repeats=3, repeat_best=4, run_dir="a")
    assert [trial.loss for trial in result.trials] == [trial.loss for trial in once.trials]
    assert result.counts["done"] == 30
    chosen = [trial for trial in result.trials if trial.repeats]
    assert {trial.number for trial in chosen} == {trial.number for trial in once.top(4)}
    assert all(len(set(trial.repeat_losses)) == 3 and trial.loss not in trial.repeat_losses for trial in chosen)
    # The same luck for all that are compared.
    noise = [[loss - round(trial.params["x"], 1) for loss in trial.repeat_losses] for trial in chosen]
    assert noise == [pytest.approx(noise[0])] * 4
    assert list(result.top(4)) == sorted(chosen, key=lambda trial: (trial.mean, trial.loss))
    assert result.best.params == min(chosen, key=lambda trial: (trial.mean, trial.loss)).params
    rows = {row["number"]: row for row in result.rows()}
    assert (rows[result.best.number]["repeats"], rows[result.best.number]["mean"]) == (3, result.best.mean)
    assert rows[result.best.number]["spread"] == pytest.approx(statistics.stdev(result.best.repeat_losses))
    assert sum(row["repeats"] for row in rows.values()) == 12
    assert "mean of 3 repeats" in show(result.record)
    assert "12 of 12 repeats" in show(result.record)
    assert result.to_json()["best"]["mean"] == result.best.mean
    # A search without repeats is resumed with some, and one with some with more trials.
    assert told(lockstep.tune(lucky, LINE, trials=30, repeats=3, repeat_best=4, run_dir="once", resume=True)) == told(
        result
    )
    more = lockstep.tune(lucky, LINE, trials=40, repeats=3, repeat_best=4, run_dir="a", resume=True)
    assert len(more.trials) == 40
    assert all(len(trial.repeats) in (0, 3) for trial in more.trials)
    best = sorted(more.trials, key=lambda trial: trial.loss)[:4]
    assert all(trial.repeats for trial in best)


def told(result):
    return [(one.number, one.point, one.losses, one.state) for one in result.record.evaluations]


def test_runs_of_repeats_have_seeds_of_their_own_and_a_repeat_that_fails_counts_as_infinite():
    def objective(params):
        with lockstep.Run(seed=7) as run:
            drawn = torch.rand(1).item()
            assert (run.settings.values.seed == 7) == (current_trial().repeat == 0)
        if current_trial().repeat == 2:
            raise ZeroDivisionError
        return drawn

    with lockstep.Run(seed=7):
        first = torch.rand(1).item()
    result = lockstep.tune(objective, LINE, trials=2, repeats=2, repeat_best=1, run_dir="a")
    assert [trial.loss for trial in result.trials] == [first, first]
    assert result.trials[0].repeat_losses[0] != first
    assert result.trials[0].mean == math.inf
    assert result.best.number == 0
    assert {path.name for path in Path("a/trials").glob("*") if (path / "checkpoints").exists()} == {"00000", "00001"}


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"repeats": 1, "objectives": 2}, "repeats=1 asks which loss is the best"),
        ({"repeats": 1, "inherit_weights": True}, "cannot be evaluated again"),
        ({"repeats": -1}, "repeats=-1: give a whole number"),
    ],
)
def test_repeats_that_make_no_sense_are_refused(options, why):
    with pytest.raises(SettingError, match=why):
        lockstep.tune(lucky, LINE, **options)


def test_repeats_are_evaluated_once_however_workers_are_killed(tmp_path):
    run_dir, choose = tmp_path / "search", random.Random(5)
    options = {"workers": 2, "retries": 10**6, "repeats": 4, "repeat_best": 4}
    driver = started(search_quickly, run_dir, 20, **options)
    for count in (5, 18, 21, 24, 28):
        wait_until(lambda c=count, d=driver: len(ends(run_dir)) >= c or d.exitcode is not None, deadline_s=DEADLINE_S)
        kill_something(driver, choose)
    while exit_code_of(driver) != 0:
        driver = started(search_quickly, run_dir, 20, resume=True, **options)
    # What was enqueued where no trial was left comes after them.
    enqueue(run_dir, [{"x": 1.0}])
    result = load(run_dir)
    assert len(result.trials) == 20
    repeated = [trial for trial in result.trials if trial.repeats]
    assert {trial.number for trial in sorted(result.trials, key=lambda trial: trial.loss)[:4]} <= {
        trial.number for trial in repeated
    }
    # While another worker evaluated its last trial, one of the best may have been another one.
    assert len(repeated) <= 5
    assert [len(trial.repeat_losses) for trial in repeated] == [4] * len(repeated)
    numbers = [one.number for one in result.record.evaluations]
    assert sorted(numbers) == list(range(20 + 4 * len(repeated)))


def test_a_stop_among_the_repeats_is_gone_on_with(tmp_path, capfd):
    (tmp_path / "search.py").write_text(SCRIPT.replace("0.01", "0.1"))
    options = ("--workers", "2", "--trials", "4", "--repeats", "20", "--repeat-best", "2", "--run-dir", "a")
    driver = started(lambda: sys.exit(main(["tune", *options, "search.py"])))
    wait_until(lambda: len(ends(tmp_path / "a")) > 6 or driver.exitcode is not None, deadline_s=DEADLINE_S)
    os.kill(driver.pid, signal.SIGTERM)
    assert exit_code_of(driver) == 75
    assert on_command_line(*options, "--resume", "search.py") == 0
    assert capfd.readouterr().out.count("best of 4") == 1
    assert [len(trial.repeat_losses) for trial in load("a").top(2)] == [20, 20]


def drawn_in_a_run(run, params):
    return torch.rand(1).item()


def search_in_runs(run_dir, ranks):
    lockstep.tune(drawn_in_a_run, LINE, trials=2, repeats=2, workers=1, ranks_per_worker=ranks, run_dir=run_dir, seed=3)


def test_a_repeat_has_the_same_loss_on_any_number_of_ranks():
    for ranks in (1, 2):
        search = started(search_in_runs, f"on-{ranks}", ranks)
        assert exit_code_of(search) == 0
    one, two = load("on-1"), load("on-2")
    assert [trial.repeat_losses for trial in one.trials] == [trial.repeat_losses for trial in two.trials]
    assert len({one.trials[0].loss, *one.trials[0].repeat_losses}) == 3
