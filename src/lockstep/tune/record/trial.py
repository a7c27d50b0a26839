"""All that is known about one trial: read from the journal, and used by stopping rules, tables and pictures."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from lockstep.tune.search.individual import Point

#: ``stopped``: ended early by a stopping rule, with a loss at a smaller budget. ``failed``: no loss, but a reason.
State = Literal["running", "done", "stopped", "failed"]


@dataclass(frozen=True, slots=True)
class Reported:
    """One call of `Run.report` in a trial."""

    step: int  #: number of calls before it
    loss: float
    at_s: float  #: seconds since 1970


@dataclass(frozen=True, slots=True)
class Trial:
    """One evaluation of the objective for one set of parameters, with all of its attempts."""

    number: int  #: unique in the search; counted from 0 in the order in which trials were claimed
    params: Mapping[str, object]  #: of the objective, by name
    point: Point  #: the same, as the algorithms see it
    state: State
    losses: tuple[float, ...] = ()  #: one for each objective; empty while it runs, and where it failed
    #: By how much it violates the constraints; 0: it satisfies them, or the search has none. Infinite: unknown, for it
    #: was stopped before it returned that, in a search where others violate them.
    violation: float = 0.0
    reason: str = ""  #: why it failed or was stopped, in one line
    #: Of a stopped one: it would have been stopped without any other trial, too, as by `patience`. Nothing was cut
    #: short: that was its training.
    converged: bool = False
    island: int = 0
    worker: int = 0
    ranks: int = 1  #: of the worker that ran its last attempt
    parents: tuple[int, ...] = ()  #: trials that it was bred from
    operator: str = ""  #: what bred it, such as ``crossover``
    inherits: int | None = None  #: number of the trial whose weights it began with
    attempts: int = 1
    reports: tuple[Reported, ...] = field(default=())
    began_at_s: float = 0.0  #: of the first attempt, in seconds since 1970
    ended_at_s: float | None = None
    run_s: float = 0.0  #: wall time of all attempts, in seconds
    repeats: tuple[Trial, ...] = ()  #: further evaluations of the same parameters, with other seeds

    @property
    def loss(self) -> float:
        """The first of its losses; NaN while there is none."""
        return self.losses[0] if self.losses else math.nan

    @property
    def repeat_losses(self) -> tuple[float, ...]:
        """The first loss of each of its repeats that has ended; infinite where that has none."""
        return tuple(one.loss if one.losses else math.inf for one in self.repeats if one.state != "running")

    @property
    def mean(self) -> float:
        """The mean loss of its repeats that have ended, without its own, for which it was chosen; NaN if none has."""
        losses = self.repeat_losses
        return sum(losses) / len(losses) if losses else math.nan

    @property
    def spread(self) -> float:
        """The standard deviation of its repeats' losses; NaN for fewer than two."""
        losses = self.repeat_losses
        if len(losses) < 2 or not math.isfinite(self.mean):
            return math.nan
        return statistics.stdev(losses)

    @property
    def is_cut_short(self) -> bool:
        """Whether it was stopped before the end of its training: its loss compares with none of a whole one."""
        return self.state == "stopped" and not self.converged


@dataclass(frozen=True, slots=True)
class MadeMove:
    """Individuals were sent from one island to another."""

    numbers: tuple[int, ...]  #: of their trials
    source: int
    target: int
    copies: bool  #: copies were sent, and the individuals stay on their island
    replaced: tuple[int, ...]  #: trials that left the population of the target island
    at_s: float  #: seconds since 1970
