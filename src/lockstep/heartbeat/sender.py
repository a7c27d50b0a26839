"""In a rank: what it is doing, and the thread that tells it.

    main thread     enter("data") ... enter("forward") ... reach(412)       two stores each
                              │
    heart           looks twice a second, and sends a heartbeat             works while the main thread waits in C;
                                                                            not while that holds Python's lock

That no heartbeat comes is thus a sign of its own.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import Final

from lockstep.heartbeat.frames import NOWHERE, collectives_begun, find_user_frame
from lockstep.heartbeat_message import Heartbeat

BEAT_EVERY_S: Final = 0.5
_SEND_S = 0.4


class ProgressMarker:
    """What the main thread is doing. Telling it costs some ten nanoseconds, so that it can be told in every step."""

    __slots__ = ("listeners", "phase", "phase_changes", "step")

    def __init__(self) -> None:
        self.step = -1  #: optimizer steps done; -1 while nobody counts them
        self.phase = "script"  #: one of `PHASES`
        self.phase_changes = 0
        self.listeners: tuple[
            Callable[[ProgressMarker], None], ...
        ] = ()  #: called in the main thread after each word of it

    def set_phase(self, phase: str) -> str:
        """From here on the rank is in ``phase``, one of `PHASES`; returns the one before."""
        before = self.phase
        self.phase = phase
        self.phase_changes += 1
        for listener in self.listeners:
            listener(self)
        return before

    def set_step(self, step: int) -> None:
        """``step`` optimizer steps are done."""
        self.step = step
        for listener in self.listeners:
            listener(self)


_MARKER: Final = ProgressMarker()


def progress_marker() -> ProgressMarker:
    """The one of this process."""
    return _MARKER


class HeartbeatSender:
    """Tells whoever watches over this rank that it lives, and where it is.

    Args:
        rank: this rank's number.
        line: where heartbeats go; None: nobody listens.
        of: what the main thread says.
    """

    def __init__(self, rank: int, line: socket.socket | None, of: ProgressMarker) -> None:
        self._rank: Final = rank
        self._marker: Final = of
        self._main: Final = threading.main_thread().ident or 0
        self._line: Final = line

    def start(self) -> None:
        """Beat now and from now on, in a thread that ends with the process. No thread where nobody listens."""
        if self._line is not None:
            self.beat()
            threading.Thread(target=self._go_on, name="lockstep heart", daemon=True).start()

    def beat(self) -> None:
        """Send one heartbeat. It is lost if nobody listens, or if the listener does not catch up for a while."""
        if self._line is not None:
            with contextlib.suppress(OSError):
                self._line.send(self.now().to_text().encode())

    def now(self) -> Heartbeat:
        """Where the main thread is."""
        frame = sys._current_frames().get(self._main)
        place, call, meets = find_user_frame(frame) if frame is not None else (NOWHERE, "", False)
        said = self._marker
        return Heartbeat(
            rank=self._rank,
            process=os.getpid(),
            step=said.step,
            phase_changes=said.phase_changes,
            phase=said.phase,
            place=place,
            call=call,
            meets=meets or (said.phase == "reduction" and call != ""),
            collectives=collectives_begun(),
            cpu_s=_cpu_s(self._main),
            at=time.time(),
        )

    def _go_on(self) -> None:
        while True:
            time.sleep(BEAT_EVERY_S)
            self.beat()


def open_channel(channel: str) -> socket.socket | None:
    """A line to whoever listens at ``channel`` (see `lockstep.world.CHANNEL`); None for "", or if nobody does."""
    if not channel:
        return None
    host, colon, port = channel.rpartition(":")
    by_path = not (colon and port.isdigit())
    line = socket.socket(socket.AF_UNIX if by_path else socket.AF_INET, socket.SOCK_DGRAM)
    try:
        line.connect(channel if by_path else (host, int(port)))
    except OSError:
        # Whoever was to listen is gone, and this rank will be, too.
        line.close()
        return None
    line.settimeout(_SEND_S)
    return line


def _cpu_s(thread: int) -> float:
    if hasattr(time, "pthread_getcpuclockid"):
        return time.clock_gettime(time.pthread_getcpuclockid(thread))
    return time.process_time()
