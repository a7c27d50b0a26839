"""Where a run is: all that a resume needs to find the next sample."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Self


@dataclass(frozen=True, slots=True)
class Progress:
    """Optimizer steps done, and where in the epochs the next one begins.

    The order of samples is a pure function of the seed, the epoch and the step within it, so nothing else about the
    data has to be saved.
    """

    step: int = 0  #: optimizer steps done since the run began
    epoch: int = 0  #: the epoch that the next step belongs to, from 0
    epoch_step: int = 0  #: steps of that epoch already done
    samples: int = 0  #: samples trained on since the run began

    def after_step(self, samples: int) -> Self:
        """One optimizer step over ``samples`` later."""
        # Spelt out, since `dataclasses.replace` would be a third of what a step costs in Python.
        return type(self)(self.step + 1, self.epoch, self.epoch_step + 1, self.samples + samples)

    def after_epoch(self) -> Self:
        """At the start of the next epoch."""
        return replace(self, epoch=self.epoch + 1, epoch_step=0)

    def as_dict(self) -> dict[str, int]:
        """Plain values, for a checkpoint."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, int]) -> Self:
        """What `as_dict` gave."""
        return cls(**values)
