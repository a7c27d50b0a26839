"""Ranks that serve others, and the remote calls by which they are asked.

    ranks     0     1     2   |   3     4         parameter-server:servers=2 on five ranks
              workers         |   servers         (rank 0 works: it leads, and measures what it trains)

    send      worker ──► letter ──► a queue, in the order of arrival, which the server's main thread goes through;
              worker ◄── answer ◄── when it likes
    read      any rank ──► what? ──► any rank, on a thread beside its main one
                       ◄── tensors

On `torch.distributed.rpc` over TensorPipe, beside the process group of the run, at the same address. A function of this
module finds the one line of its process: a remote reference (RRef) to an object on each rank would say the same with
more messages, which its counting of references costs.

Tensors travel through the memory of the CPU, whatever the device.
"""

from __future__ import annotations

import queue
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch.distributed import rpc

from lockstep.collectives import Group
from lockstep.errors import PeerLost, SettingError, WorldError
from lockstep.launch_contract import EXIT_NOT_SAVED, EXIT_STOPPED
from lockstep.peer_failure import is_peer_failure

Answer = torch.futures.Future[Any]
Read = Callable[[Any], Any]
"""What this rank answers to a `read`, on a thread of its own: from what was asked."""


@dataclass(frozen=True, slots=True)
class Staff:
    """Which ranks work and which serve."""

    size: int
    serving: int  #: how many of the ranks, the last ones

    def __post_init__(self) -> None:
        if not 1 <= self.serving < self.size:
            raise SettingError(
                f"servers={self.serving} of {self.size} ranks: give at least one, and leave at least one to work"
            )

    @property
    def workers(self) -> range:
        """The ranks that go through micro-batches."""
        return range(self.size - self.serving)

    @property
    def servers(self) -> range:
        """The ranks that serve them."""
        return range(self.size - self.serving, self.size)


@dataclass(frozen=True, slots=True)
class Letter:
    """What one rank has sent to another, which waits for the answer or will."""

    sender: int
    content: Any
    _answer: Answer

    def answer(self, content: Any) -> None:
        """The sender's wait is over."""
        self._answer.set_result(content)


class Line:
    """Remote calls between the ranks of a group; one line in a process at a time.

    All ranks make theirs at the same time; about 0.15 s.

    Args:
        group: who is connected.
        read: answers what other ranks `read` here, while this rank's main thread does what it does.

    Raises:
        WorldError: if the ranks cannot be connected.
    """

    def __init__(self, group: Group, read: Read) -> None:
        self.rank: Final = group.rank
        self._group: Final = group
        self._read: Final = read
        self._arrived: Final[queue.SimpleQueue[Letter | PeerLost]] = queue.SimpleQueue()
        self._watched_by: Final[list[Answer]] = []
        self._closing = False
        self._lock: Final = threading.Lock()
        _open.append(self)
        options = rpc.TensorPipeRpcBackendOptions(init_method="env://", rpc_timeout=group.timeout_s)
        try:
            with warnings.catch_warnings():
                # Torch's own way to set it up uses a form of process groups of which torch warns.
                warnings.filterwarnings("ignore", "You are using a Backend", UserWarning)
                rpc.init_rpc(_name(group.rank), rank=group.rank, world_size=group.size, rpc_backend_options=options)
        except RuntimeError as error:
            _open.remove(self)
            raise WorldError(
                f"rank {group.rank} of {group.size} could not open its line for remote calls: "
                f"{str(error).splitlines()[0]}"
            ) from error

    def watch(self, ranks: Sequence[int]) -> None:
        """From now on `take` raises when one of ``ranks`` is gone, though no letter of it is awaited.

        It is a call that each of them leaves unanswered; that the other end has closed ends it.
        """
        for rank in ranks:
            call = rpc.rpc_async(_name(rank), _stay, timeout=0)
            call.add_done_callback(lambda ended, rank=rank: self._see_end(rank, ended))

    def send(self, rank: int, content: Any) -> Answer:
        """Lay ``content`` before ``rank``; it waits there until it is taken. See `wait` for the answer."""
        answer: Answer = rpc.rpc_async(_name(rank), _deliver, args=(self._group.rank, content))
        return answer

    def read(self, rank: int, what: Any) -> Answer:
        """What ``rank`` answers to ``what`` at once. See `wait`."""
        answer: Answer = rpc.rpc_async(_name(rank), _answer, args=(what,))
        return answer

    def wait(self, rank: int, answer: Answer, what: str) -> Any:
        """The answer of ``rank``.

        Raises:
            PeerLost: if it is gone, or does not answer in the group's time.
        """
        with naming(rank, what):
            return answer.wait()

    def take(self, what: str) -> Letter:
        """The next letter, once it is there.

        Raises:
            PeerLost: if a watched rank is gone, or nothing comes in the group's time.
        """
        try:
            letter = self._arrived.get(timeout=self._group.timeout_s)
        except queue.Empty:
            raise PeerLost(
                f"rank {self._group.rank} waited {self._group.timeout_s:g} s for {what} and nothing came. Ranks that "
                "serve do not run the body of the loop over micro-batches: where workers leave more than the loop from "
                "there, as by `return`, leave it by `break`, and return after it"
            ) from None
        if isinstance(letter, PeerLost):
            raise letter
        return letter

    def close(self) -> None:
        """The line is down. All ranks; after an error each by itself."""
        if self not in _open:
            return
        error = sys.exception()
        # Who fails goes down alone; those who wait for it are told by the end of the connection.
        by_agreement = (None, 0, EXIT_NOT_SAVED, EXIT_STOPPED)
        together = error is None or (isinstance(error, SystemExit) and error.code in by_agreement)
        if together:
            with self._lock:
                self._closing = True
            for call in self._watched_by:
                call.set_result(None)
            # The end waits for all calls, also those that a stop has overtaken.
            while not self._arrived.empty():
                if isinstance(letter := self._arrived.get(), Letter):
                    letter.answer(None)
        rpc.shutdown(graceful=together)
        _open.remove(self)

    def _lay_down(self, sender: int, content: Any) -> Answer:
        answer = Answer()
        with self._lock:
            if self._closing:
                answer.set_result(None)
            else:
                self._arrived.put(Letter(sender, content, answer))
        return answer

    def _be_watched(self) -> Answer:
        answer = Answer()
        with self._lock:
            if self._closing:
                answer.set_result(None)
            else:
                self._watched_by.append(answer)
        return answer

    def _see_end(self, rank: int, call: Answer) -> None:
        try:
            call.value()
        except RuntimeError as error:
            told = str(error).splitlines()[0]
            self._arrived.put(PeerLost(f"rank {rank} left or fell silent while this rank served it: {told}"))


@dataclass(frozen=True, slots=True)
class Parting:
    """A worker's loop over micro-batches is over."""

    whole: bool  #: whether it came to its end


class Round:
    """In each step every worker lays one letter before every server, and they are answered together.

    So it does after the last step of a loop, when it parts:

        worker 0   push  push  parting
        worker 1   push  push  parting        break after the second step: the servers' loop ends there, too

    Args:
        line: between all ranks.
        staff: who works and who serves.
    """

    def __init__(self, line: Line, staff: Staff) -> None:
        self._line: Final = line
        self._staff: Final = staff
        self.unsent: dict[int, Any] = {}  #: of a worker: what each server will be told
        self._asked: dict[int, Answer] = {}
        self._letters: list[Letter] = []  # of a server, not answered yet

    def send(self) -> None:
        """A worker's letters leave, if they have not."""
        unsent, self.unsent = self.unsent, {}
        for server, content in unsent.items():
            self._asked[server] = self._line.send(server, content)

    def gather(self, what: str) -> list[Any]:
        """On a server: what each worker sent, in their order, once all have."""
        while len(self._letters) < len(self._staff.workers):
            silent = set(self._staff.workers).difference(letter.sender for letter in self._letters)
            self._letters.append(self._line.take(f"{what} of {named(silent)}"))
        self._letters.sort(key=lambda letter: letter.sender)
        return [letter.content for letter in self._letters]

    def answer(self, content: Callable[[], Any]) -> None:
        """On a server: all workers are told ``content()``."""
        letters, self._letters = self._letters, []
        if letters:
            answer = content()
            for letter in letters:
                letter.answer(answer)

    def keep(self, letter: Letter) -> None:
        """On a server: ``letter``, taken already, is its sender's of this round."""
        self._letters.append(letter)

    @property
    def come(self) -> set[int]:
        """On a server: whose letters of this round are here."""
        return {letter.sender for letter in self._letters}

    def is_over(self, what: str) -> bool:
        """On a server, once all letters are here: whether workers part, instead of ``what``.

        Raises:
            PeerLost: if not all do the same.
        """
        hows = [content.whole if isinstance(content, Parting) else None for content in self.gather(what)]
        if len(set(hows)) > 1:
            ranks = {how: [r for r, h in zip(self._staff.workers, hows, strict=True) if h is how] for how in set(hows)}
            raise strayed(ranks.get(False) or ranks[True])
        return hows[0] is not None

    def part(self, *, whole: bool) -> bool:
        """See `HasServerRanks.part`; before a worker sends anything else it must `rejoin`."""
        if self._line.rank in self._staff.workers:
            for server in self._staff.servers:
                self._asked[server] = self._line.send(server, Parting(whole))
            return whole
        over = self.is_over(_END)
        assert over, "workers make as many steps as an epoch has"
        parting: Parting = self._letters[0].content
        self.answer(lambda: None)
        return parting.whole

    def rejoin(self) -> None:
        """On a worker: servers are through with the loop before; their `part` has returned."""
        for _ in self.answers(_END):
            pass

    def answers(self, what: str) -> Iterator[tuple[int, Any]]:
        """On a worker: each server, and what it answered."""
        asked, self._asked = self._asked, {}
        for server, answer in asked.items():
            yield server, self._line.wait(server, answer, what)


def strayed(ranks: Iterable[int]) -> PeerLost:
    """What a server raises when some workers part and some do not."""
    return PeerLost(
        f"{named(ranks)} left the loop over micro-batches before its end, and other workers did not; "
        "leave it on all of them after the same step"
    )


def named(ranks: Iterable[int]) -> str:
    """Such as ``rank 2`` or ``ranks 0, 1``."""
    numbers = sorted(ranks)
    return f"rank{'s' if len(numbers) != 1 else ''} {', '.join(map(str, numbers))}"


@contextmanager
def naming(rank: int, what: str) -> Iterator[None]:
    """Errors inside that tell of the other end's loss become `PeerLost`, which names ``rank``."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, PeerLost) or not is_peer_failure(error):
            raise
        raise PeerLost(f"rank {rank} left or fell silent during {what}: {str(error).splitlines()[0]}") from error


_END: Final = "the end of the loop over micro-batches"

#: The line of this process, if it has one. Remote calls name functions of a module, so the module must know it.
_open: Final[list[Line]] = []


def _name(rank: int) -> str:
    return f"rank{rank}"


@rpc.functions.async_execution  # type: ignore[untyped-decorator]
def _deliver(sender: int, content: Any) -> Answer:
    return _open[0]._lay_down(sender, content)


def _answer(what: Any) -> Any:
    return _open[0]._read(what)


@rpc.functions.async_execution  # type: ignore[untyped-decorator]
def _stay() -> Answer:
    return _open[0]._be_watched()
