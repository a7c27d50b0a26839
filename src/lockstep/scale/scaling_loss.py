"""What published systems lose as they grow, beyond what the simulator explains: a Gaussian process over their traits.

A row with n GPUs loses y = log(rate of a GPU of its base / rate of a GPU of its own), of which the simulator explains a
part s. What is left is a size times a shape over n that all systems share:

    y - s = a (G(n) - G(base)),    G = (1 - g^-p) / (1 - 8^-p) + q log2(nodes),    g GPUs on each of the nodes

    z = log(a + c) ~ normal, with a covariance that is the sum of what two rows have in common: the source, the unit in
    which they count, precision, framework, a model's name and size, the same run.

Rows that resemble what is asked for say most, as with random effects; where nothing resembles it, the mean over all
systems is what remains, with a wide interval. The data is `calibration.json`, written by benchmarks/calibrate.py.

A source differs from all others in ways that no trait names, so the normal distribution says only how much wider one
interval is than another. Its middle half is widened by as much as it takes for nine of ten losses of sources that were
left out to lie within: conformalized quantile regression (Romano et al., 2019), with folds by source, and one vote for
each source, model and GPU.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cache, lru_cache
from pathlib import Path
from statistics import NormalDist
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

_FILE: Final = Path(__file__).with_name("calibration.json")
MEAN: Final = -3.0  #: of z over all systems before any is seen: about 5 % lost on 8 GPUs
_QUARTILE: Final = NormalDist().inv_cdf(0.75)
INSIDE: Final = 0.9  #: of all cases lie within an interval
_LEAST_SIZE: Final = 60e6  #: parameters of a middling model, the middle of the scale of sizes

Matrix = NDArray[np.float64]
LeftOut = Literal["subject", "source"]


@dataclass(frozen=True, slots=True)
class Traits:
    """What of a system and a training is known to say something about what is lost. An empty word: not known."""

    source: str
    framework: str
    unit: str
    precision: str  #: half, tf32 or fp32
    gpu: str
    model: str
    run: str  #: rows of one group have the same
    parameters: float | None
    rate: float  #: throughput of one GPU
    accumulation: float
    ranks: int
    nodes: int
    base_ranks: int
    base_nodes: int
    simulated: float  #: loss that the simulator explains
    loss: float | None = None  #: measured

    @property
    def subject(self) -> tuple[str, str, str]:
        """What rows that are nearly alike have in common."""
        return (self.source, self.model, self.gpu)


@dataclass(frozen=True, slots=True)
class Constants:
    """Chosen by benchmarks/calibrate.py near these guesses; mostly variances.

    The guesses, like the form of the model, were settled while looking at the table that it is calibrated on.
    """

    p: float = 1.0  #: how soon the loss within a node is complete; 1: as a ring's (g - 1) / g
    q: float = 0.05  #: of each doubling of nodes, as a part of that within a node
    c: float = 0.007  #: below which losses are alike
    noise: float = 0.05
    measuring: float = 0.01  #: standard error of a published throughput, as a part of a tenth
    everything: float = 0.3
    source: float = 0.5
    unit: float = 0.5
    unit_and_precision: float = 0.1
    framework_and_precision: float = 0.2
    words: float = 0.3
    model: float = 0.4
    model_gpu_precision: float = 0.1
    run: float = 0.1
    accumulation: float = 0.05
    size: float = 0.5
    like_size: float = 0.2
    model_and_ranks: float = 0.01
    gpu: float = 0.05
    beyond_anchored: float = 0.0  #: what intervals are widened by where a row of the run with several GPUs is known
    fixed_share: float = 0.1  #: what of a pass does not shrink with the batch, over what does
    fixed_share_least: float = 0.0  #: 19 of 20 devices have more
    fixed_share_most: float = 0.4  #: 19 of 20 devices have less


@dataclass(frozen=True, slots=True)
class Loss:
    """A predicted loss y, and where it lies in nine cases of ten."""

    median: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class ScalingLoss:
    """The model, with the rows that it knows."""

    constants: Constants
    known: tuple[Traits, ...]
    date: str = ""
    origin: str = ""

    def predict(self, asked: Sequence[Traits], also: Sequence[Traits] = ()) -> list[Loss]:
        """The loss of each of ``asked``, where ``also`` are measured, too.

        Costs the solution of a linear system of as many equations as rows are known; once for each source in it, too,
        if ``also`` is empty.
        """
        beyond = self.constants.beyond_anchored if also else _beyond(self)
        losses = self._normal(asked, also)
        return [Loss(one.median, one.low - beyond, one.high + beyond) for one in losses]

    def _normal(self, asked: Sequence[Traits], also: Sequence[Traits] = ()) -> list[Loss]:
        """As `predict`, with intervals that hold half of the normal distribution."""
        known, c = [*self.known, *also], self.constants
        k = _covariance(c, asked, known)
        z, noise = observed(c, known)
        # Columns: what is expected, and what is still open.
        factor = np.linalg.cholesky(_covariance(c, known, known) + np.diag(noise))
        weights = np.linalg.solve(factor, np.column_stack([z - MEAN, k.T]))
        mean = MEAN + weights[:, 1:].T @ weights[:, 0]
        own = np.array([_covariance(c, [one], [one])[0, 0] for one in asked])
        spread = np.sqrt(np.maximum(own - (weights[:, 1:] ** 2).sum(0), 1e-9) + c.noise)
        losses = []
        for one, middle, sd in zip(asked, mean, spread, strict=True):
            grown = growth(c, one)
            low, median, high = (
                one.simulated + (math.exp(middle + sign * _QUARTILE * sd) - c.c) * grown for sign in (-1, 0, 1)
            )
            losses.append(Loss(median, low, high))
        return losses

    def without(self, trait: LeftOut, value: object) -> ScalingLoss:
        """The model that has not seen the rows with this ``value`` of ``trait``; its constants stay."""
        return replace(self, known=tuple(row for row in self.known if getattr(row, trait) != value))

    def as_json(self) -> str:
        """As `read` takes it."""
        held = {
            "date": self.date,
            "origin": self.origin,
            "constants": asdict(self.constants),
            "columns": [field.name for field in fields(Traits)],
            "rows": [list(asdict(row).values()) for row in self.known],
        }
        rows = held.pop("rows")
        head = json.dumps(held, indent=1)[:-2]
        return head + ',\n "rows": [\n  ' + ",\n  ".join(map(json.dumps, rows)) + "\n ]\n}\n"

    @classmethod
    def read(cls, text: str) -> ScalingLoss:
        """From what `as_json` wrote."""
        held: dict[str, Any] = json.loads(text)
        rows = (Traits(**dict(zip(held["columns"], row, strict=True))) for row in held["rows"])
        return cls(Constants(**held["constants"]), tuple(rows), held["date"], held["origin"])


@lru_cache(maxsize=128)
def _beyond(model: ScalingLoss) -> float:
    """By how much losses lie outside of the intervals of a model that has not seen their source, in nine of ten."""
    scores, votes = [], []
    many = Counter(row.subject for row in model.known)
    for source in dict.fromkeys(row.source for row in model.known):
        asked = [row for row in model.known if row.source == source]
        unseen = model.without("source", source)
        if unseen.known:
            for row, found in zip(asked, unseen._normal(asked), strict=True):
                loss = row.loss or 0.0
                scores.append(max(found.low - loss, loss - found.high, 0.0))
                votes.append(1 / many[row.subject])
    return weighted_quantile(scores, votes, INSIDE) if scores else 0.0


def weighted_quantile(values: Sequence[float], weights: Sequence[float], part: float) -> float:
    """The value below which ``part`` of the weights lies, between the middles of two of them in proportion."""
    order = np.argsort(values)
    ordered, mass = np.asarray(values)[order], np.asarray(weights)[order]
    return float(np.interp(part, (np.cumsum(mass) - mass / 2) / mass.sum(), ordered))


@cache
def shipped_loss() -> ScalingLoss:
    """The one that comes with the package."""
    return ScalingLoss.read(_FILE.read_text(encoding="utf-8"))


def growth(c: Constants, one: Traits) -> float:
    """G(n) - G(base): how much of the loss within a node comes with these GPUs."""

    def shape(ranks: int, nodes: int) -> float:
        within = (1 - math.pow(ranks / nodes, -c.p)) / (1 - math.pow(8, -c.p))
        return within + c.q * math.log2(nodes)

    return max(shape(one.ranks, one.nodes) - shape(one.base_ranks, one.base_nodes), 0.02)


def observed(c: Constants, rows: Sequence[Traits]) -> tuple[Matrix, Matrix]:
    """Of each row z, and the variance with which it was measured."""
    grown = np.array([growth(c, row) for row in rows])
    loss = np.array([max((row.loss or 0.0) - row.simulated, 0.0) for row in rows])
    a = loss / grown
    return np.log(a + c.c), c.noise + (0.1 * c.measuring / np.maximum(grown, 0.05) / (a + c.c)) ** 2


def _covariance(c: Constants, left: Sequence[Traits], right: Sequence[Traits]) -> Matrix:
    parts = in_common(left, right)
    total = np.zeros((len(left), len(right)))
    for name, part in parts.items():
        total += getattr(c, name) * part
    return total


def in_common(left: Sequence[Traits], right: Sequence[Traits]) -> dict[str, Matrix]:
    """What each pair of rows has in common, by the constant that is its variance."""

    def same(trait: str) -> Matrix:
        numbers: dict[str, float] = {"": math.nan}  # what is not known is like nothing
        ours, theirs = (
            np.array([numbers.setdefault(getattr(row, trait), float(len(numbers))) for row in rows])
            for rows in (left, right)
        )
        alike: Matrix = (ours[:, None] == theirs[None]).astype(np.float64)
        return alike

    def of_both(value: Callable[[Traits], float]) -> tuple[Matrix, Matrix]:
        return np.array([value(row) for row in left]), np.array([value(row) for row in right])

    def apart(value: Callable[[Traits], float]) -> Matrix:
        ours, theirs = of_both(value)
        return (ours[:, None] - theirs[None]) ** 2

    def log_rate(row: Traits) -> float:
        return math.log(row.rate)

    precision, model, unit = same("precision"), same("model"), same("unit")
    return {
        "everything": np.ones((len(left), len(right))),
        "source": same("source"),
        "unit": unit,
        "unit_and_precision": unit * precision,
        "framework_and_precision": same("framework") * precision,
        "words": _alike([row.model for row in left], [row.model for row in right]),
        "model": model * np.exp(-2 * apart(log_rate)),
        "model_gpu_precision": model * same("gpu") * precision,
        "run": same("run"),
        "accumulation": np.outer(*of_both(lambda row: math.log2(max(row.accumulation, 1)))),
        "size": np.outer(*of_both(_size)),
        "like_size": np.exp(-apart(_size)),
        "model_and_ranks": np.outer(*of_both(lambda row: math.log2(row.ranks) - 3)) * model,
        "gpu": same("gpu"),
    }


def _size(row: Traits) -> float:
    return math.log((row.parameters or _LEAST_SIZE) / _LEAST_SIZE)


def _alike(left: Sequence[str], right: Sequence[str]) -> Matrix:
    """The part of the words of two models' names that both have."""
    names = {name: _words(name) for name in {*left, *right}}
    found = {}
    for one in set(left):
        for other in set(right):
            ours, theirs = names[one], names[other]
            found[one, other] = len(ours & theirs) / max(1, len(ours | theirs))
    return np.array([[found[one, other] for other in right] for one in left], dtype=np.float64)


def _words(name: str) -> frozenset[str]:
    return frozenset(word for word in re.split(r"[^a-z]+", name.lower()) if len(word) > 2)
