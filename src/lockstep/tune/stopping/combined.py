"""Several rules at once, and none."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lockstep.tune.record.trial import Trial
from lockstep.tune.stopping.protocol import StoppingRule


@dataclass(frozen=True, slots=True)
class AnyOf:
    """Stops a trial as soon as one of the rules does; the first that does says why."""

    rules: tuple[StoppingRule, ...]

    def stops(self, trial: Trial, others: Sequence[Trial]) -> str:
        """The reason of the first rule that stops ``trial``; "" if none does."""
        return next((reason for rule in self.rules if (reason := rule.stops(trial, others))), "")


@dataclass(frozen=True, slots=True)
class NeverStops:
    """Lets every trial come to its end."""

    def stops(self, trial: Trial, others: Sequence[Trial]) -> str:
        """Never a reason."""
        return ""
