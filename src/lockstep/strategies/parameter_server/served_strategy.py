"""Strategies with servers: who serves, and what workers and servers say to each other.

    ranks     0     1     2   |   3     4         parameter-server:servers=2 on five ranks
              workers         |   servers         (rank 0 is a worker: it is the leader, and measures)

    worker 0   push  push  end
    worker 1   push  push  end                    break after the second step: the servers' loop ends there, too

In each step every worker sends one push to every server. Where servers wait for all of them, as `SyncServers` do,
they set their gradients to the sum of all pushes, step, and answer all workers together.
"""

from __future__ import annotations

import functools
import sys
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Final

import torch
from torch import nn

from lockstep.batch import MicroBatchPosition
from lockstep.collectives import Mailbox, Node, fold, open_all_reduce, translating_peer_errors
from lockstep.errors import MismatchError, PeerLost, SettingError, UsageError
from lockstep.formatting import format_ranks, plural
from lockstep.launch_contract import EXIT_NOT_SAVED, EXIT_STOPPED
from lockstep.strategies.parts.buffers import Buffers
from lockstep.strategies.parts.gradient_accumulation import (
    ParameterSet,
    TreeGradientAccumulator,
    begin_total,
    divide_by_counts,
    require_items,
)
from lockstep.strategies.parts.state_layout import OwnerLayout
from lockstep.strategies.strategy import ReplicaAssignment, ServerStrategy, StrategyContext

_PUSH: Final = "the push"
_END: Final = "the end of the loop over micro-batches"
_NEXT_EPOCH: Final = "the next epoch of the data"
_ADVICE: Final = (
    ". Ranks that serve do not run the body of the loop over micro-batches: where workers leave more than the loop "
    "from there, as by `return`, leave it by `break`, and return after it"
)


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
class Push:
    """What a worker sends to one server in a step."""

    step: int  #: of this worker, from 0
    micro_batches: int  #: of the step
    nodes: list[Node]  #: of the tree, whose sums these are; none if the worker had no micro-batch
    sums: list[Any]  #: for each node, of what the server owns
    used: set[int]  #: places of the target's parameters that had a part in some loss here
    counted: int | None = None  #: items of the step over all workers, where they are counted
    version: int = 0  #: of the server's parameters, from which the gradient was computed


@dataclass(frozen=True, slots=True)
class EndOfLoop:
    """What a worker sends when its loop over micro-batches is over."""

    complete: bool  #: whether it came to its end


@dataclass(frozen=True, slots=True)
class LoopGoesOn:
    """What a worker sends where its loop over micro-batches goes from one epoch of the data to the next."""


class ServedStrategy(ServerStrategy):
    """A strategy with servers.

    Args:
        context: of the run.
        roles: which ranks are workers and which are servers.
    """

    #: What workers wait for after a step, as errors name it.
    pull: ClassVar[str]

    def __init__(self, context: StrategyContext, roles: ServerRoles) -> None:
        group = context.group
        self._group: Final = group
        self._roles: Final = roles
        self._say: Final = context.say
        self._serves: Final = group.rank in roles.servers
        self.assignment = ReplicaAssignment(None if self._serves else group.rank, len(roles.workers))
        #: the workers' group on a worker, the servers' group on a server
        self._role_group: Final = group.subgroup(roles.servers if self._serves else roles.workers)
        self._mailbox: Final = self._open_mailbox(_ADVICE)
        self._step = 0  # on a server that does not wait for all workers, of the slowest one
        self._owing: set[int] = set()  # the servers that have not answered this worker yet
        self._arrived: dict[int, Any] = {}  # by worker, what this server has not answered yet

    def goes_on(self) -> bool:
        """Whether the loop goes on with the next epoch. Collective."""
        if not self._serves:
            self._send(dict.fromkeys(self._roles.servers, LoopGoesOn()), _NEXT_EPOCH)
            self._await_answers(_NEXT_EPOCH)
            return True
        if self._is_over(_NEXT_EPOCH):
            return False
        self._answer(None)
        return True

    def end_loop(self, *, complete: bool) -> bool:
        """End the loop over micro-batches; whether it was complete. Collective."""
        if not self._serves:
            self._send(dict.fromkeys(self._roles.servers, EndOfLoop(complete)), _END)
            return complete
        over = self._is_over(_END)
        assert over, "workers make as many steps as an epoch has"
        complete = self._arrived[0].complete
        self._answer(None)
        return complete

    def resync(self) -> None:
        """Wait until servers have ended the loop before."""
        self._await_answers(_END)

    def close(self) -> None:
        """End the connections. Collective; after an error each rank does so alone."""
        error = sys.exception()
        # A rank that fails closes alone; for those that wait for it, the end of the connection is the message.
        by_agreement = (None, 0, EXIT_NOT_SAVED, EXIT_STOPPED)
        try:
            if error is None or (isinstance(error, SystemExit) and error.code in by_agreement):
                self._group.barrier("the end of the run")
        finally:
            self._mailbox.close()

    def _open_mailbox(self, advice: str = "") -> Mailbox:
        """Connections of each worker with each server. Collective."""
        if self._serves:
            return Mailbox(self._group, (), self._roles.workers, advice)
        return Mailbox(self._group, self._roles.servers, (), advice)

    def _send(self, messages: Mapping[int, object], what: str) -> None:
        """On a worker: send each server its message, which it will answer."""
        for server, message in messages.items():
            self._mailbox.send(server, message, what)
            self._owing.add(server)

    def _answers(self, what: str) -> Iterator[tuple[int, Any]]:
        """On a worker: the answer of each server that owes one, as they come."""
        while self._owing:
            server, answer = self._mailbox.receive(self._owing, what)
            self._owing.remove(server)
            yield server, answer

    def _await_answers(self, what: str) -> None:
        for _ in self._answers(what):
            pass

    def _gather(self, what: str) -> list[Any]:
        """On a server: wait for a message of each worker, and return them in the order of workers."""
        while silent := self._roles.workers - self._arrived.keys():
            worker, message = self._mailbox.receive(silent, what)
            self._arrived[worker] = message
        return [self._arrived[worker] for worker in self._roles.workers]

    def _answer(self, answer: object) -> None:
        """On a server: answer all workers whose messages have arrived."""
        arrived, self._arrived = self._arrived, {}
        for worker in arrived:
            self._mailbox.send(worker, answer, self.pull)

    def _is_over(self, what: str) -> bool:
        """On a server: wait for all workers; whether they have sent the end of the loop, instead of ``what``.

        Raises:
            PeerLost: if some have and some have not.
        """
        ends = [message.complete if isinstance(message, EndOfLoop) else None for message in self._gather(what)]
        if len(set(ends)) > 1:
            raise unexpected_end_of_loop(rank for rank, complete in enumerate(ends) if complete is (False not in ends))
        return ends[0] is not None


class SyncServers(ServedStrategy):
    """A strategy whose servers wait for all workers in each step."""

    def __init__(self, context: StrategyContext, roles: ServerRoles) -> None:
        super().__init__(context, roles)
        self._all_reduce: Final = open_all_reduce(self._role_group, context.runs)
        self._buffers: Final = Buffers(self._all_reduce, self._role_group)
        self._sums: TreeGradientAccumulator | None = None
        self._unsent: dict[int, Push] = {}  # on a worker, by server

    @abstractmethod
    def _set_gradients(self, target: ParameterSet, of: int, pushes: Sequence[Push]) -> None:
        """Set ``.grad`` of what this server owns to the sum of ``pushes`` over a step ``of`` so many micro-batches."""

    def _values(self) -> object:
        """What this server answers after its step."""
        return None

    def _update(self, server: int, values: object) -> None:
        """Take what ``server`` has answered."""

    def serve(self, target: ParameterSet, position: MicroBatchPosition) -> bool:
        """Receive a push of each worker, and set ``.grad`` to their sum; False, if they have ended the loop instead.

        Raises:
            MismatchError: if workers are in another step.
        """
        if self._is_over(_PUSH):
            return False
        pushes: list[Push] = self._gather(_PUSH)
        if {(push.step, push.micro_batches) for push in pushes} != {(self._step, position.of)}:
            raise MismatchError(
                f"workers push other steps than this server is in ({self._step}, of {position.of} micro-batches): "
                + ", ".join(f"{push.step}, of {push.micro_batches}" for push in pushes)
            )
        self._set_gradients(target, position.of, pushes)
        (counted,) = {push.counted for push in pushes}
        if counted is not None:
            divide_by_counts(target, position.step_samples, counted)
        return True

    def begin_count(self, counted: int) -> Callable[[], int]:
        """Begin to add up the items of all workers. Collective."""
        return begin_total(self._role_group, counted)

    def normalize_by_count(self, target: ParameterSet, samples: int, counted: int) -> None:
        """Let servers divide by the number of items, after their sum."""
        require_items(counted)
        self._unsent = {server: replace(push, counted=counted) for server, push in self._unsent.items()}

    def before_optimizer_step(self, target: ParameterSet) -> None:
        """Send the servers their pushes, if they were not sent yet."""
        self._send_pushes()

    def end_micro_batch(self, position: MicroBatchPosition) -> None:
        """After the last micro-batch, wait for the servers' answers; then bring buffers in step."""
        if position.last:
            if self._serves:
                self._answer(self._values())
            for server, values in self._answers(self.pull):
                self._update(server, values)
            self._step += 1
        if not self._serves:
            with translating_peer_errors("the reduction of buffers"):
                self._buffers.end_micro_batch(position)

    def end_replay(self) -> None:
        """Restore buffers."""
        self._buffers.restore(discards_step=False)

    def discard_step(self) -> None:
        """Drop gradients that were not sent, and restore buffers."""
        self._sums, self._unsent = None, {}
        self._buffers.restore()

    def resync(self) -> None:
        """Wait until servers have ended the loop before; start from the buffers that models hold."""
        super().resync()
        self._buffers.resync()

    def close(self) -> None:
        """End the threads and connections. Collective."""
        self._all_reduce.close()
        super().close()

    def _send_pushes(self) -> None:
        unsent, self._unsent = self._unsent, {}
        self._send(unsent, _PUSH)


class ServedLayout(OwnerLayout):
    """As its base class says; ``prepare`` is called before the norm of gradients, to which servers add theirs."""

    def __init__(self, context: StrategyContext, prepare: Callable[[], None]) -> None:
        super().__init__(context.group)
        self._prepare: Final = prepare

    def norm(self, parameters: Sequence[nn.Parameter]) -> torch.Tensor:
        """The 2-norm of all gradients. Collective."""
        self._prepare()
        return super().norm(parameters)


def require_everything(target: ParameterSet) -> None:
    """Check that servers make one update in each step.

    Raises:
        UsageError: where a run has several optimizers that step apart.
    """
    if not target.everything:
        raise UsageError(
            "servers make one update in each step, and this loss is for some of the parameters only; give "
            "run.step(loss, optimizer=[first, second]) all optimizers at once, or use strategy ddp"
        )


def sum_of(pushes: Sequence[Push], of: int, add: Callable[[Any, Any], Any], *, exact: bool) -> Any:
    """The sum over a step ``of`` so many micro-batches: at the root of the tree, or just in the order of ranks."""
    sums = [row for push in pushes for row in push.sums]
    if exact:
        return fold(of, [node for push in pushes for node in push.nodes], sums, add)
    return functools.reduce(add, sums)


def unexpected_end_of_loop(ranks: Iterable[int]) -> PeerLost:
    """What a server raises when some workers end the loop and some do not."""
    return PeerLost(
        f"{format_ranks(ranks)} left the loop over micro-batches before its end, and other workers did not; "
        "leave it on all of them after the same step"
    )
