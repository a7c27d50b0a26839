"""Evolutionary operators: pure moves from individuals to offspring, which `Cascade` and `Conditional` put together.

Selections, crossovers, mutations and the uniform initialisation are those of Propulate (Taubert et al. 2023,
"Massively parallel genetic optimization through asynchronous propagation of populations", and its version 1.2.2), with
its errors left out: a mutation reaches every value of a choice, and an interval mutation stays within the limits.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol, TypeAlias

import numpy as np

from lockstep.errors import SettingError
from lockstep.tune.search.algorithm import Proposal
from lockstep.tune.search.individual import Individual
from lockstep.tune.search.population import Ranked, rank_of
from lockstep.tune.search.space import Space

Parent: TypeAlias = Individual | Proposal  #: evaluated, or made by an operator before


class Operator(Protocol):
    """From individuals to individuals: a pure function of them and of the generator that it is given."""

    @property
    def takes(self) -> int | None:
        """How many individuals it needs; None: any number, from one on."""

    @property
    def gives(self) -> int | None:
        """How many individuals it makes or selects; None: any number."""

    def __call__(self, individuals: Sequence[Parent], random: np.random.Generator) -> Sequence[Parent]:
        """What comes out: of ``individuals``, or `Proposal`s that name those they come from."""


def origins(individuals: Sequence[Parent]) -> tuple[int, ...]:
    """The trials that these come from, each once."""
    numbers = [
        number
        for parent in individuals
        for number in ((parent.number,) if isinstance(parent, Individual) else parent.parents)
    ]
    return tuple(dict.fromkeys(numbers))


def _loss(parent: Parent) -> tuple[bool, float, float, float]:
    return rank_of(parent) if isinstance(parent, Individual) else (True, 0.0, 0.0, math.inf)


# Selections ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SelectMin:
    """The ``gives`` best, the best first (`rank_of`); all, where there are fewer."""

    gives: int
    takes: int | None = None

    def __call__(self, individuals: Sequence[Parent], random: np.random.Generator) -> Sequence[Parent]:
        """The selected ones."""
        if isinstance(individuals, Ranked):
            return individuals[: self.gives]
        return heapq.nsmallest(self.gives, individuals, key=_loss)


@dataclass(frozen=True, slots=True)
class SelectMax:
    """The ``gives`` worst, the worst first; all, where there are fewer."""

    gives: int
    takes: int | None = None

    def __call__(self, individuals: Sequence[Parent], random: np.random.Generator) -> Sequence[Parent]:
        """The selected ones."""
        if isinstance(individuals, Ranked):
            return individuals[: -self.gives - 1 : -1]
        return heapq.nlargest(self.gives, individuals, key=_loss)


@dataclass(frozen=True, slots=True)
class SelectUniform:
    """``gives`` of them at random, none twice; all in a random order, where there are fewer."""

    gives: int
    takes: int | None = None

    def __call__(self, individuals: Sequence[Parent], random: np.random.Generator) -> Sequence[Parent]:
        """The selected ones."""
        count = min(self.gives, len(individuals))
        return [individuals[index] for index in random.choice(len(individuals), count, replace=False)]


@dataclass(frozen=True, slots=True)
class SelectTournament:
    """``gives`` times the best of ``size`` that are drawn at random; of those not selected yet."""

    gives: int
    size: int = 2
    takes: int | None = None

    def __call__(self, individuals: Sequence[Parent], random: np.random.Generator) -> Sequence[Parent]:
        """The selected ones."""
        left = list(range(len(individuals)))
        selected: list[Parent] = []
        while left and len(selected) < self.gives:
            drawn = random.choice(len(left), min(self.size, len(left)), replace=False)
            winner = min((left[index] for index in drawn), key=lambda index: _loss(individuals[index]))
            left.remove(winner)
            selected.append(individuals[winner])
        return selected


# Crossovers ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CrossoverUniform:
    """Each gene from the second of two parents with probability 1 - ``contribution``, else from the first.

    With ``probability``; else the first as it is.
    """

    space: Space
    contribution: float = 0.5
    probability: float = 1.0
    takes: int | None = 2
    gives: int | None = 1

    def __call__(self, individuals: Sequence[Parent], random: np.random.Generator) -> Sequence[Parent]:
        """One child."""
        first, second = individuals[0], individuals[-1]
        if random.random() >= self.probability:
            return [first]
        other = random.random(len(self.space)) > self.contribution
        return [_child(self.space, np.where(other, second.point, first.point), (first, second), "crossover")]


@dataclass(frozen=True, slots=True)
class CrossoverMultiple:
    """Each gene from a parent that is drawn for it, of all ``takes``. With ``probability``; else the first as it is."""

    space: Space
    takes: int | None = None
    probability: float = 1.0
    gives: int | None = 1

    def __call__(self, individuals: Sequence[Parent], random: np.random.Generator) -> Sequence[Parent]:
        """One child."""
        if random.random() >= self.probability:
            return [individuals[0]]
        points = np.array([parent.point for parent in individuals])
        drawn = random.integers(len(individuals), size=len(self.space))
        parents = [individuals[index] for index in dict.fromkeys(drawn.tolist())]
        return [_child(self.space, points[drawn, np.arange(len(self.space))], parents, "crossover")]


@dataclass(frozen=True, slots=True)
class CrossoverSigmoid:
    """Genes of the better of two parents with a probability that grows with the difference of their losses.

    Each gene is the better one's with probability 1 / (1 + exp(-d / ``temperature``)), where d >= 0 is that difference:
    one half for equal losses. With ``probability``; else the first as it is.
    """

    space: Space
    temperature: float = 1.0
    probability: float = 1.0
    takes: int | None = 2
    gives: int | None = 1

    def __call__(self, individuals: Sequence[Parent], random: np.random.Generator) -> Sequence[Parent]:
        """One child."""
        first, second = individuals[0], individuals[-1]
        if random.random() >= self.probability:
            return [first]
        better, worse = sorted((first, second), key=_loss)
        from_better = random.random(len(self.space)) < self.better_share(better, worse)
        return [_child(self.space, np.where(from_better, better.point, worse.point), (first, second), "crossover")]

    def better_share(self, better: Parent, worse: Parent) -> float:
        """The probability of a gene to come from ``better``."""
        if not (isinstance(better, Individual) and isinstance(worse, Individual)):
            return 0.5
        difference = abs(worse.losses[0] - better.losses[0])
        return 1 / (1 + math.exp(-difference / self.temperature)) if math.isfinite(difference) else 1.0


# Mutations and initialisation ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PointMutation:
    """``points`` genes, drawn at random, anew from all their values. With ``probability``; else the first as it is."""

    space: Space
    points: int = 1
    probability: float = 1.0
    takes: int | None = 1
    gives: int | None = 1

    def __call__(self, individuals: Sequence[Parent], random: np.random.Generator) -> Sequence[Parent]:
        """One child."""
        if random.random() >= self.probability:
            return [individuals[0]]
        return [_resampled(self.space, individuals[0], self.points, random)]


@dataclass(frozen=True, slots=True)
class RandomPointMutation:
    """`PointMutation` of ``least`` to ``most`` genes, each number as likely as every other."""

    space: Space
    least: int = 1
    most: int = 2
    probability: float = 1.0
    takes: int | None = 1
    gives: int | None = 1

    def __post_init__(self) -> None:
        if not 1 <= self.least <= self.most:
            raise SettingError(f"RandomPointMutation(least={self.least}, most={self.most}): give 1 <= least <= most")

    def __call__(self, individuals: Sequence[Parent], random: np.random.Generator) -> Sequence[Parent]:
        """One child."""
        if random.random() >= self.probability:
            return [individuals[0]]
        return [_resampled(self.space, individuals[0], int(random.integers(self.least, self.most + 1)), random)]


@dataclass(frozen=True, slots=True)
class IntervalMutation:
    """``points`` genes of `Float`s, drawn at random, moved by N(0, ``sigma``) of their range, at most to its limits.

    As it is where the space has no `Float`. With ``probability``; else the first as it is.
    """

    space: Space
    sigma: float = 0.1
    points: int = 1
    probability: float = 1.0
    takes: int | None = 1
    gives: int | None = 1

    def __call__(self, individuals: Sequence[Parent], random: np.random.Generator) -> Sequence[Parent]:
        """One child."""
        floats = np.flatnonzero(self.space.is_float)
        if random.random() >= self.probability or not len(floats):
            return [individuals[0]]
        point = np.array(individuals[0].point)
        drawn = random.choice(floats, min(self.points, len(floats)), replace=False)
        point[drawn] = np.clip(point[drawn] + random.normal(0, self.sigma, len(drawn)), 0, 1)
        return [_child(self.space, point, individuals[:1], "interval mutation")]


@dataclass(frozen=True, slots=True)
class InitUniform:
    """A point drawn uniformly, of no parents. With ``probability``; else the first individual as it is."""

    space: Space
    probability: float = 1.0
    takes: int | None = None
    gives: int | None = 1

    def __call__(self, individuals: Sequence[Parent], random: np.random.Generator) -> Sequence[Parent]:
        """One individual."""
        if individuals and random.random() >= self.probability:
            return [individuals[0]]
        return [Proposal(self.space.sample(random), (), "uniform")]


# Composition ---------------------------------------------------------------------------------------------------------


class Cascade:
    """Operators one after another, each on what the one before gives (Propulate's ``Compose``).

    Raises:
        SettingError: if one gives fewer individuals than the next takes.
    """

    def __init__(self, *operators: Operator) -> None:
        if not operators:
            raise SettingError("Cascade(): give it operators, such as SelectMin(8), SelectUniform(2)")
        for one, following in itertools.pairwise(operators):
            if one.gives is not None and following.takes is not None and one.gives != following.takes:
                raise SettingError(f"Cascade: {one} gives {one.gives}, but {following} takes {following.takes}")
        self._operators = operators
        self.takes, self.gives = operators[0].takes, operators[-1].gives

    def __call__(self, individuals: Sequence[Parent], random: np.random.Generator) -> Sequence[Parent]:
        """What the last operator gives."""
        for operator in self._operators:
            individuals = operator(individuals, random)
        return individuals


@dataclass(frozen=True, slots=True)
class Conditional:
    """``enough`` from ``population`` individuals on, ``before`` with fewer."""

    population: int
    enough: Operator
    before: Operator
    takes: int | None = None
    gives: int | None = 1

    def __call__(self, individuals: Sequence[Parent], random: np.random.Generator) -> Sequence[Parent]:
        """What the one or the other gives."""
        return (self.enough if len(individuals) >= self.population else self.before)(individuals, random)


SELECTIONS: Final[dict[str, Callable[[int], Operator]]] = {
    "best": SelectMin,
    "worst": SelectMax,
    "uniform": SelectUniform,
    "tournament": SelectTournament,
}  #: the words for them


def _resampled(space: Space, parent: Parent, points: int, random: np.random.Generator) -> Proposal:
    genes = np.array(parent.point)
    drawn = random.choice(len(space), min(points, len(space)), replace=False)
    genes[drawn] = random.random(len(drawn)) * space.widths[drawn]
    return _child(space, genes, (parent,), "point mutation")


def _child(
    space: Space, genes: np.ndarray[tuple[int], np.dtype[np.float64]], parents: Sequence[Parent], made: str
) -> Proposal:
    """Offspring that names all trials it comes from, and all operators."""
    before = [parent.operator for parent in parents if isinstance(parent, Proposal)]
    return Proposal(space.snap(genes), origins(parents), " + ".join(dict.fromkeys([*before, made])))
