"""Individuals from the best to the worst: what selections choose from."""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterable, Iterator
from typing import TypeAlias

from lockstep.tune.search.individual import Individual

Rank: TypeAlias = tuple[bool, float, float, float]


def rank_of(individual: Individual) -> Rank:
    """Smaller is better; of the first loss, where there are several.

    What satisfies the constraints comes before what does not, and that by how little it violates them (Deb 2000, "An
    efficient constraint handling method for genetic algorithms"). A loss after more reports comes before one after
    fewer, since a loss of an early stop cannot be compared with that of a whole training; so do Optuna's TPE and BOHB.
    A loss that is not finite comes last.
    """
    loss = individual.losses[0]
    budget = math.inf if individual.budget is None else individual.budget
    violation = math.inf if math.isnan(individual.violation) else max(individual.violation, 0.0)
    return not math.isfinite(loss), violation, -budget, loss


class Ranked(list[Individual]):
    """Individuals from the best to the worst; those without a finite loss are left out. Not to be changed."""


class Population:
    """All individuals of an island that a worker knows, in order of `rank_of`.

    Adding and removing take 10 us with 40,000 of them; a number is held once. Those whose loss is not finite are held
    apart: they breed nothing.
    """

    def __init__(self) -> None:
        self._members: dict[int, Individual] = {}
        self._keys: list[tuple[Rank, int]] = []
        self._ordered = Ranked()

    def add(self, individuals: Iterable[Individual]) -> None:
        """Adds those that are not there yet."""
        for individual in individuals:
            if individual.number in self._members:
                continue
            self._members[individual.number] = individual
            key = (rank_of(individual), individual.number)
            if not key[0][0]:
                place = bisect.bisect_left(self._keys, key)
                self._keys.insert(place, key)
                self._ordered.insert(place, individual)

    def remove(self, numbers: Iterable[int]) -> None:
        """Removes those that are there."""
        for number in numbers:
            individual = self._members.pop(number, None)
            if individual is None:
                continue
            key = (rank_of(individual), number)
            if not key[0][0]:
                place = bisect.bisect_left(self._keys, key)
                del self._keys[place], self._ordered[place]

    def place(self, individual: Individual) -> int:
        """How many of those with a finite loss are better than ``individual``, which need not be there."""
        return bisect.bisect_left(self._keys, (rank_of(individual), individual.number))

    @property
    def ranked(self) -> Ranked:
        """From the best to the worst, without a copy: it changes with the population."""
        return self._ordered

    def __contains__(self, number: int) -> bool:
        return number in self._members

    def __getitem__(self, number: int) -> Individual:
        return self._members[number]

    def __len__(self) -> int:
        """How many there are, those without a finite loss included."""
        return len(self._members)

    def __iter__(self) -> Iterator[Individual]:
        return iter(self._members.values())
