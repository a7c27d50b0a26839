"""NSGA-II for several losses, in the steady state (Deb et al. 2002, "A fast and elitist ... genetic algorithm")."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import numpy as np

from lockstep.tune.search.algorithm import Proposal
from lockstep.tune.search.cma_es import Array
from lockstep.tune.search.individual import Individual
from lockstep.tune.search.pareto import crowding, fronts
from lockstep.tune.search.space import Space

#: The share of pairs that are crossed, and how close children are to their parents (Deb 2002, section IV).
CROSSED: Final = 0.9
ETA_CROSSOVER: Final = 20.0
ETA_MUTATION: Final = 20.0


class Nsga2:
    """Binary tournaments by front and crowding, simulated binary crossover, polynomial mutation of 1 / genes.

    Asynchronous: breeds from what is known. The best ``population`` by front and crowding survive whenever there are
    twice as many; in between, new ones compete with them. Constraints count before losses (`dominates`).

    Cost: 0.1 ms a proposal.
    """

    def __init__(self, space: Space, population: int = 0) -> None:
        self._space = space
        self._size = population or 40
        self._pool: dict[int, Individual] = {}
        self._known: set[int] = set()
        self._ordered: list[Individual] = []  # of the pool at its last sorting, from the best
        self._unsorted = 0

    def observe(self, individuals: Sequence[Individual]) -> None:
        """From now on it breeds from these, too."""
        for individual in individuals:
            if individual.number in self._known or not all(map(math.isfinite, individual.losses)):
                continue
            self._known.add(individual.number)
            self._pool[individual.number] = individual
            self._unsorted += 1
            if len(self._pool) >= 2 * self._size:
                self._sort()
                self._ordered = self._ordered[: self._size]
                self._pool = {one.number: one for one in self._ordered}

    def forget(self, numbers: Sequence[int]) -> None:
        """From now on it does not breed from these."""
        for number in numbers:
            self._pool.pop(number, None)
        self._ordered = [one for one in self._ordered if one.number in self._pool]

    def propose(self, random: np.random.Generator) -> Proposal:
        """Uniform points until half a population is known; then a child of two."""
        if len(self._pool) < max(self._size // 2, 2):
            return Proposal(self._space.sample(random), (), "uniform")
        if self._unsorted >= max(self._size // 8, 1) or len(self._ordered) < 2:
            self._sort()
        first, second = self._drawn(random), self._drawn(random)
        genes = np.array(first.point)
        if random.random() < CROSSED:
            genes = self._crossed(genes, np.array(second.point), random)
        genes = self._mutated(genes, random)
        return Proposal(self._space.snap(genes), tuple(dict.fromkeys((first.number, second.number))), "nsga2")

    def _sort(self) -> None:
        individuals = list(self._pool.values())
        self._ordered, self._unsorted = [], 0
        for front in fronts(individuals):
            far = crowding(np.array([individuals[index].losses for index in front]))
            self._ordered += [individuals[front[place]] for place in np.argsort(-far, kind="stable")]

    def _drawn(self, random: np.random.Generator) -> Individual:
        return self._ordered[int(random.integers(len(self._ordered), size=2).min())]

    def _crossed(self, first: Array, second: Array, random: np.random.Generator) -> Array:
        """Simulated binary crossover (Deb and Agrawal 1995) of half of the genes; choices from either parent."""
        u = random.random(len(first))
        beta = np.where(u < 0.5, 2 * u, 1 / np.maximum(2 * (1 - u), 1e-12)) ** (1 / (ETA_CROSSOVER + 1))
        sign = np.where(random.random(len(first)) < 0.5, 1.0, -1.0)
        child = np.clip((first + second) / 2 + sign * beta * (first - second) / 2, 0, 1)
        child = np.where(self._space.is_choice, np.where(sign > 0, first, second), child)
        return np.where(random.random(len(first)) < 0.5, child, first)

    def _mutated(self, genes: Array, random: np.random.Generator) -> Array:
        """Polynomial mutation (Deb and Goyal 1996) of each gene with probability 1 / genes; choices anew."""
        u = random.random(len(genes))
        low = (2 * u) ** (1 / (ETA_MUTATION + 1)) - 1
        high = 1 - (2 * (1 - u)) ** (1 / (ETA_MUTATION + 1))
        moved = np.clip(genes + np.where(u < 0.5, low, high), 0, 1)
        moved = np.where(self._space.is_choice, random.random(len(genes)) * self._space.widths, moved)
        return np.where(random.random(len(genes)) < 1 / len(genes), moved, genes)
