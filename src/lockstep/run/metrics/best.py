"""The best value so far of the metric that a run is judged by, as the setting ``best`` names it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from lockstep.checkpoint import SavedTree, StateTree
from lockstep.formatting import did_you_mean
from lockstep.settings import BestMetric


class BestValue:
    """The same on all ranks, as metrics are.

    Args:
        metric: which one, and what is better; None: the run is judged by none.
    """

    def __init__(self, metric: BestMetric | None) -> None:
        self._metric: Final = metric
        self._value: float | None = None
        self.step: int | None = None  #: at which it was measured
        self._is_measured = False
        self._first: int | None = None  # steps done when anything was measured
        self._is_said = False

    def note(self, metrics: Mapping[str, float], measured_at: Mapping[str, int], step: int) -> bool:
        """Whether what was measured after ``step`` steps is better than all before; then it is the best from now on.

        Equal is not better, and what is not a number never is.
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
        """What the user is told, once, if the metric was not measured though others were; "" if there is nothing.

        Args:
            metrics: what was measured.
            step: said where others were measured before it. None: wherever they were.
            at_end: the training is over; said once more.
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
        """Plain values, for a checkpoint, in which a program without a run finds the best step; None: there is none."""
        if self._metric is None or self.step is None:
            return None
        return {"metric": self._metric.name, "mode": self._metric.mode, "value": self._value, "step": self.step}

    def load(self, values: SavedTree | None) -> None:
        """Go on from `as_dict`, unless that was of another metric."""
        metric = self._metric
        same = (
            metric is not None
            and values is not None
            and (values["metric"], values["mode"]) == (metric.name, metric.mode)
        )
        self._value, self.step = (values["value"], values["step"]) if same and values is not None else (None, None)
        self._is_measured |= self.step is not None
