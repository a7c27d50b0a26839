"""Requests from outside to stop a run: by signals, by a file ``STOP``, by the end of the scheduler's job.

    first signal           a flag, no more: the ranks agree on a step, save, and leave with 75
    then Ctrl-C            KeyboardInterrupt at the program's place: 130, without a further save
    then Ctrl-C once more  the process is ended, wherever it is

Only Ctrl-C, and a second SIGQUIT, which terminals send for Ctrl and a backslash, demand an immediate end. A scheduler
that warns with SIGUSR1 and ends with SIGTERM must not cut off the save it warned of.
"""

from __future__ import annotations

import contextlib
import os
import signal
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from datetime import datetime
from pathlib import Path
from types import FrameType
from typing import Final

from lockstep.errors import SettingError
from lockstep.launch_contract import (
    CHANNEL,
    ENDS_AT,
    EXIT_INTERRUPTED,
    STOP_REASON,
    STOP_SIGNALS,
)

# A step asks for the file no more often than this.
_CHECK_EVERY_S = 0.2
#: Time that a process that must stop now may stay where it is, such as in a collective whose peers are gone.
_STOP_NOW_S = 2.0
#: Assumed time of a save before the first one.
_SAVE_S = 30.0
#: For closing files and the connections to the other ranks, and for a scheduler that counts in other seconds.
_LEAVE_S = 5.0
_STEPS = 15  # remembered; the usual time of a step is their median


class JobDeadline:
    """The end of the job of this process, and the time before it at which a run must begin to stop.

    Args:
        at_s: seconds since 1970; None: no known end.
        wall: the clock, in seconds since 1970.
    """

    def __init__(self, at_s: float | None, wall: Callable[[], float] = time.time) -> None:
        self._at_s: Final = at_s
        self._wall: Final = wall
        self._steps_s: deque[float] = deque(maxlen=_STEPS)
        self.save_s: float | None = None  #: how long the last save took until it was on disk

    @classmethod
    def from_env(cls, env: Mapping[str, str]) -> JobDeadline:
        """The end that the launcher knows, or that newer versions of Slurm give to every process.

        Raises:
            SettingError: if the variable holds no number.
        """
        name = next((name for name in (ENDS_AT, "SLURM_JOB_END_TIME") if env.get(name)), None)
        try:
            return cls(None if name is None else float(env[name]))
        except ValueError:
            raise SettingError(f"{name}={env[name or '']!r}: give seconds since 1970, such as from date +%s") from None

    @property
    def margin_s(self) -> float:
        """How long before the end a stop must begin: two steps, two saves as measured, and a little."""
        step_s = statistics.median(self._steps_s) if self._steps_s else 0.0
        return 2 * step_s + 2 * (_SAVE_S if self.save_s is None else self.save_s) + _LEAVE_S

    @property
    def left_s(self) -> float | None:
        """Seconds for which a run may still train; None without an end."""
        return None if self._at_s is None else self._at_s - self.margin_s - self._wall()

    def step_took(self, seconds: float) -> None:
        """Note the duration of a step; costs little without a known end."""
        if self._at_s is not None:
            self._steps_s.append(seconds)

    def reason(self) -> str | None:
        """The reason to stop now; None if there is time left."""
        if self._at_s is None or (self.left_s or 0.0) > 0:
            return None
        return f"the end of its job at {datetime.fromtimestamp(self._at_s):%H:%M:%S}"


class StopRequests:
    """The requests to this process. A request once seen stays."""

    def __init__(self, stop_file: Path, end: JobDeadline, now: Callable[[], float] = time.monotonic) -> None:
        self._stop_file: Final = stop_file
        self._end: Final = end
        self._now: Final = now
        self._next_check_s = now()
        self._reason: str | None = None
        self._quits = 0  # SIGQUIT, so far
        self._before: dict[int, object] = {}
        self._signal_thread: _SignalThread | None = None

    def listen(self) -> None:
        """Take signals as requests to stop from now on. To be called in the main thread."""
        for number in STOP_SIGNALS:
            # Under nohup a process must outlive its terminal.
            if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._note)
        self._signal_thread = _SignalThread.open()

    def unlisten(self) -> None:
        """Restore the earlier handlers of signals."""
        if self._signal_thread is not None:
            self._signal_thread.close()
            self._signal_thread = None
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        self._before = {}

    def reason(self) -> str | None:
        """Why to stop, or None. Cheap enough for every step; from any thread."""
        if self._reason is None and self._now() >= self._next_check_s:
            self._next_check_s = self._now() + _CHECK_EVERY_S
            self._reason = f"the file {self._stop_file}" if self._stop_file.exists() else self._end.reason()
        return self._reason

    def acknowledge(self) -> None:
        """The request is met: the file must not stop the next run, too. For the leader."""
        with contextlib.suppress(OSError):
            self._stop_file.unlink(missing_ok=True)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._quits += number == signal.SIGQUIT
        if self._reason is None:
            self._reason = _why(number, os.environ)
        elif _insists(number, self._quits):
            raise KeyboardInterrupt


def _insists(number: int, quits: int) -> bool:
    """Whether a further signal demands an immediate stop, after ``quits`` SIGQUIT signals.

    A single SIGQUIT may come from a scheduler or an init system, to every process of a job, including the launcher.
    """
    return number == signal.SIGINT or (number == signal.SIGQUIT and quits > 1)


def _why(number: int, env: Mapping[str, str]) -> str:
    """The reason of a signal, from the launcher's file; else the signal's name, and the rank that got it."""
    name = signal.Signals(number).name
    if not env.get(CHANNEL, "").startswith("/"):
        return name
    # A small file in a directory of the launcher's, on this machine.
    with contextlib.suppress(OSError, UnicodeDecodeError):
        return Path(env[CHANNEL]).with_name(STOP_REASON).read_text(encoding="utf-8") or name
    return f"{name} to rank {env.get('RANK', '?')}" if int(env.get("WORLD_SIZE", "1")) > 1 else name


class _SignalThread:
    """A thread that notices signals, also while the main thread is in a call that runs no handler."""

    def __init__(self, read_end: int, write_end: int) -> None:
        self._read_end, self._write_end = read_end, write_end
        self._thread = threading.Thread(target=self._listen, name="lockstep signals", daemon=True)

    @classmethod
    def open(cls) -> _SignalThread | None:
        """A started thread; None if other code, such as an event loop, already receives signals."""
        read_end, write_end = os.pipe()
        os.set_blocking(write_end, False)
        other = signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
        if other != -1:
            signal.set_wakeup_fd(other)
            os.close(read_end)
            os.close(write_end)
            return None
        thread = cls(read_end, write_end)
        thread._thread.start()
        _wakeup_fds.add(write_end)
        return thread

    def close(self) -> None:
        signal.set_wakeup_fd(-1)
        _wakeup_fds.discard(self._write_end)
        os.write(self._write_end, b"\0")
        self._thread.join()
        os.close(self._write_end)
        os.close(self._read_end)

    def _listen(self) -> None:
        asked = insists = quits = 0
        while number := os.read(self._read_end, 1)[0]:
            quits += number == signal.SIGQUIT
            wants_it_now = asked > 0 and _insists(number, quits)
            insists += wants_it_now
            asked += number in STOP_SIGNALS
            if insists == 1 and wants_it_now:
                # In most cases the main thread has ended before this time is over.
                last = threading.Timer(_STOP_NOW_S, os._exit, (EXIT_INTERRUPTED,))
                last.daemon = True
                last.start()
            if insists > 1:
                os._exit(EXIT_INTERRUPTED)


_wakeup_fds: set[int] = set()  #: where this process notes its own signals, if it does


def _forget_signals() -> None:
    # Else a signal to a loader process would reach its rank, too, as if the rank had got the signal.
    if _wakeup_fds:
        _wakeup_fds.clear()
        signal.set_wakeup_fd(-1)


os.register_at_fork(after_in_child=_forget_signals)
