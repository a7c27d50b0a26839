"""What an audit finds: bits flipped on purpose, and whether rank and tensor are named; false alarms; what it costs.

python benchmarks/audit.py
python benchmarks/audit.py --flips 40 --clean 0 --rounds 2 --seed 7 --json audit.json

A small network with BatchNorm is trained with `Run(audit="5 steps")` on 1 to 4 ranks. One bit is flipped on one rank or
on two: of a gradient within the backward pass, of a sample after it was read, of a stored parameter, buffer or state
of the optimizer. Bits are drawn at random, and so is when:

once        in an audited step, and of what is stored after one
broken      a unit that flips a bit in each computation from some step on, audited or not
any         of what is stored, at any moment

What is found counts as placed if the error names the ranks that were wrong and no others. Two ranks cannot tell which
of them computes wrongly each time; then the error names both, which counts as found. Of what is stored on one rank
alone, an audit sees what changes between an audited step and the next update.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset, TensorDataset

from lockstep import Run
from lockstep.batch import StepCheck
from lockstep.collectives import local_part
from lockstep.errors import AuditError, LockstepError
from lockstep.formatting import format_ranks
from lockstep.testing import run_ranks

WHAT = ("gradient", "batch", "parameter", "buffer", "optimizer")
EVERY = 5  # steps between two audits
STEPS = 24
SAMPLES = 128


@dataclass(frozen=True)
class Flip:
    """One fault: what is flipped where and when."""

    what: str
    when: str  #: once, broken or any
    strategy: str
    ranks: int
    wrong: tuple[int, ...]  #: ranks
    step: int  #: after which it happens
    bit: int  #: of the number
    place: int  #: of the number in its tensor


@dataclass(frozen=True)
class Ended:
    """How a training ended on one rank."""

    steps: int = 0  #: done
    flipped: bool = False  #: whether this rank has flipped a bit
    error: str = ""
    accused: tuple[int, ...] = ()


@dataclass(frozen=True)
class Found:
    """What became of a flip."""

    flip: Flip
    error: str  #: "" if nothing was found
    later: int  #: steps from the flip to the error
    placed: bool  #: whether the ranks that were wrong are accused, and no others


def flip_bit(tensor: torch.Tensor, place: int, bit: int) -> None:
    """Flip one bit of ``tensor``, of 32-bit numbers, as a fault of the memory does: nothing counts it as a change.

    Of one that is not zero, if there is any: a bit of a zero makes a number that is lost in the next sum.
    """
    words = tensor.detach().numpy().reshape(-1).view("uint32")
    places = words.nonzero()[0] if words.any() else range(len(words))
    words[places[place % len(places)]] ^= 1 << bit


class Faulty:
    """Does what a flip says, on this rank."""

    __module__ = "lockstep.faults"  # it stands for a device, and is no state of the script

    def __init__(self, flip: Flip | None, rank: int) -> None:
        self.flip = None
        if flip is not None and rank in flip.wrong:  # two devices do not break alike
            self.flip = replace(flip, place=flip.place + flip.wrong.index(rank))
        self.step = 0  # done
        self.check = StepCheck.NONE
        self.done = False

    def is_due(self, *what: str) -> bool:
        """Whether one of ``what`` is flipped now."""
        flip = self.flip
        if flip is None or flip.what not in what:
            return False
        if flip.when == "broken":
            return self.step >= flip.step
        computed = flip.what not in ("gradient", "batch") or self.check is StepCheck.REPLAYED
        return self.step == flip.step and computed and not self.done

    def flip_stored(self, net: Net, optimizer: torch.optim.Optimizer) -> None:
        """Flip a bit of what is stored."""
        assert self.flip is not None
        held: dict[str, list[torch.Tensor]] = {
            "parameter": list(net.parameters()),
            "buffer": [buffer for buffer in net.buffers() if buffer.dim()],
            "optimizer": [value for of in optimizer.state.values() for value in of.values() if value.dim()],
        }
        parts = [local_part(one.detach()) for one in held[self.flip.what]]
        parts = [part for part in parts if part.numel()]
        flip_bit(parts[self.flip.place % len(parts)], self.flip.place, self.flip.bit)
        self.done = True

    def flipped(self, tensor: torch.Tensor) -> torch.Tensor:
        """``tensor`` with another bit."""
        assert self.flip is not None
        self.done, other = True, tensor.detach().clone()
        flip_bit(other, self.flip.place, self.flip.bit)
        return other


class Waves(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Samples that are computed as they are read."""

    def __init__(self) -> None:
        self.reading: Callable[[], None] = lambda: None

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        self.reading()
        x = torch.sin(torch.arange(8.0) * (index + 1))
        return x, x.sum().view(1)


class Net(nn.Module):
    """Two layers, with a gradient in between that may be flipped."""

    def __init__(self, faulty: Faulty) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16))
        self.outer = nn.Linear(16, 1)
        self.faulty = faulty

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Predictions for ``x``."""
        hidden = self.inner(x)
        if self.faulty.is_due("gradient") and hidden.requires_grad:
            hidden.register_hook(self.faulty.flipped)
        return self.outer(hidden.relu())


def train(flip: Flip | None, strategy: str, steps: int, audit: str | None) -> Ended:
    """On a rank: a training in which ``flip`` happens."""
    faulty, data = Faulty(flip, int(os.environ.get("RANK", "0"))), Waves()
    done, ended = 0, Ended()
    try:
        with Run(seed=3, strategy=strategy, audit=audit) as run:
            torch.manual_seed(0)
            net = Net(faulty)
            optimizer = run.optimizer(torch.optim.AdamW(run.model(net).parameters(), lr=1e-3))

            def read() -> None:  # between two steps, when no body runs
                faulty.step = run.progress.step
                if flip is not None and flip.when == "once" and faulty.is_due("buffer"):
                    faulty.flip_stored(net, optimizer)

            data.reading = read
            batches = run.loader(data, global_batch=16, micro_batch=2, workers=0)
            for _ in run.steps(steps):
                for inputs, targets in run.train(batches):
                    done = faulty.step = run.progress.step
                    faulty.check = run.micro_batch.check
                    if faulty.is_due("batch"):
                        inputs = faulty.flipped(inputs)  # noqa: PLW2901
                    if faulty.is_due("parameter", "buffer", "optimizer"):
                        faulty.flip_stored(net, optimizer)
                    run.step(F.mse_loss(net(inputs), targets))
            done = run.progress.step
    except LockstepError as error:
        accused = error.accused if isinstance(error, AuditError) else ()
        ended = Ended(error=f"{type(error).__name__}: {error}", accused=accused)
        if dist.is_initialized():
            dist.destroy_process_group()
    return replace(ended, steps=done, flipped=faulty.done)


def train_all(flips: Sequence[Flip]) -> list[Ended]:
    """On a rank: one training after the other."""
    return [train(flip, flip.strategy, STEPS, f"{EVERY} steps") for flip in flips]


def what_was_found(flips: Sequence[Flip]) -> list[Found]:
    """Each of ``flips``, all on equally many ranks, in a training of its own."""
    by_rank = run_ranks(train_all, flips[0].ranks, flips, timeout_s=60 + 20 * len(flips))
    return [found(flip, ended) for flip, ended in zip(flips, zip(*by_rank, strict=True), strict=True)]


def found(flip: Flip, ended: Sequence[Ended]) -> Found:
    """What became of ``flip``, from how the training ended on each rank."""
    missed = [rank for rank in flip.wrong if not ended[rank].flipped]
    assert not missed, f"ranks {missed} have flipped nothing: {flip}"
    # A rank that finds wrong bytes of its own says so alone; the others have lost it.
    errors = sorted((one for one in ended if one.error), key=lambda one: one.error.startswith("PeerLost"))
    accused = {rank for one in errors for rank in one.accused}
    if errors and errors[0].error.startswith("MismatchError"):  # which names them, and accuses no device
        accused = set(flip.wrong) if f" on {format_ranks(sorted(flip.wrong))}" in errors[0].error else set()
    later = max(one.steps for one in ended) - flip.step
    return Found(flip, errors[0].error if errors else "", later, accused == set(flip.wrong))


def draw(number: int, rng: random.Random) -> list[Flip]:
    """So many flips of all kinds, in turn."""
    kinds = [
        (what, when, strategy, ranks, wrong)
        for what in WHAT
        for when in (("once", "broken") if what in ("gradient", "batch") else ("once", "any"))
        for strategy in ("ddp", "zero", "fsdp")
        for ranks, wrong in ((1, 1), (2, 1), (3, 1), (4, 2))
        if (when, ranks) != ("broken", 1)  # what is wrong each time on one rank alone is what it gives
    ]
    rng.shuffle(kinds)
    flips = []
    for what, when, strategy, ranks, wrong in (kinds * (number // len(kinds) + 1))[:number]:
        audited = EVERY * rng.randrange(1, (STEPS - 1) // EVERY)  # steps that are done after an audit
        step = audited - (what in ("gradient", "batch")) if when == "once" else rng.randrange(3, STEPS - 2 * EVERY)
        # Of numbers around one: a bit of the mantissa, the sign, or one of the exponent that makes it small.
        bit = rng.choice([*range(4, 28), 31])
        flips.append(
            Flip(what, when, strategy, ranks, tuple(rng.sample(range(ranks), wrong)), step, bit, rng.randrange(1 << 20))
        )
    return flips


def table(results: Sequence[Found]) -> str:
    """A row for each kind of flip."""
    rows = [
        "| flipped | when | strategy | flips | found | placed | steps later: median, most |",
        "|---|---|---|---|---|---|---|",
    ]
    for what in WHAT:
        for when in ("once", "broken", "any"):
            for strategy in ("ddp", "zero", "fsdp"):
                of = [r for r in results if (r.flip.what, r.flip.when, r.flip.strategy) == (what, when, strategy)]
                later = sorted(r.later for r in of if r.error)
                said = f"{median(later):g}, {later[-1]}" if later else "-"
                if of:
                    count, placed = len(later), sum(r.placed for r in of if r.error)
                    rows.append(f"| {what} | {when} | {strategy} | {len(of)} | {count} | {placed} | {said} |")
    return "\n".join(rows)


def clean_steps(strategy: str, steps: int) -> Ended:
    """On a rank: a training in which every second step is audited and nothing is wrong."""
    return train(None, strategy, steps, "2 steps")


def timed(rounds: int, steps: int, width: int) -> list[dict[str, float]]:
    """On a rank: the CPU seconds of ``steps`` with an audit in every second one and of as many without, round by round.

    So many audits, for what one costs is little. Other work on the machine changes CPU seconds less than the time.
    """
    seen = []
    for number in range(rounds):
        took = {}
        for audit in ("2 steps", None) if number % 2 else (None, "2 steps"):
            with Run(seed=0, audit=audit) as run:
                model = run.model(nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 1)))
                run.optimizer(torch.optim.AdamW(model.parameters()))
                x = torch.randn(512, 64)
                batches = run.loader(TensorDataset(x, x[:, :1]), global_batch=64, micro_batch=8)
                began = 0.0
                for _ in run.steps(steps + 10):
                    for inputs, targets in run.train(batches):
                        if not began and run.progress.step == 10:
                            began = time.process_time()
                        run.step(F.mse_loss(model(inputs), targets))
                took["audited" if audit else "plain"] = time.process_time() - began
        seen.append(took)
    return seen


def main() -> None:
    """Print the table, the false alarms and the cost."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--flips", type=int, default=200)
    parser.add_argument(
        "--clean", type=int, default=20_000, help="steps without a fault, over all strategies and ranks"
    )
    parser.add_argument("--rounds", type=int, default=6, help="of the comparison of times; 0: none")
    parser.add_argument("--steps", type=int, default=100, help="of each round")
    parser.add_argument("--width", type=int, default=512, help="of the network that is timed")
    parser.add_argument("--ranks", type=int, default=2, help="that are timed")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    results: list[Found] = []
    flips = draw(given.flips, random.Random(given.seed))
    for ranks in range(1, 5):
        of_ranks = [flip for flip in flips if flip.ranks == ranks]
        results += what_was_found(of_ranks) if of_ranks else []
    if results:
        print(table(results))
    alarms = {}
    worlds = [(strategy, ranks) for strategy in ("ddp", "zero", "fsdp") for ranks in (1, 2, 3)]
    for strategy, ranks in worlds if given.clean else ():
        ended = run_ranks(clean_steps, ranks, strategy, -(-given.clean // len(worlds)), timeout_s=3600)
        alarms[f"{strategy} on {ranks}"] = next((one.error for one in ended if one.error), "")
    if alarms:
        print(f"false alarms in {given.clean} clean steps: {sum(map(bool, alarms.values()))}")
    costs: list[float] = []
    if given.rounds:
        rounds = run_ranks(timed, given.ranks, given.rounds, given.steps, given.width, timeout_s=3600)[0]
        costs = [2 * (took["audited"] / took["plain"] - 1) for took in rounds]
        spread = f"{min(costs):.2f} to {max(costs):.2f}"
        print(
            f"an audit costs {median(costs):.2f} of a step's CPU seconds ({spread}; {given.rounds} rounds of "
            f"{given.steps} steps, {given.ranks} ranks): {median(costs) / 2:.2f} % at audit='200 steps'"
        )
    if given.json:
        found_all = [asdict(result) for result in results]
        given.json.write_text(json.dumps({"flips": found_all, "alarms": alarms, "costs": costs}, indent=1))


if __name__ == "__main__":
    main()
