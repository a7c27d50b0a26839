"""What a simulated step takes, and what of it each cause takes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

#: What a step consists of, in the order of a waterfall: the first four are those of one device.
PARTS: Final = (
    *("data", "forward", "backward", "optimizer", "other"),
    *("communication", "compression", "waiting", "bubbles", "input", "fixed"),
)


@dataclass(frozen=True, slots=True)
class StepTime:
    """One optimizer step on a system, in seconds; `low` and `high` hold it in nine cases of ten, as far as known."""

    ranks: int
    seconds: float
    low: float
    high: float
    parts: Mapping[str, float]  #: of `PARTS`, each with its seconds; their sum is `seconds`
    sent_bytes: float  #: by the busiest rank
    samples: float  #: of the step, over all ranks
    transfers: tuple[tuple[float, float], ...] = ()  #: begin and end of each within the step
    notes: tuple[str, ...] = ()

    @property
    def samples_per_s(self) -> float:
        """Throughput over all ranks."""
        return self.samples / self.seconds
