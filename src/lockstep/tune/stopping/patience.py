"""Patience: a trial ends once its loss has not improved for some reports."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lockstep.errors import SettingError
from lockstep.formatting import plural
from lockstep.tune.record.trial import Trial
from lockstep.tune.stopping.curves import losses_of


@dataclass(frozen=True, slots=True)
class Patience:
    """Stops a trial whose last ``reports`` losses all failed to be lower by ``min_delta`` than the best one before.

    Looks at no other trial.
    """

    reports: int = 5
    min_delta: float = 0.0

    def __post_init__(self) -> None:
        if self.reports < 1 or not self.min_delta >= 0:
            raise SettingError(
                f"patience:reports={self.reports},min_delta={self.min_delta}: give reports from 1 and min_delta from 0"
            )

    def stops(self, trial: Trial, others: Sequence[Trial]) -> str:
        """That none of the newest losses of ``trial`` was lower by ``min_delta``; "" if one was."""
        losses = losses_of(trial)
        if not losses:
            return ""
        best, waited = losses[0], 0
        for loss in losses[1:]:
            improves = loss < best - self.min_delta
            best, waited = (loss, 0) if improves else (best, waited + 1)
        if waited < self.reports:
            return ""
        return f"no loss below {best:.6g} in the last {plural(waited, 'report')}"
