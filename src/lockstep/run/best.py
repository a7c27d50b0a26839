"""The best value so far of the metric that a run is judged by, as the setting ``best`` names it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from lockstep.checkpoint import SavedTree, StateTree
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

    def note(self, metrics: Mapping[str, float], measured_at: Mapping[str, int], step: int) -> bool:
        """Whether what was measured after ``step`` steps is better than all before; then it is the best from now on.

        Equal is not better, and what is not a number never is.
        """
        if self._metric is None or measured_at.get(self._metric.name) != step:
            return False
        value = metrics[self._metric.name]
        if value != value or not (self._value is None or self._metric.is_better(value, self._value)):
            return False
        self._value, self.step = value, step
        return True

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
