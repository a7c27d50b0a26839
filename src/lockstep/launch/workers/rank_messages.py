"""How a launcher and its ranks communicate while they run: messages of ranks, and notes for them.

rank 0 ─┬─ heartbeats, failures ──► socket ──► receive()
rank 1 ─┘

leave_reason(), leave_lost() ──► files beside the socket, read by the ranks
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import socket
import tempfile
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Final, Self

from lockstep.errors import SettingError
from lockstep.heartbeat_message import Heartbeat, note_from_text
from lockstep.launch.diagnosis.error_record import Failure
from lockstep.launch.run_dir.owned_directory import (
    SHARED_MEMORY,
    new_owned_directory,
    remove_left,
    remove_owned_directory,
)
from lockstep.launch_contract import LOST_ADDRESSES, PRIVATE, RANK_FILES, STOP_REASON
from lockstep.small_files import replace_text

_MESSAGE_BYTES = 1 << 16
#: The longest path that a socket may have on Linux, and how much of it multiprocessing and this module need below the
#: directory for temporary files: two directories and a socket, each of a prefix and eight random letters.
_SOCKET_PATH_BYTES, _BELOW_BYTES = 107, 55


class RankChannel:
    """A private directory of this launcher, for the ranks of this node, one generation after the other."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say: Final = say  # tells the user
        self._said: set[str] = set()  # notes of ranks
        self._home, self._owner = _new_home()
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
            with contextlib.suppress(OSError):
                replace_text(self._home / LOST_ADDRESSES, text)

    def receive(self) -> tuple[list[Heartbeat], list[Failure]]:
        """The heartbeats that have come since the last call, and why ranks said that they fail. Does not wait.

        Notes of ranks are said, each once.
        """
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
            if note := note_from_text(text):
                if note not in self._said:
                    self._said.add(note)
                    self._say(note)
                continue
            with contextlib.suppress(ValueError):
                beats.append(Heartbeat.from_text(text))

    def close(self) -> None:
        """Stop listening and remove the directory, with what the ranks have left."""
        self._socket.close()
        remove_owned_directory(self._home, self._owner)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _new_home() -> tuple[Path, int]:
    """A new private directory, and its lock: for temporary files, or in memory where their directory cannot be used.

    What launchers that were killed have left there is removed.

    Raises:
        SettingError: if there is none, with what to do.
    """
    roots, why = [SHARED_MEMORY], "it has too long a path for a socket"
    try:
        roots.insert(0, Path(tempfile.gettempdir()))
    except FileNotFoundError as error:
        why = str(error)
    remove_left({SHARED_MEMORY, *roots})
    for root in roots:
        # Not the run directory, whose path is often longer.
        if len(os.fsencode(root)) > _SOCKET_PATH_BYTES - _BELOW_BYTES:
            continue
        try:
            return new_owned_directory(root, PRIVATE)
        except OSError as error:
            why = f"{root}: {error.strerror}"
    raise SettingError(f"no directory for temporary files can be used ({why}); set TMPDIR to one, such as TMPDIR=/tmp")
