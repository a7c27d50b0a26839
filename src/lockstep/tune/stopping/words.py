"""Stopping rules as words: ``asha:eta=3,min=1``, ``patience:5 or median:warmup=5``."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, Final

from lockstep.errors import SettingError
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
    name, _, rest = word.partition(":")
    if name not in STOPPING_WORDS:
        near = difflib.get_close_matches(name, STOPPING_WORDS, n=1)
        raise SettingError(
            f"stopping={word!r}: {f'did you mean {near[0]}?' if near else ''} give one of "
            f"{', '.join(STOPPING_WORDS)}, several joined by ' or '"
        )
    rule = STOPPING_WORDS[name]
    kinds: dict[str, Any] = {field.name: type(field.default) for field in fields(rule)}
    given: dict[str, float] = {}
    for number, part in enumerate(rest.split(",") if rest else ()):
        option, _, value = part.rpartition("=")
        option = option or (next(iter(kinds)) if number == 0 else "")
        if option not in kinds or option in given:
            raise SettingError(f"stopping={word!r}: {name} has the options {', '.join(kinds)}, each once")
        try:
            given[option] = kinds[option](value)
        except ValueError:
            raise SettingError(
                f"stopping={word!r}: {option} is {'a whole number' if kinds[option] is int else 'a number'}"
            ) from None
    made: StoppingRule = rule(**given)
    return made
