"""What hooks of Python on each gradient would cost, beside torch's DistributedDataParallel, which counts them in C++.

python benchmarks/gradient_hooks.py                  half a minute
python benchmarks/gradient_hooks.py --layers 250 --rounds 40

The backward pass of a model of many small layers, in one process that sends nothing, in three ways that take turns:

    plain   nothing waits for a gradient
    ddp     DistributedDataParallel, whose communication hook gives each bucket back as it is
    hooks   `register_post_accumulate_grad_hook` for each parameter, which counts its bucket down

`ddp` also copies gradients into buckets, or has them there; `hooks` does not: it is less than a strategy would need.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median, quantiles

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

WIDTH, BATCH = 16, 8
BUCKET_BYTES = 25 << 20


def build(layers: int) -> nn.Module:
    """A perceptron with two parameters for each of its ``layers``."""
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(layers)))


def counted(model: nn.Module) -> None:
    """Give each parameter a hook that counts its bucket down."""
    left: dict[int, int] = {}
    size = bucket = 0
    for parameter in reversed(list(model.parameters())):
        if size > BUCKET_BYTES:
            size, bucket = 0, bucket + 1
        size += parameter.numel() * parameter.element_size()
        left[bucket] = left.get(bucket, 0) + 1

        def ready(_: torch.Tensor, bucket: int = bucket) -> None:
            left[bucket] -= 1

        parameter.register_post_accumulate_grad_hook(ready)


def as_it_is(_: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """A communication hook that sends nothing."""
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, nargs="+", default=[100, 500], help="(default: 100 500)")
    parser.add_argument("--rounds", type=int, default=60, help="of each way, one after the other (default: 60)")
    parser.add_argument("--json", metavar="FILE", help="write the figures there, too")
    told = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as place:
        dist.init_process_group("gloo", store=dist.FileStore(str(Path(place, "store")), 1), rank=0, world_size=1)
        print("| parameters | way | backward pass, ms: median, 10 % | more than plain for each parameter, us |")
        print("|---|---|---|---|")
        found = [row for layers in told.layers for row in compare(layers, told.rounds)]
        dist.destroy_process_group()
    if told.json:
        Path(told.json).write_text(json.dumps(found))


def compare(layers: int, rounds: int) -> list[dict[str, object]]:
    """Time each way for models of so many ``layers``; print its row, and return it."""
    plain, wrapped, hooked = build(layers), build(layers), build(layers)
    ddp = DistributedDataParallel(wrapped, gradient_as_bucket_view=True)
    ddp.register_comm_hook(None, as_it_is)
    counted(hooked)
    ways: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {"plain": plain, "ddp": ddp, "hooks": hooked}
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    batch = torch.randn(BATCH, WIDTH)
    for turn in range(rounds + 3):  # the first three: buckets are laid out again, gradients are allocated
        for way, model in ways.items():
            loss = model(batch).sum()
            began = time.perf_counter()
            loss.backward()
            if turn >= 3:
                seconds[way].append(time.perf_counter() - began)
    parameters = 2 * layers
    low = {way: quantiles(taken, n=10)[0] if len(taken) > 1 else taken[0] for way, taken in seconds.items()}
    rows: list[dict[str, object]] = []
    for way, taken in seconds.items():
        more = (low[way] - low["plain"]) / parameters * 1e6
        print(f"| {parameters} | {way} | {median(taken) * 1e3:.2f}, {low[way] * 1e3:.2f} | {more:.1f} |", flush=True)
        rows.append({"parameters": parameters, "way": way, "ms": median(taken) * 1e3, "low_ms": low[way] * 1e3})
    return rows


if __name__ == "__main__":
    main()
