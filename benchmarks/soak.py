"""Whether anything grows in a long training: memory and open descriptors of every process of a run.

python benchmarks/soak.py                                    60,000 steps on 2 ranks
python benchmarks/soak.py --steps 600000 --ranks 4 --json soak.json

A small model trains under `lockstep run`, with all that a long training has: metrics, evaluations, checkpoints, rows of
a log. It waits after a tenth of its steps, when all is warm, and at the end, while its processes are looked at.

Resident memory is what a process holds. Private memory is the part of it that no other process shares: ranks start as
copies of one process and share its pages until they write to them, so that private memory grows a little for as long
as a rank writes to pages for the first time, while resident memory stays what it was.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

import psutil

import lockstep

SCRIPT = """
import sys, time
from pathlib import Path
import torch
from torch.nn import functional as F
import lockstep

steps = int(sys.argv[1])
looks = {steps // 10: "warm", steps: "end"}
data = torch.utils.data.TensorDataset(torch.randn(8000, 8), torch.randint(2, (8000,)))

with lockstep.Run(seed=0, save_every="5000 steps") as run:
    model = run.model(torch.nn.Linear(8, 2))
    run.optimizer(torch.optim.Adam(model.parameters()))
    batches = run.loader(data, global_batch=16, micro_batch=8)
    for _ in run.steps(steps):
        for x, y in run.train(batches):
            run.measure(accuracy=model(x).argmax(1) == y)
            run.step(F.cross_entropy(model(x), y))
            look = looks.get(run.progress.step)
            if look:
                if run.leads:
                    Path(look).touch()
                while not Path(f"{look}-seen").exists():
                    time.sleep(0.01)
        for x, y in run.evaluate(batches):
            run.measure(held=model(x).argmax(1) == y)
        run.log()
"""

Look = Mapping[str, tuple[int, int, int]]
"""Of each process, by its number and name: bytes resident, bytes that it shares with no other, and open descriptors."""


def look(launcher: psutil.Process) -> Look:
    """What the processes of a run hold now."""
    processes = [launcher, *launcher.children(recursive=True)]
    return {f"{p.pid} {p.name()}": held(p) for p in processes}


def held(process: psutil.Process) -> tuple[int, int, int]:
    """What one process holds now."""
    memory = process.memory_full_info()
    return memory.rss, memory.uss, process.num_fds()


def mib(count: int, sign: str = "") -> str:
    """A cell of the table for bytes."""
    return f"{count / 2**20:>{sign}13.2f}"


def soak(ranks: int, steps: int) -> tuple[Look, Look, float]:
    """What is held after a tenth of the steps and at the end, and the seconds between; exits if the run fails."""
    with tempfile.TemporaryDirectory() as place:
        here = Path(place)
        (here / "train.py").write_text(SCRIPT)
        command = ["-m", "lockstep", "run", "--nproc-per-node", str(ranks), "--run-dir", "r", "train.py", str(steps)]
        with (here / "screen").open("w") as screen:
            run = subprocess.Popen(
                [sys.executable, *command],
                cwd=here,
                env=os.environ | {"PYTHONPATH": str(Path(lockstep.__file__).parents[1])},
                stdout=screen,
                stderr=subprocess.STDOUT,
            )
            looks, times = [], []
            for name in ("warm", "end"):
                while not (here / name).exists():
                    if run.poll() is not None:
                        sys.exit((here / "screen").read_text())
                    time.sleep(0.05)
                looks.append(look(psutil.Process(run.pid)))
                times.append(time.monotonic())
                (here / f"{name}-seen").touch()
            run.wait()
        if run.returncode:
            sys.exit((here / "screen").read_text())
    return looks[0], looks[1], times[1] - times[0]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=60_000, help="(default: 60000)")
    parser.add_argument("--ranks", type=int, default=2, help="(default: 2)")
    parser.add_argument("--rounds", type=int, default=1, help="trainings (default: 1)")
    parser.add_argument("--json", type=Path, help="write the figures there, too")
    told = parser.parse_args()
    found = []
    for _ in range(told.rounds):
        warm, end, seconds = soak(told.ranks, told.steps)
        found.append({"warm": warm, "end": end, "seconds": seconds})
        print(f"{told.ranks} ranks, {told.steps} steps, {seconds:.0f} s of them between the two looks")
        titles = ("resident MiB", "growth", "private MiB", "growth", "descriptors", "growth")
        print(f"{'process':<28}" + "".join(f"{title:>13}" for title in titles))
        for name, now in end.items():
            resident, private, descriptors = now
            more, unshared, opened = (a - b for a, b in zip(now, warm.get(name, (0, 0, 0)), strict=True))
            memory = mib(resident) + mib(more, "+") + mib(private) + mib(unshared, "+")
            print(f"{name:<28}{memory}{descriptors:>13}{opened:>+13}")
    if told.json:
        told.json.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
