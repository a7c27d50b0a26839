"""Ends the connections of this process to hosts that are lost, of which nobody else tells it.

When the power of a host fails, nobody closes its connections, and a rank waits in a collective for as long as TCP bears
that. Its launcher finds out sooner. What waits on a connection that is shut down gets the error that it gets when the
other end has closed it, whoever has opened it: gloo, a store, or the script.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Collection
from pathlib import Path
from typing import Final

from lockstep.launch_contract import LOST_ADDRESSES
from lockstep.network_interface import plain_address

_DESCRIPTORS: Final = Path("/proc/self/fd")


class LostPeers:
    """Looks whether the launcher has left addresses of lost hosts, and cuts this process off from them.

    Args:
        channel: where the launcher hears this rank, see `open_channel`.
    """

    def __init__(self, channel: str) -> None:
        self._file: Final = Path(channel).with_name(LOST_ADDRESSES) if channel.startswith("/") else None
        self._known = ""

    def look(self) -> None:
        """To be called now and then, from any thread; some microseconds as long as no host is lost."""
        if self._file is None:
            return
        try:
            told = self._file.read_text(encoding="ascii")
        except OSError:
            return
        if told != self._known:
            self._known = told
            end_connections(set(told.split()))

    def told(self) -> bool:
        """Whether the launcher has left some: then whatever breaks in this process may be a connection to them."""
        return self._file is not None and self._file.exists()


def end_connections(addresses: Collection[str]) -> int:
    """Shut down all TCP connections of this process to ``addresses``, spelt as `plain_address`; how many there were.

    Also those that belong to libraries: they see the other end as closed.
    """
    ended, entries = 0, list[Path]()
    with contextlib.suppress(OSError):  # a system that does not list them
        entries = list(_DESCRIPTORS.iterdir())
    for entry in entries:
        with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
            # Sockets only: to close a duplicate of a file gives up the locks (`fcntl.lockf`) that this process has.
            if not _is_socket(entry):
                continue
            # Of a duplicate, so that the number cannot come to stand for something else meanwhile.
            duplicate = os.dup(int(entry.name))
            stack.callback(os.close, duplicate)
            if not _is_socket(_DESCRIPTORS / str(duplicate)):
                continue
            connection = socket.socket(fileno=duplicate)
            stack.callback(connection.detach)
            is_tcp = connection.type == socket.SOCK_STREAM and connection.family in (socket.AF_INET, socket.AF_INET6)
            if is_tcp and plain_address(connection.getpeername()[0]) in addresses:
                connection.shutdown(socket.SHUT_RDWR)
                ended += 1
    return ended


def _is_socket(entry: Path) -> bool:
    return str(entry.readlink()).startswith("socket:")
