"""Weights & Biases, online or with ``WANDB_MODE=offline``; it reads its own environment: project, entity, key."""

from __future__ import annotations

import uuid
from typing import Any, Final

from lockstep.report.trackers.tracker import Row, TrackerContext, values_of


def open_tracker(context: TrackerContext) -> WandbTracker:
    """The tracker; the settings of the run are its config, and a run that goes on is the same run there."""
    return WandbTracker(context)


class WandbTracker:
    """Logs rows as the library's own history."""

    replays = False

    def __init__(self, context: TrackerContext) -> None:
        import wandb

        context.directory.mkdir(parents=True, exist_ok=True)
        self.run_id: Final[str] = context.run_id or uuid.uuid4().hex[:8]
        self._run: Final[Any] = wandb.init(
            id=self.run_id,
            resume="allow",
            dir=str(context.directory),
            name=context.directory.name,
            config=dict(context.settings),
            settings=wandb.Settings(console="off", silent=True),
        )

    def write(self, row: Row) -> None:
        """Log one row."""
        self._run.log(values_of(row), step=int(row["step"]))

    def close(self) -> None:
        """Finish the run there; waits for what is not yet uploaded."""
        self._run.finish()
