"""Messages between ranks that do not run the same code, such as workers and servers.

    worker 0   push ──────►                      server    receive() ─► 0, push
    worker 1   ──── push ─►                                receive() ─► 1, push        as they come
               ◄─────── answer                             send(0, answer)

No process group of torch carries these messages: a server waits for whichever message comes first, and learns at once
that a rank is gone. Each pair of ranks has one connection, used in both directions.

Ranks cannot wait for each other in a circle if each rank that asks others sends to all of them in one order, and then
receives answers in any order: a rank that cannot send waits for a rank that sends to a later one.
"""

from __future__ import annotations

import contextlib
import pickle
import socket
import struct
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from multiprocessing.connection import wait
from typing import Any, Final

import torch

from lockstep.collectives.group import Group
from lockstep.collectives.neighbour_link import meet_neighbours, receive_into
from lockstep.collectives.object_channel import as_bytes, rebuild_object, split_object
from lockstep.errors import PeerLost, WorldError
from lockstep.formatting import format_ranks

_LENGTH: Final = struct.Struct("<q")  # length of the header before the tensors
_CPU: Final = torch.device("cpu")


class Mailbox:
    """Connections between this rank and each of some others. The constructor is collective.

    A message is any picklable object; its tensors travel and arrive in the memory of the CPU.

    Args:
        group: all ranks.
        calls: the ranks that this rank asks.
        called_by: the ranks that ask this rank.
        advice: a sentence for the error of a rank that waits in vain.

    Raises:
        WorldError: if the ranks do not reach each other.
    """

    def __init__(self, group: Group, calls: Collection[int], called_by: Collection[int], advice: str = "") -> None:
        met = meet_neighbours(group, calls, called_by)
        if isinstance(met, str):
            raise WorldError(f"the ranks cannot send each other messages: {met}")
        self._connections: Final[dict[int, socket.socket]] = {**met.to, **met.sources}
        self._advice: Final = advice
        self._timeout_s: Final = group.timeout_s
        self._last = -1  # the rank of the last received message
        self._asking: Final = threading.Lock()
        self._answering: threading.Thread | None = None
        for connection in self._connections.values():
            connection.settimeout(group.timeout_s)

    def send(self, rank: int, message: object, what: str) -> None:
        """Send ``message``, a part of ``what``, to ``rank``, which need not wait for it yet.

        Raises:
            PeerLost: if the rank is gone, or reads nothing within the group's timeout.
        """
        header, tensors = split_object(message, _CPU)
        text = pickle.dumps(header)
        with _naming(rank, what):
            self._connections[rank].sendall(_LENGTH.pack(len(text)) + text)
            for tensor in tensors:
                self._connections[rank].sendall(as_bytes(tensor).numpy().data)

    def receive(self, silent: Collection[int], what: str, *, for_ever: bool = False) -> tuple[int, object]:
        """Wait for a message of any rank, and return its sender and the message. Ranks have turns.

        Args:
            silent: the ranks that must send, to be named in an error.
            what: the awaited message, for errors.
            for_ever: wait beyond the group's timeout.

        Raises:
            PeerLost: if any rank is gone, or no message comes within the group's timeout.
        """
        ready = wait(list(self._connections.values()), None if for_ever else self._timeout_s)
        if not ready:
            raise PeerLost(
                f"{format_ranks(silent)} exited or stopped responding during {what}: nothing came in "
                f"{self._timeout_s:g} s{self._advice}"
            )
        turns = [(rank <= self._last, rank) for rank, one in self._connections.items() if one in ready]
        _, rank = min(turns)
        self._last = rank
        with _naming(rank, what):
            return rank, _message_from(self._connections[rank])

    def ask(self, questions: Mapping[int, object], what: str) -> list[Any]:
        """Send each rank its question, and return the answers in the same order; may be called from any thread.

        Raises:
            PeerLost: if a rank is gone, or does not answer within the group's timeout.
            Exception: that the answering rank has raised.
        """
        answers: dict[int, Any] = {}
        with self._asking:
            for rank, question in questions.items():
                self.send(rank, question, what)
            while silent := questions.keys() - answers.keys():
                rank, answers[rank] = self.receive(silent, what)
        for answer in answers.values():
            if isinstance(answer, Exception):
                raise answer
        return [answers[rank] for rank in questions]

    def answer(self, read: Callable[[Any], object], what: str) -> None:
        """Answer each question by ``read(question)`` from now on, on a thread of its own."""
        self._answering = threading.Thread(target=self._answer, args=(read, what), name="lockstep-mailbox", daemon=True)
        self._answering.start()

    def close(self) -> None:
        """End the connections; ranks that still wait for a message of this rank see it as gone."""
        for connection in self._connections.values():
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        if self._answering is not None:
            self._answering.join()
        for connection in self._connections.values():
            connection.close()

    def _answer(self, read: Callable[[object], object], what: str) -> None:
        with contextlib.suppress(PeerLost):  # the main thread learns of it, too; or this mailbox is closed
            while True:
                rank, question = self.receive((), what, for_ever=True)
                try:
                    answer = read(question)
                except Exception as error:  # noqa: BLE001 - the asking rank raises it
                    answer = error
                self.send(rank, answer, what)


def _message_from(connection: socket.socket) -> object:
    length = bytearray(_LENGTH.size)
    receive_into(connection, memoryview(length))
    text = bytearray(*_LENGTH.unpack(length))
    receive_into(connection, memoryview(text))
    return rebuild_object(pickle.loads(text), lambda flat: receive_into(connection, flat.numpy().data), _CPU, _CPU)


@contextlib.contextmanager
def _naming(rank: int, what: str) -> Iterator[None]:
    """A context in which errors of the connection with ``rank`` become `PeerLost` errors that name the rank."""
    try:
        yield
    except OSError as error:
        raise PeerLost(f"rank {rank} exited or stopped responding during {what}: {error.strerror or error}") from error
