"""Objectives of searches with few trials, of four kinds: what `tune_few.py` measures on.

An objective takes parameters by name and returns a loss, 0 at best where the best is known. Those of `TUNED` were
looked at while the default algorithm was written; those of `FRESH` were chosen afterwards and are what is reported.

Functions: Surjanovic and Bingham 2013, "Virtual Library of Simulation Experiments: Test Functions and Datasets", and
Jamil and Yang 2013, arXiv:1308.4008; optima are moved out of the middle of the box, which some algorithms favour. Real
models: classifiers and regressors of scikit-learn on its own data sets, by cross-validation.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from lockstep.tune import Choice, Float, Int, Space

Array = np.ndarray


@dataclass(frozen=True)
class Objective:
    """A loss over a space."""

    name: str
    kind: str  #: smooth, minima, rotated or models
    space: Space
    loss: Callable[[Mapping[str, Any]], float]


def _function(
    kind: str, name: str, dimensions: int, low: float, high: float, value: Callable[[Array], float]
) -> Objective:
    space = Space.of({f"x{index}": Float(low, high) for index in range(dimensions)})
    return Objective(f"{name} {dimensions}", kind, space, lambda params: float(value(np.array([*params.values()]))))


def _rotated(x: Array, seed: int) -> Array:
    rotation, _ = np.linalg.qr(np.random.default_rng(seed).normal(size=(len(x), len(x))))
    return rotation @ x


def _ackley(x: Array) -> float:
    return -20 * np.exp(-0.2 * np.sqrt((x @ x) / len(x))) - np.exp(np.cos(2 * np.pi * x).mean()) + 20 + np.e


def _levy(x: Array) -> float:
    w = 1 + (x - 1) / 4
    middle = ((w[:-1] - 1) ** 2 * (1 + 10 * np.sin(np.pi * w[:-1] + 1) ** 2)).sum()
    return np.sin(np.pi * w[0]) ** 2 + middle + (w[-1] - 1) ** 2 * (1 + np.sin(2 * np.pi * w[-1]) ** 2)


def _michalewicz(x: Array) -> float:
    return 9.66015 - (np.sin(x) * np.sin(np.arange(1, len(x) + 1) * x**2 / np.pi) ** 20).sum()


def _ellipsoid(x: Array) -> float:
    return float((10 ** (4 * np.arange(len(x)) / (len(x) - 1)) * _rotated(x - 0.7, 5) ** 2).sum())


def _rosenbrock(x: Array) -> float:
    return (100 * (x[1:] - x[:-1] ** 2) ** 2 + (1 - x[:-1]) ** 2).sum()


def _rastrigin(x: Array) -> float:
    return 10 * len(x) + (x**2 - 10 * np.cos(2 * np.pi * x)).sum()


def _trid(x: Array) -> float:
    return ((x - 1) ** 2).sum() - (x[1:] * x[:-1]).sum() + len(x) * (len(x) + 4) * (len(x) - 1) / 6


def _dixon_price(x: Array) -> float:
    return (x[0] - 1) ** 2 + (np.arange(2, len(x) + 1) * (2 * x[1:] ** 2 - x[:-1]) ** 2).sum()


def _powell(x: Array) -> float:
    a, b, c, d = x[0::4], x[1::4], x[2::4], x[3::4]
    return ((a + 10 * b) ** 2 + 5 * (c - d) ** 2 + (b - 2 * c) ** 4 + 10 * (a - d) ** 4).sum()


def _griewank(x: Array) -> float:
    return 1 + (x @ x) / 4000 - np.prod(np.cos(x / np.sqrt(np.arange(1, len(x) + 1))))


def _alpine(x: Array) -> float:
    return np.abs(x * np.sin(x) + 0.1 * x).sum()


def _cigar(x: Array) -> float:
    return x[0] ** 2 + 1e4 * (x[1:] @ x[1:])


def _zakharov(x: Array) -> float:
    weighted = 0.5 * (np.arange(1, len(x) + 1) * x).sum()
    return x @ x + weighted**2 + weighted**4


CLASSIFIERS = {
    "model": Choice(
        "vectors",
        "neighbours",
        "logistic",
        "tree",
        opens={
            "vectors": {
                "C": Float(1e-3, 1e3, log=True),
                "gamma": Float(1e-6, 1e1, log=True),
                "kernel": Choice("rbf", "sigmoid"),
            },
            "neighbours": {"neighbours": Int(1, 60), "p": Float(1, 4), "weights": Choice("uniform", "distance")},
            "logistic": {"strength": Float(1e-4, 1e3, log=True)},
            "tree": {"depth": Int(1, 12), "leaf": Int(1, 40, log=True), "criterion": Choice("gini", "entropy")},
        },
    ),
    "scale": Choice("standard", "none"),
}
REGRESSORS = {
    "model": Choice(
        "vectors",
        "neighbours",
        "kernel ridge",
        "tree",
        opens={
            "vectors": {"C": Float(1e-3, 1e3, log=True), "gamma": Float(1e-6, 1e1, log=True), "eps": Float(0, 1)},
            "neighbours": {"neighbours": Int(1, 80), "p": Float(1, 4), "weights": Choice("uniform", "distance")},
            "kernel ridge": {
                "alpha": Float(1e-5, 1e2, log=True),
                "width": Float(1e-5, 1e1, log=True),
                "shape": Choice("rbf", "laplacian"),
            },
            "tree": {"depth": Int(1, 14), "leaf": Int(1, 60, log=True)},
        },
    ),
    "scale": Choice("standard", "none"),
}
NETWORK = {
    "hidden": Int(2, 64, log=True),
    "lr": Float(1e-3, 3.0, log=True),
    "momentum": Float(0, 0.99),
    "decay": Float(1e-6, 1e-1, log=True),
    "activation": Choice("tanh", "relu"),
    "steps": Int(10, 80),
}


@cache
def _data(name: str) -> tuple[Array, Array, list[Array]]:
    """Inputs, targets, and for each of four parts of the rows its indices."""
    import sklearn.datasets

    x, y = getattr(sklearn.datasets, f"load_{name}")(return_X_y=True)
    order = np.random.default_rng(7).permutation(len(x))[:250]
    return x[order], y[order], np.array_split(np.arange(len(order)), 4)


def _estimator(params: Mapping[str, Any], regression: bool) -> Any:
    from sklearn.kernel_ridge import KernelRidge
    from sklearn.linear_model import LogisticRegression
    from sklearn.neighbors import KNeighborsClassifier, KNeighborsRegressor
    from sklearn.svm import SVC, SVR
    from sklearn.tree import DecisionTreeClassifier, DecisionTreeRegressor

    match params["model"]:
        case "vectors" if regression:
            return SVR(C=params["C"], gamma=params["gamma"], epsilon=params["eps"], max_iter=3000)
        case "vectors":
            return SVC(C=params["C"], gamma=params["gamma"], kernel=params["kernel"], max_iter=3000)
        case "neighbours":
            kind = KNeighborsRegressor if regression else KNeighborsClassifier
            return kind(params["neighbours"], p=params["p"], weights=params["weights"])
        case "kernel ridge":
            return KernelRidge(alpha=params["alpha"], gamma=params["width"], kernel=params["shape"])
        case "logistic":
            return LogisticRegression(C=params["strength"], max_iter=200)
        case _ if regression:
            return DecisionTreeRegressor(max_depth=params["depth"], min_samples_leaf=params["leaf"], random_state=0)
        case _:
            return DecisionTreeClassifier(
                max_depth=params["depth"],
                min_samples_leaf=params["leaf"],
                criterion=params["criterion"],
                random_state=0,
            )


def _cross_validated(data: str, regression: bool) -> Callable[[Mapping[str, Any]], float]:
    """The mean over four parts of the share of errors, or of the squared error in units of the variance."""

    def loss(params: Mapping[str, Any]) -> float:
        x, y, parts = _data(data)
        if regression:
            y = (y - y.mean()) / y.std()
        errors = []
        for part in parts:
            rest = np.setdiff1d(np.arange(len(x)), part)
            middle, width = (x[rest].mean(axis=0), x[rest].std(axis=0)) if params["scale"] == "standard" else (0, 1)
            train, test = (x[rest] - middle) / (width + 1e-12), (x[part] - middle) / (width + 1e-12)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                predicted = _estimator(params, regression).fit(train, y[rest]).predict(test)
            errors.append(float(np.mean((predicted - y[part]) ** 2 if regression else predicted != y[part])))
        return min(float(np.mean(errors)), 100.0)

    return loss


def _network(data: str) -> Callable[[Mapping[str, Any]], float]:
    """The cross-entropy on held-out rows of a perceptron with one hidden layer, by gradient descent with momentum."""

    def loss(params: Mapping[str, Any]) -> float:
        x, y, parts = _data(data)
        rest, held = np.concatenate(parts[1:]), parts[0]
        x = (x - x[rest].mean(axis=0)) / (x[rest].std(axis=0) + 1e-9)
        random, classes = np.random.default_rng(3), int(y.max()) + 1
        sizes = (x.shape[1], params["hidden"], classes)
        weights = [random.normal(size=shape) / np.sqrt(shape[0]) for shape in itertools.pairwise(sizes)]
        speeds = [np.zeros_like(weight) for weight in weights]
        is_tanh, target = params["activation"] == "tanh", np.eye(classes)[y]

        def forward(rows: Array) -> tuple[Array, Array]:
            inner = x[rows] @ weights[0]
            inner = np.tanh(inner) if is_tanh else np.maximum(inner, 0)
            outer = inner @ weights[1]
            shares = np.exp(outer - outer.max(axis=1, keepdims=True))
            return inner, shares / shares.sum(axis=1, keepdims=True)

        with np.errstate(all="ignore"):
            for _ in range(params["steps"]):
                inner, shares = forward(rest)
                error = (shares - target[rest]) / len(rest)
                back = (error @ weights[1].T) * (1 - inner**2 if is_tanh else inner > 0)
                gradients = x[rest].T @ back, inner.T @ error
                for index, gradient in enumerate(gradients):
                    step = params["lr"] * (gradient + params["decay"] * weights[index])
                    speeds[index] = params["momentum"] * speeds[index] - step
                    weights[index] = weights[index] + speeds[index]
            shares = forward(held)[1]
            found = -np.log(np.maximum(shares[np.arange(len(held)), y[held]], 1e-12)).mean()
        return float(found) if np.isfinite(found) else 30.0

    return loss


TUNED = [
    _function("minima", "ackley", 8, -25, 25, lambda x: _ackley(x - 4.3)),
    _function("minima", "levy", 8, -10, 10, _levy),
    _function(
        "minima", "styblinski-tang", 8, -5, 5, lambda x: (x**4 - 16 * x**2 + 5 * x).sum() / 2 + 39.16617 * len(x)
    ),
    _function("minima", "michalewicz", 10, 0, np.pi, _michalewicz),
    _function("rotated", "ellipsoid", 6, -5, 5, _ellipsoid),
    _function("smooth", "rosenbrock", 5, -2, 3, _rosenbrock),
    Objective("cancer classifiers", "models", Space.of(CLASSIFIERS), _cross_validated("breast_cancer", False)),
]
FRESH = [
    _function("smooth", "trid", 6, -36, 36, _trid),
    _function("smooth", "dixon-price", 6, -10, 10, lambda x: _dixon_price(x - 3.7)),
    _function("smooth", "powell", 8, -4, 5, lambda x: _powell(x - 1.9)),
    _function("minima", "rastrigin", 6, -5.12, 5.12, lambda x: _rastrigin(x - 1.9)),
    _function("minima", "griewank", 6, -60, 60, lambda x: _griewank(x - 17)),
    _function("minima", "alpine", 8, -10, 10, lambda x: _alpine(x - 3.3)),
    _function("rotated", "rotated rastrigin", 5, -5.12, 5.12, lambda x: _rastrigin(_rotated(x - 1.1, 8))),
    _function("rotated", "rotated cigar", 6, -10, 10, lambda x: _cigar(_rotated(x + 2.6, 9))),
    _function("rotated", "rotated zakharov", 7, -5, 10, lambda x: _zakharov(_rotated(x - 5.2, 10))),
    Objective("wine classifiers", "models", Space.of(CLASSIFIERS), _cross_validated("wine", False)),
    Objective("diabetes regressors", "models", Space.of(REGRESSORS), _cross_validated("diabetes", True)),
    Objective("digits network", "models", Space.of(NETWORK), _network("digits")),
]
