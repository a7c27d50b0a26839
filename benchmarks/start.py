"""From the command to the first step: `lockstep run` beside torchrun, with the same plain script of torch.distributed.

python benchmarks/start.py
python benchmarks/start.py --ranks 2 4 8 --rounds 9 --json start.json

The launchers take turns, in an order that changes from round to round. A round's ratio compares what was measured in
that round, so that what else the machine does falls on both alike.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import lockstep

SCRIPT = """
import sys, time
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model(torch.ones(4, 8)).sum().backward()
optimizer.step()
if dist.get_rank() == 0:
    with open(sys.argv[1], "w") as file:
        file.write(f"{time.time()}")
dist.barrier()
dist.destroy_process_group()
"""
WAYS = ("lockstep run", "torchrun")


def seconds(way: str, ranks: int) -> float:
    """From the start of the command to the leader's first step done."""
    with tempfile.TemporaryDirectory() as place:
        script, stepped = Path(place, "train.py"), Path(place, "stepped")
        script.write_text(SCRIPT)
        module = {
            "lockstep run": ["lockstep", "run", "--run-dir", str(Path(place, "run"))],
            "torchrun": ["torch.distributed.run", "--standalone"],
        }[way]
        began = time.time()
        done = subprocess.run(
            [sys.executable, "-m", *module, "--nproc-per-node", str(ranks), str(script), str(stepped)],
            env=os.environ | {"PYTHONPATH": str(Path(lockstep.__file__).parents[1]), "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
        # Torch now and then aborts a process that is done, which comes after what is measured.
        if done.returncode and not stepped.exists():
            sys.exit(f"{way} failed:\n{done.stderr}")
        return float(stepped.read_text()) - began


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], help="(default: 2 4)")
    parser.add_argument("--rounds", type=int, default=5, help="(default: 5)")
    parser.add_argument("--json", metavar="FILE", help="write the figures there, too")
    told = parser.parse_args()
    seen: dict[str, dict[str, list[float]]] = {}
    print("| ranks | lockstep run, s | torchrun, s | ratio |\n|---|---|---|---|")
    for ranks in told.ranks:
        taken: dict[str, list[float]] = {way: [] for way in WAYS}
        for number in range(told.rounds):
            for way in WAYS if number % 2 else reversed(WAYS):
                taken[way].append(seconds(way, ranks))
        ratio = median(ours / theirs for ours, theirs in zip(*taken.values(), strict=True))
        ours_s, theirs_s = (median(taken[way]) for way in WAYS)
        print(f"| {ranks} | {ours_s:.2f} | {theirs_s:.2f} | {ratio:.2f} |", flush=True)
        seen[str(ranks)] = taken
    if told.json:
        Path(told.json).write_text(json.dumps(seen))


if __name__ == "__main__":
    main()
