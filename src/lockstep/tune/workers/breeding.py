"""Proposes the next trial of one worker, from the trials of all islands that it knows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import numpy as np

from lockstep.tune.record.trial import Trial
from lockstep.tune.search import (
    Individual,
    Move,
    Point,
    Proposal,
    Residents,
    Space,
    make_algorithm,
    plan_emigration,
    plan_replacement,
)
from lockstep.tune.search_settings import SearchSettings


class Breeding:
    """The algorithm of one worker, and the population of its island.

    A proposal is a function of the seed, the worker, the calls of `learn` so far, in their order, and of what other
    workers evaluate then. So a search with one worker can be repeated exactly, also when it is resumed.

    Args:
        space: what is searched.
        settings: of the search.
        worker: the number of this worker.
        workers: number of workers of the search.
        known: from other searches; each island breeds from them, and they move nowhere.
    """

    def __init__(
        self,
        space: Space,
        settings: SearchSettings,
        *,
        worker: int,
        workers: int,
        known: Iterable[Individual] = (),
    ) -> None:
        islands, algorithm = settings.islands, settings.algorithm
        self.island: Final = islands.island_of(worker)
        self._space: Final = space
        self._islands, self._seed, self._worker, self._workers = islands, settings.seed, worker, workers
        spec = islands.algorithm_of(self.island) if algorithm is None else algorithm
        here = max(1, len(islands.workers_of(self.island, workers)))
        self._algorithm = make_algorithm(spec, space, objectives=settings.objectives, worker=worker, workers=here)
        if known := list(known):
            self._algorithm.observe(known)
        self._residents = Residents()
        self._failed: list[Point] = []  # on this island
        self._trained_s = 0.0  # of all trials of this island, in seconds

    def learn(self, trials: Sequence[Trial], moves: Sequence[Move]) -> None:
        """These trials have ended, and these moves were planned, since the last call."""
        for trial in trials:
            if trial.island == self.island:
                self._trained_s += trial.run_s
                self._failed += [trial.point] if trial.state == "failed" else []
            if trial.losses:
                self._residents.add_individual(individual_of(trial))
        for move in moves:
            self._residents.add_move(move)
        came, gone = self._residents.take_changes(self.island)
        if gone:
            self._algorithm.forget(gone)
        if came:
            self._algorithm.observe(came)

    def propose(self, number: int, running: Sequence[Trial]) -> Proposal:
        """The point of the trial ``number``, while ``running`` are evaluated by others."""
        points = [trial.point for trial in running if trial.island == self.island]
        self._algorithm.inform(points, self._failed, self._trained_s)
        return self._algorithm.propose(self._random(number, 0))

    def complete(self, number: int, params: Mapping[str, object], point: Point) -> Point:
        """The point of the trial ``number`` with ``params``, and else that of its proposal."""
        return self._space.complete(params, point, self._random(number, 2))

    def plan_moves(self, number: int) -> tuple[Move, ...]:
        """The moves between islands after this worker's trial ``number``, which `learn` was called with."""
        if self._islands.count == 1:
            return ()
        random = self._random(number, 1)
        return (
            *plan_emigration(self._islands, self._residents, self._worker, self._workers, random),
            *plan_replacement(self._islands, self._residents, self._worker, random),
        )

    def _random(self, number: int, purpose: int) -> np.random.Generator:
        # Seeded by its purpose and not by earlier draws, so that a resumed search draws the same numbers.
        return np.random.default_rng([self._seed, self.island, self._worker, number, purpose])


def individual_of(trial: Trial) -> Individual:
    """A trial that has ended with losses, as algorithms see it."""
    return Individual(
        number=trial.number,
        point=trial.point,
        losses=trial.losses,
        violation=trial.violation,
        budget=len(trial.reports) if trial.is_cut_short else None,
        island=trial.island,
        worker=trial.worker,
        parents=trial.parents,
        operator=trial.operator,
    )
