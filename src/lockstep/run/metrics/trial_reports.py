"""What a training tells of its loss before its end, and that a search ends its trial."""

from __future__ import annotations

from typing import Final

import torch

from lockstep.errors import TrialStopped, UsageError
from lockstep.run.metrics.run_log import RunLog
from lockstep.run.setup.resume import TrainingStart
from lockstep.run.setup.run_context import RunContext
from lockstep.trial_contract import current_trial


class TrialReports:
    """Hands reported losses to the search, on the leader, and its decision to all ranks."""

    def __init__(self, context: RunContext, start: TrainingStart, log: RunLog) -> None:
        self._context: Final = context
        self._start: Final = start
        self._log: Final = log
        trial = current_trial()
        self._before: Final = [] if trial is None else list(trial.reports_of_runs)
        if trial is not None:
            position = context.position  # and not the context, which would outlive the run with all it holds
            trial.reports_of_runs.append(lambda: position.reports)

    def report(self, loss: float | torch.Tensor) -> None:
        """Record ``loss``, and give it to the search of which this run is a trial. Collective.

        Raises:
            TrialStopped: on all ranks, if the search stops the trial.
        """
        value = _number(loss)
        # What stands in a turn before the pass that goes on runs again after a resume.
        if self._start.resumes_within_turn:
            return
        context, position, trial = self._context, self._context.position, current_trial()
        before = position.reports
        position.reports += 1
        self._log.write({"reported": value}, position.progress.step, position.epoch_number)
        if trial is None:
            return
        before += sum(reports() for reports in self._before)
        reason = trial.report(value, before) if context.group.leads else ""
        reason = context.group.broadcast_object(reason, "run.report")
        if reason:
            raise TrialStopped(f"trial {trial.number} is stopped: {reason}")


def _number(loss: object) -> float:
    if isinstance(loss, torch.Tensor) and loss.numel() == 1:
        return float(loss)
    if isinstance(loss, int | float) and not isinstance(loss, bool):
        return float(loss)
    raise UsageError(f"run.report({loss!r}): give one number, such as run.metrics['loss']")
