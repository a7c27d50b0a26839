"""Visits to strategies: steps of a real `Run` on hosts with links of any speed, one way after the other.

Each rank has a host of its own (see `hosts.py`), and what a host sends and is sent is limited to the speed. On each
host one process has loaded everything and waits; for each visit it forks a rank, which opens a `Run` with the strategy,
trains some steps, and is gone. So visits share nothing, and ways can take turns.

    the benchmark    orders      hosts n1, n2 ...            ranks, one at a time
        |  --- {"spec", "steps"} -->  ready  --- fork --->  Run(strategy=spec), steps, gone
        |  <-- moments, bytes, peak ----'  <----------------'
"""

import argparse
import contextlib
import importlib
import json
import multiprocessing
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import mean, median, quantiles

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import lockstep
from hosts import Host, hosts
from lockstep.strategy_kinds import BUILT_IN, split
from lockstep.world import World
from ranks import memory_bytes, return_freed_memory

WARM_UP = 2  # steps: DDP lays out its buckets again after the first
INPUTS, CLASSES = 784, 10
ALONE = "none"  # the way in which each rank computes by itself, at the same time as the others
LOOPBACK = "loopback"  # the speed where all ranks share one host

#: Bytes that the busiest rank sends in a step, from the model's parameters and the number of ranks.
Formula = Callable[[list[nn.Parameter], int], float]


@dataclass(frozen=True)
class Way:
    """One strategy with its options."""

    spec: str  #: as `Run` is told
    sends: Formula | None = None  #: None: there is no short one
    same_bits: bool = False  #: whether it promises those of one rank
    micro: int = 1  #: micro-batches of a step for each rank
    least: int = 2  #: ranks that it takes to differ from the others

    @property
    def period(self) -> int:
        """Steps after which what it does repeats."""
        return int(split(self.spec)[1].get("period", "1"))


def build(millions: float) -> nn.Sequential:
    """A multilayer perceptron of about so many million parameters, with the same weights at each call."""
    torch.manual_seed(0)
    # 2 w^2 + (inputs + classes) w parameters
    rest = INPUTS + CLASSES
    width = max(1, round(((rest**2 + 8e6 * millions) ** 0.5 - rest) / 4))
    sizes = (INPUTS, width, width, width, CLASSES)
    layers = [layer for a, b in pairwise(sizes) for layer in (nn.Linear(a, b), nn.ReLU())]
    return nn.Sequential(*layers[:-1])


def size(parameters: list[nn.Parameter]) -> int:
    """Their bytes."""
    return sum(p.numel() * p.element_size() for p in parameters)


# What a rank does -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Order:
    """What a rank is to train, and where it belongs."""

    spec: str
    steps: int
    batch: int  #: samples of a step, over all ranks
    micro_batch: int
    millions: float
    port: int
    rank: int
    ranks: int
    nodes: int
    card: str  #: the network card whose bytes count
    timeout_s: float
    for_memory: bool  #: whether the peak is what counts, not the time


@dataclass
class Seen:
    """What one rank saw in one visit; a moment is the end of a step, the first that of the last to warm up."""

    moments_s: list[float] = field(default_factory=list)
    sent: list[int] = field(default_factory=list)  #: bytes since the host came up, at each moment
    received: list[int] = field(default_factory=list)
    peak: int = 0  #: bytes of memory at most, over what it held before the run
    error: str = ""


def train(order: Order) -> Seen:
    """A few steps, through the door that users take."""
    if order.for_memory:
        return_freed_memory()
    before = memory_bytes("VmRSS")
    seen = Seen()
    samples = (order.steps + WARM_UP) * order.batch
    # Samples that differ, in little memory: each row begins one number after the one before.
    inputs = torch.randn(samples + INPUTS).unfold(0, INPUTS, 1)[:samples]
    data = TensorDataset(inputs, torch.arange(samples) % CLASSES)
    with lockstep.Run(seed=0, strategy=order.spec, peer_timeout_s=order.timeout_s) as run:
        model = run.model(build(order.millions))
        run.optimizer(torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9))
        batches = run.loader(data, global_batch=order.batch, micro_batch=order.micro_batch, workers=0)
        for _ in run.epochs(1):
            for images, labels in run.train(batches):
                step = run.progress.step
                run.step(F.cross_entropy, images, labels)
                if step + 1 >= WARM_UP and run.progress.step > step:
                    sent, received = _traffic(order.card)
                    seen.moments_s.append(time.monotonic())
                    seen.sent.append(sent)
                    seen.received.append(received)
        seen.peak = memory_bytes("VmHWM") - memory_bytes("RssShmem") - before
    return seen


def _traffic(card: str) -> tuple[int, int]:
    """Bytes that a network card has sent and received."""
    (line,) = (x for x in Path("/proc/self/net/dev").read_text().splitlines() if x.strip().startswith(f"{card}:"))
    numbers = line.partition(":")[2].split()
    return int(numbers[8]), int(numbers[0])


def obey() -> None:
    """On a host: fork a rank for each order that comes in, and hand back what it saw."""
    torch.set_num_threads(1)
    # What is loaded here, no visit pays for; with its first optimizer torch loads much more of itself.
    for kind in BUILT_IN.values():
        importlib.import_module(kind.module)
    torch.optim.SGD(build(0).parameters())
    assert len(os.listdir("/proc/self/task")) == 1, "threads would be missing in the copies"
    fork = multiprocessing.get_context("fork")
    for line in sys.stdin:
        order = Order(**json.loads(line))
        here, there = fork.Pipe(duplex=False)
        rank = fork.Process(target=_one_visit, args=(order, there))
        rank.start()
        there.close()
        try:
            seen = here.recv() if here.poll(2 * order.timeout_s) else Seen(error=f"no end in {2 * order.timeout_s:g} s")
        except EOFError:
            seen = Seen(error="it died")
        rank.join(10)
        rank.kill()
        rank.join()
        print(json.dumps(asdict(seen)), flush=True)


def _one_visit(order: Order, home: Connection) -> None:
    os.dup2(2, 1)  # standard output is for what was seen
    place = World(0, 1, 0, 1, 0, 1)
    if order.spec != ALONE:
        on_node = (0, 1, order.rank, order.ranks) if order.nodes > 1 else (order.rank, order.ranks, 0, 1)
        place = World(order.rank, order.ranks, *on_node, address="n1", port=order.port)
    os.environ.update(place.rank_variables())
    try:
        seen = train(order)
    except Exception as error:  # noqa: BLE001 - the line of the table for whatever it is
        traceback.print_exc()
        seen = Seen(error=f"{type(error).__name__}: {error}")
    home.send(seen)


# What the command does ------------------------------------------------------------------------------------------------


class Crew:
    """The processes that wait for orders: one on each host, or all of them on one."""

    def __init__(self, places: list[Host], nodes: int, logs: Path, options: argparse.Namespace) -> None:
        self._nodes, self._logs, self._options = nodes, logs, options
        self._port = 29500
        words = [sys.executable, str(Path(__file__).resolve())]
        ways_in = (str(Path(lockstep.__file__).parents[1]), str(Path(__file__).parent))
        env = os.environ | {
            "PYTHONPATH": os.pathsep.join(ways_in),
            "LOCKSTEP_VIEW": "silent",
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
        }
        self._ready = []
        for number, host in enumerate(places):
            with self._log(number).open("w") as log:
                pipes = {"stdin": -1, "stdout": -1, "stderr": log}
                self._ready.append(host.start(words, cwd=logs, env=env, **pipes))

    def visit(
        self, way: Way, ranks: int, steps: int, *, workers: int | None = None, for_memory: bool = False
    ) -> list[Seen]:
        """What each of the first ``ranks`` saw; its ``error`` says what went wrong, here or elsewhere.

        Where only some of them are ``workers``, the step is as large as theirs.
        """
        batch = self._options.batch
        self._port += 1
        for rank, ready in enumerate(self._ready[:ranks]):
            alone = way.spec == ALONE
            order = Order(
                spec=way.spec,
                steps=steps,
                batch=batch if alone else batch * (workers or ranks),
                micro_batch=batch // way.micro,
                millions=self._options.millions,
                port=self._port,
                rank=rank,
                ranks=ranks,
                nodes=ranks if self._nodes > 1 else 1,
                card="eth0" if self._nodes > 1 else "lo",
                timeout_s=self._options.timeout,
                for_memory=for_memory,
            )
            ready.stdin.write(json.dumps(asdict(order)) + "\n")
            ready.stdin.flush()
        answers = [ready.stdout.readline() for ready in self._ready[:ranks]]
        for rank, answer in enumerate(answers):
            if not answer:
                sys.exit(f"the process of rank {rank} is gone:\n{self._log(rank).read_text()}")
        return [Seen(**json.loads(answer)) for answer in answers]

    def _log(self, number: int) -> Path:
        return self._logs / f"rank-{number}.txt"

    def close(self) -> None:
        """They end."""
        for ready in self._ready:
            ready.stdin.close()
            ready.stdout.close()
            ready.wait(self._options.timeout)


@contextlib.contextmanager
def crew(speed: str, ranks: int, options: argparse.Namespace) -> Iterator[Crew]:
    """Ranks on hosts with links of ``speed``, as `tc` writes it, or on one host."""
    nodes = 1 if speed == LOOPBACK else ranks
    with hosts(nodes) as machines, tempfile.TemporaryDirectory(prefix="strategies-") as logs:
        places = [machines[f"n{rank + 1 if nodes > 1 else 1}"] for rank in range(ranks)]
        if speed not in (LOOPBACK, "unlimited"):
            for host in places:
                host.slow(speed, burst=f"{max(32_000, round(bits_per_s(speed) / 8 * 1e-3))}b")
        made = Crew(places, nodes, Path(logs), options)
        try:
            yield made
        finally:
            made.close()


def bits_per_s(speed: str) -> float:
    """Of a speed such as ``100mbit``."""
    for unit, factor in (("gbit", 1e9), ("mbit", 1e6), ("kbit", 1e3)):
        if speed.endswith(unit):
            return float(speed.removesuffix(unit)) * factor
    raise SystemExit(f"{speed!r} is no speed; give one such as 100mbit, {LOOPBACK} or unlimited")


@dataclass
class Visits:
    """All that was seen of one way at one speed."""

    steps_ms: list[float] = field(default_factory=list)  #: each step, or each period over its steps
    rounds_ms: list[float] = field(default_factory=list)  #: of each visit, what it took over its steps
    sent: list[list[float]] = field(default_factory=list)  #: of each visit, bytes of a step that each worker sent
    received: list[list[float]] = field(default_factory=list)
    error: str = ""

    def add(self, way: Way, visit: list[Seen]) -> None:
        """One visit more."""
        self.error = error_of(visit)
        if self.error:
            return
        workers = [seen for seen in visit if len(seen.moments_s) > way.period]  # servers have no steps of their own
        steps = [ms for seen in workers for ms in _periods_ms(seen.moments_s, way.period)]
        self.steps_ms += steps
        # The mean, as those with periods have no other: a median would leave out what takes long now and then.
        self.rounds_ms.append(mean(steps))
        self.sent.append([(seen.sent[-1] - seen.sent[0]) / (len(seen.sent) - 1) for seen in workers])
        self.received.append([(seen.received[-1] - seen.received[0]) / (len(seen.received) - 1) for seen in workers])


def error_of(visit: list[Seen]) -> str:
    """What went wrong, if something did."""
    # Those who lost a peer are victims; the cause is the one that speaks of something else.
    return min((seen.error for seen in visit if seen.error), key=lambda error: "PeerLost" in error, default="")


def _periods_ms(moments_s: list[float], period: int) -> list[float]:
    return [(b - a) * 1e3 / period for a, b in pairwise(moments_s[::period])]


def quartiles(values: list[float]) -> tuple[float, float]:
    """Between which half of the values lie."""
    if len(values) < 2:
        return values[0], values[0]
    low, _, high = quantiles(values, n=4, method="inclusive")
    return low, high


def steps_of(way: Way, visits: Visits, seconds: float) -> int:
    """How many steps fill so many seconds: at first a few; whole periods."""
    per_period_s = median(visits.rounds_ms) / 1e3 * way.period if visits.rounds_ms else seconds / 4
    return way.period * min(40, max(1 if way.period > 1 else 4, round(seconds / max(per_period_s, 1e-6))))


def add_options(parser: argparse.ArgumentParser) -> None:
    """Those of every benchmark of visits."""
    parser.add_argument("--speeds", nargs="*", metavar="SPEED", help=f"such as 1gbit, {LOOPBACK} (one host), unlimited")
    parser.add_argument("--millions", type=float, default=5.0, help="parameters of the model")
    parser.add_argument("--batch", type=int, default=64, help="samples of a step for each rank that computes")
    parser.add_argument("--rounds", type=int, default=3, help="of each strategy's visits; quartiles are over rounds")
    parser.add_argument("--seconds", type=float, default=3.0, help="of a visit to one strategy, about")
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds after which a rank that waits gives up")
    parser.add_argument("--json", metavar="FILE", help="write the figures there")
    parser.add_argument("--page", metavar="FILE", help="put the tables into this page of the documentation")


if __name__ == "__main__":
    obey()
