"""Where a run is: what a checkpoint says of it beside the state of its objects."""

from __future__ import annotations

from typing import Final, Literal

import torch

from lockstep.progress import Progress
from lockstep.report import epoch_number
from lockstep.run.progress_reporter import RunLength
from lockstep.seeding import seed_generators, seed_of


class RunPosition:
    """Steps and epochs done, and what they gave. The same on all ranks, but for `loss`.

    Args:
        seed: of the run.
    """

    def __init__(self, seed: int) -> None:
        self._seed: Final = seed
        self.progress = Progress()
        self.metrics: dict[str, float] = {}  #: the means of the last training pass, and of each evaluation since
        self.evaluations = 0  #: evaluations since the last step
        self.is_left = False  #: whether the epoch's loop was left by `break`, and the script has not left `epochs`
        self.loss: torch.Tensor | None = None  #: of the last micro-batch trained on
        self.length = RunLength()

    @property
    def epoch_number(self) -> int:
        """The epoch in work, as it is shown and recorded."""
        return epoch_number(self.progress.epoch, self.length.epochs)

    def seed_script(self, where: Literal["body", "outside"] = "outside") -> None:
        """Random numbers that the script draws from here on are the same on all ranks."""
        seed_generators(seed_of(self._seed, where, self.progress.step, self.evaluations))
