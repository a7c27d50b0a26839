"""The end of this process's connections to lost hosts, which the system would notice late.

When the power of a host fails, its connections are not closed, and a rank waits in a collective until TCP gives up. The
launcher notices the loss sooner. Code that waits on a connection that is shut down gets the same error as if the other
end had closed it, whether gloo, a store or the script has opened the connection.
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
    """Looks for addresses of lost hosts from the launcher, and ends this process's connections to these hosts.

    Args:
        channel: of this rank to the launcher, see `open_channel`.
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
        """Whether the launcher has left addresses: then any error in this process may be from a lost connection."""
        return self._file is not None and self._file.exists()


def end_connections(addresses: Collection[str]) -> int:
    """Shut down all TCP connections of this process to ``addresses``, in the form of `plain_address`; their number.

    Connections of libraries are included, which see the other end as closed.
    """
    ended, entries = 0, list[Path]()
    with contextlib.suppress(OSError):  # a system that does not list them
        entries = list(_DESCRIPTORS.iterdir())
    for entry in entries:
        with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
            # Sockets only: closing a duplicate of a file gives up this process's locks (`fcntl.lockf`) on the file.
            if not _is_socket(entry):
                continue
            # By a duplicate, since the original number could be reused meanwhile.
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
