"""Bytes from each rank to one on another node, beside the training and not through its process groups.

    main thread       step 42 ────────────── step 43 ─────────────────────── step 44
    sending thread            └─ number, bytes ──────► answer ┘
    the neighbour's           ┌─ number, bytes ──► kept ─► answer

A connection of its own for each pair of ranks: a collective of the training neither waits for it nor breaks with it.
"""

from __future__ import annotations

import contextlib
import secrets
import socket
import struct
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final

from lockstep.collectives.group import Group

Fill = Callable[[memoryview], None]
"""Fills the memory that it is given with the bytes that arrive."""
Keep = Callable[[int, int, Fill], None]
"""Called on a thread for each thing that arrives: its number, how many bytes it has, and what fills memory with them.

Where it raises `OSError` before it has called that, the sender is told that this was not kept.
"""

_HEAD: Final = struct.Struct("<qq")  # number, bytes that follow
_ANSWER: Final = struct.Struct("<?")  # whether it is kept
_GREETING: Final = struct.Struct("<16sq")  # the receiver's secret, who connects
_SCRAP_BYTES: Final = 1 << 16
#: For a connection within a cluster; the ranks have met already.
_CONNECT_S: Final = 20.0


class NeighbourLink:
    """Sends to one rank and receives from others; see `open_neighbour_link`."""

    def __init__(self, to: socket.socket, sources: Sequence[tuple[socket.socket, Keep]], timeout_s: float) -> None:
        to.settimeout(timeout_s)
        self._to: Final = to
        self._sources: Final = [connection for connection, _ in sources]
        self._sender: Final = ThreadPoolExecutor(1, thread_name_prefix="lockstep-to-neighbour")
        self._sending: Future[None] | None = None
        self._receivers: Final = [
            threading.Thread(target=_receive, args=source, name="lockstep-from-neighbour", daemon=True)
            for source in sources
        ]
        for receiver in self._receivers:
            receiver.start()

    def begin(self, number: int, content: memoryview) -> None:
        """Begin to send ``content``, which must not change until `finish`, and is released then.

        What was begun before must be finished.
        """
        self._sending = self._sender.submit(self._send, number, content)

    def finish(self) -> None:
        """What was begun last is kept by the neighbour when this returns.

        Raises:
            OSError: if it is not kept: the neighbour has no room, or is gone.
        """
        sending, self._sending = self._sending, None
        if sending is not None:
            sending.result()

    def _send(self, number: int, content: memoryview) -> None:
        with content:
            self._to.sendall(_HEAD.pack(number, len(content)))
            self._to.sendall(content)
        answer = bytearray(_ANSWER.size)
        _fill(self._to, memoryview(answer))
        if not _ANSWER.unpack(answer)[0]:
            raise OSError("it has no room")

    def close(self) -> None:
        """End all threads and connections, whatever is on the way; without a word to the neighbour."""
        for connection in (self._to, *self._sources):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        self._sender.shutdown()
        for receiver in self._receivers:
            receiver.join()
        for connection in (self._to, *self._sources):
            connection.close()


def open_neighbour_link(
    group: Group, address: tuple[str, int], to: int, sources: Mapping[int, Keep]
) -> NeighbourLink | str:
    """Connect this rank to ``to``, and with those that are to send to it. Collective.

    Args:
        group: all ranks.
        address: of a host and a port in the network through which the ranks reach each other.
        to: the rank to which this one sends.
        sources: what is done with what each rank sends that sends to this one.

    Returns:
        The link; on all ranks alike, why there is none.
    """
    secret = secrets.token_bytes(16)
    with contextlib.ExitStack() as stack:
        listening, here, why_not = _listen(address)
        if listening is not None:
            stack.callback(listening.close)
        ranks = group.gather_objects((here, secret, why_not), "where neighbours meet")
        connection: socket.socket | None = None
        accepted: dict[int, socket.socket] = {}
        if listening is not None and not any(failed for *_, failed in ranks):
            there, its_secret, _ = ranks[to]
            try:
                connection = socket.create_connection(there, timeout=_CONNECT_S)
                connection.sendall(_GREETING.pack(its_secret, group.rank))
                accepted = _accept(listening, secret, sources)
            except OSError as error:
                why_not = f"rank {group.rank} and rank {to}: {error}"
        failures = [failed for failed in group.gather_objects(why_not, "whether neighbours have met") if failed]
        made = (*accepted.values(), *([] if connection is None else [connection]))
        if failures or connection is None:
            for one in made:
                one.close()
            return failures[0] if failures else "they have not met"
        for one in made:
            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            one.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            one.settimeout(None)  # nothing may come for as long as an evaluation takes
        return NeighbourLink(connection, [(accepted[rank], keep) for rank, keep in sources.items()], group.timeout_s)


def _listen(address: tuple[str, int]) -> tuple[socket.socket | None, tuple[str, int], str]:
    """A socket at this host's address in the network of ``address``; else why there is none."""
    try:
        family, *_, place = socket.getaddrinfo(*address, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:  # sends nothing
            probe.connect(place)
            host = str(probe.getsockname()[0])
        listening = socket.create_server((host, 0), family=family, backlog=64)
    except OSError as error:
        return None, ("", 0), f"no address in the network of {address[0]}: {error}"
    return listening, (host, listening.getsockname()[1]), ""


def _accept(listening: socket.socket, secret: bytes, sources: Mapping[int, Keep]) -> dict[int, socket.socket]:
    accepted: dict[int, socket.socket] = {}
    listening.settimeout(_CONNECT_S)
    while accepted.keys() != sources.keys():
        connection, _ = listening.accept()
        connection.settimeout(_CONNECT_S)
        greeting = bytearray(_GREETING.size)
        with contextlib.suppress(OSError):
            _fill(connection, memoryview(greeting))
        told, rank = _GREETING.unpack(greeting)
        if secrets.compare_digest(told, secret) and rank in sources:
            accepted[rank] = connection
        else:
            connection.close()
    return accepted


def _receive(connection: socket.socket, keep: Keep) -> None:
    head = bytearray(_HEAD.size)
    filled = False

    def fill(memory: memoryview) -> None:
        nonlocal filled
        filled = True
        _fill(connection, memory)

    with contextlib.suppress(OSError):  # the other end is gone, or this one is closed
        while True:
            _fill(connection, memoryview(head))
            number, length = _HEAD.unpack(head)
            filled = False
            try:
                keep(number, length, fill)
            except OSError:
                if filled:
                    raise
                _skip(connection, length)
            connection.sendall(_ANSWER.pack(filled))


def _skip(connection: socket.socket, length: int) -> None:
    scrap = memoryview(bytearray(_SCRAP_BYTES))
    while length:
        taken = min(length, _SCRAP_BYTES)
        _fill(connection, scrap[:taken])
        length -= taken


def _fill(connection: socket.socket, memory: memoryview) -> None:
    """Fill ``memory`` with the next bytes.

    Raises:
        ConnectionError: if the connection ends before.
        OSError: if it breaks.
    """
    at = 0
    while at < len(memory):
        got = connection.recv_into(memory[at:])
        if not got:
            raise ConnectionError("the other rank has closed the connection")
        at += got
