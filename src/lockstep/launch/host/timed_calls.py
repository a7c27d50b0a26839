"""Calls that may block forever, made in threads, so that the launcher's loop never waits for them.

    launcher's loop ── ask(read the leader's log) ──►  thread ──►  the run directory, perhaps on a dead NFS server
                    ◄─ what it found, or what stands for it after `_PATIENCE_S` ─┘
    launcher's loop ── say, leader ─────────────────►  thread ──►  a terminal that is held, a pipe that nobody reads

A system call that does not return cannot be cancelled. Its thread is abandoned, and the next call gets a new one.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO, TypeVar

from lockstep.errors import SettingError
from lockstep.launch.terminal.console import Screen
from lockstep.report import Status

T = TypeVar("T")

#: How long the loop waits for a file. A node counts as lost after some seconds, so several such waits must be possible.
_PATIENCE_S = 0.5
#: How long files may take that are needed before a run begins.
_START_S = 60.0
#: When the user is told of a file that does not answer: a busy disk answers before.
_SILENT_S = 5.0
#: When a file that did not answer is asked again; then after twice the time, and so on.
_AGAIN_S = (5.0, 120.0)
#: Threads that wait for files which do not answer; more are not started.
_MOST_STUCK = 32
#: Texts that wait to be shown. More are left in the leader's log until some of them have been.
_MOST_WAITING = 64
#: How long a reader of the last words may take for a part of them, unless the user asks for the end before.
_LAST_WORDS_S = 30.0


class TaskThread:
    """A daemon thread that makes calls in their order. It starts with the first one.

    Those of a `ThreadPoolExecutor` are waited for when Python exits: a call that does not return would hold it.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._tasks: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    @property
    def waiting(self) -> int:
        """How many calls have not begun."""
        return self._tasks.qsize()

    def start(self, call: Callable[[], T]) -> Future[T]:
        """Have ``call`` made after all that were started before."""
        task = Future[T]()
        self._tasks.put((task, call))
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name=self._name, daemon=True)
            self._thread.start()
        return task

    def close(self, within_s: float = 0.0) -> bool:
        """End the thread after its last call; returns whether it ended ``within_s``. Without waiting it ends later."""
        self._tasks.put(None)
        return self.ended(within_s)

    def ended(self, within_s: float) -> bool:
        """Whether the thread ends ``within_s``, once `close` was called, or has never begun."""
        if self._thread is not None and within_s:
            self._thread.join(within_s)
        return self._thread is None or not self._thread.is_alive()

    def _work(self) -> None:
        while (begun := self._tasks.get()) is not None:
            task, call = begun
            try:
                task.set_result(call())
            except BaseException as error:  # noqa: BLE001 - it is raised where the result is asked for
                task.set_exception(error)


def done_within(task: Future[Any], within_s: float) -> bool:
    """Whether the call has returned, after up to ``within_s``."""
    return bool(futures.wait([task], within_s).done)


class StoppedWaiting(Exception):
    """The user asked for the end before something that was waited for was there."""


def call_in_time(
    call: Callable[[], T], of: str, say: Callable[[str], None], stopped: Callable[[], bool] = lambda: False
) -> T:
    """What ``call`` returns, which cannot be done without before a run begins. Ctrl-C interrupts the waiting.

    Args:
        call: reads or writes files.
        of: the file or directory that it is about, for messages.
        say: tells the user that it is waited for.
        stopped: whether the user asks for the end, where Ctrl-C does not interrupt.

    Raises:
        SettingError: if it takes longer than `_START_S`, or raises an OSError.
        StoppedWaiting: if ``stopped``.
        BaseException: what else ``call`` raises.
    """
    thread = TaskThread("lockstep start")
    task = thread.start(call)
    begin_s, told = time.monotonic(), False
    while not done_within(task, 0.1):
        waited_s = time.monotonic() - begin_s
        if stopped():
            raise StoppedWaiting
        if waited_s > _START_S:
            raise SettingError(f"{of} does not answer within {_START_S:g} s: is its file system there?")
        if not told and waited_s > _SILENT_S:
            told = True
            say(f"waiting for {of}, which does not answer: the machine is busy, or the file system is gone")
    thread.close(_PATIENCE_S)
    try:
        return task.result()
    except OSError as error:
        raise SettingError(f"{of} cannot be used: {error}") from error


class FileThread:
    """Access to files that never keeps its caller waiting for long.

    Args:
        say: tells the user of a file that does not answer, and when it does again.
        shown: a path as the user would write it.
        patience_s: how long a call waits.
    """

    def __init__(
        self, say: Callable[[str], None], shown: Callable[[Path], str] = str, patience_s: float = _PATIENCE_S
    ) -> None:
        self._say, self._shown, self._patience_s = say, shown, patience_s
        self._thread = TaskThread("lockstep files")
        self._stuck: dict[Path, _Stuck] = {}
        self._stuck_tasks: list[Future[Any]] = []
        self._told: set[str] = set()

    def ask(
        self, call: Callable[[], T], otherwise: T, *, of: Path, urgent: bool = False, within_s: float | None = None
    ) -> T:
        """What ``call`` returns; ``otherwise`` if it raises an OSError, or takes longer than the patience.

        The user is told once of each. A file that did not answer is asked again after some seconds only, unless it is
        ``urgent``.

        Args:
            call: reads or writes the file, and changes nothing of the caller's: it may end much later.
            otherwise: stands for what is not known.
            of: the file or directory that ``call`` is about.
            urgent: ask in any case.
            within_s: how long this call may take; None: as others.
        """
        now_s = time.monotonic()
        stuck = self._stuck.get(of)
        self._tell_stuck(now_s)
        self._stuck_tasks = [task for task in self._stuck_tasks if not task.done()]
        waits = stuck is not None and now_s < stuck.again_s and not stuck.task.done()
        if (waits and not urgent) or len(self._stuck_tasks) >= _MOST_STUCK:
            return otherwise
        task = self._thread.start(call)
        if not done_within(task, self._patience_s if within_s is None else within_s):
            self._give_up(of, task)
            return otherwise
        if (answers := self._stuck.pop(of, None)) is not None and answers.told:
            self._say(f"{self._shown(of)} answers again")
        try:
            return task.result()
        except OSError as error:
            self._tell(f"note: {self._shown(of)}: {error.strerror or error}; the run goes on without it")
            return otherwise

    def close(self) -> None:
        """End the thread; one that waits for a file that does not answer ends with this process."""
        self._thread.close(self._patience_s)

    def _give_up(self, of: Path, task: Future[Any]) -> None:
        before, now_s = self._stuck.get(of), time.monotonic()
        if before is None:
            self._stuck[of] = _Stuck(task, _AGAIN_S[0], now_s + _AGAIN_S[0], told_s=now_s + _SILENT_S)
        else:
            before.task, before.pause_s = task, min(2 * before.pause_s, _AGAIN_S[1])
            before.again_s = now_s + before.pause_s
        self._stuck_tasks.append(task)
        self._thread.close()
        self._thread = TaskThread("lockstep files")

    def _tell_stuck(self, now_s: float) -> None:
        for path, stuck in self._stuck.items():
            if not stuck.told and now_s >= stuck.told_s and not stuck.task.done():
                stuck.told = True
                self._say(
                    f"note: {self._shown(path)} does not answer: the machine is busy, or the file system is gone. "
                    "The run goes on without the file"
                )

    def _tell(self, text: str) -> None:
        if text not in self._told:
            self._told.add(text)
            self._say(text)


@dataclass
class _Stuck:
    """A file that did not answer."""

    task: Future[object]
    pause_s: float
    again_s: float  #: when the file is asked again
    told_s: float  #: when the user is told, unless the file has answered
    told: bool = False


class ScreenThread:
    """A screen with a thread of its own: no call waits until something is shown. Its methods are those of `Screen`."""

    def __init__(self, screen: Screen) -> None:
        self._screen = screen
        self._thread = TaskThread("lockstep screen")
        self._failures: list[tuple[str, Future[None]]] = []
        self._parts = 0  # of rests that were shown

    @property
    def is_behind(self) -> bool:
        """Whether much is still to be shown, so that what can wait should."""
        return self._thread.waiting > _MOST_WAITING

    def leader(self, text: str) -> None:
        """Show lines of the leader's output."""
        if text:
            self._thread.start(lambda: self._screen.leader(text))

    def rest(self, parts: Iterator[str]) -> None:
        """Show the leader's output in these ``parts``, each of which is read when the one before was shown."""

        def show() -> None:
            for text in parts:
                self._screen.leader(text)
                self._parts += 1

        self._thread.start(show)

    def unfinished(self, text: str) -> None:
        """Show a line of the leader's that is not finished yet."""
        if text and not self._thread.waiting:
            self._thread.start(lambda: self._screen.unfinished(text))

    def say(self, text: str) -> None:
        """Show a message of the launcher."""
        self._thread.start(lambda: self._screen.say(text))

    def fail(self, text: str) -> None:
        """Show a message as `say` does, with a mark in front of it."""
        self._failures.append((text, self._thread.start(lambda: self._screen.fail(text))))

    def attached(self, data: bytes, out: TextIO, *, prompts: bool) -> None:
        """Show what the rank that has the terminal ``out`` wrote."""
        self._thread.start(lambda: self._screen.attached(data, out, prompts=prompts))

    def show(self, status: Status) -> None:
        """Show how far the run is."""
        if not self._thread.waiting:
            self._thread.start(lambda: self._screen.show(status))

    def close(self) -> None:
        """Restore the terminal; lines can still be shown afterwards."""
        self._thread.start(self._screen.close)

    def finish(self, urged: Callable[[], int]) -> None:
        """Wait until all is shown, or nothing more was for `_LAST_WORDS_S`, or the user asks for the end once more.

        Args:
            urged: how often the user has asked for the end.
        """
        before, end_s, shown = urged(), time.monotonic() + _LAST_WORDS_S, (0, 0)
        self._thread.close()
        while not self._thread.ended(0.05) and urged() == before and time.monotonic() < end_s:
            if (now := (self._thread.waiting, self._parts)) != shown:
                shown, end_s = now, time.monotonic() + _LAST_WORDS_S
        unsaid = [text for text, task in self._failures if not task.done()]
        if unsaid:
            # Standard output is a pipe that nobody reads; standard error may be another one.
            errors = TaskThread("lockstep errors")
            errors.start(lambda: self._screen.fail(unsaid[-1]))
            errors.close(_PATIENCE_S)
