"""The examples of searches run to their end; each asserts its own result where it is as long as it stands."""

import subprocess
import sys
from pathlib import Path

import pytest

from lockstep.tune import load

EXAMPLES = Path(__file__).parents[3] / "examples"


def run(tmp_path, *words):
    done = subprocess.run([sys.executable, *map(str, words)], cwd=tmp_path, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.campaign
def test_search_digits_finds_a_network_that_reads_digits(tmp_path):
    said = run(tmp_path, EXAMPLES / "search_digits.py")
    (directory,) = (tmp_path / "runs").iterdir()
    result = load(directory)
    assert f"trial {result.best.number}: loss {result.best.loss:.4f}" in said
    assert result.best.loss <= 0.25
    assert result.counts["stopped"] > result.counts["done"] > 0


@pytest.mark.campaign
def test_search_convnet_trains_each_trial_on_two_ranks(tmp_path):
    words = ("-m", "lockstep", "tune", "--ranks-per-worker", 2, "--run-dir", tmp_path / "run")
    said = run(tmp_path, *words, EXAMPLES / "search_convnet.py", "--trials", 2, "--epochs", 1, "--samples", 64)
    assert "island 0: loss" in said
    trials = load(tmp_path / "run").trials
    assert [(trial.state, trial.ranks, len(trial.reports)) for trial in trials] == [("done", 2, 1)] * 2
