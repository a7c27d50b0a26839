"""Repetition of small writes into a rank's memory, in order, in the memory of a rank on another node.

    rank 0, step 43     write, write ─► send()      backward pass, reduction       no thread, no answer
    rank 2, step 43          its kernel holds the bytes ─► received()              when it looks, or ends

Sent writes leave this host long before the sums of the same step, and a reader of the copy sees how far the copy goes.
So no rank waits: a call takes some microseconds.
"""

from __future__ import annotations

import contextlib
import socket
import struct
from typing import Final, NamedTuple

from lockstep.collectives.neighbour_link import Neighbours

_HEAD: Final = struct.Struct("<qq")  # offset, bytes that follow
_CHUNK_BYTES: Final = 1 << 16
#: Number of unsent bytes from which on the receiver is taken not to read any more.
_MOST_UNSENT_BYTES: Final = 1 << 20


class Write(NamedTuple):
    """Bytes that a rank has written."""

    source: int  #: the rank
    at: int  #: the offset in the rank's memory
    content: bytes


class WriteChannel:
    """Sends writes to one rank and receives from others; for one thread. No call waits for another rank.

    Args:
        neighbours: the connections, with exactly one to another rank; closed with the channel.
    """

    def __init__(self, neighbours: Neighbours) -> None:
        (to,) = neighbours.to.values()
        self._to: socket.socket | None = to  # None: the rank is gone, or does not read
        self._sources: Final = dict(neighbours.sources)
        for connection in (to, *self._sources.values()):
            connection.setblocking(False)
        self._unsent: Final = bytearray()
        self._unread: Final = {source: bytearray() for source in self._sources}

    def write(self, at: int, content: bytes) -> None:
        """Add a write of ``content`` at the offset ``at``, for the next `send`."""
        if self._to is not None:
            self._unsent.extend(_HEAD.pack(at, len(content)))
            self._unsent.extend(content)

    def send(self) -> None:
        """Send added writes, as far as the connection has room; the rest is sent by the next call.

        If the other rank is gone, or has not read for long, no write is sent any more.
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
        """The writes received from other ranks since the last call, in the order of each rank."""
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
        """Close the connections. Sent writes can still be received."""
        self._end_sending()
        for connection in self._sources.values():
            with contextlib.suppress(OSError):
                connection.close()
        self._sources.clear()
