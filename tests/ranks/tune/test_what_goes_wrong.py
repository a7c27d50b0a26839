"""Objectives, scripts and drivers that do what they should not: what comes out is right, or says what is wrong."""

import contextlib
import csv
import io
import json
import math
import os
import shutil
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import psutil
import pytest
import torch
from rich.console import Console
from torch import nn
from torch.nn import functional as F

import lockstep
from lockstep.cli.main import main
from lockstep.errors import MismatchError, SettingError, TrialStopped
from lockstep.formatting import acts
from lockstep.launch_contract import ENDS_AT
from lockstep.trial_contract import current_trial
from lockstep.tune import Choice, Evaluated, Float, draw_pictures, load
from lockstep.tune.record.journal import JournalWriter, SearchPlan, write_patiently
from lockstep.tune.record.records import TrialBegan
from lockstep.tune.results.summary import show
from lockstep.tune.results.terminal_view import picture
from lockstep.tune.search import Space
from lockstep.tune.search_settings import SearchSettings
from lockstep.tune.start_search import _compare_ranks
from lockstep.tune.workers.outcome import Outcome
from searches import exit_code_of, started

LINE = {"x": Float(0, 1)}


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


# ---- what an objective does ---------------------------------------------------------------------------------------


def on_two_ranks(run, params):
    """In the first trial the followers return nothing; in the second all catch the order to stop; the third is nan."""
    number = current_trial().number
    if number == 0:
        return torch.tensor(params["x"]) if run.leads else None
    if number == 1:
        try:
            for _ in range(4):
                run.report(1.0)
        except TrialStopped:
            return 0.0
    return math.nan if run.leads else 0.5


def search_on_two_ranks():
    lockstep.tune(
        on_two_ranks, LINE, trials=3, workers=1, ranks_per_worker=2, stopping="patience:1", run_dir="a", retries=0
    )


def test_what_the_leader_returns_is_the_loss():
    driver = started(search_on_two_ranks)
    assert exit_code_of(driver) == 0
    returned, caught, undefined = load("a").trials
    assert (returned.state, returned.losses) == ("done", (pytest.approx(returned.params["x"]),))
    assert (caught.state, caught.losses) == ("stopped", (1.0,))
    assert (undefined.state, undefined.reason) == ("failed", "the objective returned nan")
    assert {trial.attempts for trial in load("a").trials} == {1}


def kills_its_launcher(params):
    if current_trial().number == 0:
        os.kill(psutil.Process(os.getppid()).ppid(), signal.SIGKILL)
        time.sleep(60)
    return params["x"]


def test_a_trial_that_kills_its_launcher_each_time_has_failed_after_its_retries():
    driver = started(lockstep.tune, kills_its_launcher, LINE, trials=2, workers=1, run_dir="a", retries=1)
    assert exit_code_of(driver) == 0
    kills, fine = load("a").trials
    assert (kills.state, kills.attempts) == ("failed", 2)
    assert kills.reason == "the launcher of its worker was killed by SIGKILL"
    assert (fine.state, fine.attempts) == ("done", 1)


def kills_its_rank(params):
    if current_trial().number == 1 and current_trial().attempt == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return params["x"]


def test_a_rank_of_a_trial_that_is_killed_is_told_on_the_screen(capfd):
    driver = started(lockstep.tune, kills_its_rank, LINE, trials=3, workers=1, run_dir="a")
    assert exit_code_of(driver) == 0
    assert [(trial.state, trial.attempts) for trial in load("a").trials] == [("done", 1), ("done", 2), ("done", 1)]
    told = capfd.readouterr().err
    assert told.count("trial 1, attempt 1: ") == 1
    assert "was killed by SIGKILL" in told.partition("trial 1, attempt 1: ")[2].splitlines()[0]


def test_a_stopped_trial_of_which_it_is_unknown_whether_it_violates_the_constraints_is_the_last():
    def objective(run, params):
        number = current_trial().number
        try:
            for _ in range(4):
                run.report(number / 100)
        except TrialStopped:
            if number < 2:
                raise
        return Evaluated(1.0, violation=(0.0, 0.0, 0.0, 3.0, 0.0)[number])

    class StopsFirstThree:
        def stops(self, trial, others):
            return "one of the first" if trial.number < 3 else ""

    result = lockstep.tune(objective, LINE, trials=3, stopping=StopsFirstThree(), run_dir="a")
    assert [trial.violation for trial in result.trials] == [0.0] * 3, "as long as no trial violates any"
    assert result.best.number == 0
    result = lockstep.tune(objective, LINE, trials=5, stopping=StopsFirstThree(), run_dir="a", resume=True)
    assert [trial.violation for trial in result.trials] == [math.inf, math.inf, 0.0, 3.0, 0.0]
    assert [trial.number for trial in result.top()] == [2, 4, 3, 0, 1]
    assert {trial.number for trial in result.pareto_front} == {2}
    assert "stopped before it was known" in show(replace(result.record, trials=result.trials[:1]))
    json.dumps(result.to_json(), allow_nan=False)


def test_what_is_bred_once_a_trial_violates_the_constraints_is_what_a_resumed_search_breeds():
    def objective(run, params):
        if current_trial().number < 6:
            run.report(params["x"])
        return Evaluated(1 - params["x"], violation=params["x"])

    class StopsFirstSix:
        def stops(self, trial, others):
            return "one of the first" if trial.number < 6 else ""

    def searched(run_dir, *steps):
        for number, trials in enumerate(steps):
            result = lockstep.tune(
                objective, LINE, trials=trials, stopping=StopsFirstSix(), run_dir=run_dir, resume=number > 0,
                algorithm="propulate:population=2,random_init=0",
            )  # fmt: skip
        return [trial.params["x"] for trial in result.trials]

    assert searched("once", 14) == searched("resumed", 9, 14)


def test_an_objective_cannot_change_what_others_get():
    space = {"sizes": Choice([8], [8, 8]), "x": Float(0, 1)}

    def objective(params):
        params["sizes"].append(10)
        return len(params["sizes"])

    result = lockstep.tune(objective, space, trials=20, run_dir="a")
    assert {trial.loss for trial in result.trials} == {2.0, 3.0}
    assert all(trial.loss == len(trial.params["sizes"]) + 1 for trial in result.trials)


def test_what_is_no_number_is_no_result():
    assert (
        Outcome.of_result(Evaluated(0.5, violation=math.nan), 1).reason == "the objective returned a violation of nan"
    )
    assert Outcome.of_result(10**400, 1).state == "failed"

    def diverging(run, params):
        for _ in range(3):
            run.report(math.nan)
        return 0.0

    result = lockstep.tune(diverging, LINE, trials=2, stopping="patience:1", run_dir="a")
    assert [(trial.state, trial.losses) for trial in result.trials] == [("stopped", ())] * 2
    assert not result.top()


XY = torch.randn(64, 2, generator=torch.Generator().manual_seed(0))
NEAR = (XY.norm(dim=1) < 1).long()


def train(run, lr, epochs=2):
    """The loss, and how many steps were trained for it."""
    model = run.model(nn.Linear(2, 2))
    run.optimizer(torch.optim.SGD(model.parameters(), lr=lr))
    batches, steps = run.loader((XY, NEAR), global_batch=32), 0
    for _ in run.epochs(epochs):
        for points, near in run.train(batches):
            steps += run.step(F.cross_entropy(model(points), near))
        run.report(run.metrics["loss"])
    return run.metrics["loss"], steps


@pytest.mark.campaign
def test_runs_of_one_trial_share_nothing_and_report_one_curve(capfd):
    trained = []

    def cross_validation(params):
        losses = []
        for fold in range(2):
            with lockstep.Run(seed=fold) as run:
                loss, steps = train(run, params["lr"])
            losses.append(loss)
            trained.append(steps)
        return sum(losses)

    result = lockstep.tune(cross_validation, {"lr": Float(0.1, 1)}, trials=2, run_dir="a")
    assert trained == [4, 4, 4, 4]
    assert [[report.step for report in trial.reports] for trial in result.trials] == [[0, 1, 2, 3]] * 2
    with lockstep.Run(seed=1) as run:
        alone = train(run, result.trials[0].params["lr"])[0]
    assert alone == result.trials[0].reports[-1].loss
    # Of trials, not a line each.
    assert capfd.readouterr().err.count("done |") == 1


def test_weights_are_inherited_and_only_the_best_keep_theirs():
    before, after = {}, {}

    def objective(run, params):
        model = run.model(nn.Linear(2, 2))
        run.optimizer(torch.optim.SGD(model.parameters(), lr=params["lr"]))
        number = current_trial().number
        for _ in run.epochs(1):
            before[number] = model.weight.tolist()
            for points, near in run.train(run.loader((XY, NEAR), global_batch=32)):
                run.step(F.cross_entropy(model(points), near))
        after[number] = model.weight.tolist()
        return run.metrics["loss"]

    result = lockstep.tune(
        objective, {"lr": Float(0.1, 1)}, trials=8, algorithm="propulate:population=2,random_init=0",
        inherit_weights=True, keep_trials=2, run_dir="a",
    )  # fmt: skip
    heirs = [trial for trial in result.trials if trial.inherits is not None]
    assert len(heirs) > 3
    assert all(before[trial.number] == after[trial.inherits] for trial in heirs)
    kept = {int(path.parent.parent.name) for path in Path("a").glob("trials/*/checkpoints/step-*")}
    assert kept == {trial.number for trial in result.top(2)}


def test_checkpoints_of_the_front_are_kept():
    losses = [(3.0, 3.0), (1.0, 4.0), (4.0, 1.0), (2.0, 2.0), (5.0, 5.0), (3.5, 1.5)]

    def objective(params):
        trial = current_trial()
        (trial.directory / "checkpoints" / "step-1").mkdir(parents=True)
        return losses[trial.number]

    result = lockstep.tune(objective, LINE, trials=6, objectives=2, keep_trials=1, run_dir="a")
    kept = {int(path.parent.parent.name) for path in Path("a").glob("trials/*/checkpoints/step-*")}
    assert kept == {trial.number for trial in result.pareto_front} == {1, 2, 3, 5}


# ---- what a stopping rule does ------------------------------------------------------------------------------------


class OwnRule:
    """Stops trial 1 for its own sake, and those after 2 for that of others."""

    def stops(self, trial, others):
        alone = "flat" if trial.number == 1 and len(trial.reports) == 3 else ""
        return alone or ("worse than others" if trial.number > 2 and others else "")


def test_who_stopped_by_itself_was_trained_to_its_end_and_who_was_cut_short_is_never_the_best():
    # What is reported need not be what is returned: the cut ones report less than the others return.
    def objective(run, params):
        number = current_trial().number
        for _ in range(4):
            run.report(0.5 if number < 3 else (1.0, 2.0)[number % 2] / 100)
        return 0.4

    result = lockstep.tune(objective, LINE, trials=5, stopping=OwnRule(), run_dir="a")
    assert [(trial.state, trial.converged) for trial in result.trials] == [
        ("done", False), ("stopped", True), ("done", False), ("stopped", False), ("stopped", False)
    ]  # fmt: skip
    assert [trial.number for trial in result.top(9)] == [0, 2, 1, 4, 3]


# ---- what a script and its drivers do -----------------------------------------------------------------------------

SCRIPT = """
import os, sys, time
import lockstep
from lockstep.tune import Float

def objective(params):
    print("heard by nobody")
    if AFTER == "raises" and params["x"] > 0.5:
        os._exit(0)
    time.sleep(0.02)
    return params["x"]

AFTER = sys.argv[1]
if __name__ == "__main__":
    result = lockstep.tune(objective, {"x": Float(0, 1)}, trials=6, algorithm="random")
    print("ended, and", result.counts["running"], "run")
    if AFTER == "raises":
        raise KeyError("the end of the script")
    lockstep.tune(objective, {"x": Float(0, 1)}, trials=6)
"""


def on_command_line(*words):
    sys.exit(main(["tune", *words]))


def test_what_a_script_does_after_its_search_is_heard(capfd):
    Path("search.py").write_text(SCRIPT)
    words = ("--workers", "1", "--run-dir")
    raises = started(on_command_line, *words, "a", "search.py", "raises")
    calls_again = started(
        on_command_line, *words, "b", "--trials", "100000", "--time-limit", "1 s", "search.py", "again"
    )
    raises.join()
    calls_again.join()
    said = capfd.readouterr()
    assert raises.exitcode == 1
    assert "KeyError" in said.err
    assert "'the end of the script'" in said.err
    exited = [trial for trial in load("a").trials if trial.params["x"] > 0.5]
    assert exited
    assert {(trial.state, trial.reason) for trial in exited} == {
        ("failed", "the objective ended its process with exit code 0")
    }
    # A time limit ends the search, and not what comes after it.
    assert calls_again.exitcode == 2
    assert "calls lockstep.tune once more" in said.err
    assert load("b").counts["done"] < 100_000
    assert load("b").counts["running"] == 0
    assert said.out.count("ended, and 0 run") == 2
    assert "heard by nobody" not in said.out


def search_in_a_job_that_ends():
    os.environ[ENDS_AT] = str(time.time())
    lockstep.tune(lambda params: 0.0, LINE, workers=1, run_dir="a")


def test_a_search_that_starts_its_workers_itself_says_that_its_job_is_over():
    driver = started(search_in_a_job_that_ends)
    assert exit_code_of(driver) == 75


class FollowerOf:
    """A channel on which a leader has told ``text``."""

    def __init__(self, text):
        self.text = text

    def tell(self, text):
        return self.text


def test_ranks_with_different_spaces_are_named():
    here, leader = (Space.of({"act": Choice(*words)}) for words in (("relu", "tanh"), ("tanh", "relu")))
    settings = SearchSettings()
    with pytest.raises(MismatchError, match=r"different spaces: .*relu.*tanh.* here, .*tanh.*relu.* on the leader"):
        _compare_ranks(here, settings, FollowerOf(json.dumps([leader.to_json(), 0, 1])))
    _compare_ranks(here, settings, FollowerOf(json.dumps([here.to_json(), 0, 1])))


def test_what_a_power_failure_cost_is_neither_counted_twice_nor_taken_for_another_trial(tmp_path):
    first = lockstep.tune(lambda params: params["x"], LINE, trials=4, run_dir="a")
    (tmp_path / "a/claims").write_bytes(b"")
    left = tmp_path / "a/trials/00004/checkpoints"
    left.mkdir(parents=True)
    evaluated = []

    def objective(params):
        evaluated.append(left.exists())
        return params["x"]

    second = lockstep.tune(objective, LINE, trials=5, run_dir="a", resume=True)
    assert evaluated == [False]
    assert second.trials[:4] == first.trials
    assert [trial.number for trial in second.trials] == list(range(5))


def test_damaged_claims_are_read_from_the_journal(tmp_path):
    first = lockstep.tune(lambda params: params["x"], LINE, trials=4, run_dir="a")
    claims = tmp_path / "a/claims"
    for damage in (b"\xff" * 8 + claims.read_bytes()[8:], b"x", b"\0" * 800, claims.read_bytes()[:19] + b"zz"):
        claims.write_bytes(damage)
        again = lockstep.tune(lambda params: params["x"], LINE, trials=4, run_dir="a", resume=True)
        assert again.trials == first.trials
    second = lockstep.tune(lambda params: params["x"], LINE, trials=6, run_dir="a", resume=True)
    assert second.trials[:4] == first.trials
    assert [trial.state for trial in second.trials] == ["done"] * 6


def test_a_disk_that_is_full_for_a_while_costs_no_trial(capfd):
    written, waited = [], []

    def write():
        if len(waited) < 3:
            waited.append(1)
            with open("/dev/full", "wb", buffering=0) as full:
                full.write(b"x")  # no space left on device
        written.append(1)
        return 1

    assert write_patiently("its journal", write) == 1
    assert (len(written), len(waited)) == (1, 3)
    assert capfd.readouterr().err.count("cannot write its journal (No space left on device), and tries again") == 1
    with pytest.raises(IsADirectoryError):
        write_patiently("its journal", lambda: os.open(".", os.O_WRONLY))


def interrupted(params):
    if current_trial().number == 1:
        raise KeyboardInterrupt
    return params["x"]


def search_with_workers(objective):
    lockstep.tune(objective, LINE, trials=6, workers=2, run_dir="a", retries=0)


def test_an_interrupt_in_an_objective_costs_that_trial_and_no_worker():
    driver = started(search_with_workers, interrupted)
    assert exit_code_of(driver) == 0
    trials = load("a").trials
    assert [trial.state for trial in trials] == ["done", "failed", *["done"] * 4]
    assert trials[1].reason.startswith("KeyboardInterrupt (test_what_goes_wrong.py:")


def removes_the_journal(params):
    number = current_trial().number
    if number == 2:
        shutil.rmtree("a/journal")
    return params["x"]


def test_a_journal_that_is_removed_is_written_again_by_those_who_have_it_open():
    result = lockstep.tune(removes_the_journal, LINE, trials=5, run_dir="a")
    assert [trial.state for trial in result.trials] == ["done"] * 5
    assert load("a").trials == result.trials
    again = lockstep.tune(removes_the_journal, LINE, trials=5, run_dir="a", resume=True)
    assert again.trials == result.trials


def test_a_trial_of_another_space_is_named(tmp_path):
    SearchPlan(Space.of({"act": Choice("relu", "tanh")}).to_json(), {"trials": 1}).write(tmp_path)
    with contextlib.closing(JournalWriter(tmp_path, 0)) as writer:
        writer.append(TrialBegan(0, 1, 1, 10.0, params={"act": "tanh"}, point=(2.0,), operator="random"))
    with pytest.raises(SettingError, match=r"trial 0 of .* is none of the space"):
        load(tmp_path)


def test_a_copy_of_a_journal_counts_no_trial_twice():
    first = lockstep.tune(lambda params: params["x"], LINE, trials=4, run_dir="a")
    shutil.copy("a/journal/worker-0000.jsonl", "a/journal/worker-0007.jsonl")
    shutil.copy("a/journal/worker-0000.jsonl", "a/journal/worker-0000 (copy).jsonl")
    second = lockstep.tune(lambda params: params["x"], LINE, trials=8, run_dir="a", resume=True)
    assert [trial.losses for trial in second.trials[:4]] == [trial.losses for trial in first.trials]
    assert [trial.state for trial in second.trials] == ["done"] * 8


def test_hostile_names_and_values_do_nothing_in_what_is_shown():
    space = {"a\x1b]0;owned\x07": Choice("=1+1", "\x00<script>", "$\\frac{$"), "x": Float(0, 1)}

    def objective(params):
        if current_trial().number == 2:
            raise ValueError("\x1b[2J [/bold] gone")
        return params["x"]

    result = lockstep.tune(objective, space, trials=8, run_dir="a")
    assert not any(acts(line) for line in show(result.record).splitlines())
    for path in draw_pictures(result.record, "pictures"):
        if path.suffix == ".svg":
            ElementTree.parse(path)
        if path.suffix == ".csv":
            with path.open(newline="") as file:
                cells = [cell for row in csv.reader(file) for cell in row]
            assert not any(acts(cell) for cell in cells)
            assert all(_is_number(cell) for cell in cells if cell.startswith(("=", "+", "-", "@")))
    Console(file=io.StringIO()).print(picture(result.record, 0.0))


def _is_number(text):
    try:
        float(text)
    except ValueError:
        return False
    return True
