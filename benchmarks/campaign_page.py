"""What came of the faults of the campaign: values, and the chapter of docs/failures.md."""

from __future__ import annotations

import os
import textwrap
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import median

BEGIN, END = "<!-- campaign -->", "<!-- end of the campaign -->"


@dataclass
class Struck:
    """One fault, and what came of it."""

    kind: str
    round: int
    way: str  #: "lockstep" or "torchrun"
    seconds: float | None = None  #: without a step; None: it did not continue
    named: bool = False
    again: int = 0  #: steps that were made once more
    allowed: int = 0  #: how many of them there may be
    left: list[str] = field(default_factory=list)
    bits: bool = False
    screen: str = ""  #: what was said, where something is wrong

    @property
    def wrong(self) -> bool:
        """Whether something is not as it must be."""
        return self.seconds is None or not self.named or not self.bits or self.again > self.allowed or bool(self.left)

    def line(self) -> str:
        """For the screen, while the campaign goes on."""
        seconds = "did not continue" if self.seconds is None else f"{self.seconds:.1f} s, {self.again} steps again"
        found = f"named {self.named}, left {len(self.left)}, bits {self.bits}" if self.way == "lockstep" else "torchrun"
        mark = "WRONG " if self.wrong and self.way == "lockstep" else ""
        return f"{self.round:3} {mark}{self.kind}: {seconds}, {found}"


def summary(struck: Sequence[Struck], seed: int, loads: Iterable[float]) -> str:
    """All of it in one paragraph."""
    ours = [one for one in struck if one.way == "lockstep"]
    theirs = [one for one in struck if one.way == "torchrun"]
    over = sum(one.again > one.allowed for one in ours)
    kinds, trainings = len({one.kind for one in ours}), len({one.round for one in ours})
    there = f"{time.strftime('%Y-%m-%d')}, {os.cpu_count()} CPU cores, shared with other work"
    return textwrap.fill(
        f"{len(ours)} faults of {kinds} kinds in {trainings} trainings: after "
        f"{_of(one.seconds is not None for one in ours)} the training continued, for {_of(one.named for one in ours)} "
        f"the right cause was named and no other, {_of(one.bits for one in ours)} were in trainings that ended with "
        f"the bits of a training without faults, {over} cost more steps than allowed, "
        f"{sum(bool(one.left) for one in ours)} were in trainings that left something behind. In "
        f"addition, {len(theirs)} faults under torchrun: after "
        f"{_of(one.seconds is not None for one in theirs)} the training continued. Seed {seed}, {there}: load "
        f"average {median(list(loads) or [0.0]):.0f} (median over the trainings).",
        width=120,
        break_on_hyphens=False,
    )


def table(struck: Sequence[Struck], kinds: Iterable[str]) -> str:
    """A row for each kind."""
    lines = [
        "| fault | n | cause named | right bits | left | steps made again: median, most (allowed) "
        "| seconds without a step: median, most | torchrun: seconds, steps made again |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for kind in [*kinds, *sorted({one.kind for one in struck} - set(kinds))]:
        ours = [one for one in struck if one.kind == kind and one.way == "lockstep"]
        if not ours:
            continue
        again, allowed = [one.again for one in ours], sorted({one.allowed for one in ours})
        limit = f"{allowed[0]} to {allowed[-1]}" if len(allowed) > 1 else f"{allowed[0]}"
        lines.append(
            f"| {kind} | {len(ours)} | {_of(one.named for one in ours)} | {_of(one.bits for one in ours)} "
            f"| {sum(bool(one.left) for one in ours)} | {median(again):g}, {max(again)} ({limit}) "
            f"| {_seconds(ours)} | {_torchrun([o for o in struck if o.kind == kind and o.way == 'torchrun'])} |"
        )
    return "\n".join(lines)


def _of(found: Iterable[bool]) -> str:
    all_found = list(found)
    return f"{sum(all_found)}/{len(all_found)}"


def _seconds(struck: Sequence[Struck]) -> str:
    known = [one.seconds for one in struck if one.seconds is not None]
    gone = f"; {len(struck) - len(known)} did not continue" if len(known) < len(struck) else ""
    return (f"{median(known):.1f}, {max(known):.1f}" if known else "-") + gone


def _torchrun(struck: Sequence[Struck]) -> str:
    if not struck:
        return "-"
    again = [one.again for one in struck if one.seconds is not None]
    steps = f" (n {len(struck)}); {median(again):g} steps" if again else f" (n {len(struck)})"
    return _seconds(struck) + steps


def page_with(page: str, text: str) -> str:
    """``page`` with ``text`` as its chapter of the campaign."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    chapter = f"{BEGIN}\n\n## A campaign of random faults\n\n{_INTRODUCTION}\n\n{text}\n\n{END}"
    return f"{before.rstrip()}\n\n{chapter}\n{after.lstrip()}"


_INTRODUCTION = """\
Made by `python benchmarks/campaign.py`. Kinds of faults, hosts and ranks are drawn at random from a seed. Several
faults are injected into each training, one after the other. Faults on one machine are injected into 2 or 3 ranks with
loader processes, under `ddp`, `ddp` with `mirror`, or `zero` with `mirror`; numbers of one rank are changed under
`ddp`. Faults of nodes and networks are injected into 2 to 4 hosts made of network namespaces, with `--nnodes 1:N` and
one rank each. A checkpoint is saved every 10 steps, and a hang is reported after 20 s. Calls for files fail, come late
or are done in part, and the clock is set, by a library that is loaded before the C library (`faulty_files.c`). That a
fault has happened is seen each time: by the rank that has taken it, by the calls or packets that were struck, or by
what is said. Trainings that found a defect, of Lockstep or of the campaign, are left out until they have been repeated
without it.

`benchmarks/faults_tried.csv` says which of these kinds, or which test, covers each of 259 faults of an earlier
campaign.

- Cause named: the launchers name what happened to the run, and blame nothing else. A launcher that was killed cannot
  name anything; then nothing else may be blamed.
- Right bits: the training ended with exit code 0 and the bits of a training without faults, whatever other faults were
  injected into it.
- Left: trainings that left a process, a socket, or a file in `/dev/shm` or the directory for temporary files.
- Steps made again: completed steps that were computed once more; the step in progress does not count. In brackets, how
  many are allowed: none where other ranks hold the state, one with a mirror, and those since the last checkpoints where
  only the disk holds it ([decision 10](decisions/0010-survivors-leave-the-last-step.md)).
- Seconds without a step: the longest pause after the fault. If a network is interrupted for 12 s, the pause includes
  the 12 s; if a launcher has ended, it includes the new start.
- torchrun: with `--nnodes 1` or `1:3` and `--max-restarts`, after the same fault, in separate trainings between the
  others. Its script uses DistributedDataParallel and saves its state every 10 steps. It is watched for 120 s. A node
  counts as lost after the same number of seconds as with Lockstep. `-`: not tried, because torchrun does not handle
  such a fault, or has nothing like it."""
