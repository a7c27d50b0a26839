"""What one step costs beside a DDP loop written by hand, on the same work.

python benchmarks/loop.py
python benchmarks/loop.py --ranks 1 --rounds 40 --json loop.json
python benchmarks/loop.py --peers /path/to/python     that has accelerate, lightning and pytorch-ignite too
python benchmarks/loop.py --comparing                 what it costs that ranks compare what they hold

Every loop trains its own copy of the same model on the same samples, in the same processes. They take turns: a block
is one pass over the data, a round is one block of each loop, in an order that changes from round to round. So what
else the machine does falls on all of them alike. The loop of Lockstep is that of a user, under ``lockstep run``: with
its metrics, its status file and the launcher's view.
"""

import argparse
import importlib.util
import json
import logging
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import lockstep
from lockstep.settings import Settings
from ranks import start, told

BATCH = 32  # samples of one rank's step
STEPS = 100  # of a block

#: One pass over the data; gives the moments at which each step was done, in seconds.
Block = Callable[[], list[float]]

#: For each loop: the time of each step of each block, and the CPU time of each block, all threads together.
Seen = dict[str, dict[str, list[Any]]]


class PerSample(TensorDataset):
    """Tensors that say nothing of it: they are asked for their samples one by one, as in most data sets."""


def build(name: str) -> nn.Module:
    """The same model, with the same weights, at each call."""
    torch.manual_seed(0)
    if name == "linear":
        return nn.Sequential(nn.Flatten(), nn.Linear(784, 10))
    return nn.Sequential(
        nn.Flatten(), nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10)
    )


def sgd(model: nn.Module) -> torch.optim.SGD:
    """The optimizer of every loop."""
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def hand_written(run: lockstep.Run, name: str, data: TensorDataset) -> dict[str, Block]:
    """The loop that the others are compared with: nothing but PyTorch, and nothing besides training."""
    model = build(name)
    if run.world_size > 1:
        model = DistributedDataParallel(model)
    optimizer, loader = sgd(model), _loader(run, data)

    def block() -> list[float]:
        done = [time.perf_counter()]
        model.train()
        for images, labels in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(images), labels).backward()
            optimizer.step()
            done.append(time.perf_counter())
        return done

    return {"by hand": block}


def lockstep_loops(run: lockstep.Run, name: str, data: TensorDataset) -> dict[str, Block]:
    """Lockstep's, with data that come sample by sample and with data in memory: two passes of one run."""
    model = run.model(build(name))
    run.optimizer(sgd(model))
    per_sample, in_memory = (
        run.loader(d, global_batch=BATCH * run.world_size, micro_batch=BATCH, workers=0)
        for d in (data, TensorDataset(*data.tensors))
    )
    epochs: Iterator[int] = run.epochs(10**9)

    def block_of(loader: DataLoader[Any]) -> Block:
        def block() -> list[float]:
            next(epochs)
            done = [time.perf_counter()]
            for images, labels in run.train(loader):
                run.step(F.cross_entropy(model(images), labels))
                done.append(time.perf_counter())
            return done

        return block

    return {"lockstep": block_of(per_sample), "lockstep, data in memory": block_of(in_memory)}


def ignite(run: lockstep.Run, name: str, data: TensorDataset) -> dict[str, Block]:
    """Ignite's `Engine`, with the running mean of the loss."""
    from ignite.engine import Engine
    from ignite.metrics import RunningAverage

    model = build(name)
    if run.world_size > 1:
        model = DistributedDataParallel(model)
    optimizer, loader = sgd(model), _loader(run, data)
    done: list[float] = []

    def update(engine: Engine, batch: tuple[Tensor, Tensor]) -> Tensor:
        done.append(time.perf_counter())
        images, labels = batch
        model.train()
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        return loss.detach()

    engine = Engine(update)
    RunningAverage(output_transform=float).attach(engine, "loss")

    def block() -> list[float]:
        done.clear()
        engine.run(loader, max_epochs=1)
        return [*done, time.perf_counter()]

    return {"ignite": block}


def fabric(run: lockstep.Run, name: str, data: TensorDataset) -> dict[str, Block]:
    """Lightning Fabric."""
    from lightning.fabric import Fabric

    strategy = "ddp" if run.world_size > 1 else "auto"
    door = Fabric(accelerator="cpu", devices=run.world_size, strategy=strategy)
    door.launch()
    model = build(name)
    model, optimizer = door.setup(model, sgd(model))
    loader = door.setup_dataloaders(DataLoader(data, batch_size=BATCH, shuffle=True))

    return {"fabric": _through(door.backward, model, optimizer, loader)}


def accelerate(run: lockstep.Run, name: str, data: TensorDataset) -> dict[str, Block]:
    """Accelerate, with everything prepared by it."""
    from accelerate import Accelerator

    door = Accelerator(cpu=True)
    model = build(name)
    model, optimizer, loader = door.prepare(model, sgd(model), DataLoader(data, batch_size=BATCH, shuffle=True))

    return {"accelerate": _through(door.backward, model, optimizer, loader)}


def _through(backward: Callable[[Tensor], Any], model: Any, optimizer: Any, loader: Any) -> Block:
    """A pass over the data for those that wrap all three and want the backward pass made through them, too."""

    def block() -> list[float]:
        done = [time.perf_counter()]
        model.train()
        for images, labels in loader:
            optimizer.zero_grad()
            backward(F.cross_entropy(model(images), labels))
            optimizer.step()
            done.append(time.perf_counter())
        return done

    return block


def _loader(run: lockstep.Run, data: TensorDataset) -> DataLoader[Any]:
    if run.world_size == 1:
        return DataLoader(data, batch_size=BATCH, shuffle=True)
    return DataLoader(data, batch_size=BATCH, sampler=DistributedSampler(data, run.world_size, run.rank))


# What a rank does -----------------------------------------------------------------------------------------------------


def measure(name: str, rounds: int, out: str, check_every: int = 500) -> None:
    """All loops in turn, on all ranks; the leader writes what it saw: for each loop, the step times of each round."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.manual_seed(0)
    with lockstep.Run(seed=0, check_every=check_every) as run:
        samples = STEPS * BATCH * run.world_size
        data = PerSample(torch.randn(samples, 784), torch.randint(10, (samples,)))
        loops = hand_written(run, name, data) | lockstep_loops(run, name, data)
        for module, peer in (("ignite", ignite), ("lightning", fabric), ("accelerate", accelerate)):
            if importlib.util.find_spec(module):
                loops |= peer(run, name, data)
        seen: Seen = {loop: {"steps_s": [], "cpu_s": []} for loop in loops}
        for number in range(-2, rounds):  # two to warm up
            turn = list(loops)
            for loop in turn[number % len(turn) :] + turn[: number % len(turn)]:
                if run.world_size > 1:
                    dist.barrier()
                cpu_s = time.process_time()
                done = loops[loop]()
                cpu_s = time.process_time() - cpu_s
                assert len(done) == STEPS + 1, f"{loop}: {len(done) - 1} steps, expected {STEPS}"
                if number >= 0:
                    seen[loop]["steps_s"].append([b - a for a, b in pairwise(done)])
                    seen[loop]["cpu_s"].append(cpu_s)
        if run.leads:
            Path(out).write_text(json.dumps(seen))


# What the command does ------------------------------------------------------------------------------------------------


def summary(seen: Seen) -> dict[str, dict[str, float]]:
    """For each loop: step times in microseconds, and how they compare with the loop written by hand."""
    by_hand = [median(block) for block in seen["by hand"]["steps_s"]]
    by_hand_cpu = seen["by hand"]["cpu_s"]
    found = {}
    for loop, blocks in seen.items():
        steps = [s * 1e6 for block in blocks["steps_s"] for s in block]
        medians = [median(block) for block in blocks["steps_s"]]
        found[loop] = {
            "p10_us": quantiles(steps, n=10)[0],
            "median_us": median(steps),
            "over_us": median((a - b) * 1e6 for a, b in zip(medians, by_hand, strict=True)),
            "ratio": median(a / b for a, b in zip(medians, by_hand, strict=True)),
            "cpu_us": median(blocks["cpu_s"]) / STEPS * 1e6,
            "cpu_ratio": median(a / b for a, b in zip(blocks["cpu_s"], by_hand_cpu, strict=True)),
        }
    p10 = found["by hand"]["p10_us"]
    return {
        loop: row | {"p10_over_us": row["p10_us"] - p10, "p10_ratio": row["p10_us"] / p10}
        for loop, row in found.items()
    }


def table(ranks: int, model: str, rows: dict[str, dict[str, float]]) -> str:
    """For people."""
    lines = [
        f"{model}, {ranks} rank{'s' if ranks > 1 else ''}",
        f"{'microseconds a step':<26}{'p10':>9}{'over':>9}{'ratio':>8}"
        f"{'median':>10}{'over':>9}{'ratio':>8}{'CPU':>10}{'ratio':>8}",
    ]
    lines += [
        f"{loop:<26}{r['p10_us']:>9.1f}{r['p10_over_us']:>+9.1f}{r['p10_ratio']:>8.3f}{r['median_us']:>10.1f}"
        f"{r['over_us']:>+9.1f}{r['ratio']:>8.3f}{r['cpu_us']:>10.1f}{r['cpu_ratio']:>8.3f}"
        for loop, r in rows.items()
    ]
    return "\n".join(lines)


def comparing(ranks: int, model: str, rounds: int, python: str) -> str:
    """What one comparison of the ranks costs, and what that is of a step at the default cadence.

    Two runs in turn, one that compares after each step and one that never does, three times.
    """
    costs_us, steps_us = [], []
    for _ in range(3):
        each, never = (
            summary(start(__file__, ranks, {"name": model, "rounds": rounds, "check_every": every}, python))
            for every in (1, 10**9)
        )
        loop = "lockstep, data in memory"
        steps_us.append(never[loop]["p10_us"])
        costs_us.append(each[loop]["p10_us"] - never[loop]["p10_us"])
    cost, step = median(costs_us), median(steps_us)
    cadence = Settings().check_every
    return (
        f"{model}, {ranks} rank{'s' if ranks > 1 else ''}: a comparison {cost:.0f} us ({min(costs_us):.0f} to "
        f"{max(costs_us):.0f}), a step {step:.0f} us; every {cadence} steps {cost / cadence / step:.2%} of a step"
    )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--models", nargs="+", default=["linear", "mlp"], choices=["linear", "mlp"])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--peers", metavar="PYTHON", default=sys.executable, help="the Python to run all of it with")
    parser.add_argument("--comparing", action="store_true", help="measure what comparing the ranks costs instead")
    parser.add_argument("--json", metavar="FILE", help="write the figures there")
    options = parser.parse_args()
    if options.comparing:
        for ranks in options.ranks:
            for model in options.models:
                print(comparing(ranks, model, options.rounds, options.peers), flush=True)
        return
    found = []
    for ranks in options.ranks:
        for model in options.models:
            rows = summary(start(__file__, ranks, {"name": model, "rounds": options.rounds}, options.peers))
            found.append({"ranks": ranks, "model": model, "torch": torch.__version__, "loops": rows})
            print(table(ranks, model, rows), end="\n\n", flush=True)
    if options.json:
        Path(options.json).write_text(json.dumps(found, indent=2))


if __name__ == "__main__":
    if (rank := told()) is not None:
        measure(**rank)
    else:
        main()
