"""On a system without what only Linux has, one rank trains and searches, and all else says what it needs."""

import os
import shutil
import subprocess
import sys

import pytest

from doc_blocks import HOUSE, environment
from lockstep.report import MetricsFile

pytestmark = pytest.mark.long

HIDDEN = HOUSE / "tests" / "harness" / "hidden_linux"

TRAIN = """
import sys
import torch
from torch import nn
from torch.utils.data import TensorDataset
import lockstep

def main(run):
    model = run.model(nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.1), nn.Linear(8, 1)))
    run.optimizer(torch.optim.Adam(model.parameters()))
    x = torch.randn(64, 3, generator=torch.Generator().manual_seed(0))
    batches = run.loader(TensorDataset(x), global_batch=16, micro_batch=4)
    for epoch in run.epochs(int(sys.argv[1])):
        for (x,) in run.train(batches):
            run.step(model(x).square().mean())
        run.log(epoch=epoch)

if __name__ == "__main__":
    with lockstep.Run(save_every="2 steps") as run:
        main(run)
"""

SEARCH = """
import lockstep
from lockstep.tune import Float

def objective(params):
    return (params["x"] - 0.5) ** 2

if __name__ == "__main__":
    workers = {"workers": 1} if WITH_WORKERS else {}
    print(len(lockstep.tune(objective, {"x": Float(0, 1)}, trials=4, run_dir="search", **workers).trials))
"""


@pytest.fixture
def place(tmp_path):
    (tmp_path / "train.py").write_text(TRAIN)
    (tmp_path / "search.py").write_text(SEARCH.replace("WITH_WORKERS", "False"))
    (tmp_path / "workers.py").write_text(SEARCH.replace("WITH_WORKERS", "True"))
    return tmp_path


def run(place, *words, hidden=True, **variables):
    env = environment(**variables)
    env["PYTHONPATH"] = os.pathsep.join([*([str(HIDDEN)] if hidden else []), env["PYTHONPATH"]])
    return subprocess.run([sys.executable, *words], cwd=place, env=env, capture_output=True, text=True, timeout=100)


def test_linux_is_hidden_indeed(place):
    code = """
import ctypes, os, socket, sys
from pathlib import Path
hidden = [not Path(p).exists() for p in ("/proc/self", "/sys/fs", "/dev/shm")]
hidden += [not hasattr(os, "sched_getaffinity"), not hasattr(socket, "AF_PACKET"), sys.platform == "darwin"]
for attempt in (os.fork, lambda: open("/proc/self/stat"), lambda: os.open("/proc/stat", 0)):
    try:
        attempt()
    except OSError:
        hidden.append(True)
hidden.append(not hasattr(ctypes.CDLL(None), "prctl"))
print(hidden.count(True))
"""
    assert run(place, "-c", code).stdout == "10\n"
    assert run(place, "-c", code, hidden=False).stdout != "10\n"


def trained(place, name, epochs, *, hidden=True, workers="0", **variables):
    """What a training has written down: its metrics, its newest checkpoint, and the model in it."""
    directory = place / name
    done = run(
        *(place, "train.py", epochs),
        hidden=hidden,
        LOCKSTEP_CHECKPOINT=str(directory),
        LOCKSTEP_WORKERS=workers,
        **variables,
    )
    assert done.returncode == 0, done.stderr
    newest = max(directory.glob("step-*"))
    model = run(place, "-m", "lockstep", "export", name, f"{name}.safetensors")
    assert model.returncode == 0, model.stderr
    rows = [row | {"wall_s": None} for row in MetricsFile.read(directory / "metrics.jsonl")]
    return rows, newest.name, (place / f"{name}.safetensors").read_bytes()


@pytest.mark.campaign
def test_one_rank_trains_there_with_the_same_bits_with_loader_processes_and_after_a_resume(place):
    expected = trained(place, "linux", "3", hidden=False)
    assert trained(place, "other", "3") == expected
    assert trained(place, "loaders", "3", workers="1") == expected
    shutil.copytree(place / "other", place / "resumed")
    for late in ("step-00000010", "step-00000012"):
        shutil.rmtree(place / "resumed" / late)
    assert trained(place, "resumed", "3", LOCKSTEP_RESUME="1") == expected


def test_one_worker_searches_there(place):
    done = run(place, "search.py")
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "4"), done.stderr


@pytest.mark.parametrize(
    ("words", "instead"),
    [
        (("-m", "lockstep", "run", "train.py", "1"), "python train.py"),
        pytest.param(
            *(("-m", "lockstep", "run", "--nproc-per-node", "2", "train.py", "1"), "python train.py"),
            marks=pytest.mark.campaign,
        ),
        (("-m", "lockstep", "tune", "search.py"), "python search.py, without workers="),
        (("workers.py",), "python search.py, without workers="),
        (("-c", "import lockstep; lockstep.launch(print, ranks=2)"), "python train.py"),
        (("-m", "lockstep", "verify", "train.py", "--", "1"), "python train.py"),
        pytest.param(
            *(("-m", "lockstep", "bench", "train.py", "--", "1"), "python train.py"), marks=pytest.mark.campaign
        ),
    ],
)
def test_what_starts_ranks_says_that_it_needs_linux(place, words, instead):
    done = run(place, *words)
    assert done.returncode != 0
    assert "starting ranks needs Linux, and this system is darwin; one" in done.stderr
    assert instead in done.stderr


def test_commands_that_start_no_rank_work_there(place):
    trained(place, "other", "1")
    for words in (["checkpoints", "list", "other"], ["checkpoints", "verify", "other"], ["config", "show"]):
        done = run(place, "-m", "lockstep", *words)
        assert done.returncode == 0, done.stderr
