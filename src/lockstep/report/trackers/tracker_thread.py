"""A tracker in a thread of its own: the training neither waits for it nor fails with it."""

from __future__ import annotations

import json
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from lockstep.records import read_object
from lockstep.report.trackers.names import opener, refuse_unknown
from lockstep.report.trackers.tracker import LogsValues, OwnTracker, Row, TrackerContext

_MOST_WAITING = 10_000  # rows

Say = Callable[[str], None]


def open_trackers(
    track: str | None, given: LogsValues | None, context: TrackerContext, record: Sequence[Row], say: Say
) -> list[TrackerThread]:
    """The trackers of a run, each in its thread; the leader's.

    Args:
        track: names, with commas between them.
        given: the script's own one.
        context: of the run, without a ``run_id``.
        record: the rows that the record holds already.
        say: takes a line for the user.
    """
    names = refuse_unknown(track or "")
    named = [TrackerThread(name, opener(name), context, record, say) for name in names]
    if given is None:
        return named
    own = TrackerThread(type(given).__name__, lambda _: OwnTracker(given), context, record, say)
    return [*named, own]


class TrackerThread:
    """Hands rows to a tracker, each once in all lives of the run.

    How many it has had is noted in ``trackers/NAME.json`` of the run directory.

    Args:
        name: of the tracker.
        opened: opens it; called in the thread.
        context: for it.
        record: the rows of the record so far: none where a run begins.
        say: takes a line for the user; called by who calls `log` and `close`.
    """

    def __init__(
        self,
        name: str,
        opened: Callable[[TrackerContext], Any],
        context: TrackerContext,
        record: Sequence[Row],
        say: Say,
    ) -> None:
        self._name: Final = name
        self._say: Final = say
        self._context: Final = context
        self._note: Final = Path(context.directory, "trackers", f"{name}.json")
        self._rows: Final[queue.Queue[Row | None]] = queue.Queue(_MOST_WAITING)
        self._record: Final = [*record]
        self._failed = ""  # why the tracker is dropped
        self._dropped = False  # ... and the user knows
        self._thread: Final = threading.Thread(target=self._run, args=(opened,), name=f"tracker {name}", daemon=True)
        self._thread.start()

    def log(self, row: Row) -> None:
        """The record has one more row. Never waits."""
        if self._drop():
            return
        try:
            self._rows.put_nowait(row)
        except queue.Full:
            self._failed = f"it does not take what was logged, {_MOST_WAITING} rows by now"
            self._drop()

    def end(self) -> None:
        """No row will come; `close` is next."""
        if not self._dropped:
            try:
                self._rows.put_nowait(None)
            except queue.Full:
                self._failed = "it does not take what was logged"

    def has_ended(self, wait_s: float) -> bool:
        """Whether the tracker has had all rows, or is dropped; waits for it at most ``wait_s``."""
        if not self._dropped:
            self._thread.join(wait_s)
        return self._dropped or not self._thread.is_alive()

    def close(self, waited_s: float) -> None:
        """Drop the tracker if it has not had all rows in ``waited_s``."""
        if not self.has_ended(0):
            self._failed = f"it did not take the last rows within {waited_s:g} s"
        self._drop()

    def _drop(self) -> bool:
        """Whether the tracker gets nothing any more; the user is told once."""
        if self._failed and not self._dropped:
            self._dropped = True
            self._say(f"tracker {self._name} is dropped: {self._failed}; metrics.jsonl holds all, and training goes on")
        return self._dropped

    def _run(self, opened: Callable[[TrackerContext], Any]) -> None:
        try:
            known = self._known()
            tracker = opened(replace(self._context, run_id=known["run_id"]))
            had = 0 if tracker.replays else known["rows"]
            number = 0
            for row in self._record:
                number += 1
                if number > had:
                    tracker.write(row)
            self._remember(tracker.run_id, max(number, had))
            while not self._failed and (next_row := self._rows.get()) is not None:
                number += 1
                if number > had:
                    tracker.write(next_row)
                    self._remember(tracker.run_id, number)
            tracker.close()
        except Exception as error:  # noqa: BLE001 - whatever the library does, it ends nothing but itself
            hint = f"; pip install {error.name}" if isinstance(error, ModuleNotFoundError) else ""
            self._failed = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}{hint}"

    def _known(self) -> Mapping[str, Any]:
        """What an earlier life of the run has noted; a run that begins has had none."""
        nothing = {"run_id": "", "rows": 0}
        if not self._context.step:
            return nothing
        try:
            return {**nothing, **read_object(self._note)}
        except (OSError, ValueError):
            return nothing

    def _remember(self, run_id: str, rows: int) -> None:
        self._note.parent.mkdir(parents=True, exist_ok=True)
        scratch = self._note.with_suffix(".new")
        scratch.write_text(json.dumps({"run_id": run_id, "rows": rows}))
        scratch.replace(self._note)
