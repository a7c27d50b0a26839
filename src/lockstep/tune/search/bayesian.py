"""The default algorithm: evolution, and beside that the point which a model of the loss says to be the most promising.

A training costs minutes to days, so most searches end after 30 to 200 trials, and a model pays. Which model is right
depends on the objective: one on the losses themselves knows how far a minimum is below another, one on their logarithms
finds its way along a valley, and evolution needs no smoothness. So a trial is proposed by one of the three, drawn by
what the trials of each have earned so far (probability matching, as between the moves of `evolution`).

    the trials known ──► losses ──► Gaussian process ──► of some 1,700 candidates the one with the
                 └─────► logarithms ──► ...              greatest expected improvement
                 └─────► evolution
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from statistics import NormalDist
from typing import Final

import numpy as np

from lockstep.tune.search.algorithm import Proposal
from lockstep.tune.search.cma_es import reflected
from lockstep.tune.search.evolution import MOVES, Elite, Evolution, drawn_by_reward
from lockstep.tune.search.gaussian_process import (
    Array,
    GaussianProcess,
    Kernel,
    log_expected_improvement,
    standard_normal_below,
)
from lockstep.tune.search.individual import Individual, Point
from lockstep.tune.search.population import Population, rank_of
from lockstep.tune.search.space import Space

#: What a model learns from.
MODELS: Final = ("gp of losses", "gp of logarithms")
EVOLUTION: Final = "evolution"
#: Of the proposals, so many are drawn evenly, whatever was earned.
_EVEN: Final = 0.1
#: What a mean reward keeps of itself at each reward.
_MEMORY: Final = 0.9
#: A model learns from at least so many individuals.
_LEAST: Final = 4
#: A model learns from at most so many individuals: the better half are the best ones, the others the newest.
_MOST: Final = 200
#: Candidates: drawn uniformly, near to the best points at each of these scales, and bred by each move of evolution.
_UNIFORM, _NEAR, _SCALES, _BRED = 400, 150, (0.3, 0.1, 0.03, 0.01), 16
_TOP: Final = 10  #: points that candidates are near to
#: Then the best of them are refined so many times: from each of some, so many at a scale that shrinks.
_ROUNDS, _KEPT, _EACH, _FIRST_SCALE, _SHRINKS = 6, 8, 12, 0.1, 0.6
#: Models may take so many seconds of each worker...
FREE_S: Final = 10.0
#: ... and so much of the time that trials have taken.
PART: Final = 0.2


class BayesianEvolution:
    """Bayesian optimisation beside evolution; see the module.

    The first point is the middle of the space, for ranges are chosen around what is known to work; then some are
    uniform. What is proposed is a function of what was observed, in its order, of what `inform` was told last, and of
    the generator. Where trials fail or violate constraints, a second model says how probable that is (Schonlau, Welch
    and Jones 1998). Where some were stopped early, losses are learnt by their ranks, for the loss after few reports
    compares with none after more.

    Cost: about 15 ms of one CPU for a proposal by a model with 100 individuals and 8 genes, 30 ms from 200 on.

    Args:
        space: what is searched.
        worker: number of the worker that it proposes for; the first one begins in the middle.
        workers: how many work on the island.
        evolves: whether evolution is one of the three; else only the models propose.
        limited: whether models leave the proposals to evolution where trials are too short for them (`FREE_S`).
    """

    def __init__(
        self, space: Space, worker: int = 0, workers: int = 1, *, evolves: bool = True, limited: bool = True
    ) -> None:
        self._space, self._worker, self._workers, self._limited = space, worker, workers, limited
        self._start = min(max(len(space) + 2, 8), 16)
        self._evolution = Evolution(space, 0, workers)
        self._allowed: list[Individual] = []  # that obey the constraints, with a finite loss, in the order of learning
        self._violating: list[Individual] = []  # the others
        self._population = Population()
        self._rewards = dict.fromkeys((*MODELS, EVOLUTION) if evolves else MODELS, 1.0)
        self._kernels: dict[str, tuple[int, Kernel]] = {}  # each with the number of individuals that it was fitted to
        self._running: Sequence[Point] = ()
        self._failed: Sequence[Point] = ()
        self._trained_s = 0.0

    def observe(self, individuals: Sequence[Individual]) -> None:
        """From now on these are known, and who proposed them gets the reward."""
        for individual in individuals:
            if individual.number in self._population:  # it comes back from another island
                continue
            self._population.add([individual])
            is_finite = math.isfinite(individual.losses[0])
            name = _proposer(individual.operator)
            if self._count >= self._start and name in self._rewards:
                reward = self._reward(individual) if is_finite else 0.0
                self._rewards[name] = _MEMORY * self._rewards[name] + (1 - _MEMORY) * reward
            (self._allowed if is_finite and individual.violation <= 0 else self._violating).append(individual)
        self._evolution.observe(individuals)

    def forget(self, numbers: Sequence[int]) -> None:
        """Evolution does not breed from these any more; what was evaluated remains true to a model."""
        self._evolution.forget(numbers)

    def inform(self, running: Sequence[Point], failed: Sequence[Point], trained_s: float) -> None:
        """As `InformedAlgorithm` says."""
        self._running, self._failed, self._trained_s = running, failed, trained_s

    def propose(self, random: np.random.Generator) -> Proposal:
        """The middle, and uniform points, at first; then what one of the models or evolution proposes."""
        if not (self._worker or self._count or self._running):
            return Proposal(self._middle(random), (), "middle")
        known = len(self._population.ranked)
        if known < _LEAST or known + len(self._running) < self._start:
            return Proposal(self._space.sample(random), (), "uniform")
        name = self._drawn(random)
        if name in MODELS and (not self._limited or self._is_affordable()):
            try:
                return Proposal(self._most_promising(name, random), (), name)
            except np.linalg.LinAlgError:  # points too close together for any model
                pass
        return self._evolution.propose(random)

    @property
    def _count(self) -> int:
        """How many individuals are known."""
        return len(self._allowed) + len(self._violating)

    def _middle(self, random: np.random.Generator) -> Point:
        """The point in the middle of all ranges, with any values of its choices."""
        drawn = random.random(len(self._space)) * self._space.widths
        return self._space.snap(np.where(self._space.is_choice, drawn, 0.5))

    def _reward(self, individual: Individual) -> float:
        """1 for the best so far; for others of the better quarter up to 0.3, by their rank."""
        place = self._population.place(individual)
        return 1.0 if place == 0 else 0.3 * max(0.0, 1 - 4 * place / len(self._population.ranked))

    def _drawn(self, random: np.random.Generator) -> str:
        """One of those that propose, by its reward."""
        count = len(self._rewards)
        return drawn_by_reward(self._rewards, np.ones(count), 0.02, _EVEN / count, random)

    def _is_affordable(self) -> bool:
        """Whether the models of this search, had each trial been proposed by one, took little beside the trials.

        By a formula of their cost and not by a clock, so that a search that is repeated proposes the same.
        """
        count = self._count
        spent_s = 8e-3 * count + 5e-5 * min(count, _MOST) ** 2 + 2e-2 * max(count - _MOST, 0)
        return spent_s <= FREE_S * self._workers + PART * self._trained_s

    def _most_promising(self, name: str, random: np.random.Generator) -> Point:
        worth = self._worth(name)
        ranked = self._population.ranked
        top = _points(ranked[:_TOP])
        elite = Elite(self._space, ranked[:_TOP], ranked[: 4 * _TOP])
        candidates = self._legal(
            np.concatenate(
                [
                    random.random((_UNIFORM, len(self._space))) * self._space.widths,
                    *(self._near(top[random.integers(len(top), size=_NEAR)], scale, random) for scale in _SCALES),
                    [breed(elite, random)[0] for breed, _ in MOVES.values() for _ in range(_BRED)],
                ]
            )
        )
        values, scale = worth(candidates), _FIRST_SCALE
        for _ in range(_ROUNDS):
            kept = np.argsort(-values, kind="stable")[:_KEPT]
            refined = self._legal(self._near(np.repeat(candidates[kept], _EACH, axis=0), scale, random))
            candidates = np.concatenate([candidates[kept], refined])
            values = np.concatenate([values[kept], worth(refined)])
            scale *= _SHRINKS
        return tuple(candidates[int(np.argmax(values))].tolist())

    def _worth(self, name: str) -> Callable[[Array], Array]:
        """What points (n, genes) promise: the logarithm of the expected improvement times the chance to be allowed."""
        chance = self._chance() if self._failed or self._violating else None
        known = self._learnt
        if chance is not None and len(known) < _LEAST:
            return chance  # first of all, points that are allowed have to be found
        points, losses = _points(known), _changed(name, known)
        model = GaussianProcess(self._kernel(name), points, losses)
        if self._running:
            model = model.supposing(np.array(self._running))

        def worth(candidates: Array) -> Array:
            improvement = log_expected_improvement(*model.predict(candidates), float(losses.min()))
            return improvement if chance is None else improvement + chance(candidates)

        return worth

    @property
    def _learnt(self) -> Sequence[Individual]:
        """Those from which models learn now; of a population, what obeys constraints comes first."""
        return _chosen(self._allowed, self._population.ranked[: _MOST // 2])

    def _chance(self) -> Callable[[Array], Array]:
        """The logarithm of the probability that points (n, genes) neither fail nor violate constraints."""
        allowed, violating = self._learnt, self._violating[-_MOST // 2 :]
        failed = self._failed[-_MOST // 2 :]
        violations = np.array([individual.violation for individual in violating])
        most = violations[np.isfinite(violations)].max(initial=0.0) or 1.0
        # Above 0 is what is not allowed, by its violation, so that less of that is nearer to none.
        faults = 0.5 + 0.5 * np.minimum(np.nan_to_num(violations / most, nan=1.0), 1.0)
        points = np.array([*(individual.point for individual in (*allowed, *violating)), *failed])
        faults = np.concatenate([np.full(len(allowed), -1.0), faults, np.ones(len(failed))])
        mean, width = faults.mean(), faults.std() or 1.0
        scaled = (faults - mean) / width
        process = GaussianProcess(Kernel.fitted(points, scaled, self._space.is_choice), points, scaled)

        def chance(candidates: Array) -> Array:
            expected, deviation = process.predict(candidates)
            z = (expected + mean / width) / deviation
            return np.asarray(np.log(np.maximum(standard_normal_below(-z), 1e-300)))

        return chance

    def _kernel(self, name: str) -> Kernel:
        """The kernel fitted to the first individuals, at a number of them that grows by a twentieth from fit to fit."""
        count = self._start
        while (more := count + max(1, count // 20)) <= len(self._allowed):
            count = more
        count = min(count, len(self._allowed))
        if self._kernels.get(name, (0,))[0] != count:
            first = self._allowed[:count]
            known = _chosen(first, heapq.nsmallest(_MOST // 2, first, rank_of))
            self._kernels[name] = count, Kernel.fitted(_points(known), _changed(name, known), self._space.is_choice)
        return self._kernels[name][1]

    def _near(self, points: Array, scale: float, random: np.random.Generator) -> Array:
        """Each of ``points`` (n, genes), of which all, half or two of the genes are moved by N(0, ``scale``).

        Of a choice, one gene in so many as there are genes is drawn anew.
        """
        shape, genes = points.shape, len(self._space)
        drawn = np.where(random.random(shape) < min(0.2, 1 / genes), random.random(shape) * self._space.widths, points)
        moved = np.where(self._space.is_choice, drawn, points + scale * random.normal(size=shape))
        part = min(1.0, 20 / genes) * random.choice([1.0, 0.5, 2 / genes], size=(len(points), 1))
        return np.where(random.random(shape) < part, moved, points)

    def _legal(self, genes: Array) -> Array:
        """Points of the space at ``genes`` (n, genes), which may lie beyond its limits."""
        return self._space.snap_all(np.where(self._space.is_choice, genes, reflected(genes)))


def _proposer(operator: str) -> str:
    """Which of those that propose has bred an individual with this operator; "" if none has."""
    if operator in MOVES or operator.startswith("cma-es"):
        return EVOLUTION
    return operator if operator in MODELS else ""


def _chosen(known: Sequence[Individual], best: Sequence[Individual]) -> Sequence[Individual]:
    """Those of ``known`` from which a model learns, where ``best`` are the best of them."""
    if len(known) <= _MOST:
        return known
    half = _MOST // 2
    numbers = {individual.number for individual in best[:half]}
    newest = [individual for individual in known[: -_MOST - 1 : -1] if individual.number not in numbers]
    return [*best[:half], *newest[:half]]


def _points(known: Sequence[Individual]) -> Array:
    return np.array([individual.point for individual in known])


def _changed(name: str, known: Sequence[Individual]) -> Array:
    """The losses that the model ``name`` learns, (n,), of mean 0 and variance 1."""
    if any(individual.budget is not None for individual in known):
        changed = _scores([(-_budget(individual), individual.losses[0]) for individual in known])
    else:
        losses = np.clip([individual.losses[0] for individual in known], -1e100, 1e100)
        changed = _scaled(losses) if name == MODELS[0] else _logarithms(losses)
    return np.asarray((changed - changed.mean()) / (changed.std() or 1.0))


def _budget(individual: Individual) -> float:
    return math.inf if individual.budget is None else individual.budget


def _scaled(losses: Array) -> Array:
    """In units of their middle half, and at most 3 of these above the median: the worst say little of the best."""
    low, middle, high = np.quantile(losses, (0.25, 0.5, 0.75))
    return np.asarray(np.minimum((losses - middle) / (high - low or losses.std() or 1.0), 3.0))


def _logarithms(losses: Array) -> Array:
    """Logarithms of their distances from the best, in units of the median one."""
    apart = losses - losses.min()
    return np.asarray(np.log(apart / (np.median(apart) or apart.mean() or 1.0) + 0.02))


def _scores(ranks: Sequence[tuple[float, float]]) -> Array:
    """The numbers that a normal distribution would have at these ranks; equal ranks have the same."""
    _, inverse, counts = np.unique(np.array(ranks), axis=0, return_inverse=True, return_counts=True)
    places = (np.cumsum(counts) - counts / 2) / len(ranks)
    return np.array([NormalDist().inv_cdf(place) for place in places])[inverse]
