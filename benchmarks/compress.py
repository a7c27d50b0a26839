"""What PowerSGD computes in a step, beside torch's hook: nothing is sent, for there is one rank.

python benchmarks/compress.py
python benchmarks/compress.py --ranks 1 2 4 8 --rounds 100 --device cuda

Both get the same gradients, in one bucket, which is the best case for torch's hook: it batches matrices of the same
shape within a bucket only. On a CPU it counts the time of all threads of this process, on a GPU time as it passes.
"""

import argparse
import itertools
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

from lockstep.collectives import single_rank_group
from lockstep.strategies.replicated.powersgd import PowerSGD


def perceptron() -> nn.Module:
    """5.0 million parameters in four layers, each matrix of another shape."""
    widths = (784, 1600, 1600, 700, 10)
    return nn.Sequential(*(nn.Linear(a, b) for a, b in itertools.pairwise(widths)))


def transformer() -> nn.Module:
    """5.3 million parameters in twelve layers that are alike."""
    layer = nn.TransformerEncoderLayer(192, 3, 768, batch_first=True)
    return nn.TransformerEncoder(layer, 12, enable_nested_tensor=False)


MODELS: dict[str, Callable[[], nn.Module]] = {"perceptron": perceptron, "transformer": transformer}


class Bucket:
    """All gradients of a model in one bucket, as DDP hands it to a hook."""

    def __init__(self, model: nn.Module) -> None:
        self._parameters = list(model.parameters())[::-1]
        sizes = [p.numel() for p in self._parameters]
        self._flat = torch.empty(sum(sizes), device=self._parameters[0].device)
        pieces = zip(self._flat.split(sizes), self._parameters, strict=True)
        self._gradients = [piece.view(p.shape) for piece, p in pieces]

    def fill(self, values: torch.Tensor) -> None:
        """The gradients of a new step."""
        self._flat.copy_(values)

    def index(self) -> int:
        """Of the only one."""
        return 0

    def is_last(self) -> bool:
        """It is."""
        return True

    def buffer(self) -> torch.Tensor:
        """All gradients, of one dimension."""
        return self._flat

    def set_buffer(self, flat: torch.Tensor) -> None:
        """Never asked here."""
        self._flat.copy_(flat)

    def parameters(self) -> list[torch.Tensor]:
        """Whose they are."""
        return list(self._parameters)

    def gradients(self) -> list[torch.Tensor]:
        """As views of `buffer`."""
        return self._gradients


def ways(model: nn.Module, rank: int) -> dict[str, Callable[[Bucket], None]]:
    """Each way to compress the gradients in a bucket, and put back what is left of them."""
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=rank, start_powerSGD_iter=2)
    state.iter = 2  # or it would begin with plain sums
    ours = PowerSGD(single_rank_group(next(model.parameters()).device), rank=rank, start=0, may_skip=False)
    ours.setup_model(model)

    def torchs_hook(bucket: Bucket) -> None:
        powerSGD_hook.powerSGD_hook(state, bucket).wait()  # type: ignore[arg-type]

    def lockstep(bucket: Bucket) -> None:
        ours.begin(bucket.buffer(), bucket.parameters(), bucket.gradients())
        ours.finish()

    return {"torch": torchs_hook, "lockstep": lockstep}


def measure(name: str, rank: int, rounds: int, device: torch.device) -> dict[str, Any]:
    """Milliseconds of each way, the median and the tenth percentile; the median of the ratio within a round."""
    torch.manual_seed(0)
    model = MODELS[name]().to(device)
    bucket = Bucket(model)
    values = [torch.randn_like(bucket.buffer()) for _ in range(4)]
    run = ways(model, rank)
    taken: dict[str, list[float]] = {way: [] for way in run}
    for step in range(rounds + 3):
        for way in sorted(run, reverse=bool(step % 2)):
            bucket.fill(values[step % len(values)])
            begin = _now_s(device)
            run[way](bucket)
            if step >= 3:
                taken[way].append(1e3 * (_now_s(device) - begin))
    ratios = [a / b for a, b in zip(taken["lockstep"], taken["torch"], strict=True)]
    figures = {way: (statistics.median(ms), sorted(ms)[len(ms) // 10]) for way, ms in taken.items()}
    return {"model": name, "rank": rank, "ms": figures, "ratio": statistics.median(ratios)}


def _now_s(device: torch.device) -> float:
    if device.type == "cpu":
        return time.process_time()
    torch.cuda.synchronize(device)
    return time.perf_counter()


def main() -> None:
    """Measure what is asked for, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--ranks", nargs="+", type=int, default=[1, 2, 4], help="of the approximation")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"))
    parser.add_argument("--json", type=Path)
    told = parser.parse_args()
    torch.set_num_threads(told.threads)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    print("| model | rank | torch, ms | p10 | lockstep, ms | p10 | ratio |")
    print("|---|---|---|---|---|---|---|")
    found = []
    for name in told.models:
        for rank in told.ranks:
            one = measure(name, rank, told.rounds, told.device)
            found.append(one)
            cells = [f"{ms:.1f}" for way in ("torch", "lockstep") for ms in one["ms"][way]]
            print(f"| {name} | {rank} | {' | '.join(cells)} | {one['ratio']:.2f} |", flush=True)
    dist.destroy_process_group()
    if told.json:
        told.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
