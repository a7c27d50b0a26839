"""The result of a search: the best trials, counts, failures, tables."""

from __future__ import annotations

import heapq
import math
import os
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, get_args

from lockstep.errors import SettingError, UsageError
from lockstep.formatting import grouped
from lockstep.tune.record.journal import SEARCH_FILE, SearchRecord, read_search
from lockstep.tune.record.trial import State, Trial
from lockstep.tune.results.importance import Importance, importances
from lockstep.tune.search import Space
from lockstep.tune.search.pareto import front_of


@dataclass(frozen=True, slots=True)
class Failure:
    """One reason for which trials failed, and the numbers of these trials."""

    reason: str
    numbers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SearchResult:
    """The trials of a search as they were when it was read; it may still be running.

    Trials are ordered by their violation of the constraints first; then those that a stopping rule has cut short by a
    comparison with others come behind all others; then those with repeats come first, by the mean of these; then by
    their first loss, then by number. Nothing here reads a file or is collective.
    """

    record: SearchRecord

    @property
    def trials(self) -> tuple[Trial, ...]:
        """All trials, in the order of their numbers."""
        return self.record.trials

    @property
    def best(self) -> Trial:
        """The best trial: ``.params`` are the parameters of the objective, ``.loss`` is the loss that it returned.

        Raises:
            UsageError: if no trial has a loss; the message gives the reasons of failed trials.
        """
        if best := self.top(1):
            return best[0]
        reasons = "; ".join(f"{len(one.numbers)} x {one.reason}" for one in self.failures[:3])
        raise UsageError(
            f"none of the {len(self.trials)} trials has a loss{f': {reasons}' if reasons else ''}; wait for one, "
            "or correct what made them fail"
        )

    def top(self, n: int = 5, island: int | None = None) -> tuple[Trial, ...]:
        """The ``n`` best trials with a loss, best first; with ``island`` only those bred there. O(trials log n)."""
        ended = (trial for trial in self.trials if trial.losses and island in (None, trial.island))
        return tuple(heapq.nsmallest(n, ended, key=_final_rank))

    def top_by_island(self, n: int = 5) -> Mapping[int, tuple[Trial, ...]]:
        """The ``n`` best trials of each island, by the number of the island. O(trials log trials)."""
        bred: defaultdict[int, list[Trial]] = defaultdict(list)
        for trial in sorted((trial for trial in self.trials if trial.losses), key=_final_rank):
            if len(bred[trial.island]) < n:
                bred[trial.island].append(trial)
        return {island: tuple(bred.get(island, ())) for island in sorted({trial.island for trial in self.trials})}

    @property
    def pareto_front(self) -> tuple[Trial, ...]:
        """The trials that satisfy the constraints and that no other such trial dominates, ordered by their losses.

        A trial dominates another if none of its losses is higher and one is lower. With one objective these are the
        trials with the lowest loss.
        """
        feasible = [trial for trial in self.trials if trial.losses and not trial.violation]
        front = front_of([trial.losses for trial in feasible])
        return tuple(sorted((feasible[index] for index in front), key=lambda trial: (trial.losses, trial.number)))

    @property
    def counts(self) -> Mapping[State, int]:
        """Number of trials in each state: ``running``, ``done``, ``stopped`` and ``failed``."""
        found = Counter(trial.state for trial in self.trials)
        return {state: found[state] for state in get_args(State)}

    @property
    def failures(self) -> tuple[Failure, ...]:
        """The reasons for which trials failed, the most frequent first."""
        numbers = grouped((trial.reason, trial.number) for trial in self.trials if trial.state == "failed")
        return tuple(
            Failure(reason, tuple(those))
            for reason, those in sorted(numbers.items(), key=lambda item: (-len(item[1]), item[1]))
        )

    @property
    def rank_hours(self) -> float:
        """Hours that ranks spent on trials: the sum over trials of wall time times number of ranks."""
        return sum(trial.run_s * trial.ranks for trial in self.record.evaluations) / 3600

    @property
    def importances(self) -> tuple[Importance, ...]:
        """How much each parameter matters to the loss, with limits; see `lockstep.tune.results.importance`."""
        return importances(self.record)

    def table(self) -> Any:
        """One row for each trial, as in `rows`: a DataFrame where pandas is installed, else a list of dicts."""
        rows = self.rows()
        try:
            import pandas as pd
        except ImportError:
            return rows
        return pd.DataFrame(rows)

    def rows(self) -> list[dict[str, Any]]:
        """One dict for each trial, all with the same keys; times are in seconds.

        A parameter has the key ``params.NAME``, and the value None in trials that do not have it.
        """
        names = list(dict.fromkeys(name for trial in self.trials for name in trial.params))
        objectives = max((len(trial.losses) for trial in self.trials), default=1)
        return [_row(trial, names, objectives) for trial in self.trials]

    def to_json(self, n: int = 5) -> dict[str, Any]:
        """The whole result as JSON, with the ``n`` best trials of each island; numbers that are not finite are None."""
        best = self.top(1)
        told = {
            "best": _told(best[0]) if best else None,
            "counts": dict(self.counts),
            "rank_hours": self.rank_hours,
            "top": {str(island): [_told(trial) for trial in top] for island, top in self.top_by_island(n).items()},
            "pareto_front": [trial.number for trial in self.pareto_front],
            "importances": [asdict(one) for one in self.importances],
            "failures": [{"reason": one.reason, "trials": one.numbers} for one in self.failures],
            "settings": dict(self.record.settings),
            "space": dict(self.record.space),
            "trials": self.rows(),
        }
        return {name: _finite(value) for name, value in told.items()}


def load(run_dir: str | os.PathLike[str]) -> SearchResult:
    """The result of the search in ``run_dir``, which may still be running. Reads the whole journal.

    Raises:
        SettingError: if ``run_dir`` holds no search, or one that cannot be read.
    """
    record = read_search(run_dir)
    space = Space.from_json(record.space)
    # From the points, since values that the script gave as tuples are lists in JSON.
    if strange := [trial.number for trial in record.trials if not space.has(trial.point)]:
        raise SettingError(f"trial {strange[0]} of {os.fspath(run_dir)} is none of the space in its {SEARCH_FILE}")
    trials = tuple(
        replace(
            trial,
            params=space.params(trial.point),
            repeats=tuple(replace(one, params=space.params(one.point)) for one in trial.repeats),
        )
        for trial in record.trials
    )
    return SearchResult(replace(record, trials=trials))


def rank_of(trial: Trial) -> tuple[float, bool, float, int]:
    """The key by which trials are sorted, best first, without their repeats."""
    loss = trial.loss
    return trial.violation, trial.is_cut_short, math.inf if math.isnan(loss) else loss, trial.number


def _final_rank(trial: Trial) -> tuple[float, bool, bool, float, tuple[float, bool, float, int]]:
    """Of a trial's own loss, luck has a part: it comes after the means of those that were chosen for theirs."""
    mean = trial.mean
    return trial.violation, trial.is_cut_short, math.isnan(mean), 0.0 if math.isnan(mean) else mean, rank_of(trial)


def _row(trial: Trial, names: Sequence[str], objectives: int) -> dict[str, object]:
    losses = {
        "loss" if index == 0 else f"loss_{index + 1}": trial.losses[index] if index < len(trial.losses) else None
        for index in range(objectives)
    }
    return {
        "number": trial.number,
        "state": trial.state,
        **losses,
        **{f"params.{name}": trial.params.get(name) for name in names},
        "repeats": len(trial.repeat_losses),
        "mean": None if math.isnan(trial.mean) else trial.mean,
        "spread": None if math.isnan(trial.spread) else trial.spread,
        "violation": trial.violation,
        "reports": len(trial.reports),
        "reason": trial.reason,
        "island": trial.island,
        "worker": trial.worker,
        "ranks": trial.ranks,
        "operator": trial.operator,
        "parents": " ".join(map(str, trial.parents)),
        "inherits": trial.inherits,
        "attempts": trial.attempts,
        "began_at_s": trial.began_at_s,
        "ended_at_s": trial.ended_at_s,
        "run_s": trial.run_s,
    }


def _told(trial: Trial) -> dict[str, Any]:
    return {
        "number": trial.number,
        "params": dict(trial.params),
        "loss": trial.loss,
        "losses": list(trial.losses),
        "repeats": list(trial.repeat_losses),
        "mean": trial.mean,
        "spread": trial.spread,
        "state": trial.state,
        "island": trial.island,
    }


def _finite(value: object) -> object:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return value if value is None or isinstance(value, str | int | bool) else repr(value)
