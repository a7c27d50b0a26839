"""The protocol of stopping rules."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from lockstep.tune.record.trial import Trial


class StoppingRule(Protocol):
    """Says after each report of a trial whether it goes on. Pure: equal arguments, equal answer.

    The leader of the trial's worker asks once for each report, and what it answers holds for all ranks of the trial.
    A rule is frozen and keeps nothing between questions, so that a worker that begins anew decides alike.
    """

    def stops(self, trial: Trial, others: Sequence[Trial]) -> str:
        """Why ``trial`` should end now, in one line; ``""`` if it goes on.

        Args:
            trial: runs, and has made its newest report.
            others: what is known of the other trials of the search, in any order: running, done, stopped and failed
                ones. The answer does not depend on their order.
        """
        ...
