"""Rules that stop what will hardly become the best, by the curve of the best trial or by a forecast from all curves.

The forecast is a Gaussian process over learning curves, with as many numbers as there are reports.

Swersky, Snoek and Adams, "Freeze-Thaw Bayesian Optimization" (arXiv 1406.3896, 2014), sections 3.1 and 3.2: a curve is
its asymptote plus an exponential decay,

    y_n ~ N(f_n 1, K_t),    k_t(t, t') = a (b / (t + t' + b)) + noise [t = t'],    f ~ N(m 1, K_x)

where t counts reports. The mixture over decay rates of equation (6) has its exponent at one. Only matrices of the size
of one curve, and of the number of curves, are inverted (equations 13 to 19).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from lockstep.errors import SettingError
from lockstep.formatting import plural
from lockstep.tune.record.trial import Trial
from lockstep.tune.stopping.curves import best_finished, finished, losses_of

#: Beyond these the forecast takes longer than it can gain.
_CURVES: Final = 40
_LOSSES: Final = 30
Array = NDArray[np.float64]

_JITTER: Final = 1e-8
_LENGTHS: Final = (0.3, 1.0, 3.0)  #: of the kernel over points, in gene ranges
_DECAYS: Final = (0.3, 1.0, 3.0)  #: of the kernel over reports, in parts of the horizon
_NOISES: Final = (1e-4, 1e-2)  #: variances, where the final losses have variance 1


@dataclass(frozen=True, slots=True)
class DynamicSurrogate:
    """Stops a trial that would end better than the best one with less than some probability.

    The forecast is that of `forecast`, from the trial's own curve and those of others near to it in
    the search space. The end is as many reports as the longest trial has made that was trained to its end. A forecast
    takes about 20 ms of one CPU.

    Args:
        probability: of becoming the best one, below which a trial is stopped.
        warmup: reports at whose end nothing is stopped yet.
        trials: how many must have been trained to their end before anything is stopped.
    """

    probability: float = 0.05
    warmup: int = 2
    trials: int = 4

    def __post_init__(self) -> None:
        if not 0 < self.probability < 1 or self.warmup < 1 or self.trials < 2:
            raise SettingError(
                f"dynamic:probability={self.probability},warmup={self.warmup},trials={self.trials}: give a probability "
                "between 0 and 1, warmup from 1 and trials from 2"
            )

    def stops(self, trial: Trial, others: Sequence[Trial]) -> str:
        """That the curve of ``trial`` will hardly end below the best of ``others``; "" if it may, or few are known."""
        ranked = [other for other in finished(others) if other.reports]
        reports = len(trial.reports)
        if len(ranked) < self.trials or reports <= self.warmup:
            return ""
        horizon = max(len(other.reports) for other in ranked)
        known = [curve for curve in map(_curve, _nearest(trial, others)) if curve.losses]
        own = _curve(trial)
        if reports >= horizon or not own.losses:
            return ""
        # In the numbers that the curves have: of reports, which an objective may return something else than.
        best = min(min(losses_of(other)) for other in ranked)
        width = max(1, math.ceil(horizon / _LOSSES))  # reports that are taken as one, where there are many
        thinned = [Curve(curve.point, curve.losses[width - 1 :: width]) for curve in (own, *known)]
        kept = [curve for curve in thinned if curve.losses]
        if not thinned[0].losses:
            return ""
        chance = forecast(kept, 0, math.ceil(horizon / width)).below(best)
        if chance >= self.probability:
            return ""
        return f"would end below {best:.6g} with probability {chance:.2g} only, seen after {plural(reports, 'report')}"


def _nearest(trial: Trial, others: Sequence[Trial]) -> list[Trial]:
    """The others whose points are nearest, at most as many as a forecast takes."""

    def distance(other: Trial) -> tuple[float, int]:
        apart = sum(min(abs(a - b), 1.0) for a, b in zip(trial.point, other.point, strict=True))
        return apart, other.number

    told = (other for other in others if other.reports and other.state != "failed")
    return sorted(told, key=distance)[: _CURVES - 1]


def _curve(trial: Trial) -> Curve:
    """Until its first loss that is not finite."""
    losses = losses_of(trial)
    end = next((number for number, loss in enumerate(losses) if not math.isfinite(loss)), len(losses))
    return Curve(trial.point, losses[:end])


@dataclass(frozen=True, slots=True)
class StaticSurrogate:
    """Stops a trial whose loss is worse by a margin than that of the best trial after as many reports.

    The rule of Propulate's ``StaticSurrogate``: stop when ``loss * margin > best``. For positive losses it is just
    that. It is written as a distance, ``loss - best > (1 / margin - 1) * abs(best)``, so that it holds for negative
    losses, too: a trial as good as the best one is never stopped. The measure is the trial with the lowest final loss
    of those trained to their end; a stopped one is never the measure.

    Args:
        margin: above 0 and up to 1; 1 stops whatever is worse than the best one.
        warmup: reports at whose end nothing is stopped yet.
    """

    margin: float = 0.8
    warmup: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.margin <= 1 or self.warmup < 0:
            raise SettingError(
                f"static:margin={self.margin},warmup={self.warmup}: give a margin above 0, up to 1, and warmup from 0"
            )

    def stops(self, trial: Trial, others: Sequence[Trial]) -> str:
        """That ``trial`` is behind what the best of ``others`` had after as many reports; "" if within the margin."""
        losses = losses_of(trial)
        best = best_finished(others)
        if best is None or not losses or len(losses) <= self.warmup:
            return ""
        measure = losses_of(best)[len(losses) - 1 : len(losses)]
        if not measure or not math.isfinite(measure[0]):
            return ""
        if losses[-1] - measure[0] <= (1 / self.margin - 1) * abs(measure[0]):
            return ""
        return (
            f"loss {losses[-1]:.6g} after {plural(len(losses), 'report')}; the best trial, number {best.number}, "
            f"had {measure[0]:.6g}, and the margin is {self.margin:g}"
        )


@dataclass(frozen=True, slots=True)
class Curve:
    """What is known of one trial."""

    point: tuple[float, ...]
    losses: tuple[float, ...]  #: after 1, 2, 3... reports; finite


@dataclass(frozen=True, slots=True)
class Forecast:
    """The normal distribution of a loss that was not reported yet."""

    mean: float
    deviation: float

    def below(self, loss: float) -> float:
        """The probability of a loss below this one."""
        return 0.5 * math.erfc((self.mean - loss) / (self.deviation * math.sqrt(2)))


def forecast(curves: Sequence[Curve], wanted: int, horizon: int) -> Forecast:
    """The loss of curve number ``wanted`` after ``horizon`` reports, given all that the curves hold.

    The kernel over points is ``exp(-d / length)``, where d adds up, over the genes, their distance or 1 where that is
    greater: two values of a choice are as far from each other as the two ends of a range. Length, decay and noise are
    those of 18 combinations with the greatest marginal likelihood. O(n t^3 + n^3) for n curves of t losses.
    """
    values = np.concatenate([np.asarray(curve.losses) for curve in curves])
    # The scale is that of the ends of curves: the beginnings of some are orders of magnitude above.
    ends = np.array([min(curve.losses) for curve in curves])
    middle, scale = float(np.median(ends)), float(np.std(ends)) or float(np.std(values)) or 1.0
    # A loss of a hundred deviations says no more than one of ten, and would drown the others.
    scaled = [np.clip((np.asarray(curve.losses) - middle) / scale, -10, 10) for curve in curves]
    apart = _distances([curve.point for curve in curves])
    fits = [
        _Fit.of(scaled, np.exp(-apart / length), decay * horizon, noise)
        for length in _LENGTHS
        for decay in _DECAYS
        for noise in _NOISES
    ]
    best = max(fits, key=lambda fit: fit.log_likelihood)
    mean, variance = best.predict(scaled[wanted], wanted, horizon)
    return Forecast(middle + scale * mean, scale * math.sqrt(variance))


def _distances(points: Sequence[tuple[float, ...]]) -> Array:
    genes = np.asarray(points, dtype=np.float64).reshape(len(points), -1)
    apart: Array = np.minimum(np.abs(genes[:, None, :] - genes[None, :, :]), 1.0).sum(axis=2)
    return apart


@dataclass(frozen=True, slots=True)
class _Fit:
    """The posterior of the asymptotes under one choice of the kernel's numbers."""

    decay: float
    amplitude: float
    noise: float
    asymptotes: Array  # their means, shape (n,)
    covariance: Array  # shape (n, n)
    log_likelihood: float

    @classmethod
    def of(cls, curves: Sequence[Array], over_points: Array, decay: float, noise: float) -> _Fit:
        # The decay must carry a curve from its beginning to its end.
        amplitude = max(float(np.mean([np.ptp(curve) ** 2 for curve in curves])), 1.0)
        weights, gains, fits, volumes = [], [], 0.0, 0.0
        for curve in curves:
            over_reports = _decay_kernel(len(curve), decay, amplitude, noise)
            solved = np.linalg.solve(over_reports, np.stack([np.ones_like(curve), curve], axis=1))
            weights.append(float(solved[:, 0].sum()))
            gains.append(float(solved[:, 1].sum()))
            fits += float(curve @ solved[:, 1])
            volumes += float(np.linalg.slogdet(over_reports)[1])
        gain = np.array(gains)
        prior = over_points + _JITTER * np.eye(len(curves))
        # (K_x^-1 + W)^-1 without the inverse of K_x, which is nearly singular where points lie close together.
        mixed = np.eye(len(curves)) + np.array(weights)[:, None] * prior
        covariance = prior @ np.linalg.inv(mixed)
        evidence = -0.5 * (fits - float(gain @ covariance @ gain) + float(np.linalg.slogdet(mixed)[1]) + volumes)
        return cls(decay, amplitude, noise, covariance @ gain, covariance, evidence)

    def predict(self, curve: Array, number: int, horizon: int) -> tuple[float, float]:
        """Mean and variance, in scaled losses, of the observed loss of this curve at the horizon."""
        times = np.arange(1, len(curve) + 1, dtype=np.float64)
        across = self.amplitude * self.decay / (times + horizon + self.decay)
        over_reports = _decay_kernel(len(curve), self.decay, self.amplitude, self.noise)
        solved = np.linalg.solve(over_reports, across)
        share = 1.0 - float(solved.sum())  # of the asymptote in what is predicted
        mean = share * float(self.asymptotes[number]) + float(solved @ curve)
        alone = self.amplitude * self.decay / (2 * horizon + self.decay) + self.noise
        variance = alone - float(across @ solved) + share**2 * float(self.covariance[number, number])
        return mean, max(variance, self.noise)


def _decay_kernel(reports: int, decay: float, amplitude: float, noise: float) -> Array:
    times = np.arange(1, reports + 1, dtype=np.float64)
    kernel: Array = amplitude * decay / (times[:, None] + times[None, :] + decay) + noise * np.eye(reports)
    return kernel
