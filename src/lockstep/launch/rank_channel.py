"""How a launcher and its ranks communicate while they run: messages of ranks, and notes for them.

rank 0 ─┬─ heartbeats, failures ──► socket ──► receive()
rank 1 ─┘

leave_reason(), leave_lost() ──► files beside the socket, read by the ranks
"""

from __future__ import annotations

import contextlib
import errno
import shutil
import socket
import tempfile
from collections.abc import Collection
from pathlib import Path
from typing import Final, Self

from lockstep.heartbeat_message import Heartbeat
from lockstep.launch.diagnosis.error_record import Failure
from lockstep.launch_contract import LOST_ADDRESSES, PRIVATE, RANK_FILES, STOP_REASON

_MESSAGE_BYTES = 1 << 16


class RankChannel:
    """A private directory of this launcher, for the ranks of this node, one generation after the other."""

    def __init__(self) -> None:
        # Short: the path of a socket holds about a hundred characters, and a run directory may have more.
        self._home: Final = Path(tempfile.mkdtemp(prefix=PRIVATE))
        self._socket: Final = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(self.address)
        self._socket.setblocking(False)
        self._lost = ""

    @property
    def address(self) -> str:
        """Where ranks are to send their heartbeats."""
        return str(self._home / "beats")

    def begin(self) -> None:
        """A new generation starts: what ranks of the one before have sent or left, and their notes, are dropped."""
        self.receive()
        for note in (STOP_REASON, LOST_ADDRESSES):
            (self._home / note).unlink(missing_ok=True)
        self._lost = ""
        for left in self._home.glob(f"{RANK_FILES}*"):
            shutil.rmtree(left, ignore_errors=True)

    def leave_reason(self, reason: str) -> None:
        """Leave for the ranks why they are asked to stop: their signal does not say it."""
        with contextlib.suppress(OSError):
            (self._home / STOP_REASON).write_text(reason, encoding="utf-8")

    def leave_lost(self, addresses: Collection[str]) -> None:
        """Leave for the ranks the ``addresses`` of hosts that are lost: nobody closes their connections to them."""
        text = "".join(f"{address}\n" for address in sorted(addresses))
        if text != self._lost:
            self._lost = text
            new = self._home / f"new-{LOST_ADDRESSES}"
            with contextlib.suppress(OSError):
                new.write_text(text, encoding="ascii")
                new.rename(self._home / LOST_ADDRESSES)

    def receive(self) -> tuple[list[Heartbeat], list[Failure]]:
        """The heartbeats that have come since the last call, and why ranks said that they fail. Does not wait."""
        beats: list[Heartbeat] = []
        failures: list[Failure] = []
        while True:
            try:
                text = self._socket.recv(_MESSAGE_BYTES)
            except OSError as error:
                if error.errno not in (errno.EAGAIN, errno.EWOULDBLOCK):
                    raise
                return beats, failures
            # A process that may write to the socket may write what it wants.
            if (failure := Failure.from_message(text)) is not None:
                failures.append(failure)
                continue
            with contextlib.suppress(ValueError):
                beats.append(Heartbeat.from_text(text))

    def close(self) -> None:
        """Stop listening and remove the directory."""
        self._socket.close()
        shutil.rmtree(self._home, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
