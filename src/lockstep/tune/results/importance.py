"""How much each parameter of a search matters to its loss, and how sure that is: by Optuna, over resampled trials."""

from __future__ import annotations

import importlib
import importlib.util
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

import numpy as np

from lockstep.tune.record.journal import SearchRecord
from lockstep.tune.results.optuna_study import study_of

if TYPE_CHECKING:  # the package need not be installed
    from optuna.trial import FrozenTrial

#: Of fewer trials not one is the best tenth, whose parameters are compared with those of all.
LEAST: Final = 10
#: Of more, so many are drawn: what they say of the importances changes little.
MOST: Final = 300
#: How often trials are drawn anew, with replacement, and which part of these importances is between the limits.
RESAMPLES, PART = 20, 0.8


@dataclass(frozen=True, slots=True)
class Importance:
    """The part that a parameter has in how good a trial is; those of all parameters add up to 1."""

    name: str
    share: float
    low: float  #: lower limit of what it is when other trials had been drawn
    high: float  #: upper limit


def has_optuna() -> bool:
    """Whether Optuna is installed."""
    return importlib.util.find_spec("optuna") is not None


def importances(record: SearchRecord) -> tuple[Importance, ...]:
    """Of all parameters, the most important first; none of fewer than `LEAST` whole trials, or without Optuna.

    PED-ANOVA (Watanabe et al. 2023, https://arxiv.org/abs/2304.10255) compares where the best tenth of the trials are
    with where all are. The limits hold `PART` of what it says of `RESAMPLES` bootstrap samples. Equal records have
    equal importances. Costs about a second.
    """
    whole = [trial for trial in record.trials if trial.state == "done"]
    if len(whole) < LEAST or not has_optuna():
        return ()
    random = np.random.default_rng(0)
    if len(whole) > MOST:
        whole = [whole[index] for index in sorted(random.choice(len(whole), MOST, replace=False))]
    study = study_of(replace(record, trials=tuple(whole), moves=()))
    create = importlib.import_module("optuna").trial.create_trial
    # Without what else is known of them, which would be copied each time.
    trials = [create(params=one.params, distributions=one.distributions, value=one.values[0]) for one in study.trials]
    found = _evaluated(trials)
    drawn = [
        _evaluated([trials[index] for index in random.integers(len(trials), size=len(trials))])
        for _ in range(RESAMPLES)
    ]
    limits = {
        name: np.quantile([one.get(name, 0.0) for one in drawn], [(1 - PART) / 2, (1 + PART) / 2]) for name in found
    }
    return tuple(
        Importance(name, share, float(limits[name][0]), float(limits[name][1]))
        for name, share in sorted(found.items(), key=lambda item: (-item[1], item[0]))
    )


def _evaluated(trials: Sequence[FrozenTrial]) -> dict[str, float]:
    import optuna
    from optuna.exceptions import ExperimentalWarning

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ExperimentalWarning)  # of the evaluator
        warnings.simplefilter("ignore", UserWarning)  # of the few trials of values that open parameters
        study = optuna.create_study()
        study.add_trials(trials)
        evaluator = optuna.importance.PedAnovaImportanceEvaluator()
        return dict(optuna.importance.get_param_importances(study, evaluator=evaluator))
