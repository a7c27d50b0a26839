"""Whole searches with small objectives: how many trials, the same ones again, what is refused, what fails."""

import sys
from pathlib import Path

import pytest

import lockstep
from lockstep.cli.main import main
from lockstep.errors import LaunchError, SettingError
from lockstep.tune import Choice, Evaluated, Float, Int, Islands, Proposal, load
from lockstep.tune.record.trial_claims import TrialClaims
from lockstep.tune.start_search import worker_sizes
from lockstep.tune.workers.driver import plan_workers
from searches import exit_code_of, started
from waiting import wait_until

SPACE = {"x": Float(-1, 1), "n": Int(0, 3), "kind": Choice("a", ("b", 2), None)}


def loss_of(params):
    return params["x"] ** 2 + params["n"]


def told(result):
    return [(trial.point, trial.losses, trial.operator, trial.parents) for trial in result.trials]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_a_search_of_one_worker_is_the_same_again_also_when_it_is_resumed():
    whole = lockstep.tune(loss_of, SPACE, trials=60, seed=5, run_dir="whole")
    lockstep.tune(loss_of, SPACE, trials=25, seed=5, run_dir="parts")
    parts = lockstep.tune(loss_of, SPACE, trials=60, seed=5, run_dir="parts", resume=True)
    assert told(whole) == told(parts)
    assert told(whole) != told(lockstep.tune(loss_of, SPACE, trials=60, seed=6, run_dir="other"))
    assert whole.counts["done"] == 60
    assert whole.best.loss == min(trial.loss for trial in whole.trials) < 0.1


def test_what_is_there_is_neither_overwritten_nor_mixed():
    lockstep.tune(loss_of, SPACE, trials=3, run_dir="a")
    with pytest.raises(SettingError, match="3 trials have ended: go on with --resume"):
        lockstep.tune(loss_of, SPACE, trials=3, run_dir="a")
    with pytest.raises(SettingError, match=r"over another space: x was .*Give the same space"):
        lockstep.tune(loss_of, SPACE | {"x": Float(-2, 1)}, trials=5, run_dir="a", resume=True)
    with pytest.raises(SettingError, match="begun with seed=0"):
        lockstep.tune(loss_of, SPACE, trials=5, seed=1, run_dir="a", resume=True)
    assert len(lockstep.tune(loss_of, SPACE, trials=4, seed=1, run_dir="a", fresh=True).trials) == 4
    with pytest.raises(SettingError, match="an objective is called as"):
        lockstep.tune(lambda: 0, SPACE, run_dir="b")


def test_what_an_objective_may_give():
    given = iter(
        [1, float("nan"), "good", (1.0, 2.0), Evaluated(0.5, violation=2.0), float("-inf"), ZeroDivisionError()]
    )

    def objective(params):
        if isinstance(value := next(given), Exception):
            raise value
        return value

    trials = lockstep.tune(objective, SPACE, trials=7, run_dir="a").trials
    assert [trial.state for trial in trials] == ["done", "failed", "failed", "failed", "done", "failed", "failed"]
    assert [trial.reason.partition(" (test_")[0] for trial in trials] == [
        "",
        "the objective returned nan",
        "the objective returned 'good', which is not a number",
        "the objective returned 2 losses, and the search has objectives=1",
        "",
        "the objective returned -inf",
        "ZeroDivisionError",
    ]
    assert (trials[4].losses, trials[4].violation) == ((0.5,), 2.0)


def claim_all(directory, worker, most):
    claims = TrialClaims(directory)
    with open(directory / f"{worker}.txt", "w", encoding="ascii") as file:
        while (number := claims.claim(worker, most)) is not None:
            file.write(f"{number}\n")


def test_each_trial_is_claimed_once(tmp_path):
    workers = [started(claim_all, tmp_path, worker, 3000) for worker in range(3)]
    for worker in workers:
        worker.join()
    claimed = [list(map(int, (tmp_path / f"{worker}.txt").read_text().split())) for worker in range(3)]
    assert sorted(number for numbers in claimed for number in numbers) == list(range(3000))
    claims = TrialClaims(tmp_path)
    assert all(claims.owners()[number] == worker for worker, numbers in enumerate(claimed) for number in numbers)
    assert claims.take_over(7, claims.owners()[7], 9)
    assert not claims.take_over(7, 5, 1)
    assert claims.owners()[7] == 9
    claims.close()


class Asked:
    """A random search that notes what it is told of trials without a loss, one line for each proposal."""

    def __init__(self, space, worker):
        self.space, self.file, self.told = space, Path(f"told-{worker}"), None

    def observe(self, individuals):
        pass

    def forget(self, numbers):
        pass

    def inform(self, running, failed, trained_s):
        self.told = len(running), len(failed), trained_s

    def propose(self, random):
        with self.file.open("a") as file:
            print(*self.told, file=file)
        return Proposal(self.space.sample(random))


def test_an_algorithm_is_told_what_runs_what_failed_and_how_long_trials_took():
    def objective(params):
        # Two workers are in a trial at a time, whichever is first; then one of them begins the next.
        Path(f"in-{params['x']}").touch()
        wait_until(lambda: len([*Path().glob("in-*")]) >= 2)
        if params["n"] == 3:
            raise ZeroDivisionError
        return loss_of(params)

    def asked(space, *, objectives, worker, workers):
        return Asked(space, worker)

    result = lockstep.tune(objective, SPACE, trials=24, workers=2, algorithm=asked, run_dir="a", seed=1)
    lines = [
        tuple(map(float, line.split())) for file in ("told-0", "told-1") for line in Path(file).read_text().splitlines()
    ]
    assert len(lines) == 24
    assert max(running for running, _, _ in lines) == 1  # the other worker's
    failed = result.counts["failed"]
    assert failed - 1 <= max(fails for _, fails, _ in lines) <= failed
    assert 0 < max(seconds for _, _, seconds in lines) <= sum(trial.run_s for trial in result.trials)


def test_workers_share_the_gpus_of_a_machine():
    assert worker_sizes(3, (2,)) == (2, 2, 2)
    assert worker_sizes(2, (2, 1)) == (2, 1)
    assert [spec.gpus for spec in plan_workers((0, 4), (2, 1), "0123")] == [("0", "1"), ("2",)]
    assert [spec.gpus for spec in plan_workers((0, 4), (2, 1), "")] == [None, None]
    with pytest.raises(SettingError, match="need 6 GPUs, and 4 can be used"):
        plan_workers((0, 1, 2), (2, 2, 2), "0123")
    with pytest.raises(SettingError, match=r"2 numbers of ranks .* for 3 workers"):
        worker_sizes(3, (2, 1))


def fails(params):
    raise RuntimeError(f"no good: {params['x'] > 2}")


def test_islands_of_workers_and_a_search_all_of_whose_trials_fail(capfd):
    islands = Islands(count=2, migration=1.0)
    result = lockstep.tune(loss_of, SPACE, trials=40, workers=2, islands=islands, run_dir="a")
    assert result.counts["done"] == 40
    # On a busy machine one of them may have done it all.
    assert {trial.island for trial in result.trials} <= {0, 1}
    assert {(move.source, move.target) for move in result.record.moves} <= {(0, 1), (1, 0)}
    with pytest.raises(LaunchError):
        lockstep.tune(fails, SPACE, trials=3, workers=1, run_dir="b")
    assert "3 trials: RuntimeError: no good: False (test_searches.py:" in capfd.readouterr().err


SCRIPT = """
import sys, time
from pathlib import Path
import lockstep
from lockstep.tune import Float

def objective(params):
    while not Path(sys.argv[1]).exists():
        time.sleep(0.01)
    time.sleep(0.02)
    return params["x"]

if __name__ == "__main__":
    result = lockstep.tune(objective, {"x": Float(0, 1)}, trials=5)
    print("best of", len(result.trials))
"""


def on_command_line(*words):
    sys.exit(main(["tune", *words]))


def test_the_command_line(tmp_path, capfd):
    (tmp_path / "search.py").write_text(SCRIPT)
    other = "a/journal/worker-0001.jsonl"  # whose worker the first one waits for
    first = started(on_command_line, "--workers", "1", "--trials", "30", "--run-dir", "a", "search.py", other)
    wait_until((tmp_path / "a/journal/worker-0000.jsonl").exists)
    # It takes over how many trials there are: the script says another number.
    joined = started(on_command_line, "--join", "--workers", "1", "--run-dir", "a", "search.py", other)
    for process in (first, joined):
        assert exit_code_of(process) == 0
    assert capfd.readouterr().out.count("best of 30") == 1
    trials = load("a").trials
    assert [trial.number for trial in trials] == list(range(30))
    assert {trial.worker for trial in trials} == {0, 1}
    (tmp_path / "broken.py").write_text("import a_package_that_is_not_there")
    broken = started(on_command_line, "--workers", "1", "--run-dir", "b", "broken.py")
    assert exit_code_of(broken) == 1
    assert "a_package_that_is_not_there" in (tmp_path / "b/workers/0000.failure").read_text()
