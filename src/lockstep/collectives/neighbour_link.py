"""Transport of bytes from each rank to a rank on another node, beside the training and its process groups.

    main thread       step 42 ────────────── step 43 ─────────────────────── step 44
    sending thread            └─ number, bytes ──────► answer ┘
    the neighbour's           ┌─ number, bytes ──► kept ─► answer

Each pair of ranks has its own connection: a collective of the training neither waits for the connection nor breaks with
it. `NeighbourLink` sends whole parts of a state over such a connection, as drawn; `WriteChannel` some hundred bytes in
each step; `Mailbox` the messages between workers and servers.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final

from lockstep.collectives.group import Group
from lockstep.network_interface import INTERFACES, address_of, address_towards

Fill = Callable[[memoryview], None]
"""Fills the given memory with arriving bytes."""
Keep = Callable[[int, int, Fill], None]
"""Called on a thread for each arriving content: its number, its number of bytes, and a `Fill` for these bytes.

If the function raises `OSError` before it calls the `Fill`, the sender is told that the content was not kept.
"""

_HEAD: Final = struct.Struct("<qq")  # number, bytes that follow
_ANSWER: Final = struct.Struct("<?")  # whether the content is kept
_GREETING: Final = struct.Struct("<16sq")  # the receiver's secret, the connecting rank
_SCRAP_BYTES: Final = 1 << 16
#: Timeout of a connection within a cluster; the ranks have met already.
_CONNECT_S: Final = 20.0
#: A rank sends its greeting as soon as it is connected, whether the other rank reads it or not.
_GREETING_S: Final = 2.0


@dataclass(frozen=True, slots=True)
class Neighbours:
    """The connections of a rank, to be closed by their owner."""

    to: Mapping[int, socket.socket]  #: to each rank that this rank has called
    sources: Mapping[int, socket.socket]  #: from each rank that has called this rank


class NeighbourLink:
    """Sends to one rank and receives from others, each content with an answer, on threads of its own.

    Args:
        to: the connection to the receiving rank.
        sources: the connections from other ranks, each with the function that keeps its content.
        timeout_s: timeout of an answer.
    """

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
        """Begin to send ``content``, which must not change until `finish`, where it is released.

        The content before must be finished.
        """
        self._sending = self._sender.submit(self._send, number, content)

    def finish(self) -> None:
        """Wait until the neighbour has kept the content that was begun last.

        Raises:
            OSError: if the content is not kept: the neighbour has no room, or is gone.
        """
        sending, self._sending = self._sending, None
        if sending is not None:
            sending.result()

    def _send(self, number: int, content: memoryview) -> None:
        with content:
            self._to.sendall(_HEAD.pack(number, len(content)))
            self._to.sendall(content)
        answer = bytearray(_ANSWER.size)
        receive_into(self._to, memoryview(answer))
        if not _ANSWER.unpack(answer)[0]:
            raise OSError("it has no room")

    def close(self) -> None:
        """End all threads and connections, also with bytes under way; without a message to the neighbour."""
        for connection in (self._to, *self._sources):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        self._sender.shutdown()
        for receiver in self._receivers:
            receiver.join()
        for connection in (self._to, *self._sources):
            connection.close()


def meet_neighbours(group: Group, to: Collection[int], sources: Collection[int]) -> Neighbours | str:
    """Connect this rank to each of ``to``, and with each of ``sources``. Collective.

    Connections use the network interface of gloo. Only these ranks can take part: the group tells each rank the others'
    secrets. Sent bytes are not encrypted.

    Args:
        group: all ranks.
        to: the ranks that this rank calls.
        sources: the ranks that call this rank.

    Returns:
        The connections; or on all ranks alike, the reason why they failed.
    """
    secret = secrets.token_bytes(16)
    with contextlib.ExitStack() as stack:
        listening, here, why_not = _listen(group.address)
        if listening is not None:
            stack.callback(listening.close)
        ranks = group.gather_objects((here, secret, why_not), "where neighbours meet")
        unreached, unheard = "", ""
        called: dict[int, socket.socket] = {}
        accepted: dict[int, socket.socket] = {}
        if listening is not None and not any(failed for *_, failed in ranks):
            for rank in to:
                there, its_secret, _ = ranks[rank]
                try:
                    called[rank] = socket.create_connection(there, timeout=_CONNECT_S)
                    called[rank].sendall(_GREETING.pack(its_secret, group.rank))
                except OSError as error:
                    unreached = f"rank {group.rank} does not reach rank {rank} at {there[0]}: {error.strerror or error}"
            unheard = _accept(listening, secret, sources, accepted)
        told = group.gather_objects((why_not, unreached, unheard), "whether neighbours have met")
        # A rank that was not reached has waited in vain, too.
        failures = [failed for kind in zip(*told, strict=True) for failed in kind if failed]
        made = (*accepted.values(), *called.values())
        if failures:
            for one in made:
                one.close()
            return f"{failures[0]}; {INTERFACES[0]} names another network interface"
        for one in made:
            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            one.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            one.settimeout(None)  # no bytes may come for as long as an evaluation takes
        return Neighbours(called, accepted)


def _listen(address: tuple[str, int]) -> tuple[socket.socket | None, tuple[str, int], str]:
    """A listening socket at this host's address in the network of the ranks, and the address; or why this failed."""
    # On the host with ``address``, the name may mean the loopback. Gloo has been told the interface.
    interface, _, _ = os.environ.get(INTERFACES[0], "").partition(",")
    host = address_of(interface) or address_towards(*address)
    if not host:
        return None, ("", 0), f"{socket.gethostname()} has no address in the network of {address[0]}"
    try:
        listening = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        return None, ("", 0), f"{socket.gethostname()} cannot listen at {host}: {error.strerror or error}"
    return listening, (host, listening.getsockname()[1]), ""


def _accept(
    listening: socket.socket, secret: bytes, sources: Collection[int], accepted: dict[int, socket.socket]
) -> str:
    """Accept only the connections of ``sources`` into ``accepted``; returns why one is missing, or ""."""
    end_s = time.monotonic() + _CONNECT_S
    while (missing := [rank for rank in sources if rank not in accepted]) and (left_s := end_s - time.monotonic()) > 0:
        listening.settimeout(left_s)
        try:
            connection, _ = listening.accept()
        except OSError as error:
            return f"rank {missing[0]} has not come: {error}"
        if (rank := _greeted(connection, secret)) in missing:
            accepted[rank] = connection
        else:
            connection.close()
    return f"rank {missing[0]} has not come within {_CONNECT_S:g} s" if missing else ""


def _greeted(connection: socket.socket, secret: bytes) -> int:
    """The rank that has opened ``connection``; -1 for a stranger, which may send nothing."""
    connection.settimeout(_GREETING_S)
    greeting = bytearray(_GREETING.size)
    with contextlib.suppress(OSError):
        receive_into(connection, memoryview(greeting))
    told, rank = _GREETING.unpack(greeting)
    return rank if secrets.compare_digest(told, secret) else -1


def _receive(connection: socket.socket, keep: Keep) -> None:
    head = bytearray(_HEAD.size)
    filled = False

    def fill(memory: memoryview) -> None:
        nonlocal filled
        filled = True
        receive_into(connection, memory)

    with contextlib.suppress(OSError):  # the other end is gone, or this one is closed
        while True:
            receive_into(connection, memoryview(head))
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
        receive_into(connection, scrap[:taken])
        length -= taken


def receive_into(connection: socket.socket, memory: memoryview) -> None:
    """Fill ``memory`` with the next bytes of ``connection``.

    Raises:
        ConnectionError: if the connection ends before.
        OSError: if the connection breaks.
    """
    at = 0
    while at < len(memory):
        got = connection.recv_into(memory[at:])
        if not got:
            raise ConnectionError("the other rank has closed the connection")
        at += got
