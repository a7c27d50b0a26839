"""Bytes from each rank to one on another node, beside the training and not through its process groups.

    main thread       step 42 ────────────── step 43 ─────────────────────── step 44
    sending thread            └─ number, bytes ──────► answer ┘
    the neighbour's           ┌─ number, bytes ──► kept ─► answer

A connection of its own for each pair of ranks: a collective of the training neither waits for it nor breaks with it.
`NeighbourLink` carries whole parts of a state over it, as drawn; `WriteChannel` some hundred bytes in each step;
`Mailbox` whatever workers and servers say to each other.
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
#: A rank sends its greeting as soon as it is connected, whether the other one looks or not.
_GREETING_S: Final = 2.0


@dataclass(frozen=True, slots=True)
class Neighbours:
    """The connections of one rank; whoever has them closes them."""

    to: Mapping[int, socket.socket]  #: to each rank that this one has called
    sources: Mapping[int, socket.socket]  #: from each rank that has called this one


class NeighbourLink:
    """Sends to one rank and receives from others, each thing with an answer, on threads of its own.

    Args:
        to: the connection to that rank.
        sources: those from the others, and what is done with what comes there.
        timeout_s: how long an answer is waited for.
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
        receive_into(self._to, memoryview(answer))
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


def meet_neighbours(group: Group, to: Collection[int], sources: Collection[int]) -> Neighbours | str:
    """Connect this rank to each of ``to``, and with those that connect to it. Collective.

    It goes over the network interface that gloo uses. Nobody but these ranks can take part: each is told the others'
    secrets by the group. What is sent is not encrypted.

    Args:
        group: all ranks.
        to: the ranks that this one calls.
        sources: the ranks that call this one.

    Returns:
        The connections; on all ranks alike, why there are none.
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
        # Whoever was not reached has waited in vain, too.
        failures = [failed for kind in zip(*told, strict=True) for failed in kind if failed]
        made = (*accepted.values(), *called.values())
        if failures:
            for one in made:
                one.close()
            return f"{failures[0]}; {INTERFACES[0]} names another network interface"
        for one in made:
            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            one.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            one.settimeout(None)  # nothing may come for as long as an evaluation takes
        return Neighbours(called, accepted)


def _listen(address: tuple[str, int]) -> tuple[socket.socket | None, tuple[str, int], str]:
    """A socket at this host's address in the network of the ranks; else why there is none."""
    # On the host that has ``address`` the name may stand for the loopback. Gloo has been told the interface.
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
    """Take the connections of ``sources`` into ``accepted``, and no others; why one is missing, "" if none is."""
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
    """The rank that has opened ``connection``; -1 for a stranger, who may be mute."""
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
        OSError: if it breaks.
    """
    at = 0
    while at < len(memory):
        got = connection.recv_into(memory[at:])
        if not got:
            raise ConnectionError("the other rank has closed the connection")
        at += got
