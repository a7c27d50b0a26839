"""Which trials of a search keep their checkpoints: the best ones and, of several losses, those on the front."""

from __future__ import annotations

import bisect
from collections.abc import Iterable

from lockstep.tune.record.trial import Trial
from lockstep.tune.results.result import rank_of


class KeptTrials:
    """Those that are kept now, as trials end in any order. A trial costs what ``most`` or the front has.

    Args:
        most: how many of the best ones are kept.
        objectives: number of losses; of several, the front is kept, too.
    """

    def __init__(self, most: int, objectives: int) -> None:
        self._most, self._has_front = most, objectives > 1 and most > 0
        self._best: list[tuple[tuple[float, bool, float, int], int]] = []
        self._front: dict[int, tuple[float, ...]] = {}
        self._dropped: set[int] = set()  # were kept, and have not been taken

    def add(self, trials: Iterable[Trial]) -> None:
        """These have ended."""
        for trial in trials:
            if not trial.losses:
                continue
            bisect.insort(self._best, (rank_of(trial), trial.number))
            self._dropped |= {number for _, number in self._best[self._most :]} - {trial.number}
            del self._best[self._most :]
            if self._has_front and not trial.violation:
                self._add_to_front(trial)

    def _add_to_front(self, trial: Trial) -> None:
        if any(_dominates(losses, trial.losses) for losses in self._front.values()):
            return
        beaten = {number for number, losses in self._front.items() if _dominates(trial.losses, losses)}
        self._front = {number: losses for number, losses in self._front.items() if number not in beaten}
        self._front[trial.number] = trial.losses
        self._dropped |= beaten

    def __contains__(self, number: int) -> bool:
        return number in self._front or any(number == kept for _, kept in self._best)

    def take_dropped(self, needed: set[int | None]) -> set[int]:
        """Those that were kept and are not any more, each once; those that are ``needed`` stay until a later call."""
        gone = {number for number in self._dropped if number not in self and number not in needed}
        self._dropped &= needed
        return gone


def _dominates(one: tuple[float, ...], other: tuple[float, ...]) -> bool:
    return one != other and all(a <= b for a, b in zip(one, other, strict=True))
