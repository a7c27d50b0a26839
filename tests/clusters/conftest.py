"""Real schedulers, where they are installed; collected only when asked for: ``pytest tests/clusters``."""

import os
import subprocess
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path

import pytest

import lockstep
from gridengine import GRID_ENGINE
from slurm import SLURM
from waiting import wait_until

SOURCE = str(Path(lockstep.__file__).parents[1])
#: For what takes three minutes on an idle machine.
DEADLINE_S = 600

#: Takes a few seconds, and leaves the hash of what it has learnt. A run that goes on was warned: it makes no pauses.
TRAIN = """\
import hashlib
import os
import time
from pathlib import Path

import torch
from torch.nn import functional as F

import lockstep


def main():
    with lockstep.Run(seed=0) as run:
        inputs = torch.randn(96, 8, generator=torch.Generator().manual_seed(1))
        data = torch.utils.data.TensorDataset(inputs, inputs.sum(1, keepdim=True))
        model = run.model(torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Dropout(0.2), torch.nn.Linear(16, 1)))
        optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9))
        batches = run.loader(data, global_batch=32, micro_batch=8)
        steps = 0
        for epoch in run.epochs(int(os.environ.get("EPOCHS", "4"))):
            for x, y in run.train(batches):
                run.step(F.mse_loss(model(x), y))
                steps += 1
                time.sleep(0.01 if "LOCKSTEP_RESUME" in os.environ else float(os.environ.get("PAUSE", "0.01")))
                if run.leads:
                    Path("steps").write_text(str(steps))
        if run.leads:
            state = b"".join(value.numpy().tobytes() for value in model.state_dict().values())
            Path("hash").write_text(f"{hashlib.sha256(state).hexdigest()} {run.world_size}")


if __name__ == "__main__":
    main()
"""


def pytest_ignore_collect(collection_path, config):
    """Nothing here runs with the rest: it needs daemons, and minutes."""
    return None if any("clusters" in argument for argument in config.args) else True


@dataclass
class Bench:
    """A directory with the script, on a file system that all nodes share."""

    here: Path

    @property
    def env(self):
        return {"PYTHONPATH": SOURCE, "OMP_NUM_THREADS": "1", "RES_OPTIONS": "timeout:1 attempts:1"}

    def batch(self, *lines, name="job.sh"):
        """A batch script with ``lines``, in which PYTHON is ours."""
        file = self.here / name
        text = "\n".join(["#!/bin/bash", *lines, ""]).replace("PYTHON", sys.executable)
        file.write_text(textwrap.dedent(text))
        return str(file)

    def command(self, *words, **env):
        """Give a command here, outside of any job; python is ours."""
        words = [sys.executable if word == "python" else word for word in words]
        env = {**os.environ, **self.env, **env}
        return subprocess.run(words, cwd=self.here, env=env, capture_output=True, text=True, timeout=DEADLINE_S)

    def steps(self):
        try:
            return int((self.here / "steps").read_text() or 0)
        except FileNotFoundError:
            return 0

    def out(self):
        """All that jobs have printed."""
        return "\n".join(file.read_text() for file in sorted(self.here.glob("*.out")))

    def result(self):
        """Hash and ranks."""
        hashed, ranks = (self.here / "hash").read_text().split()
        return hashed, int(ranks)

    def until(self, what, why):
        return wait_until(what, lambda: f"{why}\n{self.out()}", deadline_s=DEADLINE_S, every_s=0.1)

    def under_way(self):
        self.until(lambda: self.steps() >= 3, "the first steps")


@pytest.fixture
def bench(tmp_path):
    # Slurm's daemons do not see a directory that only its owner may enter, if they run as another user.
    (tmp_path / "train.py").write_text(TRAIN)
    return Bench(tmp_path)


@pytest.fixture(scope="session")
def expected(tmp_path_factory):
    """The bits of the model, no matter which ranks compute it; with so many epochs."""
    known = {}

    def of(epochs=4):
        if epochs not in known:
            alone = Bench(tmp_path_factory.mktemp("alone"))
            (alone.here / "train.py").write_text(TRAIN)
            done = alone.command("python", "train.py", EPOCHS=str(epochs), PAUSE="0")
            assert done.returncode == 0, done.stderr
            known[epochs] = alone.result()[0]
        return known[epochs]

    return of


def running(kind, here):
    """Daemons of a scheduler until all tests have ended; without what they need, tests are skipped."""
    if lacking := kind.missing():
        pytest.skip(f"no {kind.title} of our own here: {', '.join(lacking)} missing")
    with kind.running(here) as daemons:
        yield daemons


@pytest.fixture(scope="session")
def slurm(tmp_path_factory):
    yield from running(SLURM, tmp_path_factory.mktemp("slurm"))


@pytest.fixture(scope="session")
def engine(tmp_path_factory):
    yield from running(GRID_ENGINE, tmp_path_factory.mktemp("sge"))
