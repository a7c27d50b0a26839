"""The ways in which a script is run, each of which is to give what the first one gives.

    as it is      1 rank, no loader process; as many steps as the time allows, passes cut short so that epochs end
    the same      once more
    worlds        2 and 3 ranks, one number that does not divide the micro-batches; with 1 and 2 loader processes
    elsewhere     another clock, host, directory, time zone, hash seed and order of listings, all at once
    resumed       killed after k steps on some ranks, and gone on with on others
    evaluations   without them
    micro-batch   of half as many samples, which may change last digits and no more
    strategies    those that are asked for

Where a way varies several things at once and differs, `parts` says which ways vary one of them each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal

from lockstep.formatting import plural
from lockstep.verify.surroundings import CLOCK, DIRECTORY, HOST, LISTING

Varies = Literal[
    "again", "ranks", "workers", "surroundings", "resume", "checkpoint", "evaluation", "micro-batch", "strategy"
]

HASHES, ZONE = "hash seed", "time zone"
_ELSEWHERE: Final = (CLOCK, HOST, LISTING, DIRECTORY, HASHES, ZONE)
_SHIFTED: Final = {
    CLOCK: "clock",
    HOST: "host name",
    LISTING: "order of directories",
    DIRECTORY: "working directory",
    HASHES: "hash seed",
    ZONE: "time zone",
}
#: Of the environment, to shift a kind of surroundings.
_VARIABLES: Final = {HASHES: {"PYTHONHASHSEED": "4711"}, ZONE: {"TZ": "XYZ-13:30"}}
MOST_RANKS: Final = 4  #: on which a script is tried


@dataclass(frozen=True, slots=True)
class Way:
    """One way to run a script."""

    varies: Varies
    ranks: int = 1
    workers: int = 0
    strategy: str | None = None  #: None: the script's own
    shifted: tuple[str, ...] = ()  #: kinds of surroundings
    killed_after: int | None = None  #: steps, on `ranks`; it goes on on `resumed_on`
    resumed_on: int = 1
    evaluates: bool = True
    micro_batch: int | None = None  #: samples; None: the script's own

    def __str__(self) -> str:
        match self.varies:
            case "again":
                return "the same again"
            case "surroundings":
                return "another " + ", ".join(_SHIFTED[kind] for kind in self.shifted)
            case "checkpoint":
                return "kill -9 after its first checkpoint, and run again"
            case "resume":
                killed = f"{self.killed_after} steps on {plural(self.ranks, 'rank')}"
                return f"{killed}, kill -9, the rest on {plural(self.resumed_on, 'rank')}"
            case "evaluation":
                return "without evaluations"
            case "micro-batch":
                return f"micro-batches of {plural(self.micro_batch or 0, 'sample')}"
            case "strategy":
                return f"{self.strategy} on {plural(self.ranks, 'rank')}"
            case "ranks" if not self.workers:
                return plural(self.ranks, "rank")
        loader = plural(self.workers, "loader process").replace("processs", "processes")
        return f"{plural(self.ranks, 'rank')}, {loader}"

    @property
    def variables(self) -> dict[str, str]:
        """Of the environment."""
        return {name: value for kind in self.shifted for name, value in _VARIABLES.get(kind, {}).items()}

    def settings(self, settings: Mapping[str, str]) -> dict[str, str]:
        """Those of the run, over the ``settings`` that the user has given."""
        own = {} if self.strategy is None else {"strategy": self.strategy}
        own |= {} if self.micro_batch is None else {"micro_batch": str(self.micro_batch)}
        return {"replay": "false", "workers": str(self.workers), **settings, **own}

    @property
    def parts(self) -> tuple[Way, ...]:
        """Ways that vary one thing each, if this one varies several."""
        if len(self.shifted) > 1:
            return tuple(replace(self, shifted=(kind,)) for kind in self.shifted)
        if self.varies == "ranks" and self.workers:
            return replace(self, workers=0), Way("workers", workers=self.workers)
        return ()


@dataclass(frozen=True, slots=True)
class RunPlan:
    """What is known of a script once it has run as it is."""

    micro_batches: int
    micro_batch: int  #: samples
    steps: int  #: in which runs are compared
    pass_steps: int  #: after which a pass ends

    @property
    def most_ranks(self) -> int:
        """That are tried."""
        return min(self.micro_batches, MOST_RANKS)


def first_ways() -> tuple[Way, Way]:
    """The script as it is, and the same once more."""
    return Way("ranks"), Way("again")


def ways_of_plain() -> list[Way]:
    """Ways to run a script that does without `Run`."""
    return [Way("surroundings", shifted=_ELSEWHERE), Way("checkpoint", killed_after=1)]


def worlds_and_surroundings(plan: RunPlan) -> list[Way]:
    """Ways on other numbers of ranks and of loader processes, and elsewhere. A pure function."""
    sizes = [size for size in (2, 3) if size <= plan.most_ranks]
    if odd := next((size for size in range(2, plan.most_ranks + 1) if plan.micro_batches % size), None):
        sizes = sorted({*sizes, odd})
    worlds = [Way("ranks", ranks=size, workers=min(2, number)) for number, size in enumerate(sizes, 1)]
    have = {world.workers for world in worlds}
    worlds += [Way("workers", workers=count) for count in (1, 2) if count not in have]
    return [*worlds, Way("surroundings", shifted=_ELSEWHERE)]


def resumes_and_strategies(plan: RunPlan, strategies: Sequence[str], *, worlds_differ: bool) -> list[Way]:
    """Ways through a kill, without evaluations, with smaller micro-batches, and by ``strategies``. A pure function.

    Where worlds differ, what is resumed stays on one rank, so that it shows what is lost by a resume alone.
    """
    few, many = (1, 1) if worlds_differ else (min(2, plan.most_ranks), min(3, plan.most_ranks))
    ways = []
    # Once within a pass, and once where one ends, with a step before each kill and behind it.
    last = plan.steps - 2
    within = next((step for step in range(last, 0, -1) if step % plan.pass_steps), None)
    at_end = next((step for step in range(last, 0, -1) if step % plan.pass_steps == 0), None)
    if within is not None:
        ways.append(Way("resume", ranks=few, killed_after=within, resumed_on=many))
    if at_end is not None:
        ways.append(Way("resume", ranks=1, killed_after=at_end, resumed_on=few))
    ways.append(Way("evaluation", evaluates=False))
    if plan.micro_batch > 1:
        ways.append(Way("micro-batch", micro_batch=plan.micro_batch // 2))
    return [*ways, *(Way("strategy", ranks=few, strategy=name) for name in strategies)]
