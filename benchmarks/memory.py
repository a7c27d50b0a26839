"""How much memory a rank needs under each strategy, beside what one would calculate.

python benchmarks/memory.py --precisions fp32 bf16 --page docs/strategies.md
python benchmarks/memory.py --ways fsdp --ranks 2 --millions 100 --precisions bf16 --json memory.json

A multilayer perceptron of eight square layers learns under AdamW, in processes of its own for each line. Most of its
memory are four numbers for each parameter, and strategies differ in how much of each lies on every rank:

             parameter  gradient  two moments    bytes a parameter, W ranks
    ddp          4          4          8         16
    zero         4          4         8/W        8 + 8/W
    fsdp        4/W        4/W        8/W        16/W

With autocast to bf16 or fp16 they stay fp32, so the formulas are the same; then half a copy of the weights comes and
goes with each forward pass.
"""

import argparse
import gc
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import lockstep
import pages
from lockstep.strategies import STRATEGIES
from ranks import memory_bytes, return_freed_memory, start, told

BATCH = 32  # samples of a step for each rank: few, so that activations are small beside the model
LAYERS, STEPS = 8, 3

#: Bytes a parameter from the number of ranks.
FORMULAS: dict[str, Callable[[int], float]] = {
    "ddp": lambda ranks: 16,
    "zero": lambda ranks: 8 + 8 / ranks,
    "fsdp": lambda ranks: 16 / ranks,
}


def build(millions: float) -> nn.Sequential:
    """Square layers of about so many million parameters."""
    width = max(1, round((millions * 1e6 / LAYERS) ** 0.5))
    return nn.Sequential(*(layer for _ in range(LAYERS) for layer in (nn.Linear(width, width), nn.ReLU())))


# What a rank does -----------------------------------------------------------------------------------------------------


def measure(way: str, millions: float, precision: str, out: str) -> None:
    """A few steps; the leader writes what the rank with most of it held, and needed at most, a parameter."""
    torch.optim.AdamW(build(0).parameters())  # loads much of torch, which is not the strategy's
    return_freed_memory()
    before = memory_bytes("VmRSS")
    held: list[int] = []
    with lockstep.Run(strategy=way, precision=precision) as run:
        on_gpu = run.device.type == "cuda"
        net = build(millions)
        parameters, width = sum(p.numel() for p in net.parameters()), net[0].in_features
        model = run.model(net)
        optimizer = run.optimizer(torch.optim.AdamW(model.parameters(), lr=1e-4))
        optimizer.register_step_post_hook(lambda *_: held.append(live_bytes(run.device)))
        samples = BATCH * run.world_size * STEPS
        inputs = torch.randn(samples + width).unfold(0, width, 1)[:samples]
        batches = run.loader(
            TensorDataset(inputs, torch.arange(samples) % width),
            global_batch=BATCH * run.world_size,
            micro_batch=BATCH,
            workers=0,
        )
        for _ in run.epochs(1):
            for images, labels in run.train(batches):
                run.step(F.cross_entropy, images, labels)
        # The ranks of one machine sum through memory that they share: it is there once, though each of them shows it.
        shared = 0 if on_gpu else memory_bytes("RssShmem")
        peak = torch.cuda.max_memory_allocated() if on_gpu else memory_bytes("VmHWM") - before - shared
        seen = {"held": max(held), "peak": peak, "shared": shared, "parameters": parameters}
        found = {what: max(one[what] for one in run.gather(seen)) for what in seen}
        if run.leads:
            Path(out).write_text(json.dumps(found | {"torch": torch.__version__, "device": run.device.type}))


def live_bytes(device: torch.device) -> int:
    """Memory of all tensors that Python knows of, each storage once."""
    storages = {}
    for value in gc.get_objects():
        if type(value) in (torch.Tensor, nn.Parameter) and value.device.type == device.type:
            for tensor in (value, value.grad if value.is_leaf else None):
                if tensor is not None and type(tensor) is not torch.Tensor:
                    tensor = getattr(tensor, "_local_tensor", tensor)  # noqa: PLW2901
                if tensor is not None:
                    storage = tensor.untyped_storage()
                    storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


# What the command does ------------------------------------------------------------------------------------------------


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ways", nargs="+", default=[way for way in FORMULAS if way in STRATEGIES], choices=FORMULAS)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--millions", type=float, default=30, help="parameters of the model")
    parser.add_argument("--precisions", nargs="+", default=["fp32"], choices=["fp32", "bf16", "fp16"])
    parser.add_argument("--rounds", type=int, default=1, help="the least of so many runs counts")
    parser.add_argument("--page", metavar="FILE", help="put the table into this page of the documentation")
    parser.add_argument("--json", metavar="FILE", help="write the figures there")
    options = parser.parse_args()
    print(f"{'':26}{'bytes a parameter: of each rank':>33}{'of a machine':>14}")
    print(f"{'strategy':<10}{'precision':<11}{'ranks':>5}{'formula':>15}{'held':>9}{'peak':>9}{'shared':>14}")
    rows: list[dict[str, Any]] = []
    for precision in options.precisions:
        for way in options.ways:
            for ranks in options.ranks:
                told_them = {"way": way, "millions": options.millions, "precision": precision}
                runs = [start(__file__, ranks, told_them) for _ in range(options.rounds)]
                found = {what: min(run[what] for run in runs) for what in runs[0]}
                per = {
                    f"{what}_per_parameter": found[what] / found["parameters"] for what in ("held", "peak", "shared")
                }
                row = {"way": way, "precision": precision, "ranks": ranks, "formula": FORMULAS[way](ranks)}
                rows.append(row | found | per)
                print(
                    f"{way:<10}{precision:<11}{ranks:>5}{row['formula']:>15.1f}{per['held_per_parameter']:>9.1f}"
                    f"{per['peak_per_parameter']:>9.1f}{per['shared_per_parameter']:>14.1f}",
                    flush=True,
                )
    if options.page:
        head = ["strategy", "precision", "ranks", "formula", "held", "peak", "shared, on a machine"]
        figures = ("formula", "held_per_parameter", "peak_per_parameter", "shared_per_parameter")
        cells = [
            [f"`{row['way']}`", row["precision"], str(row["ranks"]), *(f"{row[figure]:.1f}" for figure in figures)]
            for row in rows
        ]
        made = f"{pages.circumstances()}, {options.millions:g} million parameters, bytes a parameter:"
        pages.put(options.page, "memory", f"{made}\n\n{pages.markdown(head, cells)}")
    if options.json:
        Path(options.json).write_text(json.dumps(rows, indent=2))


if __name__ == "__main__":
    if (rank := told()) is not None:
        measure(**rank)
    else:
        main()
