"""The most memory that a rank needs while it starts, steps, saves and resumes.

python benchmarks/memory_phases.py
python benchmarks/memory_phases.py --ways fsdp --millions 100 --ranks 4 --json phases.json

The model and the optimizer are those of memory.py, in bytes a parameter of the rank that needs most; memory of files
is not counted. Each line is two jobs: one that starts, trains and saves, and one that resumes. The run is given the
function that makes the model.
"""

import argparse
import json
import os
import tempfile
from pathlib import Path

import torch
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import lockstep
from memory import build
from ranks import memory_bytes, return_freed_memory, start, told

WAYS = ("ddp", "zero", "fsdp", "hsdp")
BATCH, STEPS = 8, 2


class Phases:
    """The greatest memory of each phase, above what the process had before the first one."""

    def __init__(self) -> None:
        torch.optim.AdamW(build(0).parameters())  # loads much of torch, which is not the strategy's
        return_freed_memory()
        self.bytes: dict[str, int] = {}
        self._before = memory_bytes("VmRSS")
        self.begin()

    def begin(self) -> None:
        """The greatest memory is counted anew."""
        Path("/proc/self/clear_refs").write_text("5")

    def end(self, name: str) -> None:
        """The phase ``name`` is over."""
        # The ranks of one machine sum through memory that they share: it is there once, though each of them shows it.
        self.bytes[name] = memory_bytes("VmHWM") - memory_bytes("RssShmem") - self._before
        self.begin()


def samples(width: int, ranks: int, micro_batches: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Those of some steps."""
    number = BATCH * ranks * micro_batches * STEPS
    inputs = torch.randn(number + width).unfold(0, width, 1)[:number]
    return inputs, torch.arange(number) % width


def measure(way: str, millions: float, micro_batches: int, place: str, resume: bool, out: str) -> None:
    """A few steps of a lockstep run; the leader writes what the rank with most of it needed."""
    os.environ["LOCKSTEP_RESUME"] = str(int(resume))
    phases = Phases()
    with lockstep.Run(strategy=way, checkpoint=place, save_every="1 epoch") as run:
        model = run.model(lambda: build(millions))
        width, parameters = model[0].in_features, sum(p.numel() for p in model.parameters())
        run.optimizer(torch.optim.AdamW(model.parameters(), lr=1e-4))
        phases.end("start")
        batches = run.loader(
            TensorDataset(*samples(width, run.world_size, micro_batches)),
            global_batch=BATCH * run.world_size * micro_batches,
            micro_batch=BATCH,
            workers=0,
        )
        names = iter(("step", "save"))
        for _ in run.epochs(3 if resume else 2):
            if resume:
                phases.end("resume")
            for images, labels in run.train(batches):
                run.step(F.cross_entropy, images, labels)
            # What is saved at the end of the first epoch is written while the second one trains.
            phases.end(next(names))
        every = run.gather(phases.bytes)
        if run.leads:
            report(every, parameters, out)


def report(every: list[dict[str, int]], parameters: int, out: str) -> None:
    """Write the greatest of each phase."""
    found = {name: max(one[name] for one in every) / parameters for name in every[0]}
    Path(out).write_text(json.dumps(found))


def line(way: str, ranks: int, millions: float, micro_batches: int) -> dict[str, float]:
    """Bytes a parameter of each phase."""
    with tempfile.TemporaryDirectory() as place:
        job = {
            "way": f"hsdp:shard={ranks}" if way == "hsdp" else way,
            "millions": millions,
            "micro_batches": micro_batches,
            "place": str(Path(place, "checkpoints")),
        }
        found: dict[str, float] = {}
        for resume in (False, True):
            seen = start(__file__, ranks, job | {"resume": resume})
            found |= {name: seen[name] for name in (("resume",) if resume else ("start", "step", "save"))}
    return found


# What the command does ------------------------------------------------------------------------------------------------


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ways", nargs="+", default=WAYS, choices=WAYS)
    parser.add_argument("--ranks", type=int, default=3)
    parser.add_argument("--millions", type=float, default=30, help="parameters of the model")
    parser.add_argument("--micro", type=int, nargs="+", default=[1, 4], help="micro-batches of a rank in a step")
    parser.add_argument("--rounds", type=int, default=1, help="the least of so many jobs counts")
    parser.add_argument("--json", metavar="FILE", help="write the figures there")
    options = parser.parse_args()
    head = ["way", "micro-batches", "start", "step", "save", "resume"]
    print(" ".join(f"{name:>13}" for name in head))
    rows = []
    for way in options.ways:
        for micro in options.micro:
            runs = [line(way, options.ranks, options.millions, micro) for _ in range(options.rounds)]
            found = {name: min(run[name] for run in runs) for name in head[2:]}
            rows.append({"way": way, "micro-batches": micro} | found)
            print(f"{way:>13} {micro:>13} " + " ".join(f"{found[name]:>13.1f}" for name in head[2:]), flush=True)
    if options.json:
        Path(options.json).write_text(json.dumps(rows, indent=2))


if __name__ == "__main__":
    if (rank := told()) is not None:
        measure(**rank)
    else:
        main()
