"""How replicas are kept in step, as the simulator needs to know it: the strategy's words with their defaults."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

from lockstep.errors import SettingError
from lockstep.scale.step_profile import MIB
from lockstep.strategy_kinds import read_strategy, split

Reduction = Literal["exact", "fast"]

#: Lockstep's own limits, by where gradients are: strategies/replicated/ddp.py.
_BUCKET_MIB: Final = {"cpu": 4.0, "cuda": 25.0}


@dataclass(frozen=True, slots=True)
class SimulatedStrategy:
    """One way to keep replicas in step."""

    name: str = "ddp"
    options: Mapping[str, str] = field(default_factory=dict)
    reduction: Reduction = "exact"
    bucket_bytes: float = 25 * MIB  #: at which a bucket closes; infinite: one bucket
    first_bucket_bytes: float | None = None  #: of the first one; None: the same, as where a script names a limit
    #: DiLoCo's exchange begins with the last backward pass, layer by layer, as in its papers; ours begins after it.
    within_backward: bool = False

    @classmethod
    def parse(
        cls,
        spec: str,
        *,
        reduction: Reduction = "exact",
        bucket_mb: float | None = None,
        device: Literal["cpu", "cuda"] = "cuda",
    ) -> SimulatedStrategy:
        """What ``--strategy SPEC`` means, with buckets of ``bucket_mb`` MiB (None: what Lockstep takes on ``device``).

        Raises:
            SettingError: for a strategy or an option that there is not, for an option of which no formula is known,
                and a limit that is not above 0.
        """
        kind, _ = read_strategy(spec)
        name, options = split(spec)
        if unknown := kind.unpredicted(options):
            raise SettingError(
                f"strategy {spec}: predictions know no formula for {unknown}; measure a step with lockstep bench, or "
                f"leave {unknown.partition('=')[0]}= out"
            )
        limit = _BUCKET_MIB[device] if bucket_mb is None else bucket_mb
        if not limit > 0:
            raise SettingError(f"bucket={limit:g}: give MiB above 0")
        return cls(name, options, reduction, limit * MIB)

    @property
    def spec(self) -> str:
        """As it is written after ``--strategy``."""
        options = ",".join(f"{name}={value}" for name, value in self.options.items())
        return f"{self.name}:{options}" if options else self.name

    def number(self, option: str, default: float) -> float:
        """The value of a numeric option.

        Raises:
            SettingError: if it is not a number from 0.
        """
        text = self.options.get(option, "")
        try:
            value = float(text) if text else default
        except ValueError:
            value = math.nan
        if not 0 <= value < math.inf:
            raise SettingError(f"strategy {self.spec}: {option}={text}; give a number")
        return value

    def word(self, option: str, default: str) -> str:
        """The value of an option that is a word."""
        return self.options.get(option, default)
