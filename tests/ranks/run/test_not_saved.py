"""Exit code 74: trained to the end, and what was asked to be saved is not."""

import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.utils.data import TensorDataset

import lockstep
from lockstep.checkpoint import list_checkpoints
from lockstep.testing import run_each
from waiting import wait_until

SOURCE = str(Path(lockstep.__file__).parents[1])


def train(directory, *, spoil_at=None, spoil=None, finish=lambda: None, **settings):
    """Two epochs of two steps; ``spoil()`` once so many are done."""
    with lockstep.Run(checkpoint=directory, **settings) as run:
        model = run.model(torch.nn.Sequential(torch.nn.Linear(100, 100), torch.nn.Linear(100, 100)))
        run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        batches = run.loader(TensorDataset(torch.ones(8, 100)), global_batch=4, workers=0)
        for _ in run.epochs(2):
            for (x,) in run.train(batches):
                run.step(model(x).mean())
                if run.progress.step == spoil_at:
                    if "save_every" in settings:
                        wait_for_a_checkpoint(directory)
                    spoil()
        finish()
    return "done"


def wait_for_a_checkpoint(directory):
    wait_until(lambda: list_checkpoints(Path(directory)))


def small_files():
    """From now on no file of this process may grow beyond a kilobyte: as a full disk, but for the process alone."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))


def large_files():
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


def full_to_the_end(directory):
    return train(directory, spoil_at=2, spoil=small_files, save_every="1 step")


def full_for_a_while(directory):
    return train(directory, spoil_at=2, spoil=small_files, finish=large_files)


def full_on_the_other_rank(directory):
    return train(directory, spoil_at=2, spoil=small_files if int(os.environ["RANK"]) else int, save_every="1 step")


def raises(directory):
    def finish():
        raise KeyError("label")

    return train(directory, spoil_at=2, spoil=small_files, finish=finish)


def leaves(directory):
    return train(directory, spoil_at=2, spoil=small_files, finish=lambda: sys.exit(0))


def notes(outcome):
    return "\n".join(getattr(outcome.error, "__notes__", ()))


@pytest.mark.parametrize("run", [full_to_the_end, full_on_the_other_rank, leaves])
def test_every_rank_leaves_with_74_and_says_what_is_missing(tmp_path, run):
    outcomes = run_each(run, 2, str(tmp_path))
    for outcome in outcomes:
        assert isinstance(outcome.error, SystemExit), outcome
        assert outcome.error.code == 74
        assert f"trained to step 4, which no checkpoint in {tmp_path} holds: " in notes(outcome)
        assert "File too large" in notes(outcome)
    assert notes(outcomes[0]) == notes(outcomes[1])
    there = [one.step for one in list_checkpoints(tmp_path)]
    good = f"The last good one is of step {there[0]}: " if there else "There is no checkpoint at all"
    assert good in notes(outcomes[0])
    assert 4 not in there


@pytest.mark.parametrize("run", [full_for_a_while, train])
def test_what_is_saved_in_the_end_is_no_complaint(tmp_path, run):
    assert [outcome.value for outcome in run_each(run, 2, str(tmp_path))] == ["done"] * 2
    assert [one.step for one in list_checkpoints(tmp_path)] == [4]
    resumed = run_each(train, 2, str(tmp_path), env={"LOCKSTEP_RESUME": "1"})
    assert [outcome.value for outcome in resumed] == ["done"] * 2


def test_an_error_of_the_script_stays_the_cause(tmp_path):
    (outcome,) = run_each(raises, 1, str(tmp_path))
    assert isinstance(outcome.error, KeyError)


def not_begun(directory):
    small_files()
    with lockstep.Run(checkpoint=directory):
        pass
    with lockstep.Run() as run:
        run.model(torch.nn.Linear(1, 1))
        for _ in run.epochs(0):
            pass
    return "done"


def test_nothing_is_missing_of_a_run_without_a_directory_or_without_training(tmp_path):
    (outcome,) = run_each(not_begun, 1, str(tmp_path))
    assert outcome.value == "done", outcome


def runs_on(directory, strategy):
    """Leave with 74, and see that all is closed, by another run in the same process and directory."""
    try:
        train(directory, finish=small_files, strategy=strategy)
    except SystemExit as ending:
        large_files()
        return ending.code, train(directory, strategy=strategy)


@pytest.mark.parametrize("strategy", ["ddp", "parameter-server"])
def test_everything_is_closed_as_at_a_normal_end(tmp_path, strategy):
    outcomes = run_each(runs_on, 2, str(tmp_path), strategy)
    assert [outcome.value for outcome in outcomes] == [(74, "done")] * 2, outcomes


HERE = Path(__file__).parent
SCRIPT = """
import sys
sys.path[:0] = {tests!r}
from test_not_saved import full_to_the_end
full_to_the_end("root")
"""


@pytest.mark.parametrize("view", ["lines", pytest.param("live", marks=pytest.mark.campaign)])
def test_a_script_alone_leaves_with_74_and_says_so_last(tmp_path, view):
    (tmp_path / "train.py").write_text(SCRIPT.format(tests=[str(HERE), str(HERE.parents[1] / "harness")]))
    ended = subprocess.run(
        [sys.executable, "train.py"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": SOURCE, "LOCKSTEP_VIEW": view, "COLUMNS": "400"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ended.returncode == 74, ended.stderr
    assert "Traceback" not in ended.stderr
    *before, last = ended.stderr.splitlines()
    assert f"NOT SAVED: trained to step 4, which no checkpoint in {tmp_path / 'root'} holds: " in last
    assert last.endswith("mend that, then run it again with --resume to go on from there")
    assert "File too large" in last
    assert "unsaved" in " ".join(before[-3:])
