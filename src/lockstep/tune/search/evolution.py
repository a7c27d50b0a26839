"""Evolution by several ways to breed, of which those that succeed are used more.

A genetic algorithm in the steady state, as Propulate's, of which each move is one of: a crossover with Propulate's
mutations, one gene resampled, one gene moved by a large, a middle or a small step, and a move along differences
(differential evolution, Storn and Price 1997, "current to best"); beside them CMA-ES learns a distribution. Genetic
moves win where parameters act separately and there are many minima, CMA-ES and differences where parameters depend on
each other; which it is, nobody knows before. The share of a move follows its success (probability matching, Goldberg
1990, with improvement as its reward, Fialho 2010).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np

from lockstep.tune.search.algorithm import Proposal
from lockstep.tune.search.cma_es import Array, CmaEs, reflected
from lockstep.tune.search.individual import Individual
from lockstep.tune.search.population import Population
from lockstep.tune.search.space import Space

#: The part of uniform points: so many of what is proposed.
UNIFORM: Final = 0.02
#: The part of CMA-ES, which needs generations before it succeeds; it earns more by success, as any other move.
CMA: Final = 0.15
#: The least part of a move, in units of its weight (`MOVES`).
LEAST: Final = 0.05
#: What a move's mean reward keeps of itself at each reward.
MEMORY: Final = 0.98


@dataclass(frozen=True, slots=True)
class Elite:
    """What moves breed from."""

    space: Space
    best: Sequence[Individual]  #: the best, from the best on; at least two
    wider: Sequence[Individual]  #: several times as many, for differences

    def drawn(self, random: np.random.Generator) -> Individual:
        """One of the best; of two draws the better."""
        return self.best[int(random.integers(len(self.best), size=2).min())]

    def crossed(self, random: np.random.Generator) -> tuple[Array, tuple[int, ...]]:
        """70 % of the genes of one and the others of another, and where they come from."""
        first, second = self.drawn(random), self.best[int(random.integers(len(self.best)))]
        genes = np.where(random.random(len(self.space)) < 0.7, first.point, second.point)
        return genes, tuple(dict.fromkeys((first.number, second.number)))

    def a_gene(self, genes: Array, random: np.random.Generator) -> int:
        """The index of one that exists at ``genes``."""
        exist = np.flatnonzero(self.space.active(self.space.snap(genes)))
        return int(exist[int(random.integers(len(exist)))])

    def stepped(self, genes: Array, gene: int, sigma: float, random: np.random.Generator) -> None:
        """Moves one gene by N(0, ``sigma``) of its range, at least to the next value; that of a choice is resampled."""
        if self.space.is_choice[gene]:
            genes[gene] = random.random() * self.space.widths[gene]
            return
        step, cells = random.normal() * sigma, int(self.space.cells[gene])
        if cells and abs(step) < 1 / cells:
            step = np.copysign(1 / cells, step)
        genes[gene] = float(reflected(genes[gene] + step))


Bred: TypeAlias = tuple[Array, tuple[int, ...]]  #: genes, and the trials that they come from
Breed: TypeAlias = Callable[[Elite, np.random.Generator], Bred]


def cross(elite: Elite, random: np.random.Generator) -> Bred:
    """A crossover; then a gene resampled in 40 % of cases, and one moved by 5 % of its range: as Propulate does."""
    genes, parents = elite.crossed(random)
    if random.random() < 0.4:
        gene = elite.a_gene(genes, random)
        genes[gene] = random.random() * elite.space.widths[gene]
    elite.stepped(genes, elite.a_gene(genes, random), 0.05, random)
    return genes, parents


def resample(elite: Elite, random: np.random.Generator) -> Bred:
    """A crossover, of which one gene is drawn anew from all its values."""
    genes, parents = elite.crossed(random)
    gene = elite.a_gene(genes, random)
    genes[gene] = random.random() * elite.space.widths[gene]
    return genes, parents


def step(least: float, most: float) -> Breed:
    """A crossover, of which one gene is moved by a step of 10^-``least`` to 10^-``most`` of its range."""

    def breed(elite: Elite, random: np.random.Generator) -> Bred:
        genes, parents = elite.crossed(random)
        elite.stepped(genes, elite.a_gene(genes, random), 10 ** -random.uniform(least, most), random)
        return genes, parents

    return breed


def differ(elite: Elite, random: np.random.Generator) -> Bred:
    """One of the best, moved towards one of the very best and along the difference of two others, in some genes.

    Genes of choices are those of the very best one.
    """
    one = elite.best[int(random.integers(len(elite.best)))]
    better = elite.best[int(random.integers(max(2, len(elite.best) // 5)))]
    others = [elite.wider[int(index)] for index in random.choice(len(elite.wider), 2, replace=False)]
    scale = min(abs(0.5 + 0.1 * random.standard_cauchy()), 1.0)
    place = np.array(one.point)
    moved = place + scale * (np.array(better.point) - place)
    moved = reflected(moved + scale * (np.array(others[0].point) - np.array(others[1].point)))
    moved = np.where(elite.space.is_choice, better.point, moved)
    takes = random.random(len(place)) < (0.1, 0.5, 0.9)[int(random.integers(3))]
    takes[int(random.integers(len(place)))] = True
    return np.where(takes, moved, place), tuple(dict.fromkeys(each.number for each in (one, better, *others)))


#: The moves by the names under which their offspring is known, each with the weight of its least part. Resampling has a
#: large one: it alone leaves a minimum in which all of the elite sit.
MOVES: Final[Mapping[str, tuple[Breed, int]]] = {
    "crossover": (cross, 1),
    "resample": (resample, 3),
    "large step": (step(0.5, 1.5), 1),
    "middle step": (step(1.5, 2.5), 1),
    "small step": (step(2.5, 4.0), 1),
    "difference": (differ, 1),
}


def drawn_by_reward(
    rewards: Mapping[str, float], weights: Array, more: float, least: float, random: np.random.Generator
) -> str:
    """One of the names of ``rewards``, each by its reward plus ``more``, times its weight.

    The part of none is below ``least``.
    """
    earned = weights * (np.array(list(rewards.values())) + more)
    parts = least * weights + (1 - least * weights.sum()) * earned / earned.sum()
    index = int(np.searchsorted(np.cumsum(parts), random.random()))
    return list(rewards)[min(index, len(rewards) - 1)]


class Evolution:
    """Evolution by several moves; see the module.

    A move's reward is by how much its offspring is better than its first parent, in units of the span of the elite's
    losses: nothing if it is not better, at most 1. So a tiny step that succeeds every other time earns little while
    large ones still bring much. The elite are the ``population`` best; 0: as many as there are workers, at least 10. An
    individual is in it once, so copies of one never fill it.

    Cost: 0.15 ms a proposal with 30 dimensions, which does not grow with the population.
    """

    def __init__(self, space: Space, population: int = 0, workers: int = 1) -> None:
        self._space = space
        self._size = population or max(workers, 10)
        self._population = Population()
        self._cma = CmaEs(space) if not space.is_choice.all() else None
        self._rewards = dict.fromkeys((*MOVES, *(("cma-es",) if self._cma else ())), 1.0)

    def observe(self, individuals: Sequence[Individual]) -> None:
        """From now on it breeds from these, too, and the moves that bred them get their reward."""
        for individual in individuals:
            name = "cma-es" if individual.operator.startswith("cma-es") else individual.operator
            if name in self._rewards and len(self._population.ranked) >= self._size:
                self._rewards[name] = MEMORY * self._rewards[name] + (1 - MEMORY) * self._reward(individual)
            self._population.add([individual])
        if self._cma is not None:
            self._cma.observe(individuals)

    def forget(self, numbers: Sequence[int]) -> None:
        """From now on it does not breed from these; what was learnt from them remains."""
        self._population.remove(numbers)
        if self._cma is not None:
            self._cma.forget(numbers)

    def propose(self, random: np.random.Generator) -> Proposal:
        """Uniform points until there is an elite; then what one of the moves breeds."""
        ranked = self._population.ranked
        if len(ranked) < max(self._size, 2) or random.random() < UNIFORM:
            return Proposal(self._space.sample(random), (), "uniform")
        name = "cma-es" if self._cma is not None and random.random() < CMA else self._drawn_move(random)
        if name == "cma-es" and self._cma is not None:
            return self._cma.propose(random)
        genes, parents = MOVES[name][0](Elite(self._space, ranked[: self._size], ranked[: 4 * self._size]), random)
        return Proposal(self._space.snap(genes), parents, name)

    def _drawn_move(self, random: np.random.Generator) -> str:
        """Each by its reward times its weight, none below its least part."""
        weights = np.array([MOVES[name][1] if name in MOVES else 1 for name in self._rewards], dtype=float)
        return drawn_by_reward(self._rewards, weights, 1e-3, LEAST, random)

    def _reward(self, individual: Individual) -> float:
        ranked = self._population.ranked
        worst = ranked[self._size - 1]
        parent = individual.parents[0] if individual.parents else None
        base = self._population[parent] if parent is not None and parent in self._population else worst
        span = worst.losses[0] - ranked[0].losses[0]
        gain = min(base.losses[0], worst.losses[0]) - individual.losses[0]
        return min(gain / span, 1.0) if gain > 0 and span > 0 else 0.0
