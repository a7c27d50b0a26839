"""Where a run is: what a checkpoint says of it beside the state of its objects."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Literal

from lockstep.progress import Progress
from lockstep.report import epoch_number
from lockstep.run.loop.epochs import Passes
from lockstep.run.metrics.best import BestValue
from lockstep.run.metrics.metric_means import Number
from lockstep.run.metrics.progress_reporter import RunLength
from lockstep.seeding import seed_generators, seed_of
from lockstep.settings import BestMetric


class RunPosition:
    """Steps and epochs done, and what they gave. The same on all ranks, but for `loss`.

    Args:
        seed: of the run.
        best: the metric that it is judged by.
    """

    def __init__(self, seed: int, best: BestMetric | None = None) -> None:
        self._seed: Final = seed
        self.progress = Progress()
        self.metrics: dict[str, float] = {}  #: the means of the last training pass, and of each evaluation since
        self.measured_at: dict[str, int] = {}  #: steps done when this process measured each of them last
        self.passes: Final = Passes()
        self.best: Final = BestValue(best)
        self.ended = False  #: whether early stopping has ended the training, so that nothing is left to train
        self.reports = 0  #: losses that were reported to a search
        self.evaluations = 0  #: evaluations since the last step
        self.evaluations_done = 0  #: of these, what a resume does not repeat
        self.is_left = False  #: whether the loop of `train` was left by `break`, and nothing says yet where it goes on
        self.loss: Number | None = None  #: of the last micro-batch trained on
        self.length = RunLength()

    @property
    def epoch_number(self) -> int:
        """The epoch in work, as it is shown and recorded."""
        return epoch_number(self.progress.epoch, self.length.epochs)

    @property
    def within_turn(self) -> bool:
        """Whether a step of the outer loop's turn is done: a resume goes on in the middle of it."""
        return self.progress.step > self.passes.began

    def begin_turn(self) -> None:
        """A turn of the outer loop begins here."""
        self.passes.begin_turn(self.progress.step)
        self.is_left = False
        self.evaluations_done = self.evaluations

    def set_metrics(self, values: Mapping[str, float], *, keep_after: int) -> None:
        """``values`` have been measured; of the others those are kept that were measured after step ``keep_after``."""
        kept = {name for name, step in self.measured_at.items() if step > keep_after}
        now = dict.fromkeys(values, self.progress.step)
        self.metrics = {name: value for name, value in self.metrics.items() if name in kept} | dict(values)
        self.measured_at = {name: step for name, step in self.measured_at.items() if name in kept} | now

    def note_best(self) -> bool:
        """Whether what has just been measured is the best value so far, which is then noted."""
        return self.best.note(self.metrics, self.measured_at, self.progress.step)

    def seed_script(self, where: Literal["gradients", "update", "body", "outside"] = "outside") -> None:
        """Random numbers that the script draws from here on are the same on all ranks."""
        seed_generators(seed_of(self._seed, where, self.progress.step, self.evaluations))
