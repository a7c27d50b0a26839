"""Learning curves: the losses that a trial has reported, as stopping rules compare them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from lockstep.tune.record.trial import Trial


def losses_of(trial: Trial) -> tuple[float, ...]:
    """The losses in the order of the reports; one that is not a number is the worst there is."""
    return tuple(math.inf if math.isnan(report.loss) else report.loss for report in trial.reports)


def reached(trials: Iterable[Trial], budget: int) -> list[tuple[float, ...]]:
    """The first ``budget`` losses of each trial that has reported so often; failed ones are left out."""
    curves = (losses_of(trial) for trial in trials if trial.state != "failed")
    return [curve[:budget] for curve in curves if len(curve) >= budget]


def finished(trials: Iterable[Trial]) -> list[Trial]:
    """Those that were trained to their end with a loss that is a number, best first: by loss, then by number."""
    whole = (trial for trial in trials if trial.state == "done" or trial.converged)
    done = (trial for trial in whole if trial.losses and not math.isnan(trial.losses[0]))
    return sorted(done, key=lambda trial: (trial.losses[0], trial.number))


def median(values: Sequence[float]) -> float:
    """The middle of the sorted values; of two middles the greater, so that it is a value that somebody has."""
    return sorted(values)[len(values) // 2]
