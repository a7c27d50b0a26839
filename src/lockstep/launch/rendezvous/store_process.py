"""The process that serves the store of a job on several machines."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from collections.abc import Callable
from typing import Final

from lockstep.launch.diagnosis.part_monitor import PartMonitor
from lockstep.launch.diagnosis.root_cause import how_it_ended
from lockstep.launch.host.child_process import own_python, stop_signals_blocked, with_this_package
from lockstep.launch.rendezvous.store_connection import LOG_LEVEL

_NAME = "the store where the launchers meet"


class StoreProcess:
    """The store behind a socket that listens already; it lives until `close`, or until this process ends.

    Args:
        listening: stays open, so that who connects while there is no process waits for the next one.
        say: tells the user what befell the process.
    """

    def __init__(self, listening: socket.socket, say: Callable[[str], None]) -> None:
        self._listening: Final = listening.dup()
        self._say = say
        self._monitor = PartMonitor(say)
        self._process = self._start()

    def look_after(self) -> None:
        """Start it anew if it is dead, or stopped for good; to be called often. What it held must be written again."""
        if (status := self._process.poll()) is not None:
            self._say(f"note: {_NAME} {how_it_ended(status)}: starting another one")
            self._process = self._start()
        if self._monitor.poll() is not None:
            self._process.kill()

    def close(self) -> None:
        """Kill the process; returns when it is gone."""
        self._listening.close()
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()

    def _start(self) -> subprocess.Popen[bytes]:
        port = self._listening.getsockname()[1]
        with stop_signals_blocked():
            process = subprocess.Popen(
                own_python("tcp-store", [str(self._listening.fileno()), str(port), str(os.getpid())]),
                env=with_this_package({**os.environ, LOG_LEVEL: "ERROR"}),
                pass_fds=[self._listening.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        self._monitor.watch({process.pid: _NAME})
        return process
