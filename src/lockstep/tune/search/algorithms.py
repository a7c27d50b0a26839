"""The search algorithms by their words: ``name`` or ``name:option=value,option=value``; an operator as an algorithm."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import islice
from typing import Final, Protocol

import numpy as np

from lockstep.errors import SettingError
from lockstep.option_words import split_options
from lockstep.settings import read_options
from lockstep.tune.search.algorithm import Algorithm, InformedAlgorithm, Proposal
from lockstep.tune.search.bayesian import BayesianEvolution
from lockstep.tune.search.cma_es import FIRST_STEP, CmaEs
from lockstep.tune.search.evolution import Evolution
from lockstep.tune.search.individual import Individual, Point
from lockstep.tune.search.nelder_mead import NelderMead
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
from lockstep.tune.search.optuna_samplers import MULTI_OBJECTIVE_SAMPLERS, SAMPLERS, OptunaSampler
from lockstep.tune.search.pareto import Nsga2
from lockstep.tune.search.particle_swarm import ParticleSwarm
from lockstep.tune.search.population import Population
from lockstep.tune.search.space import Space

#: How often a duplicate is varied, in more and more genes, before it is proposed as it is.
ATTEMPTS: Final = 16


class AlgorithmFactory(Protocol):
    """Makes the algorithm of one worker: what a user gives in place of a word."""

    def __call__(self, space: Space, *, objectives: int, worker: int, workers: int) -> Algorithm:
        """For ``worker`` of the ``workers`` on its island, and losses of ``objectives`` numbers."""


@dataclass(frozen=True, slots=True)
class _Auto:
    def __call__(self, space: Space, *, objectives: int, worker: int, workers: int) -> Algorithm:
        return Nsga2(space) if objectives > 1 else BayesianEvolution(space, worker, workers)


@dataclass(frozen=True, slots=True)
class _GaussianProcess:
    def __call__(self, space: Space, *, objectives: int, worker: int, workers: int) -> Algorithm:
        return BayesianEvolution(space, worker, workers, evolves=False, limited=False)


@dataclass(frozen=True, slots=True)
class _Evolution:
    population: int = 0

    def __call__(self, space: Space, *, objectives: int, worker: int, workers: int) -> Algorithm:
        if objectives > 1:
            return Nsga2(space, self.population)
        return Evolution(space, self.population, workers)


@dataclass(frozen=True, slots=True)
class _Propulate:
    population: int = 0
    crossover: float = 0.7
    mutation: float = 0.4
    random_init: float = 0.1
    sigma: float = 0.05

    def __call__(self, space: Space, *, objectives: int, worker: int, workers: int) -> Algorithm:
        population = self.population or max(2 * workers, 8)
        return Evolving(
            propulate_operator(space, population, self.crossover, self.mutation, self.random_init, self.sigma)
        )


@dataclass(frozen=True, slots=True)
class _Genetic:
    population: int = 24
    crossover: float = 0.9
    mutation: float = 0.2
    sigma: float = 0.1
    tournament: int = 2

    def __call__(self, space: Space, *, objectives: int, worker: int, workers: int) -> Algorithm:
        return Evolving(
            genetic_operator(space, self.population, self.crossover, self.mutation, self.sigma, self.tournament)
        )


@dataclass(frozen=True, slots=True)
class _CmaEs:
    population: int = 0
    active: bool = True
    sigma: float = FIRST_STEP

    def __call__(self, space: Space, *, objectives: int, worker: int, workers: int) -> Algorithm:
        return CmaEs(space, self.population, self.active, self.sigma)


@dataclass(frozen=True, slots=True)
class _ParticleSwarm:
    variant: str = "constriction"
    particles: int = 0

    def __call__(self, space: Space, *, objectives: int, worker: int, workers: int) -> Algorithm:
        return ParticleSwarm(space, self.variant, worker, self.particles or -(-24 // workers))


@dataclass(frozen=True, slots=True)
class _NelderMead:
    adaptive: bool = False

    def __call__(self, space: Space, *, objectives: int, worker: int, workers: int) -> Algorithm:
        return NelderMead(space, worker, self.adaptive)


@dataclass(frozen=True, slots=True)
class _Nsga2:
    population: int = 0

    def __call__(self, space: Space, *, objectives: int, worker: int, workers: int) -> Algorithm:
        return Nsga2(space, self.population)


@dataclass(frozen=True, slots=True)
class _Random:
    def __call__(self, space: Space, *, objectives: int, worker: int, workers: int) -> Algorithm:
        return Evolving(InitUniform(space))


def _optuna(word: str) -> type[AlgorithmFactory]:
    @dataclass(frozen=True, slots=True)
    class _Optuna:
        def __call__(self, space: Space, *, objectives: int, worker: int, workers: int) -> Algorithm:
            return OptunaSampler(space, word, objectives)

    return _Optuna


_FACTORIES: Final[dict[str, type[AlgorithmFactory]]] = {
    "auto": _Auto,
    "gp": _GaussianProcess,
    "evolution": _Evolution,
    "propulate": _Propulate,
    "genetic": _Genetic,
    "cma-es": _CmaEs,
    "pso": _ParticleSwarm,
    "nelder-mead": _NelderMead,
    "nsga2": _Nsga2,
    "random": _Random,
    **{word: _optuna(word) for word in SAMPLERS},
}
#: The words of the algorithms, each with the names of its options.
ALGORITHM_WORDS: Final = {
    name: tuple(field.name for field in fields(kind))  # type: ignore[arg-type]
    for name, kind in _FACTORIES.items()
}
#: Those that minimise several losses at a time.
MULTI_OBJECTIVE: Final = ("auto", "evolution", "nsga2", "random", *MULTI_OBJECTIVE_SAMPLERS)


def make_algorithm(
    spec: str | AlgorithmFactory, space: Space, *, objectives: int = 1, worker: int = 0, workers: int = 1
) -> Distinct:
    """The algorithm that ``spec`` names, for ``worker`` of the ``workers`` on its island.

    Its proposals are new ones as far as there are any (`Distinct`). A new one knows nothing; it draws from the
    generator that each call of ``propose`` is given, and from nothing else.

    Args:
        spec: words such as ``evolution`` or ``propulate:population=24,mutation=0.2``, or a factory of one's own.
        space: what is searched.
        objectives: how many losses an individual has.
        worker: whose algorithm it is, as in `Individual.worker`.
        workers: how many work on the island; sizes of populations follow it.

    Raises:
        SettingError: for words that name no algorithm or option, a value that cannot be used, and an algorithm of one
            loss where there are several.
    """
    factory = parse(spec, objectives) if isinstance(spec, str) else spec
    return Distinct(factory(space, objectives=objectives, worker=worker, workers=workers), space)


def parse(spec: str, objectives: int = 1) -> AlgorithmFactory:
    """The factory that ``spec`` names, checked without a space.

    Raises:
        SettingError: as `make_algorithm` does.
    """
    name, options = split_options("algorithm", spec, ALGORITHM_WORDS)
    if objectives > 1 and name not in MULTI_OBJECTIVE:
        raise SettingError(
            f"algorithm={spec!r} minimises one loss, the objective has {objectives}; give "
            f"{', '.join(MULTI_OBJECTIVE)}, or return one loss"
        )
    return read_options(f"algorithm {name}", _FACTORIES[name], options)


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
        self._failed = 0  # how many of what has failed are known

    def observe(self, individuals: Sequence[Individual]) -> None:
        """As the algorithm does."""
        self._known.update(individual.point for individual in individuals)
        self._algorithm.observe(individuals)

    def forget(self, numbers: Sequence[int]) -> None:
        """As the algorithm does; that they were evaluated is still known."""
        self._algorithm.forget(numbers)

    def inform(self, running: Sequence[Point], failed: Sequence[Point], trained_s: float) -> None:
        """Tells the algorithm, if it wants to know; what others evaluate or what has failed is known from now on."""
        self._known.update(running, islice(failed, self._failed, None))
        self._failed = len(failed)
        if isinstance(self._algorithm, InformedAlgorithm):
            self._algorithm.inform(running, failed, trained_s)

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
