"""What a search is told: by the script, and by the command line, which wins."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Final, Self

from lockstep.errors import SettingError
from lockstep.tune.search import AlgorithmFactory, Islands
from lockstep.tune.stopping import StoppingRule

#: Settings that a search keeps when it is resumed; the others may be others then.
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

    def __post_init__(self) -> None:
        for name, least in (("trials", 1), ("seed", 0), ("objectives", 1), ("retries", 0), ("keep_trials", 0)):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or value < least):
                raise SettingError(f"{name}={value!r}: give a whole number, at least {least}")
        if self.time_limit_s is not None and not 0 < self.time_limit_s < math.inf:
            raise SettingError(f"time_limit_s={self.time_limit_s}: give seconds, more than 0")

    def with_options(self, options: Mapping[str, Any]) -> Self:
        """These settings, but for what the command line says."""
        given = dict(options)
        if "islands" in given:
            given["islands"] = Islands(
                **{one.name: getattr(self.islands, one.name) for one in fields(Islands) if one.name in _OF_ISLANDS},
                count=given["islands"],
            )
        return type(self)(**{**{one.name: getattr(self, one.name) for one in fields(self)}, **given})

    def to_json(self) -> dict[str, Any]:
        """The settings in terms of JSON, for people and tables: objects by their names."""
        plain = {one.name: getattr(self, one.name) for one in fields(self)}
        for name in ("algorithm", "stopping"):
            value = plain[name]
            plain[name] = value if value is None or isinstance(value, str) else repr(value)
        return {**plain, "islands": asdict(self.islands)}


#: What of `Islands` does not depend on how many there are.
_OF_ISLANDS = ("migration", "pollination", "emigrants", "immigrants")
