"""P2: `kill -9` of a rank, of the launcher, of what starts the ranks, of everything; the same bits in the end.

A job is struck again and again and each time taken up from its newest checkpoint, mostly on another number of ranks:

    life 0, 3 ranks           life 1, 1 rank              life 2, 2 ranks                 life 3
    1 2 3 .. 12 X             11 12 13 14 X               11 .. 15 (saving X              16 ...
                kill a rank               kill everything         kill the launcher

When to strike is told by what is seen to happen, never by a clock: so many steps done, or so many calls of a save. To
be sure to be struck, the job does not go further than that until it is.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Literal

import pytest

from campaign_marks import combinations
from lockstep.checkpoint import list_checkpoints, verify

pytestmark = [pytest.mark.together, pytest.mark.timeout(300)]

EPOCHS = 9
TOTAL = 11 * EPOCHS  #: steps; the last one of each epoch is a short one
SAVE_EVERY = 5
KEEP = 2
DEADLINE_S = 90.0  #: for what takes a second on an idle machine

SCRIPT = """
import hashlib, json, os, sys, time
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset

import lockstep

HERE = Path(sys.argv[1])
PLAN = json.loads((HERE / "plan.json").read_text())
CALLS = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir")


class Noisy(Dataset):
    def __len__(self):
        return 170

    def __getitem__(self, index):
        return torch.sin(torch.arange(8.0) * (index + 1)) + 0.1 * torch.randn(8), index % 3


def wait_to_be_struck():
    deadline = time.monotonic() + 100
    while not (HERE / f"struck-{PLAN['life']}").exists():
        if time.monotonic() > deadline:
            os._exit(99)
        time.sleep(0.001)


def watch_saves(root):
    calls = 0

    def see(event, arguments):
        nonlocal calls
        if event in CALLS and str(root) in str(arguments[0]):
            calls += 1
            if calls == PLAN["call"]:
                note = HERE / f"inside-{PLAN['life']}"
                note.with_suffix(".new").write_text(f"{event} {arguments[0]}")
                note.with_suffix(".new").rename(note)
                wait_to_be_struck()

    sys.addaudithook(see)


def state(model, optimizer):
    sums = hashlib.sha256(repr(sorted(run.progress.as_dict().items())).encode())
    for name, tensor in sorted(model.state_dict().items()):
        sums.update(name.removeprefix("module.").encode() + tensor.numpy().tobytes())
    for values in optimizer.state.values():
        sums.update(values["momentum_buffer"].numpy().tobytes())
    return sums.hexdigest()


with lockstep.Run(seed=3, clip_norm=1.0) as run:
    net = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 3))
    model = run.model(net)
    optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9))
    run.scheduler(torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=200))
    batches = run.loader(Noisy(), global_batch=16, micro_batch=4, workers=0)
    first = None
    with (HERE / f"life-{PLAN['life']}-rank-{run.rank}").open("a", buffering=1) as book:
        book.write(f"{os.getpid()} {os.getppid()}\\n")
        for epoch in run.epochs(PLAN["epochs"]):
            for x, y in run.train(batches):
                before = run.progress.step
                run.step(F.cross_entropy(model(x), y))
                if run.progress.step == before:
                    continue
                book.write(f"{run.progress.step}\\n")
                if first is None:
                    first = run.progress.step
                    if run.leads and PLAN["call"]:
                        watch_saves(Path(os.environ["LOCKSTEP_RUN_DIR"], "checkpoints"))
                if PLAN["steps"] and run.progress.step - first + 1 == PLAN["steps"] + 3:
                    wait_to_be_struck()
            run.log(epoch=epoch)
    (HERE / f"final-{PLAN['life']}-rank-{run.rank}").write_text(state(net, optimizer))
"""

Target = Literal["rank", "launcher", "fork server", "everything", "nothing"]
Moment = Literal["step", "save"]
Outcome = tuple[str, list[dict[str, object]]]

_OFTEN: list[tuple[Target, Moment]] = [("rank", "step")] * 2 + [("rank", "save")] * 4

#: Every target at both moments, 21 in all; each hand must end in the same bits. Mostly ranks, after which the launcher
#: lives on and starts them again: a start of the launcher costs seconds. The first hand is the one of `make test`.
HANDS: dict[str, list[tuple[Target, Moment]]] = {
    "first": [("rank", "step"), *[("rank", "save")] * 2, ("launcher", "step"), ("everything", "save")],
    "second": [*_OFTEN, ("launcher", "save"), ("fork server", "step")],
    "third": [*_OFTEN, ("everything", "step"), ("fork server", "save")],
}


@dataclass(frozen=True)
class Fault:
    """One kill: of what, and when, counted from the first step of the life that it ends."""

    life: int
    target: Target
    steps: int = 0  #: after so many steps, if any
    call: int = 0  #: before the so manieth call of a save, if any


def deal(hand: list[tuple[Target, Moment]], dice: random.Random) -> list[Fault]:
    """The hand in some order, the first one when at least one save is done; and at last a life without."""
    faults = []
    for life, (target, moment) in enumerate(dice.sample(hand, len(hand))):
        if moment == "step":
            faults.append(Fault(life, target, steps=dice.randint(11, 16) if life == 0 else dice.randint(1, 7)))
        else:
            faults.append(Fault(life, target, call=dice.randint(12, 24) if life == 0 else dice.randint(1, 16)))
    return [*faults, Fault(len(hand), "nothing")]


@dataclass(frozen=True)
class Book:
    """What a rank has written in one life."""

    process: int
    fork_server: int  #: its parent
    steps: list[int]  #: that it has done, at least one


class Job:
    """What is started, struck and started again in one directory."""

    def __init__(self, here: Path) -> None:
        self.here, self.run_dir = here, here / "run"
        self.launcher: subprocess.Popen[bytes] | None = None
        self.world = 0
        self.story: list[str] = []
        (here / "train.py").write_text(SCRIPT)

    def plan(self, fault: Fault) -> None:
        """What the ranks of the next life read when they begin."""
        new = self.here / "plan.new"
        new.write_text(json.dumps(asdict(fault) | {"epochs": EPOCHS}))
        new.rename(self.here / "plan.json")

    def start(self, world: int, restarts: int) -> None:
        self.world = world
        with (self.here / "shown").open("ab") as shown:
            self.launcher = subprocess.Popen(
                [
                    *(sys.executable, "-m", "lockstep", "run", "--nproc-per-node", str(world)),
                    *("--max-restarts", str(restarts), "--run-dir", str(self.run_dir), "--resume"),
                    *("--save-every", f"{SAVE_EVERY} steps", "--set", f"keep={KEEP}", "--grace", "5"),
                    *(str(self.here / "train.py"), str(self.here)),
                ],
                stdout=shown,
                stderr=shown,
                stdin=subprocess.DEVNULL,
                env=os.environ | {"LOCKSTEP_VIEW": "silent"},
            )

    def book(self, life: int, rank: int = 0) -> Book | None:
        """What a rank has written; None before its first step is done."""
        with contextlib.suppress(FileNotFoundError):
            lines = (self.here / f"life-{life}-rank-{rank}").read_text().splitlines(keepends=True)
            first, *others = [line for line in lines if line.endswith("\n")] or [""]
            # A generation that only saves what survivors have left begins the script once more.
            if steps := [int(line) for line in others if " " not in line]:
                return Book(*map(int, first.split()), steps)
        return None

    def steps(self, life: int) -> int:
        """How many the leader has done."""
        book = self.book(life)
        return len(book.steps) if book else 0

    def processes(self) -> list[int]:
        """What lives of this job besides its launcher."""
        mark = f"LOCKSTEP_RUN_DIR={self.run_dir}".encode()
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with contextlib.suppress(OSError):
                    if mark in (entry / "environ").read_bytes().split(b"\0"):
                        found.append(int(entry.name))
        return found

    def wait_for(self, what: str, happened: Callable[[], object], *, running: bool = True) -> None:
        """Returns once it has happened; fails if it does not, or the launcher ends before although it should not."""
        deadline = time.monotonic() + DEADLINE_S
        while not happened():
            ended = running and self.launcher.poll() is not None
            assert not ended or happened(), self.told(f"the job ended before {what}")
            assert time.monotonic() < deadline, self.told(f"waited {DEADLINE_S:g} s for {what}")
            time.sleep(0.001 if running else 0.02)  # a look at all processes takes milliseconds itself

    def strike(self, fault: Fault, then: Fault, dice: random.Random) -> None:
        """Wait for the moment and kill; see that it was in time, and that what was to be killed is dead."""
        where = ""
        if fault.steps:
            self.wait_for(f"step {fault.steps} of life {fault.life}", lambda: self.steps(fault.life) >= fault.steps)
            # Somewhere within a step, of which each takes some milliseconds.
            moment = time.perf_counter() + dice.uniform(0, 0.008)
            while time.perf_counter() < moment:
                pass
        else:
            inside = self.here / f"inside-{fault.life}"
            self.wait_for(f"call {fault.call} of the saves of life {fault.life}", inside.exists)
            where = f", inside a save before {inside.read_text().replace(str(self.run_dir), '')}"
        books = []
        for rank in range(self.world):
            self.wait_for("the first step of all ranks", partial(self.book, fault.life, rank))
            books.append(self.book(fault.life, rank))
        self.plan(then)
        victim = dice.randrange(self.world)
        killed = {
            "rank": [books[victim].process],
            "launcher": [self.launcher.pid],
            "fork server": [books[0].fork_server],
            "everything": [self.launcher.pid, *self.processes()],
        }[fault.target]
        assert self.launcher.poll() is None, self.told("the job had ended already")
        assert not list(self.here.glob("final-*")), self.told("the training was done already")
        for process in dice.sample(killed, len(killed)):
            # Some die with others before their turn comes.
            with contextlib.suppress(*([ProcessLookupError] if fault.target == "everything" else [])):
                os.kill(process, signal.SIGKILL)
        (self.here / f"struck-{fault.life}").touch()
        if self.launcher.pid in killed:
            self.launcher.wait(DEADLINE_S)
        self.wait_for("its death", lambda: not {*killed} & {*self.processes()}, running=False)
        name = f"rank {victim}" if fault.target == "rank" else fault.target
        first, last = books[0].steps[0], self.book(fault.life).steps[-1]
        assert last < TOTAL
        self.story.append(
            f"life {fault.life}, {self.world} ranks, from step {first}: {name} killed after step {last}{where}"
        )

    def ended(self) -> int:
        """The launcher's exit code, once it has ended and nothing of the job is left."""
        self.wait_for("the launcher's end", lambda: self.launcher.poll() is not None)
        self.wait_for("the end of all processes", lambda: not self.processes(), running=False)
        code, self.launcher = self.launcher.returncode, None
        return code

    def told(self, what: str) -> str:
        shown = (self.here / "shown").read_text(errors="replace")[-4000:]
        return "\n".join([what, *self.story, "shown:", shown])

    def end(self) -> None:
        """Nothing of it lives afterwards."""
        if self.launcher is not None:
            self.launcher.kill()
            self.launcher.wait()
        for process in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)


@pytest.fixture
def job(tmp_path) -> Iterator[Job]:
    job = Job(tmp_path)
    yield job
    job.end()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> Outcome:
    """Of a run that nothing happened to."""
    job = Job(tmp_path_factory.mktemp("undisturbed"))
    job.plan(Fault(0, "nothing"))
    try:
        job.start(world=2, restarts=0)
        assert job.ended() == 0, job.told("the undisturbed run failed")
        assert job.book(0).steps == [*range(1, TOTAL + 1)]
        return outcome(job, 0)
    finally:
        job.end()


def outcome(job: Job, life: int) -> Outcome:
    """The state that all ranks ended with, and what was logged, but for the clock."""
    (state,) = {(job.here / f"final-{life}-rank-{rank}").read_text() for rank in range(job.world)}
    logged = [json.loads(line) for line in (job.run_dir / "metrics.jsonl").read_text().splitlines()]
    return state, [{name: value for name, value in line.items() if name != "wall_s"} for line in logged]


#: The launcher's exit code when this was killed.
CODES = {"rank": 137, "launcher": -signal.SIGKILL, "fork server": 1, "everything": -signal.SIGKILL}


@pytest.mark.long
@pytest.mark.parametrize("hand", combinations(HANDS, campaign=lambda hand: hand != "first"))
def test_whatever_is_killed_and_whenever_the_bits_are_those_of_the_undisturbed_run(hand, job, undisturbed):
    dice = random.Random(random.getrandbits(32))  # of the seed that the suite prints
    faults = deal(HANDS[hand], dice)
    job.plan(faults[0])
    restarts = 0
    survived = set()  # lives that began with what a life before had left in memory, if a rank of it could leave it
    for fault, then in pairwise(faults):
        if job.launcher is None:
            restarts = dice.randint(1, 3)
            job.start(dice.choice([world for world in (1, 2, 3) if world != job.world]), restarts)
        job.strike(fault, then, dice)
        if fault.target == "rank":  # with the fork server all ranks die
            survived.add(then.life)  # also without a restart: the launcher saves what is left before it ends
        if fault.target in ("rank", "fork server") and restarts:
            restarts -= 1  # the launcher starts the next life by itself
        else:
            code = job.ended()
            assert code == CODES[fault.target], job.told(f"exit code {code}")
    last = faults[-1].life
    if job.launcher is None:
        job.start(dice.choice([world for world in (1, 2, 3) if world != job.world]), 0)
    assert job.ended() == 0, job.told("the last life failed")

    story = job.told("the bits differ")
    assert len(job.story) == len(HANDS[hand])
    assert outcome(job, last) == undisturbed, story
    begins = {fault.life: job.book(fault.life).steps[0] for fault in faults}
    assert begins.pop(faults[0].life) == 1
    assert all(begin > 1 for begin in begins.values()), story
    # The others went on from a checkpoint.
    assert all(begin % SAVE_EVERY == 1 for life, begin in begins.items() if life not in survived), story
    root = job.run_dir / "checkpoints"
    saved = list_checkpoints(root)
    assert [one.step for one in saved] == [TOTAL, TOTAL // SAVE_EVERY * SAVE_EVERY], story
    for one in saved:
        verify(one.path)
    there = {path.name for path in root.iterdir()} - {".run-lock"}
    assert there == {one.path.name for one in saved}, story
