"""Rules that stop what will hardly become the best, by the curve of the best trial or by a forecast from all curves."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from lockstep.errors import SettingError
from lockstep.formatting import plural
from lockstep.tune.record.trial import Trial
from lockstep.tune.stopping.curves import best_finished, finished, losses_of
from lockstep.tune.stopping.gaussian_process import Curve, forecast

#: Beyond these the forecast takes longer than it can gain.
_CURVES: Final = 40
_LOSSES: Final = 30


@dataclass(frozen=True, slots=True)
class DynamicSurrogate:
    """Stops a trial that would end better than the best one with less than some probability.

    The forecast is that of `gaussian_process.forecast`, from the trial's own curve and those of others near to it in
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
