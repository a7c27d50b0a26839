"""Two runs in one directory for checkpoints: the second is refused before it touches anything."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.utils.data import TensorDataset

import lockstep
from lockstep.checkpoint import list_checkpoints
from lockstep.errors import SettingError, UsageError
from lockstep.testing import run_each

SOURCE = str(Path(lockstep.__file__).parents[1])
HOLDS = """
import sys, lockstep
with lockstep.Run(checkpoint=sys.argv[1]):
    print("open", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def holder(tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDS, "root"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": SOURCE},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == "open\n"
    yield process
    if process.poll() is None:
        process.kill()
        process.communicate()


def train(directory, steps=1):
    with lockstep.Run(checkpoint=directory) as run:
        model = run.model(torch.nn.Linear(1, 1))
        run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        batches = run.loader(TensorDataset(torch.ones(4 * steps, 1)), global_batch=4, workers=0)
        for _ in run.epochs(1):
            for (x,) in run.train(batches):
                run.step(model(x).mean())
        return run.progress.step


def test_all_ranks_of_the_second_are_refused_and_it_leaves_everything_as_it_was(tmp_path, holder):
    root = tmp_path / "root"
    (root / ".saving-step-00000007-of-the-first").mkdir()
    before = sorted(os.listdir(root))
    outcomes = run_each(train, 2, str(root), env={"LOCKSTEP_FRESH": "1"})
    for outcome in outcomes:
        assert isinstance(outcome.error, SettingError), outcome
        assert f"checkpoint={str(root)!r} is in use by another run, process {holder.pid} on " in str(outcome.error)
    assert sorted(os.listdir(root)) == before
    holder.communicate()  # the end of its input
    assert holder.returncode == 0
    assert [outcome.value for outcome in run_each(train, 2, str(root))] == [1, 1]


def test_runs_of_one_process_follow_each_other_and_do_not_nest(tmp_path, monkeypatch):
    with lockstep.Run(checkpoint=tmp_path) as outer:
        with lockstep.Run(checkpoint=tmp_path):  # closes the other one first
            pass
        with pytest.raises(UsageError, match="this run is closed"):
            outer.log()
    with pytest.raises(ZeroDivisionError), lockstep.Run(checkpoint=tmp_path):
        1 / 0  # noqa: B018
    assert train(tmp_path) == 1
    monkeypatch.setenv("LOCKSTEP_FRESH", "1")
    assert train(tmp_path, steps=2) == 2
    assert [one.step for one in list_checkpoints(tmp_path)] == [2]
