"""The process that serves the store of a job on several machines."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from typing import Final

from lockstep.launch.child_process import own_python, stop_signals_blocked, with_this_package
from lockstep.launch.rendezvous.tcp_store_client import LOG_LEVEL


class StoreProcess:
    """The store behind a socket that listens already; it lives until `close`, or until this process ends."""

    def __init__(self, listening: socket.socket) -> None:
        with listening:
            os.set_inheritable(listening.fileno(), True)
            port = listening.getsockname()[1]
            with stop_signals_blocked():
                self._process: Final = subprocess.Popen(
                    own_python("tcp-store", [str(listening.fileno()), str(port), str(os.getpid())]),
                    env=with_this_package({**os.environ, LOG_LEVEL: "ERROR"}),
                    pass_fds=[listening.fileno()],
                    stdin=subprocess.DEVNULL,
                    start_new_session=True,
                )

    def close(self) -> None:
        """Kill the process; returns when it is gone."""
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()
