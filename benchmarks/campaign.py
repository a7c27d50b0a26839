"""A campaign of seeded faults against whole runs: ranks, loader processes, every part of the launcher, and files.

python benchmarks/campaign.py --faults 500                 some hours on two cores; writes its table to docs/failures.md
python benchmarks/campaign.py --rounds 1 --seed 3 --out -  one run with four faults, to the screen

Each round is one training that is carried to its end. Four faults strike it, each after some more steps were seen. They
are drawn from a seed: their kinds, the rank and the number of ranks. What ends the launcher is gone on with by
``--resume``. What is measured:

    cause      the screen names what befell the run, and nothing else
    seconds    from the fault to the next step
    left       processes of the run that live ten seconds after its launcher has ended
    bits       of parameters and optimizer in the end, against a run without faults
"""

import argparse
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import TypeVar

import lockstep

T = TypeVar("T")
HOME = str(Path(lockstep.__file__).parents[1])
PAGE = Path(__file__).parents[1] / "docs" / "failures.md"
BEGIN, END = "<!-- campaign -->", "<!-- end of the campaign -->"
MARK = "LOCKSTEP_CAMPAIGN_MARK"
FAULTS_PER_ROUND = 4
LIMIT_S = 180.0  #: for any one thing that is waited for
LEFT_S = 10.0
HANG_S = 8

TRAIN = """
import hashlib, os, sys, time
import torch, lockstep
from torch import nn
from torch.nn import functional as F

torch.manual_seed(0)
inputs = torch.randn(480, 12)
samples = list(zip(inputs, (inputs[:, 0] * inputs[:, 1] > 0).long()))


def fault():
    # What a process can only do to itself: a file with its name is left for this rank.
    try:
        os.rename(f"do-{os.environ['RANK']}", "doing")
    except OSError:
        return
    what = open("doing").read()
    if what == "raise":
        raise ValueError("bad label 255")
    if what == "exit":
        os._exit(5)
    if what == "abort":
        os.abort()


with lockstep.Run(seed=3) as run:
    model = run.model(nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 2)))
    optimizer = run.optimizer(torch.optim.Adam(model.parameters(), lr=0.01))
    batches = run.loader(samples, global_batch=24, micro_batch=4, workers=1)
    steps = open(f"steps-{run.rank}", "a", buffering=1)
    for epoch in run.epochs(EPOCHS):
        for x, y in run.train(batches):
            if run.step(F.cross_entropy(model(x), y)):
                steps.write(f"{time.time():.3f} {os.getpid()}\\n")
                fault()
                time.sleep(0.05)
    if run.leads:
        digest = hashlib.sha256()
        for value in [*model.state_dict().values(), *optimizer.state_dict()["state"][0].values()]:
            digest.update(value.numpy().tobytes())
        open("digest", "w").write(digest.hexdigest())
"""


@dataclass
class Struck:
    """One fault, and what came of it."""

    kind: str
    round: int
    named: bool
    seconds: float | None  #: to the next step
    left: int = 0
    bits: bool = True
    screen: str = ""  #: what was said since the fault, where the cause is not named


@dataclass
class Scene:
    """One run in a directory of its own, at which faults are aimed."""

    here: Path
    ranks: int
    draw: random.Random
    restarts: int = FAULTS_PER_ROUND
    mark: str = field(default_factory=lambda: uuid.uuid4().hex)
    launcher: subprocess.Popen | None = None

    def start(self, *, resume: bool) -> None:
        """Start the launcher, or go on with what it left."""
        options = ["--nproc-per-node", self.ranks, "--run-dir", "r", "--max-restarts", self.restarts]
        options += ["--save-every", "5 steps", "--hang-after", HANG_S, "--on-hang", "restart", "--grace", 3]
        env = {name: value for name, value in os.environ.items() if not name.startswith("LOCKSTEP_")}
        with (self.here / "screen").open("a") as screen:
            self.launcher = subprocess.Popen(
                [sys.executable, "-m", "lockstep", "run", *map(str, options), *["--resume"] * resume, "train.py"],
                cwd=self.here,
                env={**env, "PYTHONPATH": HOME, MARK: self.mark, "OMP_NUM_THREADS": "1", "NO_COLOR": "1"},
                stdin=subprocess.DEVNULL,
                stdout=screen,
                stderr=screen,
            )

    def steps(self) -> list[tuple[float, int]]:
        """When each step of the leader was done, and by which process."""
        with suppress(OSError):
            lines = [line.split() for line in (self.here / "steps-0").read_text().splitlines()]
            return [(float(line[0]), int(line[1])) for line in lines if len(line) == 2]
        return []

    def screen(self) -> str:
        """All that was said so far."""
        return (self.here / "screen").read_text(errors="replace")

    def processes(self) -> dict[int, str]:
        """What lives of this run: names by process id."""
        found = {}
        for directory in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                dead = (directory / "stat").read_text().rpartition(")")[2].split()[0] in "ZX"
                if not dead and f"{MARK}={self.mark}".encode() in (directory / "environ").read_bytes():
                    found[int(directory.name)] = (directory / "comm").read_text().strip()
        return found

    def named(self, name: str) -> int:
        """The process of this name."""
        return wait_for(lambda: next((p for p, n in self.processes().items() if n == name), None), name)

    def rank(self) -> int:
        """A rank's process, drawn."""
        return self.named(f"rank {self.draw.randrange(self.ranks)}")

    def children(self, process: int) -> list[int]:
        """What ``process`` has started."""
        with suppress(OSError):
            return [int(n) for n in Path(f"/proc/{process}/task/{process}/children").read_text().split()]
        return []

    def fork_server(self) -> int:
        """The process that forks the ranks."""
        return wait_for(lambda: self.children(self.launcher.pid), "the fork server")[0]

    def worker(self) -> int:
        """A rank's loader process."""
        rank = self.rank()
        return wait_for(lambda: self.children(rank), "a loader process")[0]

    def tell(self, what: str) -> None:
        """Have a rank, drawn, do ``what`` to itself."""
        rank = self.draw.randrange(self.ranks)
        (self.here / "do").write_text(what)
        (self.here / "do").rename(self.here / f"do-{rank}")


def send(process: Callable[[Scene], int], signum: signal.Signals) -> Callable[[Scene], None]:
    """A fault that is a signal."""

    def strike(scene: Scene) -> None:
        with suppress(ProcessLookupError):
            os.kill(process(scene), signum)

    return strike


def deaf_status(scene: Scene) -> None:
    """A pipe that nobody writes, in place of status.json, for as long as the leader does not write a new one."""
    status = scene.here / "r" / "status.json"
    for _ in range(20):
        with suppress(OSError):
            status.unlink(missing_ok=True)
            os.mkfifo(status)
        time.sleep(0.05)
    with suppress(OSError):
        os.kill(scene.rank(), signal.SIGKILL)


_RANK = r"run failed: (ranks? \d|all \d ranks)"
LAUNCHER, GONE = (lambda scene: scene.launcher.pid), ""
#: Each kind of fault: how it strikes, and what the screen must say since. Nothing can be said by who was killed.
KINDS: dict[str, tuple[Callable[[Scene], None], str]] = {
    "kill -9 of a rank": (send(Scene.rank, signal.SIGKILL), _RANK + r" of \d .*was killed by SIGKILL"),
    "SIGSEGV of a rank": (send(Scene.rank, signal.SIGSEGV), _RANK + r" of \d .*was killed by SIGSEGV"),
    "SIGSTOP of a rank": (send(Scene.rank, signal.SIGSTOP), _RANK + r" of \d .*hung"),
    "exception": (lambda scene: scene.tell("raise"), _RANK + r".*raised ValueError"),
    "os._exit": (lambda scene: scene.tell("exit"), _RANK + r".*left with exit code 5"),
    "os.abort": (lambda scene: scene.tell("abort"), _RANK + r".*was killed by SIGABRT"),
    "kill -9 of a loader process": (send(Scene.worker, signal.SIGKILL), r"(?s)run failed: rank.*(worker|loader)"),
    "kill -9 of the ranks' store": (
        send(lambda scene: scene.named("lockstep store"), signal.SIGKILL),
        r"run failed: the store where the ranks meet was killed by SIGKILL",
    ),
    "SIGSTOP of the ranks' store": (
        send(lambda scene: scene.named("lockstep store"), signal.SIGSTOP),
        r"the store where the ranks meet was stopped",
    ),
    "kill -9 of the fork server": (
        send(Scene.fork_server, signal.SIGKILL),
        r"run failed: the fork server, which starts the ranks, was killed by SIGKILL",
    ),
    "SIGSTOP of the fork server": (
        send(Scene.fork_server, signal.SIGSTOP),
        r"the fork server, which starts the ranks, was stopped",
    ),
    "kill -9 of the launcher": (send(LAUNCHER, signal.SIGKILL), GONE),
    "SIGTERM to the launcher": (send(LAUNCHER, signal.SIGTERM), r"stopped with a complete checkpoint"),
    "Ctrl-C": (send(LAUNCHER, signal.SIGINT), r"stopped with a complete checkpoint"),
    "status.json does not answer, and kill -9 of a rank": (deaf_status, _RANK + r" of \d .*was killed by SIGKILL"),
}


def wait_for(happened: Callable[[], T], what: str, limit_s: float = LIMIT_S) -> T:
    """The first true value of ``happened``."""
    end_s = time.monotonic() + limit_s
    while not (value := happened()):
        if time.monotonic() > end_s:
            raise TimeoutError(f"waited {limit_s:g} s for {what}")
        time.sleep(0.05)
    return value


def carry_out(number: int, seed: int, kinds: Sequence[str], epochs: int, expected: str) -> list[Struck]:
    """One round: a training that these faults strike."""
    draw = random.Random(f"{seed} {number}")
    ranks = draw.choice((2, 3))
    with scene_in(ranks, draw, epochs) as scene:
        scene.start(resume=False)
        struck = []
        for kind in kinds:
            more = len(scene.steps()) + draw.randrange(3, 9)
            wait_for(lambda more=more: len(scene.steps()) >= more or scene.launcher.poll() is not None, "more steps")
            if scene.launcher.poll() is not None:
                break  # trained to its end before all of them struck
            struck.append(strike_once(scene, kind, number))
        code = scene.launcher.wait(LIMIT_S)
        left = left_of(scene)
        bits = code == 0 and (scene.here / "digest").read_text() == expected
        for one in struck:
            one.left, one.bits = max(one.left, left), bits
        return struck


def strike_once(scene: Scene, kind: str, number: int) -> Struck:
    """Have one fault strike, and see how the run goes on."""
    strike, says = KINDS[kind]
    said = len(scene.screen())
    began, at_s = scene.launcher, time.time()
    before = {process for _, process in scene.steps()}
    strike(scene)
    left = 0

    def next_step() -> bool:
        nonlocal left
        if scene.launcher is began and began.poll() is not None:
            left = left_of(scene)
            scene.start(resume=True)
        return bool(after())

    def after() -> list[float]:
        # Of a new generation, but where the fault ends none.
        goes_on = kind.startswith("SIGSTOP of the")
        return [when for when, process in scene.steps() if when > at_s and (goes_on or process not in before)]

    wait_for(next_step, f"a step after {kind}")
    seconds = after()[0] - at_s
    with suppress(TimeoutError):  # the part may be told to go on only after more steps
        wait_for(lambda: re.search(says, scene.screen()[said:]), "the cause", 2 * HANG_S)
    new = scene.screen()[said:]
    named = re.search(says, new) is not None
    return Struck(kind, number, named, seconds, left, screen="" if named else new[-2000:])


def left_of(scene: Scene) -> int:
    """How many processes outlive the launcher."""
    with suppress(TimeoutError):
        wait_for(lambda: not scene.processes(), "the end of all", LEFT_S)
    return len(scene.processes())


@contextmanager
def scene_in(ranks: int, draw: random.Random, epochs: int) -> Iterator[Scene]:
    """A directory with the script; nothing is left of it."""
    here = Path(tempfile.mkdtemp(prefix="campaign-"))
    (here / "train.py").write_text(TRAIN.replace("EPOCHS", str(epochs)))
    scene = Scene(here, ranks, draw)
    try:
        yield scene
    finally:
        for process in scene.processes():
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        if scene.launcher is not None:
            scene.launcher.wait()
        shutil.rmtree(here, ignore_errors=True)


def undisturbed(epochs: int) -> str:
    """The bits of a run in which nothing fails."""
    with scene_in(2, random.Random(0), epochs) as scene:
        scene.start(resume=False)
        if (code := scene.launcher.wait(LIMIT_S)) != 0:
            raise RuntimeError(f"the run without faults ended with {code}:\n{scene.screen()}")
        return (scene.here / "digest").read_text()


def table(struck: Sequence[Struck], seed: int) -> str:
    """What came of all faults, as a page for people."""
    lines = [
        f"Made by `python benchmarks/campaign.py --faults {len(struck)} --seed {seed}` on {time.strftime('%Y-%m-%d')}: "
        f"{len(struck)} faults in {len({one.round for one in struck})} trainings of 2 or 3 ranks.",
        "",
        "| fault | n | cause named | seconds to the next step, median | most | left | bits |",
        "|---|---|---|---|---|---|---|",
    ]
    for kind in KINDS:
        if ours := [one for one in struck if one.kind == kind]:
            named = "-" if KINDS[kind][1] == GONE else f"{sum(one.named for one in ours)}/{len(ours)}"
            seconds = [one.seconds for one in ours if one.seconds is not None]
            bits = "equal" if all(one.bits for one in ours) else f"{sum(one.bits for one in ours)}/{len(ours)} equal"
            left = sum(one.left for one in ours)
            lines.append(
                f"| {kind} | {len(ours)} | {named} | {median(seconds):.1f} | {max(seconds):.1f} | {left} | {bits} |"
            )
    return "\n".join(lines)


def main() -> None:
    """Carry the campaign out and write what was seen."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=500)
    parser.add_argument("--rounds", type=int, help="trainings, in place of --faults")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kinds", help="only those whose name this regular expression finds")
    parser.add_argument("--out", help="- for the screen; else into docs/failures.md")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    kinds = [kind for kind in KINDS if re.search(args.kinds or "", kind)]
    rounds = args.rounds or -(-args.faults // FAULTS_PER_ROUND)
    drawn = []  # each kind as often as the others
    draw = random.Random(args.seed)
    while len(drawn) < rounds * FAULTS_PER_ROUND:
        drawn += draw.sample(kinds, len(kinds))
    epochs = 6
    expected = undisturbed(epochs)
    struck = []
    for number in range(rounds):
        ours = drawn[number * FAULTS_PER_ROUND :][:FAULTS_PER_ROUND]
        struck += carry_out(number, args.seed, ours, epochs, expected)
        for one in struck:
            if one.round != number:
                continue
            print(f"{one.round:3} {one.kind}: named {one.named}, {one.seconds:.1f} s, left {one.left}, bits {one.bits}")
            if one.screen and KINDS[one.kind][1]:
                print("    " + one.screen.replace("\n", "\n    "))
    text = table(struck, args.seed)
    if args.json:
        args.json.write_text(json.dumps([asdict(one) for one in struck]))
    if args.out == "-" or args.json:
        print(text)
        return
    page = PAGE.read_text(encoding="utf-8")
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    chapter = f"{BEGIN}\n\n## A campaign of drawn faults\n\n{text}\n\n{END}"
    PAGE.write_text(f"{before.rstrip()}\n\n{chapter}\n{after.lstrip()}", encoding="utf-8")


if __name__ == "__main__":
    main()
