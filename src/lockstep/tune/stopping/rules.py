"""Rules that compare losses as they are, several rules at once, and all rules as words: ``patience:5 or median``."""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Final, Protocol

from lockstep.errors import SettingError
from lockstep.formatting import plural
from lockstep.option_words import split_options
from lockstep.settings import read_options
from lockstep.tune.record.trial import Trial
from lockstep.tune.stopping.curves import last, losses_of, mean, values_at
from lockstep.tune.stopping.surrogates import DynamicSurrogate, StaticSurrogate


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
        averages = values_at(others, budget, mean)
        # Of two middles the greater, so that it is a value that somebody has.
        if len(averages) < self.trials or min(losses) <= (median := averages[len(averages) // 2]):
            return ""
        return (
            f"best loss {min(losses):.6g} after {plural(budget, 'report')} is above {median:.6g}, the median "
            f"of {plural(len(averages), 'trial')} by then"
        )


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
        rivals = values_at(others, len(losses), last)
        here = len(rivals) + 1
        better = bisect.bisect_left(rivals, losses[-1])
        if here < self.eta or better < here // self.eta:
            return ""
        return (
            f"loss {losses[-1]:.6g} is number {better + 1} of {here} after {plural(len(losses), 'report')}; "
            f"{here // self.eta} go on"
        )


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


#: The rules that have a word; their options are their fields.
STOPPING_WORDS: Final[Mapping[str, type[Any]]] = {
    "patience": Patience,
    "median": Median,
    "asha": SuccessiveHalving,
    "static": StaticSurrogate,
    "dynamic": DynamicSurrogate,
}
_OPTIONS: Final = {name: tuple(field.name for field in fields(rule)) for name, rule in STOPPING_WORDS.items()}


def make_stopping(spec: str | StoppingRule | None) -> StoppingRule:
    """The rule that ``spec`` names; a rule comes back as it is, and ``None``, ``""`` and ``"none"`` stop nothing.

    Words are ``name:option=value,option=value``; a value alone is that of the rule's first option: ``patience:5``.
    Several rules are joined by ``or``, and the first that stops a trial ends it.

    Raises:
        SettingError: if there is no such rule or option (with the nearest one), or the value does not fit.
    """
    if spec is None:
        return NeverStops()
    if not isinstance(spec, str):
        if not callable(getattr(spec, "stops", None)):
            raise SettingError(
                f"stopping={spec!r}: give words such as 'asha:eta=3' or an object with stops(trial, others)"
            )
        return spec
    if spec.strip() in ("", "none"):
        return NeverStops()
    rules = [_rule_of(word.strip()) for word in spec.split(" or ")]
    return rules[0] if len(rules) == 1 else AnyOf(tuple(rules))


def _rule_of(word: str) -> StoppingRule:
    name, options = split_options("stopping", _with_first_option(word), _OPTIONS)
    rule: StoppingRule = read_options(f"stopping {name}", STOPPING_WORDS[name], options)
    return rule


def _with_first_option(word: str) -> str:
    """``word`` with the name of the first option, which may be left out: ``patience:5`` is ``patience:reports=5``."""
    name, _, rest = word.partition(":")
    if name not in _OPTIONS or not rest or "=" in rest.partition(",")[0]:
        return word
    return f"{name}:{_OPTIONS[name][0]}={rest}"


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
