"""The run's own record of metrics, the line in which the user sees them, and the trackers that get them, too."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Final, Literal

import numpy as np
import torch

from lockstep.report import LogsValues, MetricsFile, TrackerContext, TrackerThread, open_trackers, record_row
from lockstep.run.setup import RunContext

LoggedRow = tuple[int, int, dict[str, float]]
"""A step, an epoch, and values by name."""

Ending = Literal["ended", "stopped", "failed"]
#: For how many seconds a run waits for its trackers. To import one of them takes a busy machine half a minute; who
#: stops a run waits for about as long in all.
_TRACKERS_S: Final[Mapping[Ending, float]] = {"ended": 60.0, "stopped": 15.0, "failed": 2.0}


class RunLog:
    """Written by the leader; the others write and say nothing.

    Args:
        context: of the run; in its directory, if it has one, is ``metrics.jsonl``.
        tracker: the script's own one.
    """

    def __init__(self, context: RunContext, tracker: LogsValues | None) -> None:
        self._context: Final = context
        self._tracker: Final = tracker
        self._leads: Final = context.group.leads
        every = context.settings.log_every
        self._every: Final = None if every is None else int(every.every)
        self._file: MetricsFile | None = None
        self._trackers: list[TrackerThread] = []
        self.rows: list[LoggedRow] = []  #: what was logged since `forget_rows`, on every rank

    def open(self, step: int) -> None:
        """The run goes on from ``step``; what the file says of later steps is removed."""
        if not self._leads:
            return
        directory, settings, say = self._context.directory, self._context.resolved, self._context.reporter.say
        record: list[dict[str, float]] = []
        if directory:
            path = Path(directory, "metrics.jsonl")
            self._file = MetricsFile(path, step=step, say=say)
            if path.exists():
                record = MetricsFile.read(path)
        context = TrackerContext(Path(directory or "runs"), settings.as_dict(), step)
        self._trackers = open_trackers(settings.values.track, self._tracker, context, record, say)

    def write(self, values: dict[str, object], step: int, epoch: int) -> None:
        """Write ``values`` to the file, if there is one, and to the trackers, and tell the user.

        Args:
            values: by name.
            step: steps done.
            epoch: the epoch in work, from 1; a value named ``epoch`` takes its place.
        """
        if self._context.emergency.notes:
            plain = record_row(step, epoch, values, 0.0)
            self.rows.append((step, epoch, {name: plain[name] for name in values}))
        if not self._leads:
            return
        row: dict[str, float] | None = None
        if self._file is not None:
            row = self._file.write(step, epoch, values)
        elif self._trackers:
            row = record_row(step, epoch, values, time.time())
        if row is not None:
            for tracker in self._trackers:
                tracker.log(row)
        texts = (f"{name} {_on_screen(value)}" for name, value in ({"epoch": epoch} | values).items())
        self._context.reporter.say(f"step {step}: " + ", ".join(texts))

    def write_recent(self) -> None:
        """A step has ended: after every so many, what they measured is written. Collective then."""
        position, context = self._context.position, self._context
        if self._every is not None and position.progress.step % self._every == 0:
            means = {f"{name}_step": mean for name, mean in context.metrics.recent.reduce(context.group).items()}
            self.write({**means}, position.progress.step, position.epoch_number)

    def forget_rows(self) -> None:
        """A step has ended: a run that goes on from there logs again what comes from here on."""
        self.rows.clear()

    def close(self, ending: Ending) -> None:
        """The file is closed, and the trackers have had what it holds, or a while to take it."""
        if self._file is not None:
            self._file.close()
        until = time.monotonic() + _TRACKERS_S[ending]
        for tracker in self._trackers:
            tracker.end()
        for tracker in self._trackers:
            while (left_s := until - time.monotonic()) > 0 and not tracker.has_ended(min(left_s, 1.0)):
                self._context.marker.set_phase("exit")  # to wait for it is no hang
            tracker.close(_TRACKERS_S[ending])


def _on_screen(value: object) -> str:
    """``value`` with four digits if it is a fraction, also one of NumPy's or torch's."""
    if isinstance(value, torch.Tensor | np.generic) and value.ndim == 0:
        value = value.item()
    return f"{value:.4g}" if isinstance(value, float) else str(value)
