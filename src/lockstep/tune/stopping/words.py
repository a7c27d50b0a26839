"""Stopping rules as words: ``asha:eta=3,min=1``, ``patience:5 or median:warmup=5``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, Final

from lockstep.errors import SettingError
from lockstep.option_words import split_options
from lockstep.settings import read_options
from lockstep.tune.stopping.combined import AnyOf, NeverStops
from lockstep.tune.stopping.dynamic_surrogate import DynamicSurrogate
from lockstep.tune.stopping.median_rule import Median
from lockstep.tune.stopping.patience import Patience
from lockstep.tune.stopping.protocol import StoppingRule
from lockstep.tune.stopping.static_surrogate import StaticSurrogate
from lockstep.tune.stopping.successive_halving import SuccessiveHalving

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
