"""`lockstep run --fault`: on runs of `Run` and on plain scripts; one that never happened fails the run."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import lockstep

SOURCE = str(Path(lockstep.__file__).parents[1])

TRAIN = """
import hashlib, sys, torch, lockstep
from torch.utils.data import TensorDataset

with lockstep.Run(seed=1, save_every="2 steps") as run:
    net = torch.nn.Linear(1, 1)
    model = run.model(net)
    run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    batches = run.loader(TensorDataset(torch.arange(40.0).reshape(-1, 1)), global_batch=4, micro_batch=1, workers=0)
    for epoch in run.epochs(1):
        for (x,) in run.train(batches):
            run.step(model(x).sin().mean())
    state = hashlib.sha256(net.weight.detach().numpy().tobytes()).hexdigest()
    if run.leads:
        print("state", state, "generation", run.world.generation)
"""
PLAIN = """
import time
time.sleep(100)
"""


@pytest.fixture
def run(tmp_path):
    (tmp_path / "train.py").write_text(TRAIN)
    (tmp_path / "plain.py").write_text(PLAIN)

    def run(*words):
        return subprocess.run(
            [sys.executable, "-m", "lockstep", "run", *words],
            cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": SOURCE},
            capture_output=True,
            text=True,
            timeout=100,
        )

    return run


def state(ended):
    return next(line.split()[1:] for line in ended.stdout.splitlines() if line.startswith("state "))


@pytest.mark.long
def test_the_same_bits_after_the_planned_faults_of_two_generations(run, tmp_path):
    whole = run("--run-dir", "whole", "--fault", "kill rank 0 at step 500", "train.py")
    assert whole.returncode == 1, "a fault that never happened fails the run"
    assert whole.stderr.splitlines()[-1] == "never happened: kill rank 0 at step 500"
    faults = ("--fault", "kill rank 1 in backward at step 5", "--fault", "raise in rank 0 at step 7")
    ended = run("--nproc-per-node", "2", "--run-dir", "r", "--max-restarts", "2", *faults, "train.py")
    assert ended.returncode == 0, ended.stderr
    assert state(ended) == [state(whole)[0], "generation", "2"]
    assert "rank 1 of 2 was killed by SIGKILL" in ended.stderr
    assert "lockstep.faults.PlannedFault" in ended.stderr
    notes = (tmp_path / "r/faults.txt").read_text().splitlines()
    assert [line.split("\t")[0] for line in notes] == ["kill rank 1 in backward at step 5", "raise in rank 0 at step 7"]


def test_a_plain_script_after_so_many_seconds(run):
    words = ("--start", "plain", "--nproc-per-node", "2", "--run-dir", "r")
    ended = run(*words, "--fault", "kill rank 1 after 0.3 s", "plain.py")
    assert ended.returncode == 137, ended.stderr
    assert "rank 1 of 2 was killed by SIGKILL" in ended.stderr


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("kill rank 2 at step 1", "the ranks are 0 to 0"),
        ("kill rank 0", "say when"),
    ],
)
def test_a_plan_that_cannot_be_is_refused_before_anything_starts(run, tmp_path, fault, says):
    ended = run("--run-dir", "r", "--fault", fault, "train.py")
    assert ended.returncode == 2
    (line,) = ended.stderr.splitlines()
    assert says in line
    assert not (tmp_path / "r").exists()
