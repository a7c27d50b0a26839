"""Workers push gradients to servers and pull parameters back; each server owns some of the parameters and updates them.

mode=sync       worker 0 ──push──╮                    ╭──pull── the next step
                worker 1 ──push──┼─ sum, clip, step ──┼──pull──
                worker 2 ──push──╯                    ╰──pull──

mode=async      worker 0 ──push─ step ─pull──  ──push─ step ─pull──
                worker 1 ────────────push─ step ─pull──                (Hogwild over remote calls: no rank waits)

``sync``: the bits are those of ``none`` and ``ddp``. A worker pushes the sums of its nodes of the tree, so the server
finishes the tree in its fixed order; then the run's own update follows there, with the user's optimizer object.

``async``: each push is the mean gradient over the worker's own micro-batches of the step, clipped by its own norm, and
is applied at once, alone. So a step of the run is one push of each worker, and makes as many updates as there are
workers; each worker counts its own steps, schedulers on a server step when the slowest worker has done the
step. The parameters that a worker computed its gradient from may be older than those it is applied to: by how many
updates is reported at the end. Each worker changes its own buffers; evaluations and checkpoints see their mean. None of
it can be repeated bit by bit. Evaluations and checkpoints begin with a barrier, so that no rank changes what they see.

Traffic, with M bytes of parameters, w workers and N servers: in each step a worker sends k*M and receives M, where k is
the number of its nodes (1 for an aligned run of micro-batches, and where sums are fast or asynchronous); a server
receives k*w*M/N and sends w*M/N. An all-reduce sends and receives 2*M*(n-1)/n on each of n ranks. So the busiest rank
carries less than with an all-reduce where N is greater than about w/2, and servers are the narrow place where it is
less. (The formula of Li et al., Scaling Distributed Machine Learning with the Parameter Server, OSDI 2014, for dense
pushes.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

import torch
from torch import nn

from lockstep.batch import MicroBatchPosition
from lockstep.collectives import fold, open_all_reduce, translating_peer_errors
from lockstep.errors import MismatchError
from lockstep.strategies.parameter_server.async_parameter_server import AsyncParameterServer
from lockstep.strategies.parameter_server.flat_buckets import (
    BucketGradients,
    set_gradients,
)
from lockstep.strategies.parameter_server.parameter_store import PULL, LayoutWithHooks
from lockstep.strategies.parameter_server.rpc import (
    ServerRoles,
    SyncRound,
)
from lockstep.strategies.parameter_server.server_context import WITHOUT_GRADIENTS, Push, ServerContext, make_push
from lockstep.strategies.parts.buffers import Buffers
from lockstep.strategies.parts.gradient_accumulation import ParameterSet, begin_total, divide_by_counts, require_items
from lockstep.strategies.parts.state_layout import ReplicatedLayout
from lockstep.strategies.replicated.single_process import SingleProcess
from lockstep.strategies.strategy import ServerStrategy, Strategy, StrategyContext, UpdateShare
from lockstep.strategy_kinds import ParameterServerOptions


def open_strategy(context: StrategyContext, options: ParameterServerOptions) -> Strategy:
    """The strategy ``parameter-server``; one rank alone needs none. Collective.

    Raises:
        SettingError: if no rank would be left to work, or for fp16.
    """
    if context.group.size == 1:
        return SingleProcess(context.group, context.runs, exact=context.exact)
    context.refuse_fp16("parameter-server", WITHOUT_GRADIENTS)
    roles = ServerRoles(context.group.size, options.servers)
    if options.mode == "sync":
        return SyncParameterServer(context, roles)
    return AsyncParameterServer(context, roles, options.staleness)


class SyncParameterServer(ServerStrategy):
    """The strategy ``parameter-server`` in its synchronous mode."""

    def __init__(self, context: StrategyContext, roles: ServerRoles) -> None:
        self._context: Final = ServerContext(context, roles)
        self._group: Final = context.group
        self._exact: Final = context.exact
        self.assignment = self._context.assignment
        # All, on a server; of several, each has some of the parameters.
        self.update_share = UpdateShare(steps=self._context.serves, is_whole=len(roles.servers) == 1)
        # Copies are loaded, too, not only what the owners hold.
        self.state_layout = LayoutWithHooks(self._context.owner_layout, self._norm, ReplicatedLayout().load_model)
        self._role_group: Final = self._context.role_group
        self._all_reduce: Final = open_all_reduce(self._role_group, context.runs)
        self._buffers: Final = Buffers(self._all_reduce, self._role_group)
        self._step = 0
        self._sums: BucketGradients | None = None
        self._round: Final = SyncRound(self._context.endpoint, roles)
        self._target: ParameterSet

    def setup_model(self, model: nn.Module, *, find_unused_parameters: bool, static_graph: bool = False) -> nn.Module:
        """``model`` itself, as it is on rank 0. Collective."""
        self._context.setup_model(model)
        self._buffers.setup_model(model)
        return model

    def backward(
        self, loss: torch.Tensor, weight: torch.Tensor | None, target: ParameterSet, position: MicroBatchPosition
    ) -> None:
        """Sum a worker's gradients; after its last micro-batch they are ready to be sent to the servers."""
        self._target = target
        if self._sums is None:
            self._context.check_copies()
            self._context.looks = position.is_checked
            self._sums = BucketGradients(self._context.buckets(target), position.of, exact=self._exact)
        target.backward(loss, weight)
        self._sums.accumulate(position)
        if position.last:
            self._round.unsent = {rank: self._push_for(rank, position.of) for rank in self._context.roles.servers}
            self._sums = None

    def serve(self, target: ParameterSet, position: MicroBatchPosition) -> bool:
        """Receive a push of each worker, and set ``.grad`` to their sum; False, if they have ended the loop instead."""
        self._target = target
        if self._round.is_over("the push"):
            return False
        pushes: list[Push] = self._round.gather("the push")
        if {(push.step, push.micro_batches) for push in pushes} != {(self._step, position.of)}:
            raise MismatchError(
                f"workers pushed for other steps than this server is in ({self._step}, of {position.of} "
                "micro-batches): " + ", ".join(f"{push.step}, of {push.micro_batches}" for push in pushes)
            )
        for number, bucket in enumerate(self._context.own_buckets(target)):
            used = set().union(*(push.used[number] for push in pushes))
            set_gradients(bucket, self._total(position.of, pushes, number), used)
        (counted,) = {push.counted for push in pushes}
        if counted is not None:
            divide_by_counts(target, position.step_samples, counted)
        return True

    def goes_on(self) -> bool:
        """Whether the loop goes on with the next epoch. Collective."""
        return self._round.goes_on()

    def end_loop(self, *, complete: bool) -> bool:
        """End the loop over micro-batches; whether it was complete. Collective."""
        complete = self._round.end_loop(complete=complete)  # first, for servers wait for it
        self._context.check_copies(ends=True)
        return complete

    def begin_count(self, counted: int) -> Callable[[], int]:
        """Begin to add up the items of all workers. Collective."""
        return begin_total(self._role_group, counted)

    def normalize_by_count(self, target: ParameterSet, samples: int, counted: int) -> None:
        """Let servers divide by the number of items, after their sum."""
        require_items(counted)
        for server, push in self._round.unsent.items():
            self._round.unsent[server] = replace(push, counted=counted)

    def before_optimizer_step(self, target: ParameterSet) -> None:
        """Send the servers, which make the step, what was not sent yet."""
        self._round.send()

    def end_micro_batch(self, position: MicroBatchPosition) -> None:
        """After the last micro-batch of a step, workers pull the parameters; then buffers are brought in step."""
        if position.last:
            self._round.answer(lambda: self._context.values(self._target))
            for server, answer in self._round.answers(PULL):
                self._context.update_copies(self._target, server, answer)
            self._step += 1
            self._context.store.version += 1
        if not self._context.serves:
            with translating_peer_errors("the reduction of buffers"):
                self._buffers.end_micro_batch(position)

    def end_replay(self) -> None:
        """Restore buffers."""
        self._buffers.restore(discards_step=False)

    def finish_training(self) -> None:
        """Give servers, too, the parameters that others own. Collective."""
        self._context.store.refresh(self._context.roles.servers)

    def discard_step(self) -> None:
        """Drop gradients that were not sent, and restore buffers."""
        self._sums, self._round.unsent = None, {}
        self._buffers.restore()

    def resync(self) -> None:
        """Wait until servers have ended the loop before; start from the buffers that models hold."""
        self._round.rejoin()
        self._buffers.resync()

    def close(self) -> None:
        """End the threads and connections. Collective."""
        self._all_reduce.close()
        self._context.endpoint.close()

    def _push_for(self, server: int, micro_batches: int) -> Push:
        assert self._sums is not None
        return make_push(server, self._context.buckets(self._target), self._sums, self._step, micro_batches)

    def _norm(self, parameters: Sequence[nn.Parameter]) -> torch.Tensor:
        self._round.send()
        return self._context.owner_layout.norm(parameters)

    def _total(self, micro_batches: int, pushes: Sequence[Push], bucket: int) -> torch.Tensor:
        """The sum at the root of the tree, or in the order of ranks where sums are fast."""
        rows = [row for push in pushes for row in push.sums[bucket].unbind()]
        nodes = [node for push in pushes for node in push.nodes]
        if self._exact:
            return fold(micro_batches, nodes, rows, lambda left, right: left.add_(right))
        for row in rows[1:]:
            rows[0].add_(row)
        return rows[0]
