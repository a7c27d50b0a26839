"""The settings of a search: those of the script, and those of the command line, which override them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Final, Self

from lockstep.errors import SettingError
from lockstep.tune.search import AlgorithmFactory, Islands
from lockstep.tune.stopping import StoppingRule

#: Settings that must stay the same when a search is resumed; all others may change.
FIXED: Final = ("seed", "objectives")


@dataclass(frozen=True, slots=True)
class SearchSettings:
    """The settings of one search; see `lockstep.tune` for what each means.

    Raises:
        SettingError: for a value that cannot be used.
    """

    trials: int = 100
    seed: int = 0
    objectives: int = 1
    algorithm: str | AlgorithmFactory | None = None
    islands: Islands = field(default_factory=Islands)
    stopping: str | StoppingRule | None = None
    retries: int = 1
    keep_trials: int | None = 5
    inherit_weights: bool = False
    time_limit_s: float | None = None
    patience: int | None = None
    min_improvement: float = 0.0
    repeats: int = 0
    repeat_best: int = 5
    enqueue: tuple[Mapping[str, object], ...] = ()
    warm_start: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or value < least):
                raise SettingError(f"{name}={value!r}: give a whole number, at least {least}")
        if not 0 <= self.min_improvement < math.inf:
            raise SettingError(f"min_improvement={self.min_improvement}: give a part of the loss, such as 0.01")
        for name in ("patience", "repeats"):
            if (value := getattr(self, name)) and self.objectives > 1:
                raise SettingError(
                    f"{name}={value} asks which loss is the best, and the objective has {self.objectives}; leave it out"
                )
        if self.repeats and self.inherit_weights:
            raise SettingError(
                f"repeats={self.repeats}: what began with weights of another trial cannot be evaluated again; leave "
                "out repeats or inherit_weights"
            )
        if len(self.enqueue) > self.trials:
            raise SettingError(f"enqueue gives {len(self.enqueue)} trials, and the search has trials={self.trials}")
        if self.time_limit_s is not None and not 0 < self.time_limit_s < math.inf:
            raise SettingError(f"time_limit_s={self.time_limit_s}: give seconds, more than 0")

    def with_options(self, options: Mapping[str, Any]) -> Self:
        """These settings with ``options`` of the command line in place of theirs."""
        given = dict(options)
        if "islands" in given:
            given["islands"] = Islands(
                **{one.name: getattr(self.islands, one.name) for one in fields(Islands) if one.name in _OF_ISLANDS},
                count=given["islands"],
            )
        if "warm_start" in given:
            given["warm_start"] = tuple(given["warm_start"])
        return type(self)(**{**{one.name: getattr(self, one.name) for one in fields(self)}, **given})

    def to_json(self) -> dict[str, Any]:
        """The settings as JSON; an algorithm or a rule that is an object becomes its ``repr``.

        What is enqueued or known from other searches is left out: it has files of its own.
        """
        apart = ("enqueue", "warm_start")
        plain = {one.name: getattr(self, one.name) for one in fields(self) if one.name not in apart}
        for name in ("algorithm", "stopping"):
            value = plain[name]
            plain[name] = value if value is None or isinstance(value, str) else repr(value)
        return {**plain, "islands": asdict(self.islands)}


#: Of each whole number, the least that can be used.
_LEAST = {
    "trials": 1,
    "seed": 0,
    "objectives": 1,
    "retries": 0,
    "keep_trials": 0,
    "patience": 1,
    "repeats": 0,
    "repeat_best": 1,
}
#: Fields of `Islands` that do not depend on the number of islands.
_OF_ISLANDS = ("migration", "pollination", "emigrants", "immigrants")
