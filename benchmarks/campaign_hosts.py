"""The faults of `campaign.py` that befall machines and the network between them: hosts of `hosts.py`, which need root.

Each fault has a training of its own on three hosts, `lockstep run --nnodes 1:3`. Where torchrun has an answer to it, a
loop of torch.distributed under `torchrun --nnodes 1:3` meets the same fault right after.
"""

from __future__ import annotations

import itertools
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import lockstep
from hosts import Host, Hosts, hosts

HOME = str(Path(lockstep.__file__).parents[1])
NAMES = ("n1", "n2", "n3")
LIMIT_S = 150.0
#: Without a step for so long, the training has stood still.
GAP_S = 1.5
#: If it has not stood still after so long, it does not: the fault has cost nothing.
WATCHED_S = 16.0

TRAIN = """
import hashlib, os, socket, sys, time
import torch, lockstep
from torch import nn
from torch.nn import functional as F

torch.manual_seed(0)
inputs = torch.randn(480, 12)
samples = list(zip(inputs, (inputs[:, 0] * inputs[:, 1] > 0).long()))

with lockstep.Run(seed=3) as run:
    model = run.model(nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 2)))
    optimizer = run.optimizer(torch.optim.Adam(model.parameters(), lr=RATE))
    batches = run.loader(samples, global_batch=24, micro_batch=4, workers=0)
    steps = open(f"steps-{socket.gethostname()}", "a", buffering=1)
    for epoch in run.epochs(EPOCHS):
        for x, y in run.train(batches):
            if run.step(F.cross_entropy(model(x), y)):
                steps.write(f"{time.time():.3f} {run.progress.step}\\n")
                if not os.path.exists("go"):
                    time.sleep(0.1)
    digest = hashlib.sha256()
    for value in [*model.state_dict().values(), *optimizer.state_dict()["state"][0].values()]:
        digest.update(value.numpy().tobytes())
    open(f"digest-{run.rank}", "w").write(digest.hexdigest())
"""
PLAIN = """
import os, socket, sys, time
import torch, torch.distributed as dist

dist.init_process_group("gloo")
steps = open(f"steps-{socket.gethostname()}", "a", buffering=1)
for step in range(10**6):
    dist.all_reduce(torch.ones(1000))
    steps.write(f"{time.time():.3f} {step}\\n")
    time.sleep(0.1)
"""


@dataclass
class Befallen:
    """One fault of a host or of the network, and what came of it."""

    kind: str
    named: bool
    seconds: float | None  #: that it stood still; None: it did not go on
    lost: int  #: steps that were made once more, beyond the one in work
    left: int  #: processes that outlive their launchers
    bits: bool
    torchrun_s: float | None = None  #: as ``seconds``
    beside: bool = False  #: whether torchrun has met it, too
    screen: str = ""


@dataclass
class Training:
    """Launchers on hosts, in one directory that all of them see."""

    machines: Hosts
    here: Path
    started: dict[str, subprocess.Popen[str]] = field(default_factory=dict)

    def launch(self, host: str, *, script: str = "train.py", env: dict[str, str] | None = None) -> None:
        """Start the launcher of one host."""
        conf = "join_timeout=90,last_call_timeout=4,lost_after=5"
        options = ["lockstep", "run", "--nnodes", "1:3", "--rdzv-endpoint", "n1:29400", "--rdzv-conf", conf]
        options += ["--nproc-per-node", "1", "--run-dir", "r", "--max-restarts", "5", "--save-every", "5 steps"]
        self._start(host, [*options, script], env or {})

    def torchrun(self, host: str) -> None:
        """Start the agent of one host."""
        options = ["torch.distributed.run", "--nnodes", "1:3", "--rdzv-backend", "c10d", "--rdzv-endpoint", "n1:29400"]
        options += ["--rdzv-id", "c", "--nproc-per-node", "1", "--max-restarts", "5"]
        self._start(host, [*options, "--rdzv-conf", "last_call_timeout=4", "plain.py"], {})

    def _start(self, host: str, module: Sequence[str], more: dict[str, str]) -> None:
        env = {n: v for n, v in os.environ.items() if not n.startswith("LOCKSTEP_")}
        with (self.here / f"{host}.screen").open("a") as screen:
            self.started[host] = self.machines[host].start(
                [sys.executable, "-m", *module],
                cwd=self.here,
                env={**env, "PYTHONPATH": HOME, "OMP_NUM_THREADS": "1", "NO_COLOR": "1", **more},
                stdout=screen,
                stderr=subprocess.STDOUT,
            )

    def steps(self) -> list[tuple[float, int]]:
        """When which step was done on some host, in the order of time."""
        found = []
        for path in self.here.glob("steps-*"):
            lines = [line.split() for line in path.read_text().splitlines()]
            found += [(float(line[0]), int(line[1])) for line in lines if len(line) == 2]
        return sorted(found)

    def said(self) -> str:
        """What all launchers have said."""
        return "".join(path.read_text(errors="replace") for path in sorted(self.here.glob("*.screen")))

    def stood_still(self, since_s: float, limit_s: float) -> float | None:
        """Seconds until it went on; 0: it did not stop. None: it did, and does not go on within ``limit_s``."""
        end_s = time.time() + limit_s
        while time.time() < end_s:
            times = [since_s, *(at for at, _ in self.steps() if at > since_s)]
            for before, after in itertools.pairwise(times):
                if after - before > GAP_S:
                    return after - since_s
            if time.time() - since_s > WATCHED_S and time.time() - times[-1] < GAP_S:
                return 0.0
            time.sleep(0.1)
        return None

    def wait_for(self, happened: Callable[[], object], limit_s: float = LIMIT_S) -> bool:
        """Whether it happens within the time."""
        end_s = time.time() + limit_s
        while time.time() < end_s:
            if happened():
                return True
            time.sleep(0.1)
        return False


@dataclass(frozen=True)
class Fault:
    """One kind: what it does, what ends it, and what must be said then."""

    strikes: Callable[[Training], None]
    says: str  #: a regular expression; "": nothing need be said
    lasts_s: float = 0.0
    ends: Callable[[Training], None] = lambda training: None
    beside: bool = False  #: whether torchrun meets it, too
    before: bool = False  #: whether it is there from the start, and no step may come of it


def _one_way(host: Host) -> None:
    # A bucket that holds less than any packet lets none of them pass.
    host.run("tc", "qdisc", "replace", "dev", "eth0", "root", "tbf", "rate", "1kbit", "burst", "10b", "latency", "1ms")


def _both_ways(host: Host) -> None:
    host.run("tc", "qdisc", "del", "dev", "eth0", "root")


def _spot_notice(training: Training) -> None:
    Host.signal(training.started["n3"], signal.SIGTERM)


def _another_script(training: Training) -> None:
    text = (training.here / "train.py").read_text().replace("lr=0.01", "lr=0.02")
    (training.here / "other").mkdir()
    (training.here / "other" / "train.py").write_text(text)


_LOST = r"lost node n3 "
KINDS: dict[str, Fault] = {
    "a node is killed": Fault(lambda t: t.machines["n3"].kill(), _LOST, beside=True),
    "the host of the endpoint is killed": Fault(
        lambda t: t.machines["n1"].kill(), r"cut off|lost", ends=lambda t: _back(t, "n1"), lasts_s=12.0
    ),
    "a node is cut off for 3 s": Fault(
        lambda t: t.machines["n3"].cut(), "", 3.0, lambda t: t.machines["n3"].mend(), beside=True
    ),
    "a node is cut off for 12 s": Fault(
        lambda t: t.machines["n3"].cut(), "", 12.0, lambda t: t.machines["n3"].mend(), beside=True
    ),
    "what a node sends is lost for 12 s": Fault(
        lambda t: _one_way(t.machines["n3"]), "", 12.0, lambda t: _both_ways(t.machines["n3"])
    ),
    "a node's link is slow": Fault(lambda t: t.machines["n3"].slow("1mbit"), ""),
    "spot notice on one node": Fault(_spot_notice, r"(?i)SIGTERM"),
    "another script on one node": Fault(_another_script, r"another .*train\.py|differ in content", before=True),
}


def _back(training: Training, host: str) -> None:
    training.machines.boot(host)
    training.launch(host)


def befall(kind: str, expected: str, *, beside: bool) -> Befallen:
    """One training that this fault strikes."""
    fault = KINDS[kind]
    with _training() as training:
        if fault.before:
            return _from_the_start(kind, fault, training)
        for host in NAMES:
            training.launch(host)
        if not training.wait_for(lambda: len(training.steps()) > 3 * 12):
            raise TimeoutError(f"no training on three hosts:\n{training.said()}")
        said, at_s, reached = len(training.said()), time.time(), training.steps()[-1][1]
        seconds = _strike(fault, training, at_s)
        after = [step for at, step in training.steps() if at > at_s + (seconds or 0.0) - 0.01]
        lost = max(0, reached - min(after, default=reached + 1))
        named = not fault.says or training.wait_for(lambda: re.search(fault.says, training.said()[said:]), 5.0)
        (training.here / "go").touch()
        alive = [host for host in NAMES if training.machines[host].keeper.poll() is None]
        ended = training.wait_for(lambda: all(training.started[host].poll() is not None for host in alive))
        left = 0 if ended else len(alive)
        digests = {path.read_text() for path in training.here.glob("digest-*")}
        bits = digests == {expected}
        screen = "" if named and bits and seconds is not None and not left else training.said()[-3000:]
    there = _beside(kind) if beside and fault.beside else None
    return Befallen(kind, named, seconds, lost, left, bits, there, beside and fault.beside, screen)


def _from_the_start(kind: str, fault: Fault, training: Training) -> Befallen:
    fault.strikes(training)
    training.launch("n1")
    training.launch("n2", script="other/train.py" if (training.here / "other").exists() else "train.py")
    named = training.wait_for(lambda: re.search(fault.says, training.said()), 60.0)
    no_step = not training.steps()
    return Befallen(kind, named, 0.0, 0, 0, no_step, screen="" if named and no_step else training.said()[-3000:])


def _strike(fault: Fault, training: Training, at_s: float) -> float | None:
    fault.strikes(training)
    if fault.lasts_s:
        training.wait_for(lambda: time.time() > at_s + fault.lasts_s)
        fault.ends(training)
    return training.stood_still(at_s, LIMIT_S)


def _beside(kind: str) -> float | None:
    """Seconds that torchrun stands still; None: it does not go on."""
    fault = KINDS[kind]
    with _training() as training:
        for host in NAMES:
            training.torchrun(host)
        if not training.wait_for(lambda: len(training.steps()) > 3 * 12):
            return None
        return _strike(fault, training, time.time())


@contextmanager
def _training() -> Iterator[Training]:
    with tempfile.TemporaryDirectory(prefix="campaign-") as place, hosts(len(NAMES)) as machines:
        here = Path(place)
        (here / "train.py").write_text(TRAIN.replace("EPOCHS", "6").replace("RATE", "0.01"))
        (here / "plain.py").write_text(PLAIN)
        training = Training(machines, here)
        try:
            yield training
        finally:
            for host in machines.up.values():
                with suppress(subprocess.TimeoutExpired):
                    host.kill()
            for started in training.started.values():
                started.wait(20)


def undisturbed() -> str:
    """The bits of one rank on this machine."""
    with tempfile.TemporaryDirectory(prefix="campaign-") as place:
        here = Path(place)
        (here / "train.py").write_text(TRAIN.replace("EPOCHS", "6").replace("RATE", "0.01"))
        (here / "go").touch()
        env = {n: v for n, v in os.environ.items() if not n.startswith("LOCKSTEP_")}
        env |= {"PYTHONPATH": HOME, "OMP_NUM_THREADS": "1"}
        subprocess.run([sys.executable, "train.py"], cwd=here, env=env, check=True, capture_output=True)
        return (here / "digest-0").read_text()


def table(befallen: Sequence[Befallen]) -> str:
    """What came of all faults, as a page for people."""
    lines = [
        "| on three hosts | n | cause named | seconds it stood still | steps made again | left | bits | torchrun |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for kind in KINDS:
        if ours := [one for one in befallen if one.kind == kind]:
            named = f"{sum(one.named for one in ours)}/{len(ours)}" if KINDS[kind].says else "-"
            bits = f"{sum(one.bits for one in ours)}/{len(ours)} equal" if not all(o.bits for o in ours) else "equal"
            bits = ("no step" if bits == "equal" else "trained") if KINDS[kind].before else bits
            there = [one.torchrun_s for one in ours if one.beside]
            lost, left = max(one.lost for one in ours), sum(one.left for one in ours)
            lines.append(
                f"| {kind} | {len(ours)} | {named} | {_seconds([o.seconds for o in ours])} | {lost} | {left} | {bits} "
                f"| {_seconds(there) if there else '-'} |"
            )
    return "\n".join(lines)


def _seconds(found: Sequence[float | None]) -> str:
    known = [one for one in found if one is not None]
    gone = f"; did not go on: {len(found) - len(known)}" if len(known) < len(found) else ""
    return (f"{median(known):.1f}" if known else "-") + gone
