"""A tracker in a thread of its own: the training neither waits for it nor fails with it."""

from __future__ import annotations

import contextlib
import json
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from lockstep.records import read_object
from lockstep.report.trackers.names import opener, refuse_unknown
from lockstep.report.trackers.tracker import LogsValues, OwnTracker, Row, Tracker, TrackerContext
from lockstep.small_files import replace_text

_MOST_WAITING = 10_000  # rows
#: Pauses after a write that the disk or the network did not take: the first, doubled each time up to the second.
_AGAIN_S = (1.0, 60.0)
_MOST_LINKS: Final = 10  # of errors that were raised from each other

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

    How many it has had is noted in ``trackers/NAME.json`` of the run directory. What a disk or a network does not take
    waits, and is tried again after 1 s to 60 s, with a tracker that is opened again; any other error drops the tracker.

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
        opened: Callable[[TrackerContext], object],
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
        self._waits = ""  # why rows wait, said once
        self._told_wait = False
        self._ending: Final = threading.Event()
        self._tried_last = False  # once no row will come
        self._tracker: Tracker | None = None  # of the thread
        self._tracker_id: str | None = None  # its ``run_id``, once it was open
        self._had = 0  # rows that it has had, in all lives
        self._dropped = False  # ... and the user knows
        self._thread: Final = threading.Thread(target=self._run, args=(opened,), name=f"tracker {name}", daemon=True)
        self._thread.start()

    def log(self, row: Row) -> None:
        """The record has one more row. Never waits."""
        if self._drop():
            return
        if self._waits and not self._told_wait:
            self._told_wait = True
            self._say(
                f"tracker {self._name}: {self._waits}; training goes on, and what is logged waits for it in memory, "
                f"at most {_MOST_WAITING} rows"
            )
        try:
            self._rows.put_nowait(row)
        except queue.Full:
            self._failed = f"it does not take what was logged, {_MOST_WAITING} rows by now"
            self._drop()

    def end(self) -> None:
        """No row will come; `close` is next."""
        self._ending.set()
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

    def _run(self, opened: Callable[[TrackerContext], object]) -> None:
        try:
            self._write(opened, 0, None)
            number = 0
            for row in self._record:
                number += 1
                self._write(opened, number, row)
            self._remember(number)
            while not self._failed and (next_row := self._rows.get()) is not None:
                number += 1
                self._write(opened, number, next_row)
                self._remember(number)
            if self._tracker is not None:
                self._tracker.close()
        except Exception as error:  # noqa: BLE001 - whatever the library does, it ends nothing but itself
            hint = f"; pip install {error.name}" if isinstance(error, ModuleNotFoundError) else ""
            self._failed = f"{_words_of(error)}{hint}"

    def _write(self, opened: Callable[[TrackerContext], object], number: int, row: Row | None) -> None:
        """Have the tracker, open by then, take ``row``, the one with this ``number``; as often as may help.

        Raises:
            Exception: what the tracker raises, where it will raise it again, or where no row will come.
        """
        pause_s = _AGAIN_S[0]
        while True:
            try:
                tracker = self._tracker or self._open(opened, goes_on=self._tracker_id is not None)
                if row is not None and number > self._had:
                    tracker.write(row)
                return
            except Exception as error:
                if self._tried_last or self._failed or not _may_pass(error):
                    raise
                self._waits = self._waits or _words_of(error)
                # It may not know what of a row it has written: another one goes on behind that.
                with contextlib.suppress(Exception):
                    if self._tracker is not None and not isinstance(self._tracker, OwnTracker):
                        self._tracker.close()
                self._tracker = None
                self._tried_last = self._ending.wait(pause_s)
                pause_s = min(2 * pause_s, _AGAIN_S[1])

    def _open(self, opened: Callable[[TrackerContext], Any], *, goes_on: bool) -> Tracker:
        known = self._known()
        run_id: str = known["run_id"] if self._tracker_id is None else self._tracker_id
        tracker: Tracker = opened(replace(self._context, run_id=run_id, goes_on=goes_on))
        if not goes_on:
            self._had = 0 if tracker.replays else known["rows"]
        self._tracker, self._tracker_id = tracker, tracker.run_id
        return tracker

    def _known(self) -> Mapping[str, Any]:
        """What an earlier life of the run has noted; a run that begins has had none."""
        nothing = {"run_id": "", "rows": 0}
        if not self._context.step:
            return nothing
        try:
            return {**nothing, **read_object(self._note)}
        except (OSError, ValueError):
            return nothing

    def _remember(self, rows: int) -> None:
        # It counts again with the next row.
        with contextlib.suppress(OSError):
            self._note.parent.mkdir(parents=True, exist_ok=True)
            replace_text(self._note, json.dumps({"run_id": self._tracker_id or "", "rows": max(rows, self._had)}))


def _may_pass(error: BaseException) -> bool:
    """Whether ``error`` is one of the disk or of the network, whatever the tracker's library has made of it."""
    link: BaseException | None = error
    for _ in range(_MOST_LINKS):
        if link is None or isinstance(link, OSError):
            break
        link = link.__cause__ or link.__context__
    return isinstance(link, OSError)


def _words_of(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
