"""CMA-ES: evolution with a normal distribution whose covariance is learnt, asynchronous and with restarts.

Hansen 2016, "The CMA Evolution Strategy: A Tutorial" (arXiv:1604.00772); the numbers of equations are from there. What
makes it asynchronous is Hansen 2011, "Injecting external solutions into CMA-ES" (arXiv:1110.4181): an individual need
not come from the present distribution, if its distance to the mean is clipped.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from lockstep.errors import SettingError
from lockstep.tune.search.algorithm import Proposal
from lockstep.tune.search.individual import Individual
from lockstep.tune.search.population import rank_of
from lockstep.tune.search.space import Space

Array: TypeAlias = NDArray[np.float64]

#: The step size of a new distribution, in units of the range.
FIRST_STEP: Final = 0.25
#: A distribution narrower than this in every direction has converged.
NARROWEST: Final = 1e-12
#: A distribution whose axes differ by more is numerically singular.
WORST_CONDITION: Final = 1e14


@dataclass(frozen=True, slots=True, eq=False)
class Weights:
    """What each rank of a generation counts, and how fast is learnt: equations 49 to 58."""

    values: Array  #: (population,), from the best; the worse half is negative in the active variant, else 0
    mu_eff: float
    c_sigma: float
    d_sigma: float
    c_c: float
    c_1: float
    c_mu: float

    @classmethod
    def of(cls, genes: int, population: int, active: bool) -> Weights:
        """For ``genes`` numbers and generations of ``population``."""
        raw = math.log((population + 1) / 2) - np.log(np.arange(1, population + 1))
        good, bad = np.where(raw > 0, raw, 0.0), np.where(raw < 0, raw, 0.0)
        mu_eff = good.sum() ** 2 / (good**2).sum()
        mu_eff_bad = bad.sum() ** 2 / (bad**2).sum()
        c_sigma = (mu_eff + 2) / (genes + mu_eff + 5)
        c_1 = 2 / ((genes + 1.3) ** 2 + mu_eff)
        c_mu = min(1 - c_1, 2 * (0.25 + mu_eff + 1 / mu_eff - 2) / ((genes + 2) ** 2 + mu_eff))
        values = good / good.sum()
        if active:
            limits = (1 + c_1 / c_mu, 1 + 2 * mu_eff_bad / (mu_eff + 2), (1 - c_1 - c_mu) / (genes * c_mu))
            values = values + bad / -bad.sum() * min(limits)
        return cls(
            values=values,
            mu_eff=mu_eff,
            c_sigma=c_sigma,
            d_sigma=1 + 2 * max(0.0, math.sqrt((mu_eff - 1) / (genes + 1)) - 1) + c_sigma,
            c_c=(4 + mu_eff / genes) / (genes + 4 + 2 * mu_eff / genes),
            c_1=c_1,
            c_mu=c_mu,
        )


@dataclass(frozen=True, slots=True, eq=False)
class Distribution:
    """The normal distribution N(mean, sigma² · covariance) and its two paths, after ``generation`` updates."""

    mean: Array  #: (genes,)
    sigma: float
    covariance: Array  #: (genes, genes)
    path_sigma: Array  #: (genes,)
    path_c: Array  #: (genes,)
    axes: Array  #: eigenvectors of the covariance in columns, (genes, genes)
    lengths: Array  #: square roots of its eigenvalues, (genes,)
    generation: int = 0

    @classmethod
    def around(cls, mean: Array, sigma: float) -> Distribution:
        """Equally wide in all directions."""
        genes, zero = len(mean), np.zeros(len(mean))
        return cls(mean, sigma, np.eye(genes), zero, zero, np.eye(genes), np.ones(genes))

    def sample(self, random: np.random.Generator) -> Array:
        """A point drawn from it, (genes,): equation 40."""
        return self.mean + self.sigma * (self.axes @ (self.lengths * random.normal(size=len(self.mean))))

    def updated(self, points: Array, weights: Weights) -> Distribution:
        """After a generation of ``points``, from the best to the worst, (population, genes): equations 41 to 47.

        A point farther from the mean than sqrt(n) + 2 n / (n + 2) standard deviations counts as one in that distance.
        """
        w, genes = weights, len(self.mean)
        steps = (points - self.mean) / self.sigma
        whitened = (steps @ self.axes) / self.lengths
        distance = np.linalg.norm(whitened, axis=1)
        clip = np.minimum(1, (math.sqrt(genes) + 2 * genes / (genes + 2)) / np.maximum(distance, 1e-300))
        steps, whitened, distance = steps * clip[:, None], whitened * clip[:, None], distance * clip
        good = np.maximum(w.values, 0)
        step = good @ steps
        expected = math.sqrt(genes) * (1 - 1 / (4 * genes) + 1 / (21 * genes**2))
        path_sigma = (1 - w.c_sigma) * self.path_sigma + math.sqrt(w.c_sigma * (2 - w.c_sigma) * w.mu_eff) * (
            self.axes @ (good @ whitened)
        )
        length = float(np.linalg.norm(path_sigma))
        grown = math.sqrt(1 - (1 - w.c_sigma) ** (2 * (self.generation + 1)))
        moves = float(length / grown < (1.4 + 2 / (genes + 1)) * expected)
        path_c = (1 - w.c_c) * self.path_c + moves * math.sqrt(w.c_c * (2 - w.c_c) * w.mu_eff) * step
        each = np.where(w.values >= 0, w.values, w.values * genes / np.maximum(distance, 1e-12) ** 2)
        kept = 1 + w.c_1 * (1 - moves) * w.c_c * (2 - w.c_c) - w.c_1 - w.c_mu * w.values.sum()
        covariance = kept * self.covariance + w.c_1 * np.outer(path_c, path_c) + w.c_mu * (steps.T * each) @ steps
        covariance = (covariance + covariance.T) / 2
        squares, axes = np.linalg.eigh(covariance)
        squares = np.maximum(squares, 1e-20 * squares[-1])
        sigma = self.sigma * math.exp(min(1.0, w.c_sigma / w.d_sigma * (length / expected - 1)))
        return Distribution(
            self.mean + self.sigma * step,
            sigma,
            covariance,
            path_sigma,
            path_c,
            axes,
            np.sqrt(squares),
            self.generation + 1,
        )

    @property
    def variances(self) -> Array:
        """Of each number, (genes,)."""
        return self.sigma**2 * np.diag(self.covariance)

    @property
    def has_converged(self) -> bool:
        """Whether there is nothing left to learn from it."""
        longest, shortest = self.lengths[-1], self.lengths[0]
        return bool(self.sigma * longest < NARROWEST or longest > math.sqrt(WORST_CONDITION) * shortest)


class CmaEs:
    """CMA-ES over all individuals of an island: all its workers learn one distribution together.

    Whenever ``population`` individuals have been learnt of since the last update, the distribution is updated with
    them; nobody waits for a generation to be whole. After convergence it restarts elsewhere with twice the population
    (IPOP, Auger and Hansen 2005), at a point of a low-discrepancy sequence, so that all workers restart at the same.

    Numbers are the places between 0 and 1 of their genes, so that widths and scales of parameters play no part; a point
    beyond a limit is reflected there. Where there are finitely many values a standard deviation is kept at which
    neighbours are reached. Genes of choices are taken from one of the better half of the last generation, each
    resampled with probability 1 / (number of genes).

    Args:
        space: with at least one number.
        population: of a generation; 0: 4 + 3 ln(numbers).
        active: whether the worse half of a generation counts, negatively.
        sigma: the first standard deviation, in units of the range.

    Raises:
        SettingError: if the space has no number.
    """

    def __init__(
        self,
        space: Space,
        population: int = 0,
        active: bool = True,
        sigma: float = FIRST_STEP,
    ) -> None:
        self._numbers, self._choices = np.flatnonzero(~space.is_choice), np.flatnonzero(space.is_choice)
        if not len(self._numbers):
            raise SettingError(f"cma-es: {space!r} has no numbers; give algorithm='evolution' or 'tpe'")
        cells = space.cells[self._numbers]
        self._least = np.where(cells > 0, 0.3 / np.maximum(cells, 1), 0.0)
        self._space, self._active, self._sigma = space, active, sigma
        self._runs = 0
        self._distribution: Distribution
        self._batch: list[Individual] = []
        self._better: list[Individual] = []  # of the last generation
        self._best: list[float] = []  # of each generation
        self._start(population or 4 + int(3 * math.log(len(self._numbers))))

    @property
    def operator(self) -> str:
        """What bred its proposals, as `Individual.operator` says; another one after each restart."""
        return f"cma-es {self._runs}" if self._runs > 1 else "cma-es"

    def observe(self, individuals: Sequence[Individual]) -> None:
        """Updates the distribution for each generation that these complete."""
        for individual in individuals:
            if not self._counts(individual):
                continue
            self._batch.append(individual)
            if len(self._batch) == self._population:
                self._update(sorted(self._batch, key=rank_of))

    def forget(self, numbers: Sequence[int]) -> None:
        """Those of the present generation do not count any more; what was learnt remains."""
        gone = set(numbers)
        self._batch = [individual for individual in self._batch if individual.number not in gone]

    def propose(self, random: np.random.Generator) -> Proposal:
        """A point of the distribution."""
        place = self._distribution.sample(random)
        place += np.sqrt(np.maximum(self._least**2 - self._distribution.variances, 0)) * random.normal(size=len(place))
        genes = np.zeros(len(self._space))
        genes[self._numbers] = reflected(place)
        parents: tuple[int, ...] = ()
        if len(self._choices):
            fresh = random.random(len(self._choices)) * self._space.widths[self._choices]
            if self._better:
                parent = self._better[int(random.integers(len(self._better)))]
                keeps = random.random(len(self._choices)) >= 1 / len(self._space)
                fresh = np.where(keeps, np.array(parent.point)[self._choices], fresh)
                parents = (parent.number,)
            genes[self._choices] = fresh
        return Proposal(self._space.snap(genes), parents, self.operator)

    def _counts(self, individual: Individual) -> bool:
        if not math.isfinite(individual.losses[0]):
            return False
        return individual.operator == self.operator or not individual.operator.startswith("cma-es")

    def _update(self, ordered: list[Individual]) -> None:
        """The distribution after this generation, or a new one."""
        points = np.array([individual.point for individual in ordered])[:, self._numbers]
        exist = np.array([self._space.active(individual.point) for individual in ordered])[:, self._numbers]
        points = np.where(exist, points, self._distribution.mean)
        self._distribution = self._distribution.updated(points, self._weights)
        self._batch, self._better = [], ordered[: max(len(ordered) // 2, 1)]
        self._best.append(ordered[0].losses[0])
        window = self._best[-10 - 30 * len(self._numbers) // self._population :]
        flat = len(window) == 10 + 30 * len(self._numbers) // self._population and max(window) == min(window)
        if flat or self._distribution.has_converged:
            self._start(2 * self._population)

    def _start(self, population: int) -> None:
        self._population = population
        self._weights = Weights.of(len(self._numbers), population, self._active)
        self._distribution = Distribution.around(_start_of(self._runs, len(self._numbers)), self._sigma)
        self._runs += 1
        self._batch, self._better, self._best = [], [], []


def _start_of(run: int, genes: int) -> Array:
    """Where the distribution of a run begins: the middle, then points of the sequence of Roberts (2018)."""
    ratio = 2.0
    for _ in range(40):  # the root of x^(genes + 1) = x + 1, the generalised golden ratio
        ratio = (1 + ratio) ** (1 / (genes + 1))
    return np.asarray((0.5 + run * (1 / ratio) ** np.arange(1, genes + 1)) % 1, dtype=np.float64)


def reflected(place: Array) -> Array:
    """``place`` between 0 and 1, as mirrors at both would show it."""
    place = np.abs(place) % 2
    return np.where(place > 1, 2 - place, place)
