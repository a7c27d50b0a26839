"""When a search has improved: its trials in the order in which they ended."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from lockstep.tune.record.trial import Trial


@dataclass(frozen=True, slots=True)
class _Step:
    """What was known when a trial ended."""

    best: Trial | None  #: the last one that was an improvement
    before: Trial | None  #: the one before that
    since: int  #: trials that have ended since
    longest: int  #: most trials in a row without an improvement


_NOTHING = _Step(None, None, 0, 0)


class Improvements:
    """Which trials were better than all that had ended before; of several losses, by the first.

    Trials may be added in any order; those that end late cost less than a microsecond each.

    Args:
        least: an improvement is by more than this part of the best loss until then, such as 0.01.
    """

    def __init__(self, least: float = 0.0) -> None:
        self._least = least
        self._ended: list[tuple[float, int, Trial]] = []
        self._steps: list[_Step] = []  # after each of the first of them
        self._unsorted = False

    def add(self, trials: Iterable[Trial]) -> None:
        """These have ended; those that have not are left out."""
        for trial in trials:
            if trial.ended_at_s is None:
                continue
            entry = (trial.ended_at_s, trial.number, trial)
            if self._ended and entry[:2] < self._ended[-1][:2]:
                # What comes after it is to be seen anew.
                while self._steps and entry[:2] < self._ended[len(self._steps) - 1][:2]:
                    self._steps.pop()
                self._unsorted = True
            self._ended.append(entry)

    @property
    def longest(self) -> int:
        """Most trials that have ended in a row without an improvement."""
        return self._newest().longest

    @property
    def since(self) -> int:
        """How many trials have ended since the last improvement."""
        return self._newest().since

    @property
    def best(self) -> Trial | None:
        """The trial of the last improvement; None if there was none."""
        return self._newest().best

    @property
    def before(self) -> Trial | None:
        """The best trial before the last improvement; None if there was none."""
        return self._newest().before

    def _newest(self) -> _Step:
        if self._unsorted:
            self._ended.sort(key=lambda entry: entry[:2])
            self._unsorted = False
        for _, _, trial in self._ended[len(self._steps) :]:
            self._steps.append(self._after(trial, self._steps[-1] if self._steps else _NOTHING))
        return self._steps[-1] if self._steps else _NOTHING

    def _after(self, trial: Trial, last: _Step) -> _Step:
        if trial.losses and (last.best is None or self._improves(trial, last.best)):
            return _Step(trial, last.best, 0, last.longest)
        return _Step(last.best, last.before, last.since + 1, max(last.longest, last.since + 1))

    def _improves(self, trial: Trial, best: Trial) -> bool:
        kind, before = (trial.violation, trial.is_cut_short), (best.violation, best.is_cut_short)
        return kind < before or (kind == before and best.loss - trial.loss > self._least * abs(best.loss))
