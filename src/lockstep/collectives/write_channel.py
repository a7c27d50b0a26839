"""Small writes into a rank's memory, repeated in that of a rank on another node, in the order in which they were made.

    rank 0, step 43     write, write ─► send()      backward pass, reduction       no thread, no answer
    rank 2, step 43          its kernel holds the bytes ─► received()              when it comes by, or ends

What is sent has left this host long before the sums of the same step do, and whoever reads the copy sees how far it
goes. So nobody waits: a call takes some microseconds.
"""

from __future__ import annotations

import contextlib
import socket
import struct
from typing import Final, NamedTuple

from lockstep.collectives.neighbour_link import Neighbours

_HEAD: Final = struct.Struct("<qq")  # where, bytes that follow
_CHUNK_BYTES: Final = 1 << 16
#: Nobody reads at the other end where so many bytes wait to be sent.
_MOST_UNSENT_BYTES: Final = 1 << 20


class Write(NamedTuple):
    """Bytes that a rank has written."""

    source: int  #: the rank
    at: int  #: where its memory has them
    content: bytes


class WriteChannel:
    """Sends to one rank and receives from others; for one thread. No call waits for another rank.

    Args:
        neighbours: the connections, of which one leads away from here; they are closed with this.
    """

    def __init__(self, neighbours: Neighbours) -> None:
        (to,) = neighbours.to.values()
        self._to: socket.socket | None = to  # None: it is gone, or reads nothing
        self._sources: Final = dict(neighbours.sources)
        for connection in (to, *self._sources.values()):
            connection.setblocking(False)
        self._unsent: Final = bytearray()
        self._unread: Final = {source: bytearray() for source in self._sources}

    def write(self, at: int, content: bytes) -> None:
        """``content`` was written ``at`` this place: the next `send` sends it."""
        if self._to is not None:
            self._unsent.extend(_HEAD.pack(at, len(content)))
            self._unsent.extend(content)

    def send(self) -> None:
        """Send what was written, as far as it finds room on the way; the rest goes with the next call.

        Where the other rank is gone, or has not read for long, nothing is sent any more.
        """
        if self._to is None or not self._unsent:
            return
        try:
            del self._unsent[: self._to.send(self._unsent)]
        except BlockingIOError:
            pass
        except OSError:
            self._end_sending()
        if len(self._unsent) > _MOST_UNSENT_BYTES:
            self._end_sending()

    def received(self) -> list[Write]:
        """What others have written and sent since the last call, in the order of each of them."""
        return [write for source in list(self._sources) for write in self._from(source)]

    def _from(self, source: int) -> list[Write]:
        connection, unread = self._sources[source], self._unread[source]
        chunk = bytes(_CHUNK_BYTES)
        while len(chunk) == _CHUNK_BYTES:
            try:
                chunk = connection.recv(_CHUNK_BYTES)
            except BlockingIOError:
                break
            except OSError:
                chunk = b""
            if not chunk:
                connection.close()
                del self._sources[source]
            unread.extend(chunk)
        writes, begin = [], 0
        while begin + _HEAD.size <= len(unread):
            at, length = _HEAD.unpack_from(unread, begin)
            end = begin + _HEAD.size + length
            if end > len(unread):
                break
            writes.append(Write(source, at, bytes(unread[begin + _HEAD.size : end])))
            begin = end
        del unread[:begin]
        return writes

    def _end_sending(self) -> None:
        if self._to is not None:
            self._to.close()
            self._to = None
        self._unsent.clear()

    def close(self) -> None:
        """Close the connections. What was sent can be received all the same."""
        self._end_sending()
        for connection in self._sources.values():
            with contextlib.suppress(OSError):
                connection.close()
        self._sources.clear()
