"""A random forest of regression trees, and how much each input matters to it.

Breiman, "Random Forests" (Machine Learning 45, 2001): trees on bootstrap samples, a random part of the inputs at each
split; an input matters by how much the error on samples outside of the bootstrap ("out of bag") grows when its values
are permuted (section 10).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

_TREES: Final = 64
_LEAF: Final = 3  #: samples that a leaf has at least
_DEPTH: Final = 12


@dataclass(frozen=True, slots=True)
class Importance:
    """What a forest says of its inputs."""

    shares: tuple[float, ...]  #: of each input in the growth of the error; they add up to 1, or are all 0
    spreads: tuple[float, ...]  #: standard error of each share over the trees
    explained: float  #: R² out of bag: how much of the variance the forest predicts; the shares mean little at 0


def permutation_importance(inputs: Array, outputs: Array, random: np.random.Generator) -> Importance:
    """Of each column of ``inputs``, (n, d), for ``outputs``, (n,). O(trees d n log n)."""
    n, d = inputs.shape
    growth = np.zeros((_TREES, d))
    sums, votes = np.zeros(n), np.zeros(n)
    for tree in range(_TREES):
        bag = random.integers(0, n, n)
        outside = np.setdiff1d(np.arange(n), bag)
        grown = _grow(inputs[bag], outputs[bag], random, 0)
        if not len(outside):
            continue
        guessed = _predict(grown, inputs[outside])
        sums[outside] += guessed
        votes[outside] += 1
        error = np.mean((guessed - outputs[outside]) ** 2)
        for column in range(d):
            shuffled = inputs[outside].copy()
            shuffled[:, column] = random.permutation(shuffled[:, column])
            growth[tree, column] = np.mean((_predict(grown, shuffled) - outputs[outside]) ** 2) - error
    means = np.maximum(growth.mean(axis=0), 0.0)
    total = float(means.sum()) or 1.0
    told = votes > 0
    left = float(np.mean((sums[told] / votes[told] - outputs[told]) ** 2)) if told.any() else 0.0
    variance = float(np.var(outputs))
    return Importance(
        tuple(map(float, means / total)),
        tuple(map(float, growth.std(axis=0) / np.sqrt(_TREES) / total)),
        max(0.0, 1 - left / variance) if variance else 0.0,
    )


@dataclass(frozen=True, slots=True)
class _Split:
    column: int
    threshold: float
    low: _Split | float
    high: _Split | float


def _grow(inputs: Array, outputs: Array, random: np.random.Generator, depth: int) -> _Split | float:
    n, d = inputs.shape
    if n < 2 * _LEAF or depth == _DEPTH or np.ptp(outputs) == 0:
        return float(outputs.mean())
    best: tuple[float, int, float] | None = None
    for column in random.permutation(d)[: max(1, round(d / 1.5))]:
        order = np.argsort(inputs[:, column], kind="stable")
        values, targets = inputs[order, column], outputs[order]
        sums = np.cumsum(targets)
        sizes = np.arange(1, n)
        # The split that leaves the least variance has the greatest sum of squared means, each times its size.
        gains = sums[:-1] ** 2 / sizes + (sums[-1] - sums[:-1]) ** 2 / (n - sizes)
        allowed = (values[1:] > values[:-1]) & (sizes >= _LEAF) & (n - sizes >= _LEAF)
        if not allowed.any():
            continue
        place = int(np.argmax(np.where(allowed, gains, -np.inf)))
        if best is None or gains[place] > best[0]:
            best = (float(gains[place]), int(column), float(values[place] + values[place + 1]) / 2)
    if best is None:
        return float(outputs.mean())
    _, column, threshold = best
    below = inputs[:, column] <= threshold
    return _Split(
        column,
        threshold,
        _grow(inputs[below], outputs[below], random, depth + 1),
        _grow(inputs[~below], outputs[~below], random, depth + 1),
    )


def _predict(tree: _Split | float, inputs: Array) -> Array:
    if not isinstance(tree, _Split):
        return np.full(len(inputs), tree)
    guessed = np.empty(len(inputs))
    below = inputs[:, tree.column] <= tree.threshold
    guessed[below] = _predict(tree.low, inputs[below])
    guessed[~below] = _predict(tree.high, inputs[~below])
    return guessed
