"""What exact sums cost: the step of `exact` beside that of `fast` and of torch's own DDP, on the same work.

python benchmarks/exact.py
python benchmarks/exact.py --ranks 4 --millions 10 --micro 1 4 --rounds 6 --json exact.json

Each way trains its own copy of a multilayer perceptron of so many million parameters, in the same processes, with so
many micro-batches a rank. DDP accumulates as often, under `no_sync`. The ways take turns: a round is a few steps of
each, in an order that changes from round to round, and what is compared is compared within a round.
"""

import argparse
import contextlib
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from lockstep.batch import BatchPlan, MicroBatchPosition
from lockstep.collectives import Group, open_group
from lockstep.strategies import ParameterSet, StrategyContext, open_strategy
from lockstep.world import World
from ranks import start, told

BATCH = 32  # samples of a micro-batch

#: One step of one way to train.
Step = Callable[[list[tuple[Tensor, Tensor]]], None]

#: For each way, the seconds of a step, round by round.
Seen = dict[str, list[float]]


def build(millions: float) -> nn.Module:
    """Four square layers of about so many million parameters, with the same weights at each call."""
    torch.manual_seed(0)
    width = round((millions * 1e6 / 4) ** 0.5)
    layers = [layer for _ in range(4) for layer in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(*layers[:-1])


def sgd(model: nn.Module) -> torch.optim.SGD:
    """The optimizer of every way."""
    return torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9)


def ddp(millions: float) -> Step:
    """As written by hand, with what torch's DDP does unless it is told otherwise."""
    model = DistributedDataParallel(build(millions))
    optimizer = sgd(model)

    def step(batches: list[tuple[Tensor, Tensor]]) -> None:
        optimizer.zero_grad()
        for number, (inputs, labels) in enumerate(batches, 1):
            with contextlib.nullcontext() if number == len(batches) else model.no_sync():
                (F.cross_entropy(model(inputs), labels) / len(batches)).backward()
        optimizer.step()

    return step


def lockstep_ddp(millions: float, group: Group, plan: BatchPlan, *, exact: bool) -> Step:
    """As `Run` does it with ``strategy="ddp"``."""
    strategy = open_strategy("ddp", StrategyContext(group, plan.run, exact=exact))
    net = build(millions)
    model, optimizer = strategy.setup_model(net, find_unused_parameters=False), sgd(net)
    target = ParameterSet(tuple(net.parameters()), everything=True)
    mine, weight = plan.run(group.rank), torch.tensor(1 / plan.micro_batches)

    def step(batches: list[tuple[Tensor, Tensor]]) -> None:
        for index, (inputs, labels) in zip(mine, batches, strict=True):
            turn = MicroBatchPosition(index, plan.micro_batches, index == mine[-1])
            strategy.begin_micro_batch(turn)
            strategy.backward(F.cross_entropy(model(inputs), labels), weight, target, turn)
            if turn.last:
                optimizer.step()
                optimizer.zero_grad()
            strategy.end_micro_batch(turn)

    return step


# What a rank does -----------------------------------------------------------------------------------------------------


def measure(millions: float, micro: list[int], rounds: int, out: str) -> None:
    """Each number of micro-batches in turn, on all ranks; the leader writes what it saw."""
    torch.set_num_threads(1)
    group = open_group(World.from_env(os.environ), torch.device("cpu"), 600)
    found = {number: measure_one(millions, number, rounds, group) for number in micro}
    if group.leads:
        Path(out).write_text(json.dumps(found))
    group.barrier("end")
    os._exit(0)  # strategies hold threads and groups that only their makers need to end in order


def measure_one(millions: float, micro: int, rounds: int, group: Group) -> Seen:
    """With so many micro-batches a rank."""
    plan = BatchPlan(BATCH * micro * group.size, BATCH, group.size)
    ways = {
        "ddp": ddp(millions),
        "exact": lockstep_ddp(millions, group, plan, exact=True),
        "fast": lockstep_ddp(millions, group, plan, exact=False),
    }
    width = round((millions * 1e6 / 4) ** 0.5)
    batches = [(torch.randn(BATCH, width), torch.randint(width, (BATCH,))) for _ in range(micro)]
    steps = min(10, max(1, round(10 / millions / micro)))
    seen: Seen = {way: [] for way in ways}
    for number in range(-2, rounds):  # two to warm up: DDP lays out its buckets again after the first step
        names = list(ways)
        for name in names[number % len(names) :] + names[: number % len(names)]:
            group.barrier("round")
            began = time.perf_counter()
            for _ in range(steps):
                ways[name](batches)
            if number >= 0:
                seen[name].append((time.perf_counter() - began) / steps)
    return seen


# What the command does ------------------------------------------------------------------------------------------------


def row(ranks: int, millions: float, micro: str, seen: Seen) -> dict[str, float | str]:
    """Milliseconds of a step, and medians of each round's ratios."""
    ratios = {
        f"{way}_over_{other}": median(a / b for a, b in zip(seen[way], seen[other], strict=True))
        for way, other in (("exact", "ddp"), ("fast", "ddp"), ("exact", "fast"))
    }
    times = {f"{way}_ms": median(times) * 1e3 for way, times in seen.items()}
    least = min(seen["exact"]) / min(seen["ddp"])
    return {"ranks": ranks, "millions": millions, "micro": int(micro), **times, **ratios, "exact_over_ddp_best": least}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--millions", type=float, nargs="+", default=[1, 10, 50], help="parameters of the model")
    parser.add_argument("--micro", type=int, nargs="+", default=[1, 2, 4], help="micro-batches a rank")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--json", metavar="FILE", help="write the figures there")
    options = parser.parse_args()
    print(
        f"{'':5}{'million':>8}{'micro-':>8}{'milliseconds a step':>27}{'medians of ratios':>33}{'of the':>11}\n"
        f"{'ranks':5}{'params':>8}{'batches':>8}{'DDP':>9}{'exact':>9}{'fast':>9}"
        f"{'exact/DDP':>11}{'fast/DDP':>11}{'exact/fast':>11}{'least':>11}"
    )
    rows = []
    for ranks in options.ranks:
        for millions in options.millions:
            told_them = {"millions": millions, "micro": options.micro, "rounds": options.rounds}
            for micro, seen in start(__file__, ranks, told_them).items():
                rows.append(r := row(ranks, millions, micro, seen))
                print(
                    f"{ranks:5}{millions:8g}{r['micro']:8}{r['ddp_ms']:9.1f}{r['exact_ms']:9.1f}{r['fast_ms']:9.1f}"
                    f"{r['exact_over_ddp']:11.3f}{r['fast_over_ddp']:11.3f}{r['exact_over_fast']:11.3f}"
                    f"{r['exact_over_ddp_best']:11.3f}",
                    flush=True,
                )
    if options.json:
        Path(options.json).write_text(json.dumps(rows, indent=2))


if __name__ == "__main__":
    if (rank := told()) is not None:
        measure(**rank)
    else:
        main()
