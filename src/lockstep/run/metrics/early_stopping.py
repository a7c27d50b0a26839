"""Early stopping: whether a metric has not improved for too long, also counted over a resume."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Literal

from lockstep.checkpoint import SavedTree, StateTree
from lockstep.errors import UsageError
from lockstep.run.loop.position import RunPosition


class EarlyStopping:
    """The result of `Run.early_stopping`; equal on all ranks, as metrics are.

    Args:
        position: where the run is, with its metrics.
        is_repeating: whether a resumed script repeats the part before the checkpoint.
        metric: the name.
        patience: how often in a row it may be measured without improving.
        mode: whether a lower or a higher value is better.
        min_delta: smallest change that counts as an improvement.
    """

    def __init__(
        self,
        position: RunPosition,
        is_repeating: Callable[[], bool],
        metric: str,
        patience: int,
        mode: Literal["min", "max"],
        min_delta: float,
    ) -> None:
        if mode not in ("min", "max"):
            raise UsageError(f"run.early_stopping({metric!r}, mode={mode!r}): give 'min' or 'max'")
        if patience < 1 or not min_delta >= 0:
            raise UsageError(
                f"run.early_stopping({metric!r}, patience={patience}, min_delta={min_delta}): give a patience from 1 "
                "and a min_delta from 0"
            )
        self._position: Final = position
        self._is_repeating: Final = is_repeating
        self._metric: Final = metric
        self._patience: Final = patience
        self._sign: Final = 1.0 if mode == "max" else -1.0
        self._min_delta: Final = min_delta
        self._best: float | None = None
        self._waited = 0  # measurements since the best value
        self._seen = -1  # steps done at the newest measurement

    @property
    def stopped(self) -> bool:
        """Whether `should_stop` has returned True."""
        return self._waited >= self._patience

    def should_stop(self) -> bool:
        """Whether the metric has now been measured ``patience`` times in a row without a new best value.

        Equal on all ranks; no collective. Each measurement counts once, for any number of calls. NaN is no improvement.

        Raises:
            UsageError: if the metric was never measured.
        """
        metrics, measured_at = self._position.metrics, self._position.measured_at
        if self._metric not in metrics and self._seen < 0:
            raise UsageError(
                f"run.early_stopping({self._metric!r}): run.metrics has {', '.join(metrics) or 'nothing yet'}; ask "
                "after the loop in which run.measure(...) measures it"
            )
        step = measured_at.get(self._metric, -1)
        if step > self._seen and not self._is_repeating():
            self._seen = step
            self._count(metrics[self._metric])
        return self.stopped

    def state_dict(self) -> StateTree:
        """Plain values, for a checkpoint."""
        return {"best": self._best, "waited": self._waited, "seen": self._seen}

    def load_state_dict(self, state: SavedTree) -> None:
        """Go on from `state_dict`."""
        self._best, self._waited, self._seen = state["best"], state["waited"], state["seen"]

    def _count(self, value: float) -> None:
        if self._best is None or self._sign * (value - self._best) > self._min_delta:
            self._best = self._best if value != value else value
            self._waited = self._waited + 1 if value != value else 0
        else:
            self._waited += 1
