"""What came of the faults of the campaign: values, and the chapter of docs/failures.md."""

from __future__ import annotations

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
    seconds: float | None = None  #: without a step; None: it did not go on
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
        seconds = "did not go on" if self.seconds is None else f"{self.seconds:.1f} s, {self.again} steps again"
        found = f"named {self.named}, left {len(self.left)}, bits {self.bits}" if self.way == "lockstep" else "torchrun"
        mark = "WRONG " if self.wrong and self.way == "lockstep" else ""
        return f"{self.round:3} {mark}{self.kind}: {seconds}, {found}"


def summary(struck: Sequence[Struck], seed: int) -> str:
    """All of it in one paragraph."""
    ours = [one for one in struck if one.way == "lockstep"]
    theirs = [one for one in struck if one.way == "torchrun"]
    trainings = len({one.round for one in ours})
    over = sum(one.again > one.allowed for one in ours)
    return (
        f"{len(ours)} faults of {len({one.kind for one in ours})} kinds in {trainings} trainings (seed {seed}): "
        f"{_of(one.seconds is not None for one in ours)} went on, {_of(one.named for one in ours)} had the right cause "
        f"named and no other, {_of(one.bits for one in ours)} ended in the bits of a training without faults, "
        f"{over} lost more steps than they may, {sum(bool(one.left) for one in ours)} left something behind. Beside them "
        f"{len(theirs)} faults under torchrun, of which {_of(one.seconds is not None for one in theirs)} went on."
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
    gone = f"; {len(struck) - len(known)} did not go on" if len(known) < len(struck) else ""
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
    chapter = f"{BEGIN}\n\n## A campaign of drawn faults\n\n{_INTRODUCTION}\n\n{text}\n\n{END}"
    return f"{before.rstrip()}\n\n{chapter}\n{after.lstrip()}"


_INTRODUCTION = ""
