"""A Gaussian process over points of the search space: the loss to expect at a point, and how uncertain that is.

Rasmussen and Williams 2006, "Gaussian Processes for Machine Learning", chapters 2 and 5: the kernel is Matérn 5/2 with
a length for each gene (equation 4.17), and its lengths and its noise are those of the greatest posterior density. NumPy
is enough for the few hundred points of a search; the gradients are those of equation 5.9.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, Self

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

_SQRT5: Final = math.sqrt(5)
_JITTER: Final = 1e-8  #: is added to the variance of the noise, so that equal points stay solvable
_ROUNDS: Final = 40  #: steps of the ascent, after which lengths hardly change
#: The prior: the logarithm of a length is the mean of all genes' plus N(0, 0.5²), and that mean N(log(0.3 √d), 0.7²);
#: the logarithm of the noise's variance is N(-8, 2²). Genes lie between 0 and 1, and losses have variance 1.
_SPREAD, _MEAN, _MEAN_SPREAD = 0.5, 0.3, 0.7
_NOISE, _NOISE_SPREAD = -8.0, 2.0
_LENGTHS: Final = (math.log(5e-3), math.log(1e2))  #: limits of the logarithm of a length
_NOISES: Final = (math.log(1e-7), 0.0)  #: limits of the logarithm of the noise's variance


@dataclass(frozen=True, slots=True)
class Kernel:
    """How alike two points are: the logarithms of the lengths (genes,), and that of the noise's variance."""

    lengths: Array
    noise: float
    is_choice: NDArray[np.bool_]  #: genes of which two values are equal or different, and nothing between

    @classmethod
    def fitted(cls, points: Array, losses: Array, is_choice: NDArray[np.bool_]) -> Self:
        """The kernel of the greatest posterior density, found by the signs of its gradient (Riedmiller's Rprop 1993).

        A function of its arguments alone, so that a search that is resumed has the same kernel.

        Args:
            points: (n, genes), from 0 to 1; genes of choices are whole numbers.
            losses: (n,), of mean 0 and variance 1.
            is_choice: (genes,).
        """
        genes = points.shape[1]
        squares = _squares(points.T[:, :, None], points.T[:, None, :], is_choice[:, None, None])
        theta = np.append(np.full(genes, math.log(_MEAN * math.sqrt(genes))), _NOISE)
        best, best_theta = -math.inf, theta
        step, last = np.full(genes + 1, 0.2), np.zeros(genes + 1)
        low, high = (np.append(np.full(genes, _LENGTHS[end]), _NOISES[end]) for end in (0, 1))
        for _ in range(_ROUNDS):
            try:
                density, gradient = _density(theta, squares, losses)
            except np.linalg.LinAlgError:
                theta = theta + np.append(np.zeros(genes), 1.0)  # with more noise it is solvable
                continue
            if density > best:
                best, best_theta = density, theta
            sign = np.sign(gradient)
            step = np.clip(np.where(sign * last > 0, 1.3 * step, np.where(sign * last < 0, step / 2, step)), 1e-3, 1.0)
            last, theta = sign, np.clip(theta + sign * step, low, high)
        return cls(best_theta[:-1], float(best_theta[-1]), is_choice)

    def between(self, ones: Array, others: Array) -> Array:
        """The correlation of each of ``ones`` (n, genes) with each of ``others`` (m, genes): (n, m)."""
        squares = np.zeros((len(ones), len(others)))
        # Gene by gene, for all genes at a time would take as much more memory.
        for gene, weight in enumerate(np.exp(-2 * self.lengths)):
            squares += weight * _squares(ones[:, gene, None], others[:, gene], self.is_choice[gene])
        return _matern(squares)[0]


class GaussianProcess:
    """The distribution of the loss at any point, given ``losses`` (n,) at ``points`` (n, genes).

    Args:
        variance: of the losses before any is known; None: the most likely one.

    Raises:
        numpy.linalg.LinAlgError: where points lie too close together for the noise of ``kernel``.
    """

    def __init__(self, kernel: Kernel, points: Array, losses: Array, variance: float | None = None) -> None:
        self._kernel, self._points, self._losses = kernel, points, losses
        noise = math.exp(kernel.noise) + _JITTER
        root = np.linalg.cholesky(kernel.between(points, points) + noise * np.eye(len(points)))
        self._root_inverse = np.linalg.inv(root)
        self._solved = self._root_inverse.T @ (self._root_inverse @ losses)
        self._variance = max(float(losses @ self._solved) / len(points), 1e-12) if variance is None else variance

    def predict(self, points: Array) -> tuple[Array, Array]:
        """Mean and standard deviation of the loss at each of ``points`` (m, genes)."""
        across = self._kernel.between(points, self._points)
        unexplained = 1 - np.square(self._root_inverse @ across.T).sum(axis=0)
        return across @ self._solved, np.sqrt(self._variance * np.maximum(unexplained, 1e-12))

    def supposing(self, points: Array) -> GaussianProcess:
        """This process, had ``points`` (m, genes) the losses to expect: it is certain there, and its means stay.

        So what others evaluate now is not proposed again (Ginsbourger, Le Riche and Carraro 2010, "Kriging is
        well-suited to parallelize optimization": the kriging believer).
        """
        losses = np.concatenate([self._losses, self.predict(points)[0]])
        return GaussianProcess(self._kernel, np.concatenate([self._points, points]), losses, self._variance)


def standard_normal_below(z: Array) -> Array:
    """The probability that N(0, 1) is below each of ``z`` (n,)."""
    return 0.5 * np.array([math.erfc(-each / math.sqrt(2)) for each in z])


def log_expected_improvement(mean: Array, deviation: Array, best: float) -> Array:
    """The logarithm of by how much a loss N(mean, deviation²) is expected to be below ``best``, where that is positive.

    Jones, Schonlau and Welch 1998, "Efficient Global Optimization of Expensive Black-Box Functions", equation 15; the
    logarithm keeps an order where the improvement itself would be 0 (Ament et al. 2023, arXiv:2310.20708).
    """
    z = (best - mean) / deviation
    density = np.exp(-0.5 * z**2) / math.sqrt(2 * math.pi)
    near = np.log(np.maximum(density + z * standard_normal_below(z), 1e-300))
    far = -0.5 * z**2 - 0.5 * math.log(2 * math.pi) - 2 * np.log(np.maximum(np.abs(z), 1.0))
    return np.asarray(np.where(z > -5, near, far) + np.log(deviation))


def _squares(ones: Array, others: Array, is_choice: NDArray[np.bool_]) -> Array:
    """The squared distances between ``ones`` and ``others``; of choices 1 where they differ."""
    apart = ones - others
    return np.where(is_choice, apart != 0, np.square(apart))


def _matern(squares: Array) -> tuple[Array, Array]:
    """The kernel at these squared distances in lengths, and -2 times its derivative by them."""
    distance = _SQRT5 * np.sqrt(squares)
    decayed = np.exp(-distance)
    return (1 + distance + distance**2 / 3) * decayed, 5 / 3 * (1 + distance) * decayed


def _density(theta: Array, squares: Array, losses: Array) -> tuple[float, Array]:
    """The logarithm of the posterior density at ``theta``, and its gradient; the variance of the losses is profiled."""
    lengths, noise, count = theta[:-1], math.exp(theta[-1]), len(losses)
    weights = np.exp(-2 * lengths)
    kernel, slope = _matern(np.tensordot(weights, squares, 1))
    root = np.linalg.cholesky(kernel + (noise + _JITTER) * np.eye(count))
    root_inverse = np.linalg.inv(root)
    inverse = root_inverse.T @ root_inverse
    solved = inverse @ losses
    variance = max(float(losses @ solved) / count, 1e-12)
    pull = np.outer(solved, solved) / variance - inverse
    gradient = np.append(
        0.5 * weights * np.tensordot(squares, pull * slope, 2),
        0.5 * noise * np.trace(pull),
    )
    mean = lengths.mean()
    apart = (lengths - mean) / _SPREAD
    middle = (mean - math.log(_MEAN * math.sqrt(len(lengths)))) / _MEAN_SPREAD
    quiet = (theta[-1] - _NOISE) / _NOISE_SPREAD
    density = -0.5 * count * math.log(variance) - float(np.log(np.diag(root)).sum())
    density -= 0.5 * (float(apart @ apart) + middle**2 + quiet**2)
    gradient[:-1] -= apart / _SPREAD + middle / _MEAN_SPREAD / len(lengths)
    gradient[-1] -= quiet / _NOISE_SPREAD
    return density, gradient
