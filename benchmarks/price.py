"""What a user sees first: a plain script on one process, beside the same training under Lockstep.

python benchmarks/price.py
python benchmarks/price.py --models cnn --seconds 5 --rounds 5 --json price.json

*plain* is a loop of bare PyTorch with as many threads as there are CPUs, which computes each batch whole. *lockstep* is
the same training on one rank, as `python train.py` starts it, and on as many ranks as there are CPUs, with one thread
each; a micro-batch is an eighth, a quarter, a half or the whole of a batch. On a machine with GPUs, *plain* computes on
one of them, and there are as many ranks as GPUs.

Each way has processes of its own, which train for some seconds after a warm-up; the ways take turns, round by round.
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
from ranks import start, told

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
    """

    def __init__(self, seconds: float, agree: Callable[[int], int]) -> None:
        self._seconds, self._agree = seconds, agree
        self._moments: list[float] = []
        self._last = 0  # step to be measured

    def step(self) -> float | None:
        """A step is done; after the last one, how many were made in a second."""
        self._moments.append(time.perf_counter())
        done = len(self._moments)
        if done == WARM_UP:
            step_s = (self._moments[-1] - self._moments[1]) / (WARM_UP - 2)
            self._last = WARM_UP + self._agree(max(3, round(self._seconds / step_s)))
            self._moments[-1] = time.perf_counter()
        if done == self._last:
            return (done - WARM_UP) / (self._moments[-1] - self._moments[WARM_UP - 1])
        return None


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
    pace = Pace(seconds, lambda steps: steps)
    while True:
        for inputs, labels in loader:
            optimizer.zero_grad()
            F.cross_entropy(net(inputs.to(device)), labels.to(device)).backward()
            optimizer.step()
            if (steps := pace.step()) is not None:
                return steps * batch


def under_lockstep(model: str, parts: int, seconds: float) -> float:
    """Samples a second over all ranks, where a batch is divided into so many micro-batches."""
    make, batch = MODELS[model]
    with lockstep.Run(seed=0) as run:
        net = run.model(make())
        run.optimizer(sgd(net))
        batches = run.loader(samples_of(model, batch * STEPS), global_batch=batch, micro_batch=batch // parts)
        pace = Pace(seconds, run.broadcast)
        for _ in run.steps(10**9):
            for inputs, labels in run.train(batches):
                if run.step(F.cross_entropy(net(inputs), labels)) and (steps := pace.step()) is not None:
                    return steps * batch
    raise AssertionError("there are always more steps")


def measure(model: str, parts: int, seconds: float, out: str) -> None:
    """One way, by hand where there are no ``parts``; the leader writes samples a second."""
    found = under_lockstep(model, parts, seconds) if parts else plain(model, seconds)
    if os.environ["RANK"] == "0":
        Path(out).write_text(json.dumps(found))


# What the command does ------------------------------------------------------------------------------------------------


def ways(most: int) -> dict[str, tuple[int, int]]:
    """Each way by its name: how many ranks, and micro-batches of a batch; none for the plain script."""
    on = {1, most}
    found = {"plain": (1, 0)}
    return found | {
        f"{ranks} rank{'s' if ranks > 1 else ''}, {_FRACTIONS[parts]}": (ranks, parts)
        for ranks in sorted(on)
        for parts in PARTS
        if parts >= ranks
    }


_FRACTIONS = {8: "an eighth", 4: "a quarter", 2: "a half", 1: "the whole"}


def table(model: str, seen: Seen) -> str:
    """For people: medians, and medians of the ratios within a round."""
    lines = [f"| {model}, batch {MODELS[model][1]} | samples/s | x plain | from | to |", "|---|---|---|---|---|"]
    for way, rates in seen.items():
        ratios = sorted(rate / plain for rate, plain in zip(rates, seen["plain"], strict=True))
        lines.append(f"| {way} | {median(rates):.0f} | {median(ratios):.2f} | {ratios[0]:.2f} | {ratios[-1]:.2f} |")
    return "\n".join(lines)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=[*MODELS])
    parser.add_argument("--seconds", type=float, default=3.0, help="of each visit to a way, after its warm-up")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", metavar="FILE", help="write the figures there")
    options = parser.parse_args()
    most = torch.cuda.device_count() or len(os.sched_getaffinity(0))
    found: dict[str, Seen] = {}
    for model in options.models:
        found[model] = {way: [] for way in ways(most)}
        for number in range(options.rounds):
            turns = list(ways(most).items())
            for way, (ranks, parts) in turns if number % 2 == 0 else reversed(turns):
                order = {"model": model, "parts": parts, "seconds": options.seconds}
                found[model][way].append(start(__file__, ranks, order))
        print(table(model, found[model]), end="\n\n", flush=True)
    if options.json:
        Path(options.json).write_text(json.dumps({"torch": torch.__version__, "models": found}, indent=2))


if __name__ == "__main__":
    if (rank := told()) is not None:
        measure(**rank)
    else:
        main()
