"""TensorBoard: event files in the run directory, for ``tensorboard --logdir``.

Each life of a run writes a file of its own, which begins by taking back what all earlier ones hold, and writes the
whole record again: so each point is there once, also those that a killed process had not yet written.
"""

from __future__ import annotations

from typing import Any, Final

from lockstep.report.trackers.tracker import Row, TrackerContext, values_of


def open_tracker(context: TrackerContext) -> TensorboardTracker:
    """The tracker, with the settings of the run as a text."""
    return TensorboardTracker(context)


class TensorboardTracker:
    """Writes scalars by the names of the record."""

    replays = True
    run_id = ""

    def __init__(self, context: TrackerContext) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.plugins.text.summary_v2 import text_pb
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event: Final[Any] = event_pb2.Event
        self._summary: Final[Any] = summary_pb2.Summary
        self._file: Final[Any] = EventFileWriter(str(context.directory / "tensorboard"))
        if context.goes_on:
            return
        # From step 0 on, what came before this is void.
        self._file.add_event(event_pb2.Event(step=0, session_log=event_pb2.SessionLog(status=1)))
        table = "\n".join(f"| {name} | {value} |" for name, value in context.settings.items())
        self._file.add_event(event_pb2.Event(summary=text_pb("settings", f"| setting | value |\n|---|---|\n{table}")))

    def write(self, row: Row) -> None:
        """Write and flush one event."""
        values = [self._summary.Value(tag=name, simple_value=value) for name, value in values_of(row).items()]
        event = self._event(wall_time=row["wall_s"], step=int(row["step"]), summary=self._summary(value=values))
        self._file.add_event(event)
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()
