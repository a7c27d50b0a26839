"""What a user sees first: a plain script on one process, beside the same training under Lockstep.

python benchmarks/price.py
python benchmarks/price.py --models cnn --seconds 5 --rounds 5 --json price.json

*plain* is a loop of bare PyTorch with as many threads as there are CPUs, which computes each batch whole. The others
are the same training under Lockstep on one rank, as `python train.py` starts it, and on as many ranks as there are
CPUs, with one thread each; a micro-batch is an eighth, a quarter, a half or the whole of a batch. On a machine with
GPUs, *plain* computes on one of them, and there are as many ranks as GPUs.

In a round, *plain*, the single rank and the many ranks are started one after another, in an order that changes from
round to round, and go through their micro-batches in one process each: a warm-up, then some steps. About four minutes.
"""

import argparse
import json
import os
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from statistics import median

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import lockstep
from lockstep.formatting import plural
from ranks import start, start_alone, told

PARTS = (8, 4, 2, 1)  # micro-batches of a batch
WARM_UP = 5  # steps
STEPS = 64  # of an epoch

#: For each way, samples a second, round by round.
Seen = dict[str, list[float]]


class Cnn(nn.Sequential):
    """Three convolutions on images of 32 x 32."""

    def __init__(self) -> None:
        sizes = (3, 32, 64, 128)
        layers: list[nn.Module] = []
        for a, b in pairwise(sizes):
            layers += [nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU(), nn.MaxPool2d(2)]
        super().__init__(*layers, nn.Flatten(), nn.Linear(sizes[-1] * 16, 10))


class Transformer(nn.Module):
    """Two encoder layers of width 128 on 64 tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(256, 128)
        layer = nn.TransformerEncoderLayer(128, 4, 512, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(128, 10)

    def forward(self, tokens: Tensor) -> Tensor:
        """From numbers of tokens, of shape (samples, 64), to 10 logits a sample."""
        logits: Tensor = self.head(self.layers(self.tokens(tokens)).mean(1))
        return logits


class Mlp(nn.Sequential):
    """A perceptron of 1.9 million parameters."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(784, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10))


MODELS = {"cnn": (Cnn, 64), "transformer": (Transformer, 32), "mlp": (Mlp, 256)}  # with samples of a batch


def samples_of(model: str, count: int) -> TensorDataset:
    """So many inputs and labels, the same at each call."""
    numbers = torch.Generator().manual_seed(0)
    shape = {"cnn": (3, 32, 32), "transformer": (64,), "mlp": (784,)}[model]
    inputs = (
        torch.randint(256, (count, *shape), generator=numbers)
        if model == "transformer"
        else torch.randn(count, *shape, generator=numbers)
    )
    return TensorDataset(inputs, torch.randint(10, (count,), generator=numbers))


def sgd(model: nn.Module) -> torch.optim.SGD:
    """The optimizer of every way."""
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


class Pace:
    """Counts the steps of one way: some to warm up, then as many as fill the seconds.

    Args:
        seconds: about how long to measure.
        agree: the leader's number for all ranks, which must stop after the same step.
        device: of this rank, which may still compute what was asked of it.
    """

    def __init__(self, seconds: float, agree: Callable[[int], int], device: torch.device) -> None:
        self._seconds, self._agree, self._device = seconds, agree, device
        self._done = 0
        self._began = 0.0
        self._last = 0  # step to be measured

    def step(self) -> float | None:
        """A step is done; after the last one, how many were made in a second."""
        self._done += 1
        if self._done == 2:
            self._began = self._now()
        if self._done == WARM_UP:
            step_s = (self._now() - self._began) / (WARM_UP - 2)
            self._last = WARM_UP + self._agree(max(3, round(self._seconds / step_s)))
            self._began = self._now()
        if self._done == self._last:
            return (self._done - WARM_UP) / (self._now() - self._began)
        return None

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()


# What a rank does -----------------------------------------------------------------------------------------------------


def plain(model: str, seconds: float) -> float:
    """Samples a second of a loop written by hand."""
    make, batch = MODELS[model]
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    torch.manual_seed(0)
    net = make().to(device)
    optimizer = sgd(net)
    loader = DataLoader(samples_of(model, batch * STEPS), batch_size=batch, shuffle=True)
    pace = Pace(seconds, lambda steps: steps, device)
    while True:
        for inputs, labels in loader:
            optimizer.zero_grad()
            F.cross_entropy(net(inputs.to(device)), labels.to(device)).backward()
            optimizer.step()
            if (steps := pace.step()) is not None:
                return steps * batch


def under_lockstep(model: str, parts: list[int], seconds: float) -> list[float]:
    """Samples a second over all ranks, where a batch is divided into so many micro-batches, in turn."""
    make, batch = MODELS[model]
    found = []
    with lockstep.Run(seed=0) as run:
        net = run.model(make())
        run.optimizer(sgd(net))
        data = samples_of(model, batch * STEPS)
        loaders = [run.loader(data, global_batch=batch, micro_batch=batch // of) for of in parts]
        pace = Pace(seconds, run.broadcast, run.device)
        for _ in run.epochs(10**9):
            for inputs, labels in run.train(loaders[len(found)]):
                if run.step(F.cross_entropy(net(inputs), labels)) and (steps := pace.step()) is not None:
                    found.append(steps * batch)
                    pace = Pace(seconds, run.broadcast, run.device)
                    break
            if len(found) == len(loaders):
                return found
    raise AssertionError("there are always more epochs")


def measure(model: str, parts: list[int], seconds: float, out: str) -> None:
    """With each number of micro-batches in turn, or by hand where there is none; the leader writes samples a second."""
    found = under_lockstep(model, parts, seconds) if parts != [0] else [plain(model, seconds)]
    if os.environ.get("RANK", "0") == "0":
        Path(out).write_text(json.dumps(found))


# What the command does ------------------------------------------------------------------------------------------------


def starts(most: int) -> list[tuple[int, list[int]]]:
    """What is started in a round: ranks, and the numbers of micro-batches that they try; none for the plain script."""
    many = [(most, [parts for parts in PARTS if parts >= most])] if most > 1 else []
    return [(1, [0]), (1, [*PARTS]), *many]


def way(ranks: int, parts: int) -> str:
    """Its name in the table."""
    return f"{plural(ranks, 'rank')}, {_FRACTIONS[parts]}" if parts else "plain"


_FRACTIONS = {8: "an eighth", 4: "a quarter", 2: "a half", 1: "the whole"}


def rates(model: str, ranks: int, parts: list[int], seconds: float) -> list[float]:
    """Of one start; a single rank is started as a script is that knows nothing of a launcher."""
    told = {"model": model, "parts": parts, "seconds": seconds}
    found: list[float] = start(__file__, ranks, told) if ranks > 1 else start_alone(__file__, told)
    return found


def table(model: str, seen: Seen) -> str:
    """For people: medians, and medians of the ratios within a round."""
    lines = [f"| {model}, batch {MODELS[model][1]} | samples/s | x plain | from | to |", "|---|---|---|---|---|"]
    for name, found in seen.items():
        ratios = sorted(rate / plain for rate, plain in zip(found, seen["plain"], strict=True))
        lines.append(f"| {name} | {median(found):.0f} | {median(ratios):.2f} | {ratios[0]:.2f} | {ratios[-1]:.2f} |")
    return "\n".join(lines)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=[*MODELS])
    parser.add_argument("--seconds", type=float, default=1.5, help="of each way in a round, after its warm-up")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", metavar="FILE", help="write the figures there")
    options = parser.parse_args()
    turns = starts(torch.cuda.device_count() or len(os.sched_getaffinity(0)))
    found: dict[str, Seen] = {}
    for model in options.models:
        found[model] = {way(ranks, each): [] for ranks, parts in turns for each in parts}
        for number in range(options.rounds):
            for ranks, parts in turns if number % 2 == 0 else reversed(turns):
                for each, rate in zip(parts, rates(model, ranks, parts, options.seconds), strict=True):
                    found[model][way(ranks, each)].append(rate)
        print(table(model, found[model]), end="\n\n", flush=True)
    if options.json:
        Path(options.json).write_text(json.dumps({"torch": torch.__version__, "models": found}, indent=2))


if __name__ == "__main__":
    if (rank := told()) is not None:
        measure(**rank)
    else:
        main()
