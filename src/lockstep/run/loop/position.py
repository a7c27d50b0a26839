"""The position of a run, saved in checkpoints beside the state of its objects, and the best value of its metric."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Literal

from lockstep.checkpoint import SavedTree, StateTree
from lockstep.formatting import did_you_mean
from lockstep.progress import Progress
from lockstep.report import epoch_number
from lockstep.run.loop.epochs import Passes
from lockstep.run.loop.step_end import Event, StepEnd
from lockstep.run.metrics.metric_means import Number
from lockstep.run.metrics.progress_reporter import RunLength
from lockstep.seeding import seed_generators, seed_of
from lockstep.settings import BestMetric


class RunPosition:
    """Steps and epochs done, and their results. The same on all ranks, but for `loss`.

    Args:
        seed: of the run.
        best: the metric that the run is judged by.
    """

    def __init__(self, seed: int, best: BestMetric | None = None) -> None:
        self._seed: Final = seed
        self.progress = Progress()
        self.metrics: dict[str, float] = {}  #: the means of the last training pass, and of each evaluation since
        self.measured_at: dict[str, int] = {}  #: steps done when this process measured each metric last
        self.passes: Final = Passes()
        self.best: Final = BestValue(best)
        self.ended = False  #: whether early stopping has ended the training, so that nothing is left to train
        self.reports = 0  #: losses that were reported to a search
        self.evaluations = 0  #: evaluations since the last step
        self.evaluations_done = 0  #: of these, the evaluations that a resume does not repeat
        self.step_end = StepEnd.ENDED  #: how far the end of the last step is
        self.loss: Number | None = None  #: of the last micro-batch trained on
        self.length = RunLength()

    @property
    def epoch_number(self) -> int:
        """The number of the current epoch, as shown to the user and recorded."""
        return epoch_number(self.progress.epoch, self.length.epochs)

    @property
    def within_turn(self) -> bool:
        """Whether a step of the outer loop's turn is done, so that a resume goes on within the turn."""
        return self.progress.step > self.passes.began

    def note(self, event: Event) -> None:
        """Change `step_end` by ``event``."""
        self.step_end = self.step_end.after(event)

    def begin_turn(self) -> None:
        """Begin a turn of the outer loop."""
        self.passes.begin_turn(self.progress.step)
        self.note("taken_up")
        self.evaluations_done = self.evaluations

    def set_metrics(self, values: Mapping[str, float], *, keep_after: int) -> None:
        """Add ``values``, just measured, to the metrics, and drop metrics measured at step ``keep_after`` or before."""
        kept = {name for name, step in self.measured_at.items() if step > keep_after}
        now = dict.fromkeys(values, self.progress.step)
        self.metrics = {name: value for name, value in self.metrics.items() if name in kept} | dict(values)
        self.measured_at = {name: step for name, step in self.measured_at.items() if name in kept} | now

    def note_best(self) -> bool:
        """Whether the metric just measured has its best value so far, which is then noted."""
        return self.best.note(self.metrics, self.measured_at, self.progress.step)

    def seed_script(self, where: Literal["hooks", "gradients", "update", "body", "outside"] = "outside") -> None:
        """Seed the random generators so that the script draws the same numbers on all ranks from now on."""
        seed_generators(seed_of(self._seed, where, self.progress.step, self.evaluations))


class BestValue:
    """The best value of a run's metric, and the step at which it was measured; the same on all ranks.

    Args:
        metric: the metric's name, and whether lower or higher is better; None: the run is judged by no metric.
    """

    def __init__(self, metric: BestMetric | None) -> None:
        self._metric: Final = metric
        self._value: float | None = None
        self.step: int | None = None  #: at which the best value was measured
        self._is_measured = False
        self._first: int | None = None  # steps done when anything was measured
        self._is_said = False

    def note(self, metrics: Mapping[str, float], measured_at: Mapping[str, int], step: int) -> bool:
        """Note the metric's value after ``step`` steps as the best if it is better than all before; whether it is.

        An equal value is not better, and NaN never is.
        """
        self._first = step if self._first is None else self._first
        if self._metric is None or measured_at.get(self._metric.name) != step:
            return False
        self._is_measured = True
        value = metrics[self._metric.name]
        if value != value or not (self._value is None or self._metric.is_better(value, self._value)):
            return False
        self._value, self.step = value, step
        return True

    def missing(self, metrics: Mapping[str, float], step: int | None, *, at_end: bool = False) -> str:
        """The line for the user, once, if other metrics were measured but not this one; "" if there is nothing to say.

        Args:
            metrics: the measured values.
            step: the line is given if other metrics were measured before this step. None: at whichever step.
            at_end: the training is over; the line is given once more.
        """
        metric, first = self._metric, self._first
        is_due = at_end or (first is not None and not self._is_said and (step is None or first < step))
        if metric is None or self._is_measured or not is_due:
            return ""
        self._is_said = True
        others = ", ".join(metrics) or "nothing"
        what = "" if at_end else " so far"
        follows = "there is no best checkpoint" if at_end else "no checkpoint is kept as the best one"
        near = did_you_mean(metric.name, list(metrics), f"measure it by run.measure({metric.name}=...)")
        return (
            f"best={str(metric)!r}: {metric.name} was not measured{what}, so {follows}; run.metrics has "
            f"{others}; {near}"
        )

    def as_dict(self) -> StateTree | None:
        """Plain values for a checkpoint, readable without a run; None: there is no best value yet."""
        if self._metric is None or self.step is None:
            return None
        return {"metric": self._metric.name, "mode": self._metric.mode, "value": self._value, "step": self.step}

    def load(self, values: SavedTree | None) -> None:
        """Load the values of `as_dict`, unless those are of another metric."""
        metric = self._metric
        same = (
            metric is not None
            and values is not None
            and (values["metric"], values["mode"]) == (metric.name, metric.mode)
        )
        self._value, self.step = (values["value"], values["step"]) if same and values is not None else (None, None)
        self._is_measured |= self.step is not None
