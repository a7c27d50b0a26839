"""Asynchronous successive halving."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lockstep.errors import SettingError
from lockstep.formatting import plural
from lockstep.tune.record.trial import Trial
from lockstep.tune.stopping.curves import losses_of, reached


@dataclass(frozen=True, slots=True)
class SuccessiveHalving:
    """Stops a trial at a rung unless it is among the best ``1/eta`` of those that have come to that rung so far.

    ASHA of Li et al., "A System for Massively Parallel Hyperparameter Tuning" (MLSys 2020), in its form without
    paused trials: nobody waits, and a trial that goes on is not called back when better ones come. Rungs are after
    ``min``, ``min * eta``, ``min * eta**2``... reports. Everybody at a rung is compared by the loss that was reported
    there, those that have gone further and those that were stopped alike: budgets are equal. While fewer than
    ``eta`` trials have come to a rung, all go on. The best one at a rung is never stopped there.

    Args:
        eta: how many come to a rung for each that goes on.
        min: reports until the first rung.
    """

    eta: int = 3
    min: int = 1

    def __post_init__(self) -> None:
        if self.eta < 2 or self.min < 1:
            raise SettingError(f"asha:eta={self.eta},min={self.min}: give eta from 2 and min from 1")

    def is_rung(self, budget: int) -> bool:
        """Whether trials are compared after so many reports."""
        rung = self.min
        while rung < budget:
            rung *= self.eta
        return rung == budget

    def stops(self, trial: Trial, others: Sequence[Trial]) -> str:
        """That ``trial`` is not among the best part of those that came to its rung; "" if it is, and between rungs."""
        losses = losses_of(trial)
        if not losses or not self.is_rung(len(losses)):
            return ""
        rivals = [curve[-1] for curve in reached(others, len(losses))]
        here = len(rivals) + 1
        better = sum(rival < losses[-1] for rival in rivals)
        if here < self.eta or better < here // self.eta:
            return ""
        return (
            f"loss {losses[-1]:.6g} is number {better + 1} of {here} after {plural(len(losses), 'report')}; "
            f"{here // self.eta} go on"
        )
