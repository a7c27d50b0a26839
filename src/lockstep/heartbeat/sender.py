"""The progress of a rank, and the thread that reports it to the launcher.

    main thread     set_phase("data") ... set_phase("forward") ... set_step(412)     two stores each
                              │
    sender thread   reads it twice a second, and sends a heartbeat            works while the main thread waits in C;
                                                                             not while that holds Python's lock

So a missing heartbeat is information, too. The values in a heartbeat are observed in Python, in torch and in the
kernel. If an observation fails, the value before is sent.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import Final, TypeVar

from lockstep.heartbeat.frames import NOWHERE, collectives_begun, find_user_frame, in_debugger
from lockstep.heartbeat_message import Heartbeat
from lockstep.memory_use import MemoryUse, host_memory

BEAT_EVERY_S: Final = 0.5
_SEND_S = 0.4

T = TypeVar("T")


class ProgressMarker:
    """The phase and step of the main thread. An update costs some ten nanoseconds, so each step can make several."""

    __slots__ = ("listeners", "memory", "phase", "phase_changes", "step")

    def __init__(self) -> None:
        self.step = -1  #: optimizer steps done; -1 while steps are not counted
        self.phase = "script"  #: one of `PHASES`
        self.phase_changes = 0
        self.listeners: tuple[
            Callable[[ProgressMarker], None], ...
        ] = ()  #: called in the main thread after each update
        self.memory: Callable[[], MemoryUse] = host_memory  #: measures memory; called from the sender's thread

    def set_phase(self, phase: str) -> str:
        """Set the rank's phase to ``phase``, one of `PHASES`; returns the phase before."""
        before = self.phase
        self.phase = phase
        self.phase_changes += 1
        for listener in self.listeners:
            listener(self)
        return before

    def set_step(self, step: int) -> None:
        """Set the number of optimizer steps done; -1 if steps are not counted any more."""
        self.step = step
        for listener in self.listeners:
            listener(self)


_MARKER: Final = ProgressMarker()


def progress_marker() -> ProgressMarker:
    """The progress marker of this process."""
    return _MARKER


class HeartbeatSender:
    """Sends heartbeats to this rank's launcher: that the rank is alive, and what it is doing.

    Args:
        rank: this rank's number.
        line: the socket for heartbeats; None: heartbeats are not sent.
        of: the progress of the main thread.
        beside: called before each heartbeat but the first, on the sender's thread.
    """

    def __init__(
        self,
        rank: int,
        line: socket.socket | None,
        of: ProgressMarker,
        beside: Callable[[], None] = lambda: None,
    ) -> None:
        self._rank: Final = rank
        self._marker: Final = of
        self._main: Final = threading.main_thread().ident or 0
        self._line = line
        self._file = None if line is None else _file(line)
        self._listener: str | tuple[str, int] = "" if line is None else line.getpeername()
        self._process: Final = os.getpid()
        self._beside: Final = beside
        self._collectives, self._cpu_s, self._memory = 0, 0.0, MemoryUse()  # last observed values

    def start(self) -> None:
        """Send a heartbeat now and every half second, from a daemon thread. No thread is started if nobody listens."""
        if self._line is not None:
            self.beat()
            threading.Thread(target=self._go_on, name="lockstep heart", daemon=True).start()

    def beat(self) -> None:
        """Send a heartbeat, which is lost if no launcher listens, or if the listener is too slow for a while.

        A copy of this process, which a script may make with `os.fork`, sends none.
        """
        if self._line is not None and os.getpid() == self._process:
            text = self.now().to_text().encode()
            with contextlib.suppress(OSError):
                self._reopen_if_closed()
                self._line.send(text)

    def _reopen_if_closed(self) -> None:
        """Open the line again where the program has closed all descriptors, as daemons do: this rank is not silent.

        By now its number may be that of a file of the program's.

        Raises:
            OSError: if nobody listens any more.
        """
        line = self._line
        if line is None or _file(line) == self._file:
            return
        line.detach()
        with socket.socket(line.family, line.type) as new:
            new.connect(self._listener)
            # Never one of the standard streams, which the program may have closed, too.
            self._line = line = socket.socket(fileno=fcntl.fcntl(new.fileno(), fcntl.F_DUPFD_CLOEXEC, 3))
        line.settimeout(_SEND_S)
        self._file = _file(line)

    def now(self) -> Heartbeat:
        """The heartbeat for the main thread's present place. Never raises: a failed observation keeps its value."""
        frame = sys._current_frames().get(self._main)
        place, call, meets = NOWHERE, "", False
        if frame is not None:
            place, call, meets = _observed(lambda: find_user_frame(frame), (place, call, meets))
        # For some backends torch counts no collectives, and raises an error when asked.
        self._collectives = _observed(collectives_begun, self._collectives)
        self._cpu_s = _observed(lambda: _cpu_s(self._main), self._cpu_s)
        said = self._marker
        self._memory = _observed(said.memory, self._memory)
        return Heartbeat(
            rank=self._rank,
            process=os.getpid(),
            step=said.step,
            phase_changes=said.phase_changes,
            phase="input" if in_debugger(frame) else said.phase,
            place=place,
            call=call,
            meets=meets or (said.phase == "reduction" and call != ""),
            collectives=self._collectives,
            cpu_s=self._cpu_s,
            at=time.time(),
            memory=self._memory,
        )

    def _go_on(self) -> None:
        while True:
            time.sleep(BEAT_EVERY_S)
            _observed(self._beside, None)
            self.beat()


def _observed(observation: Callable[[], T], before: T) -> T:
    """The result of ``observation``; ``before`` if it raises, since an error must not end the sender's thread."""
    try:
        return observation()
    except Exception:  # noqa: BLE001 - private parts of torch, and measures of memory, may raise anything
        return before


def _file(line: socket.socket) -> tuple[int, int] | None:
    """The device and inode that identify the socket; None if it is closed."""
    try:
        found = os.fstat(line.fileno())
    except OSError:
        return None
    return found.st_dev, found.st_ino


def open_channel(channel: str) -> socket.socket | None:
    """A socket to the listener at ``channel`` (see `lockstep.launch_contract.CHANNEL`); None for "" or no listener."""
    if not channel:
        return None
    host, colon, port = channel.rpartition(":")
    by_path = not (colon and port.isdigit())
    line = socket.socket(socket.AF_UNIX if by_path else socket.AF_INET, socket.SOCK_DGRAM)
    try:
        line.connect(channel if by_path else (host, int(port)))
    except OSError:
        # The launcher is gone, so this rank will end, too.
        line.close()
        return None
    line.settimeout(_SEND_S)
    return line


def _cpu_s(thread: int) -> float:
    if hasattr(time, "pthread_getcpuclockid"):
        return time.clock_gettime(time.pthread_getcpuclockid(thread))
    return time.process_time()
