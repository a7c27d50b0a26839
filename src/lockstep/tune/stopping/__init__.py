"""Rules that end a trial early, as pure functions of its reports and those of others, and how stopped trials rank.

words              ``asha:eta=3 or patience:5`` becomes a rule
patience, median_rule, successive_halving, static_surrogate, dynamic_surrogate, combined
equal_budget       the order of stopped and finished trials
"""

from lockstep.tune.stopping.combined import AnyOf, NeverStops
from lockstep.tune.stopping.dynamic_surrogate import DynamicSurrogate
from lockstep.tune.stopping.equal_budget import losses_at_equal_budget, order_at_equal_budget
from lockstep.tune.stopping.median_rule import Median
from lockstep.tune.stopping.patience import Patience
from lockstep.tune.stopping.protocol import StoppingRule
from lockstep.tune.stopping.static_surrogate import StaticSurrogate
from lockstep.tune.stopping.successive_halving import SuccessiveHalving
from lockstep.tune.stopping.words import STOPPING_WORDS, make_stopping

__all__ = [
    "STOPPING_WORDS",
    "AnyOf",
    "DynamicSurrogate",
    "Median",
    "NeverStops",
    "Patience",
    "StaticSurrogate",
    "StoppingRule",
    "SuccessiveHalving",
    "losses_at_equal_budget",
    "make_stopping",
    "order_at_equal_budget",
]
