"""The median stopping rule."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lockstep.errors import SettingError
from lockstep.formatting import plural
from lockstep.tune.record.trial import Trial
from lockstep.tune.stopping.curves import losses_of, median, reached


@dataclass(frozen=True, slots=True)
class Median:
    """Stops a trial whose best loss so far is worse than what the middle one of the others had on average by then.

    The rule of Golovin et al., "Google Vizier: A Service for Black-Box Optimization" (KDD 2017), section 3.2.1, with
    one difference: trials that were stopped, or still run, count for the reports that they have made. All are
    compared after the same number of reports.

    Args:
        warmup: reports at whose end nothing is stopped yet.
        trials: others that must have come as far before anything is stopped.
    """

    warmup: int = 5
    trials: int = 5

    def __post_init__(self) -> None:
        if self.warmup < 0 or self.trials < 1:
            raise SettingError(
                f"median:warmup={self.warmup},trials={self.trials}: give warmup from 0 and trials from 1"
            )

    def stops(self, trial: Trial, others: Sequence[Trial]) -> str:
        """That the best loss of ``trial`` is above the median of ``others`` after as many reports; "" if it is not."""
        losses = losses_of(trial)
        budget = len(losses)
        if budget <= self.warmup or not losses:
            return ""
        averages = [sum(curve) / budget for curve in reached(others, budget)]
        if len(averages) < self.trials or min(losses) <= median(averages):
            return ""
        return (
            f"best loss {min(losses):.6g} after {plural(budget, 'report')} is above {median(averages):.6g}, the median "
            f"of {plural(len(averages), 'trial')} by then"
        )
