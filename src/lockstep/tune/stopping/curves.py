"""Learning curves: the losses that a trial has reported, as stopping rules compare them."""

from __future__ import annotations

import bisect
import math
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from typing import Any, TypeAlias

from lockstep.tune.record.trial import Trial

CurveValue: TypeAlias = Callable[[Sequence[float]], float]


def losses_of(trial: Trial) -> tuple[float, ...]:
    """The losses in the order of the reports; one that is not a number is the worst there is."""
    return tuple(math.inf if math.isnan(report.loss) else report.loss for report in trial.reports)


def reached(trials: Iterable[Trial], budget: int) -> list[tuple[float, ...]]:
    """The first ``budget`` losses of each trial that has reported so often; failed ones are left out."""
    curves = (losses_of(trial) for trial in trials if trial.state != "failed")
    return [curve[:budget] for curve in curves if len(curve) >= budget]


class EndedCurves:
    """What rules compare of the trials that have ended. Each trial is looked at once for each number of reports."""

    def __init__(self) -> None:
        self._ended: list[Trial] = []
        self._sorted: dict[tuple[int, CurveValue], tuple[int, array[float]]] = {}  # with how many of them are in it
        self.best: Trial | None = None  #: as the first of `finished`

    def add(self, trials: Sequence[Trial]) -> None:
        """These have ended."""
        self._ended += trials
        self.best = next(iter(finished([*trials, *([] if self.best is None else [self.best])])), None)

    def values_at(self, budget: int, value: CurveValue) -> array[float]:
        """As `values_at` says. Not to be changed."""
        seen, values = self._sorted.get((budget, value), (0, array("d")))
        new = [value(curve) for curve in reached(self._ended[seen:], budget)]
        if len(new) > len(values):
            values = array("d", sorted([*values, *new]))
        else:
            for one in new:
                bisect.insort(values, one)
        self._sorted[budget, value] = (len(self._ended), values)
        return values


class OtherTrials(Sequence[Trial]):
    """The other trials of a search, as a worker knows them: a list only for a rule that looks at each.

    Args:
        ended: those that have ended.
        running: those that have not.
        load: the list of all.
    """

    def __init__(self, ended: EndedCurves, running: Sequence[Trial], load: Callable[[], Sequence[Trial]]) -> None:
        self.ended, self.running, self._load = ended, running, load

    @cached_property
    def _all(self) -> Sequence[Trial]:
        return self._load()

    def __getitem__(self, index: Any) -> Any:
        return self._all[index]

    def __len__(self) -> int:
        return len(self._all)


def values_at(trials: Sequence[Trial], budget: int, value: CurveValue) -> array[float]:
    """The ``value`` of the first ``budget`` losses of each trial that has reported so often, sorted; see `reached`."""
    known = array("d", trials.ended.values_at(budget, value)) if isinstance(trials, OtherTrials) else array("d")
    for curve in reached(trials.running if isinstance(trials, OtherTrials) else trials, budget):
        bisect.insort(known, value(curve))
    return known


def best_finished(trials: Sequence[Trial]) -> Trial | None:
    """The first of `finished`."""
    if isinstance(trials, OtherTrials):
        return trials.ended.best
    return next(iter(finished(trials)), None)


def last(curve: Sequence[float]) -> float:
    """The newest loss."""
    return curve[-1]


def mean(curve: Sequence[float]) -> float:
    """The mean of the losses."""
    return sum(curve) / len(curve)


def finished(trials: Iterable[Trial]) -> list[Trial]:
    """Those that were trained to their end with a loss that is a number, best first: by loss, then by number."""
    whole = (trial for trial in trials if trial.state == "done" or trial.converged)
    done = (trial for trial in whole if trial.losses and not math.isnan(trial.losses[0]))
    return sorted(done, key=lambda trial: (trial.losses[0], trial.number))


def order_at_equal_budget(trials: Sequence[Trial]) -> tuple[Trial, ...]:
    """The done and stopped trials, best first; running and failed ones, and those without a loss, are left out.

    A trial that was stopped after b reports takes the place among the finished ones that it had among them after b
    reports: behind as many of them as were better by then, in best losses so far. The loss with which it was stopped
    is never compared with a loss of more training. Several in one place are compared after as many reports as the
    shortest of them has made. The order is total, and that of ``trials`` does not matter. O(s f + n log n) for s
    stopped and f finished trials.
    """
    ranked = finished(trials)
    places: defaultdict[int, list[Trial]] = defaultdict(list)
    for trial in trials:
        if trial.is_cut_short and trial.reports:
            places[_place(trial, ranked)].append(trial)
    order: list[Trial] = []
    for place in range(len(ranked) + 1):
        here = places.get(place, [])
        budget = min((len(trial.reports) for trial in here), default=0)
        order += sorted(here, key=lambda trial: (min(losses_of(trial)[:budget]), trial.number))
        order += ranked[place : place + 1]
    return tuple(order)


def _place(trial: Trial, ranked: Sequence[Trial]) -> int:
    """How many of the finished trials were better after as many reports; those that ended before count as they were."""
    budget = len(trial.reports)
    own = min(losses_of(trial))
    curves = (losses_of(other)[:budget] or other.losses[:1] for other in ranked)
    return sum(min(curve) < own for curve in curves)
