"""Proposals that were not made before, as far as the space has any left."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Final

import numpy as np

from lockstep.tune.search.algorithm import Algorithm, Proposal
from lockstep.tune.search.individual import Individual, Point
from lockstep.tune.search.space import Space

#: How often a duplicate is varied, in more and more genes, before it is proposed as it is.
ATTEMPTS: Final = 16


class Distinct:
    """Another algorithm, of whose proposals those that are known already are varied.

    Known is what was observed, also of individuals that are gone, and what was proposed here. One gene of a duplicate
    is resampled, then two, then four, ...; where all points are known, or none is found in `ATTEMPTS`, it is proposed
    as it is. So a search in a small space ends, and an objective with noise is measured again there.
    """

    def __init__(self, algorithm: Algorithm, space: Space) -> None:
        self._algorithm = algorithm
        self._space = space
        self._known: set[Point] = set()

    def observe(self, individuals: Sequence[Individual]) -> None:
        """As the algorithm does."""
        self._known.update(individual.point for individual in individuals)
        self._algorithm.observe(individuals)

    def forget(self, numbers: Sequence[int]) -> None:
        """As the algorithm does; that they were evaluated is still known."""
        self._algorithm.forget(numbers)

    def propose(self, random: np.random.Generator) -> Proposal:
        """What the algorithm proposes, varied where that is known."""
        proposal = self._algorithm.propose(random)
        point = proposal.point
        if point in self._known and len(self._known) < self._space.points:
            point = next(
                (varied for varied in islice(self._varied(point, random), ATTEMPTS) if varied not in self._known), point
            )
        self._known.add(point)
        return Proposal(point, proposal.parents, proposal.operator)

    def _varied(self, point: Point, random: np.random.Generator) -> Iterator[Point]:
        """``point`` with one gene resampled, with two, with four, ..., without end."""
        widths, genes = self._space.widths, 1
        while True:
            drawn = random.choice(len(point), min(genes, len(point)), replace=False)
            varied = np.array(point)
            varied[drawn] = random.random(len(drawn)) * widths[drawn]
            yield self._space.snap(varied)
            genes *= 2
