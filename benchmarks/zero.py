"""The optimizer divided among ranks: `zero` beside torch's ZeroRedundancyOptimizer, on the same work.

python benchmarks/zero.py
python benchmarks/zero.py --ranks 4 --millions 10 --rounds 6 --json zero.json

Each way trains its own copy of a multilayer perceptron of so many million parameters with AdamW, in the same processes,
one micro-batch a rank and step. The ways take turns: a round is a few steps of each. Then each saves its optimizer's
state a few times: torch's way gathers it on rank 0 and writes it with `torch.save`, while the ranks do not train;
Lockstep's ranks copy what they hold, and write it in the background.
"""

import argparse
import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from lockstep.batch import BatchPlan, MicroBatchPosition
from lockstep.checkpoint import Checkpoints
from lockstep.collectives import Group, open_group
from lockstep.strategies import (
    ParameterSet,
    Strategy,
    StrategyContext,
    open_strategy,
)
from lockstep.world import World
from ranks import start, told

BATCH = 16  # samples of a micro-batch
RATE = 1e-3
SAVES = 3  # of each way, after one to warm up

Step = Callable[[Tensor, Tensor], None]


@dataclass
class Way:
    """One way to train."""

    step: Step
    optimizer: torch.optim.Optimizer  #: whose state lies on this rank
    save: Callable[[Path], float]  #: writes the optimizer's state there; seconds during which nobody trained


def build(millions: float) -> nn.Module:
    """Eight square layers of about so many million parameters, with the same weights at each call."""
    torch.manual_seed(0)
    width = round((millions * 1e6 / 8) ** 0.5)
    layers = [layer for _ in range(8) for layer in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(*layers[:-1])


def by_hand(millions: float, group: Group, *, divided: bool) -> Way:
    """DDP with AdamW, or with what torch divides it by."""
    model = DistributedDataParallel(build(millions), gradient_as_bucket_view=True)
    if divided:
        optimizer: Any = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=RATE)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)

    def step(inputs: Tensor, labels: Tensor) -> None:
        F.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
        optimizer.zero_grad()

    def save(place: Path) -> float:
        began = time.perf_counter()
        if divided:
            optimizer.consolidate_state_dict(0)
        if group.leads:
            torch.save(optimizer.state_dict(), place / "state.pt")
        group.barrier("saved")
        return time.perf_counter() - began

    return Way(step, optimizer.optim if divided else optimizer, save)


def lockstep(word: str, millions: float, group: Group, plan: BatchPlan) -> Way:
    """As `Run` does it with this strategy."""
    strategy: Strategy = open_strategy(word, StrategyContext(group, plan.run))
    net = build(millions)
    model, optimizer = (
        strategy.setup_model(net, find_unused_parameters=False),
        torch.optim.AdamW(net.parameters(), lr=RATE),
    )
    target = ParameterSet(tuple(net.parameters()), everything=True)
    turn, weight = MicroBatchPosition(group.rank, group.size, True), torch.tensor(1 / group.size)

    def step(inputs: Tensor, labels: Tensor) -> None:
        strategy.begin_micro_batch(turn)
        strategy.backward(F.cross_entropy(model(inputs), labels), weight, target, turn)
        strategy.before_optimizer_step(target)
        optimizer.step()
        optimizer.zero_grad()
        strategy.end_micro_batch(turn)

    saves: list[Checkpoints] = []

    def save(place: Path) -> float:
        saves[:] = saves or [Checkpoints(place, group, keep=9, say=print)]
        saves[0].wait()
        group.barrier("the one before is saved")
        began = time.perf_counter()
        saves[0].save(strategy.state_layout.optimizer_state(optimizer), len(list(place.iterdir())), {})
        took = time.perf_counter() - began
        saves[0].wait()
        return took

    return Way(step, optimizer, save)


# What a rank does -----------------------------------------------------------------------------------------------------


def measure(millions: float, rounds: int, out: str) -> None:
    """All ranks; the leader writes what it saw."""
    torch.set_num_threads(1)
    group = open_group(World.from_env(os.environ), torch.device("cpu"), 600)
    plan = BatchPlan(BATCH * group.size, BATCH, group.size)
    ways = {
        "DDP": by_hand(millions, group, divided=False),
        "ZeroRedundancyOptimizer": by_hand(millions, group, divided=True),
        "ddp": lockstep("ddp", millions, group, plan),
        "zero": lockstep("zero", millions, group, plan),
    }
    width = round((millions * 1e6 / 8) ** 0.5)
    inputs, labels = torch.randn(BATCH, width), torch.randint(width, (BATCH,))
    steps = min(10, max(1, round(10 / millions)))
    found: dict[str, dict[str, Any]] = {name: {"step_s": [], "cpu_s": [], "save_s": []} for name in ways}
    for number in range(-2, rounds):  # two to warm up: DDP lays out its buckets again after the first step
        names = list(ways)
        for name in names[number % len(names) :] + names[: number % len(names)]:
            group.barrier("round")
            began, used = time.perf_counter(), time.process_time()
            for _ in range(steps):
                ways[name].step(inputs, labels)
            if number >= 0:
                found[name]["step_s"].append((time.perf_counter() - began) / steps)
                found[name]["cpu_s"].append((time.process_time() - used) / steps)
    for name, way in ways.items():
        held = sum(t.nbytes for state in way.optimizer.state.values() for t in state.values())
        found[name]["state_bytes"] = group.gather_objects(held, "states")
        place = Path(out).parent / name
        if group.leads:
            place.mkdir()
        for _ in range(1 + SAVES):
            group.barrier("save")
            found[name]["save_s"].append(way.save(place))
        del found[name]["save_s"][0]
    if group.leads:
        Path(out).write_text(json.dumps(found))
    group.barrier("end")
    os._exit(0)  # strategies hold threads and groups that only their makers need to end in order


# What the command does ------------------------------------------------------------------------------------------------


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--millions", type=float, nargs="+", default=[1, 10], help="parameters of the model")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--json", metavar="FILE", help="write the figures there")
    options = parser.parse_args()
    print(
        f"{'':5}{'million':>8}{'':27}{'step, ms':>16}{'CPU':>9}{'training':>10}{'state, bytes a parameter':>26}\n"
        f"{'ranks':5}{'params':>8}{'':27}{'median':>8}{'least':>8}{'ms':>9}{'waits, ms':>10}{'held':>13}{'formula':>13}"
    )
    rows = []
    for ranks in options.ranks:
        for millions in options.millions:
            found = start(__file__, ranks, {"millions": millions, "rounds": options.rounds})
            parameters = sum(p.numel() for p in build(millions).parameters())
            for name, seen in found.items():
                row = {
                    "ranks": ranks,
                    "millions": millions,
                    "way": name,
                    "step_ms": median(seen["step_s"]) * 1e3,
                    "least_ms": min(seen["step_s"]) * 1e3,
                    "cpu_ms": median(seen["cpu_s"]) * 1e3,
                    "save_ms": median(seen["save_s"]) * 1e3,
                    "state_bytes": max(seen["state_bytes"]) / parameters,
                }
                rows.append(row)
                print(
                    f"{ranks:5}{millions:8g}  {name:25}{row['step_ms']:8.1f}{row['least_ms']:8.1f}{row['cpu_ms']:9.1f}"
                    f"{row['save_ms']:10.1f}{row['state_bytes']:13.2f}{8 / ranks if 'ero' in name else 8:13.2f}",
                    flush=True,
                )
    if options.json:
        Path(options.json).write_text(json.dumps(rows, indent=2))


if __name__ == "__main__":
    if (rank := told()) is not None:
        measure(**rank)
    else:
        main()
