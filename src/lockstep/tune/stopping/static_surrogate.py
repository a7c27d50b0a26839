"""Propulate's static surrogate: the curve of the best trial is the measure of all others."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from lockstep.errors import SettingError
from lockstep.formatting import plural
from lockstep.tune.record.trial import Trial
from lockstep.tune.stopping.curves import finished, losses_of


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
        ranked = finished(others)
        if not ranked or not losses or len(losses) <= self.warmup:
            return ""
        measure = losses_of(ranked[0])[len(losses) - 1 : len(losses)]
        if not measure or not math.isfinite(measure[0]):
            return ""
        if losses[-1] - measure[0] <= (1 / self.margin - 1) * abs(measure[0]):
            return ""
        return (
            f"loss {losses[-1]:.6g} after {plural(len(losses), 'report')}; the best trial, number {ranked[0].number}, "
            f"had {measure[0]:.6g}, and the margin is {self.margin:g}"
        )
