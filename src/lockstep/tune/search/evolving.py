"""An operator as an algorithm: it breeds from all individuals that a worker knows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lockstep.errors import SettingError
from lockstep.tune.search.algorithm import Proposal
from lockstep.tune.search.individual import Individual
from lockstep.tune.search.operators import (
    Cascade,
    Conditional,
    CrossoverUniform,
    InitUniform,
    IntervalMutation,
    Operator,
    PointMutation,
    SelectMin,
    SelectTournament,
    SelectUniform,
)
from lockstep.tune.search.population import Population
from lockstep.tune.search.space import Space


class Evolving:
    """The steady-state genetic algorithm: each proposal is what ``operator`` makes of all that is known now."""

    def __init__(self, operator: Operator) -> None:
        if operator.gives not in (1, None):
            raise SettingError(f"{operator} gives {operator.gives} individuals; end with one that gives one")
        self._operator = operator
        self._population = Population()

    def observe(self, individuals: Sequence[Individual]) -> None:
        """From now on it breeds from these, too."""
        self._population.add(individuals)

    def forget(self, numbers: Sequence[int]) -> None:
        """From now on it does not breed from these."""
        self._population.remove(numbers)

    def propose(self, random: np.random.Generator) -> Proposal:
        """What the operator makes of the population; a selected individual itself, where it changes nothing."""
        made = self._operator(self._population.ranked, random)[0]
        if isinstance(made, Individual):
            return Proposal(made.point, (made.number,), "copy")
        return made


def propulate_operator(
    space: Space,
    population: int,
    crossover: float = 0.7,
    mutation: float = 0.4,
    random_init: float = 0.1,
    sigma: float = 0.05,
) -> Operator:
    """Propulate's ``get_default_propagator`` (version 1.2.2), with its defaults.

    Uniform points until ``population`` individuals are known. Then two of the ``population`` best ever, drawn
    uniformly; each gene of the first with probability ``crossover`` and else of the second, always; one gene resampled
    with probability ``mutation``; one gene of a `Float`, where there is one, moved by N(0, ``sigma``) of its range;
    with probability ``random_init`` a uniform point instead of all that. So ``crossover`` is no probability of
    crossing, as its name promised there, but the share of the first parent: this is kept, since results depend on it.
    Not kept: a category that mutation could not reach, reversed limits that pinned a gene, NaN as the best loss.
    """
    return Conditional(
        population,
        Cascade(
            SelectMin(population),
            SelectUniform(2),
            CrossoverUniform(space, contribution=crossover),
            PointMutation(space, probability=mutation),
            IntervalMutation(space, sigma=sigma),
            InitUniform(space, probability=random_init),
        ),
        InitUniform(space),
    )


def genetic_operator(
    space: Space, population: int, crossover: float, mutation: float, sigma: float, tournament: int
) -> Operator:
    """A genetic algorithm as in textbooks (Eiben and Smith 2015, chapter 5): tournaments, crossover, mutation.

    Uniform points until ``population`` individuals are known. Then two of the ``population`` best, by tournaments of
    ``tournament``; crossed with probability ``crossover``; one gene resampled with
    probability ``mutation``; one gene of a `Float` moved by N(0, ``sigma``) of its range.
    """
    return Conditional(
        population,
        Cascade(
            SelectMin(population),
            SelectTournament(2, size=tournament),
            CrossoverUniform(space, probability=crossover),
            PointMutation(space, probability=mutation),
            IntervalMutation(space, sigma=sigma),
        ),
        InitUniform(space),
    )
