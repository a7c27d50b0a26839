"""Ranks that serve others, and the remote calls to them.

    ranks     0     1     2   |   3     4         parameter-server:servers=2 on five ranks
              workers         |   servers         (rank 0 is a worker: it is the leader, and measures)

    send      worker ──► request ──► a queue, in the order of arrival, which the server's main thread empties;
              worker ◄── answer  ◄── at any later time
    read      any rank ──► what? ──► any rank, on a thread beside its main one
                       ◄── tensors

On `torch.distributed.rpc` over TensorPipe, beside the process group of the run, at the same address. A function of this
module finds the one endpoint of its process: a remote reference (RRef) to an object on each rank would do the same
with more messages, which the counting of references costs.

Tensors are sent from the memory of the CPU, whatever the device.
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
from lockstep.formatting import format_ranks, plural
from lockstep.launch_contract import EXIT_NOT_SAVED, EXIT_STOPPED
from lockstep.peer_failure import is_peer_failure

Answer = torch.futures.Future[Any]
Read = Callable[[Any], Any]
"""Computes the answer to a `RpcEndpoint.read` from what was asked; called on a thread of its own."""


@dataclass(frozen=True, slots=True)
class ServerRoles:
    """Which ranks are workers and which are servers."""

    size: int
    server_count: int  #: how many of the ranks, the last ones

    def __post_init__(self) -> None:
        if not 1 <= self.server_count < self.size:
            raise SettingError(
                f"servers={self.server_count} of {plural(self.size, 'rank')}: give at least one, and leave at least "
                "one to work"
            )

    @property
    def workers(self) -> range:
        """The ranks that compute micro-batches."""
        return range(self.size - self.server_count)

    @property
    def servers(self) -> range:
        """The ranks that serve them."""
        return range(self.size - self.server_count, self.size)


@dataclass(frozen=True, slots=True)
class RpcRequest:
    """What one rank has sent to another; the sender waits for the answer, or will."""

    sender: int
    content: Any
    _answer: Answer

    def answer(self, content: object) -> None:
        """Send ``content`` as the answer."""
        self._answer.set_result(content)


class RpcEndpoint:
    """Remote calls between the ranks of a group; one endpoint in a process at a time.

    Collective to make; that takes about 0.15 s.

    Args:
        group: who is connected.
        read: answers what other ranks `read` here, beside this rank's main thread.

    Raises:
        WorldError: if the ranks cannot be connected.
    """

    def __init__(self, group: Group, read: Read) -> None:
        self.rank: Final = group.rank
        self._group: Final = group
        self._read: Final = read
        self._arrived: Final[queue.SimpleQueue[RpcRequest | PeerLost]] = queue.SimpleQueue()
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
                f"rank {group.rank} of {group.size} could not connect for remote calls: {str(error).splitlines()[0]}"
            ) from error

    def watch(self, ranks: Sequence[int]) -> None:
        """Let `take` raise from now on when one of ``ranks`` is gone, also while no request of it is awaited.

        This is a call to each of them that stays unanswered; it ends with an error when the connection closes.
        """
        for rank in ranks:
            call = rpc.rpc_async(_name(rank), _stay_connected, timeout=0)
            call.add_done_callback(lambda ended, rank=rank: self._watched_rank_ended(rank, ended))

    def send(self, rank: int, content: object) -> Answer:
        """Send ``content`` to the queue of ``rank``; `wait` gives the answer."""
        answer: Answer = rpc.rpc_async(_name(rank), _deliver, args=(self._group.rank, content))
        return answer

    def read(self, rank: int, what: object) -> Answer:
        """Ask ``rank`` for ``what``, which it answers at once; `wait` gives the answer."""
        answer: Answer = rpc.rpc_async(_name(rank), _answer, args=(what,))
        return answer

    def wait(self, rank: int, answer: Answer, what: str) -> Any:
        """Wait for the answer of ``rank``, and return it.

        Raises:
            PeerLost: if it is gone, or does not answer in the group's time.
        """
        with translating_rpc_errors(rank, what):
            return answer.wait()

    def take(self, what: str) -> RpcRequest:
        """Wait for the next request, and return it.

        Raises:
            PeerLost: if a watched rank is gone, or nothing comes in the group's time.
        """
        try:
            request = self._arrived.get(timeout=self._group.timeout_s)
        except queue.Empty:
            raise PeerLost(
                f"rank {self._group.rank} waited {self._group.timeout_s:g} s for {what} and nothing came. Ranks that "
                "serve do not run the body of the loop over micro-batches: where workers leave more than the loop from "
                "there, as by `return`, leave it by `break`, and return after it"
            ) from None
        if isinstance(request, PeerLost):
            raise request
        return request

    def close(self) -> None:
        """Close the connections. Collective; after an error each rank does so alone."""
        if self not in _open:
            return
        error = sys.exception()
        # A rank that fails closes alone; for those that wait for it, the end of the connection is the message.
        by_agreement = (None, 0, EXIT_NOT_SAVED, EXIT_STOPPED)
        together = error is None or (isinstance(error, SystemExit) and error.code in by_agreement)
        if together:
            with self._lock:
                self._closing = True
            for call in self._watched_by:
                call.set_result(None)
            # The shutdown waits for all calls, also for those whose answer was no longer awaited when the run stopped.
            while not self._arrived.empty():
                if isinstance(request := self._arrived.get(), RpcRequest):
                    request.answer(None)
        rpc.shutdown(graceful=together)
        _open.remove(self)

    def _store_request(self, sender: int, content: object) -> Answer:
        answer = Answer()
        with self._lock:
            if self._closing:
                answer.set_result(None)
            else:
                self._arrived.put(RpcRequest(sender, content, answer))
        return answer

    def _register_watcher(self) -> Answer:
        answer = Answer()
        with self._lock:
            if self._closing:
                answer.set_result(None)
            else:
                self._watched_by.append(answer)
        return answer

    def _watched_rank_ended(self, rank: int, call: Answer) -> None:
        try:
            call.value()
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
            self._arrived.put(PeerLost(f"rank {rank} left or fell silent while this rank served it: {reason}"))


@dataclass(frozen=True, slots=True)
class EndOfLoop:
    """What a worker sends when its loop over micro-batches is over."""

    complete: bool  #: whether it came to its end


@dataclass(frozen=True, slots=True)
class LoopGoesOn:
    """What a worker sends where its loop over micro-batches goes from one epoch of the data to the next."""


class SyncRound:
    """In each step every worker sends one request to every server, and a server answers all of them together.

    So it is after the last step of a loop, too, when workers send its end:

        worker 0   push  push  end
        worker 1   push  push  end            break after the second step: the servers' loop ends there, too

    Args:
        endpoint: of this rank.
        roles: which ranks are workers and which are servers.
    """

    def __init__(self, endpoint: RpcEndpoint, roles: ServerRoles) -> None:
        self._endpoint: Final = endpoint
        self._roles: Final = roles
        self.unsent: dict[int, Any] = {}  #: on a worker: what will be sent to each server
        self._unanswered: dict[int, Answer] = {}
        self._requests: list[RpcRequest] = []  # on a server, not answered yet

    def send(self) -> None:
        """On a worker: send what was not sent yet."""
        unsent, self.unsent = self.unsent, {}
        for server, content in unsent.items():
            self._unanswered[server] = self._endpoint.send(server, content)

    def gather(self, what: str) -> list[Any]:
        """On a server: wait for a request of each worker, and return their contents in the order of workers."""
        while len(self._requests) < len(self._roles.workers):
            silent = set(self._roles.workers).difference(request.sender for request in self._requests)
            self._requests.append(self._endpoint.take(f"{what} of {format_ranks(silent)}"))
        self._requests.sort(key=lambda request: request.sender)
        return [request.content for request in self._requests]

    def answer(self, content: Callable[[], object]) -> None:
        """On a server: answer all workers with ``content()``."""
        requests, self._requests = self._requests, []
        if requests:
            answer = content()
            for request in requests:
                request.answer(answer)

    def keep(self, request: RpcRequest) -> None:
        """On a server: add ``request``, which was taken already, to this round."""
        self._requests.append(request)

    @property
    def arrived(self) -> set[int]:
        """On a server: the workers whose requests of this round have arrived."""
        return {request.sender for request in self._requests}

    def is_over(self, what: str) -> bool:
        """On a server: wait for all requests; whether they are the end of the loop, instead of ``what``.

        Raises:
            PeerLost: if some are and some are not.
        """
        ends = [content.complete if isinstance(content, EndOfLoop) else None for content in self.gather(what)]
        if len(set(ends)) > 1:
            ranks = {how: [r for r, h in zip(self._roles.workers, ends, strict=True) if h is how] for how in set(ends)}
            raise unexpected_end_of_loop(ranks.get(False) or ranks[True])
        return ends[0] is not None

    def end_loop(self, *, complete: bool) -> bool:
        """End the loop, see `ServerStrategy.end_loop`; before a worker sends anything else it must call `rejoin`."""
        if self._endpoint.rank in self._roles.workers:
            for server in self._roles.servers:
                self._unanswered[server] = self._endpoint.send(server, EndOfLoop(complete))
            return complete
        over = self.is_over(_END)
        assert over, "workers make as many steps as an epoch has"
        end_of_loop: EndOfLoop = self._requests[0].content
        self.answer(lambda: None)
        return end_of_loop.complete

    def goes_on(self) -> bool:
        """Whether the loop goes on, see `ServerStrategy.goes_on`."""
        if self._endpoint.rank in self._roles.workers:
            self.unsent = dict.fromkeys(self._roles.servers, LoopGoesOn())
            self.send()
            for _ in self.answers(_NEXT_EPOCH):
                pass
            return True
        if self.is_over(_NEXT_EPOCH):
            return False
        self.answer(lambda: None)
        return True

    def rejoin(self) -> None:
        """On a worker: wait until servers have ended the loop before, which is when their `end_loop` has returned."""
        for _ in self.answers(_END):
            pass

    def answers(self, what: str) -> Iterator[tuple[int, Any]]:
        """On a worker: wait for the answer of each server, and give both."""
        unanswered, self._unanswered = self._unanswered, {}
        for server, answer in unanswered.items():
            yield server, self._endpoint.wait(server, answer, what)


def unexpected_end_of_loop(ranks: Iterable[int]) -> PeerLost:
    """What a server raises when some workers end the loop and some do not."""
    return PeerLost(
        f"{format_ranks(ranks)} left the loop over micro-batches before its end, and other workers did not; "
        "leave it on all of them after the same step"
    )


@contextmanager
def translating_rpc_errors(rank: int, what: str) -> Iterator[None]:
    """Turn errors of a lost connection into `PeerLost`, which names ``rank``."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, PeerLost) or not is_peer_failure(error):
            raise
        raise PeerLost(
            f"rank {rank} exited or stopped responding during {what}: {str(error).splitlines()[0]}"
        ) from error


_END: Final = "the end of the loop over micro-batches"
_NEXT_EPOCH: Final = "the next epoch of the data"

#: The endpoint of this process, if it has one. Remote calls name functions of a module, so the module must know it.
_open: Final[list[RpcEndpoint]] = []


def _name(rank: int) -> str:
    return f"rank{rank}"


@rpc.functions.async_execution  # type: ignore[untyped-decorator]
def _deliver(sender: int, content: object) -> Answer:
    return _open[0]._store_request(sender, content)


def _answer(what: Any) -> Any:
    return _open[0]._read(what)


@rpc.functions.async_execution  # type: ignore[untyped-decorator]
def _stay_connected() -> Answer:
    return _open[0]._register_watcher()
