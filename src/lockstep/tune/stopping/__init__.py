"""Rules that end a trial early, as pure functions of its reports and those of others, and how stopped trials rank.

rules          patience, median, successive halving; ``asha:eta=3 or patience:5`` becomes a rule
surrogates     rules that compare a curve with another one, or with a forecast
curves         the losses of a trial; the order of stopped and finished trials at equal budget
"""

from lockstep.tune.stopping.curves import EndedCurves, OtherTrials, order_at_equal_budget
from lockstep.tune.stopping.rules import (
    STOPPING_WORDS,
    AnyOf,
    Median,
    NeverStops,
    Patience,
    StoppingRule,
    SuccessiveHalving,
    make_stopping,
)
from lockstep.tune.stopping.surrogates import DynamicSurrogate, StaticSurrogate

__all__ = [
    "STOPPING_WORDS",
    "AnyOf",
    "DynamicSurrogate",
    "EndedCurves",
    "Median",
    "NeverStops",
    "OtherTrials",
    "Patience",
    "StaticSurrogate",
    "StoppingRule",
    "SuccessiveHalving",
    "make_stopping",
    "order_at_equal_budget",
]
