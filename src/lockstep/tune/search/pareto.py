"""Several losses at a time: who dominates whom, fronts, crowding, and NSGA-II, which breeds by them.

Deb et al. 2002, "A fast and elitist multiobjective genetic algorithm: NSGA-II".
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from lockstep.tune.search.algorithm import Proposal
from lockstep.tune.search.cma_es import Array
from lockstep.tune.search.individual import Individual
from lockstep.tune.search.space import Space

Losses: TypeAlias = NDArray[np.float64]

#: The share of pairs that are crossed, and how close children are to their parents (Deb 2002, section IV).
CROSSED: Final = 0.9
ETA_CROSSOVER: Final = 20.0
ETA_MUTATION: Final = 20.0


def dominates_losses(one: tuple[float, ...], other: tuple[float, ...]) -> bool:
    """Whether none of the losses ``one`` is larger than that of ``other``, and one is smaller."""
    return one != other and all(a <= b for a, b in zip(one, other, strict=True))


def fronts(individuals: Sequence[Individual]) -> list[list[int]]:
    """The indices of ``individuals``, front by front: those that nobody dominates, those only they dominate, ...

    One dominates another if it violates the constraints less; or as little, and it was trained longer; or as long, and
    none of its losses is larger and one is smaller.

    Cost: n² comparisons, in arrays; 2 ms for 200 individuals.
    """
    if not individuals:
        return []
    losses = np.array([individual.losses for individual in individuals])
    before = [_before_losses(individual) for individual in individuals]
    order = {key: place for place, key in enumerate(sorted(set(before)))}
    class_of = np.array([order[key] for key in before])
    no_larger = (losses[:, None, :] <= losses[None, :, :]).all(axis=2)
    smaller = (losses[:, None, :] < losses[None, :, :]).any(axis=2)
    better = (class_of[:, None] < class_of[None, :]) | ((class_of[:, None] == class_of[None, :]) & no_larger & smaller)
    left = better.sum(axis=0)  # how many dominate each
    found: list[list[int]] = []
    placed = np.zeros(len(individuals), dtype=bool)
    while not placed.all():
        front = np.flatnonzero((left == 0) & ~placed)
        found.append(front.tolist())
        placed[front] = True
        left = left - better[front].sum(axis=0)
    return found


def crowding(losses: Losses) -> Losses:
    """The crowding distance of each of one front, (individuals,), from its ``losses``, (individuals, objectives).

    How far apart its neighbours are in each loss, in units of that loss's span, added up; infinite at the ends.
    """
    distance = np.zeros(len(losses))
    for column in losses.T:
        order = np.argsort(column, kind="stable")
        span = column[order[-1]] - column[order[0]]
        distance[order[[0, -1]]] = np.inf
        if span > 0:
            distance[order[1:-1]] += (column[order[2:]] - column[order[:-2]]) / span
    return distance


def front_of(losses: Sequence[tuple[float, ...]]) -> list[int]:
    """The indices of the vectors that no other one dominates, in ascending order; equal vectors are all included.

    One vector dominates another if it is nowhere higher and somewhere lower. O(n log n) for one or two losses,
    O(n times the front) for more.
    """
    if not losses:
        return []
    values = np.asarray(losses, dtype=np.float64).reshape(len(losses), -1)
    values = np.where(np.isnan(values), np.inf, values)
    order = np.lexsort(values.T[::-1])  # by the first loss, then by the second...: a vector comes after its dominators
    front: list[int] = []
    if values.shape[1] <= 2:
        lowest = np.inf
        latest: np.ndarray | None = None
        for index in order:
            last = values[index, -1]
            if not front or last < lowest or (latest is not None and np.array_equal(values[index], latest)):
                front.append(int(index))
                lowest, latest = last, values[index]
        if values.shape[1] == 1:
            front = [index for index in front if values[index, 0] == values[order[0], 0]]
        return sorted(front)
    members = np.empty_like(values)
    for index in order:
        known = members[: len(front)]
        dominated = (known <= values[index]).all(axis=1) & (known < values[index]).any(axis=1)
        if not dominated.any():
            members[len(front)] = values[index]
            front.append(int(index))
    return sorted(front)


def pareto_front(individuals: Sequence[Individual]) -> list[Individual]:
    """Those that no other dominates, with finite losses, by their first loss; of equal losses all.

    Cost: that of `front_of`.
    """
    finite = [individual for individual in individuals if all(map(math.isfinite, individual.losses))]
    best = min(map(_before_losses, finite), default=None)
    alike = [individual for individual in finite if _before_losses(individual) == best]
    front = [alike[index] for index in front_of([individual.losses for individual in alike])]
    return sorted(front, key=lambda individual: individual.losses)


def _before_losses(individual: Individual) -> tuple[float, float]:
    """What counts before the losses: constraints, then how long it was trained."""
    violation = math.inf if math.isnan(individual.violation) else max(individual.violation, 0.0)
    return violation, -(math.inf if individual.budget is None else individual.budget)


class Nsga2:
    """Binary tournaments by front and crowding, simulated binary crossover, polynomial mutation of 1 / genes.

    NSGA-II in the steady state, asynchronous: it breeds from what is known. The best ``population`` by front and
    crowding survive whenever there are twice as many; in between, new ones compete with them. Constraints count before
    losses (`fronts`).

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
