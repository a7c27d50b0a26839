"""Workers push gradients to servers and pull parameters back; each server owns some of the parameters and updates them.

mode=sync       worker 0 ──push──╮                    ╭──pull── the next step
                worker 1 ──push──┼─ sum, clip, step ──┼──pull──
                worker 2 ──push──╯                    ╰──pull──

mode=async      worker 0 ──push─ step ─pull──  ──push─ step ─pull──
                worker 1 ────────────push─ step ─pull──                (Hogwild over messages: no rank waits)

``sync``: the bits are those of ``none`` and ``ddp``. A worker pushes the sums of its nodes of the tree, so the server
finishes the tree in its fixed order; then the run's own update follows there, with the user's optimizer object.

``async``: each push is the mean gradient over the worker's own micro-batches of the step, clipped by its own norm, and
is applied at once, alone. So a step of the run is one push of each worker, and makes as many updates as there are
workers; each worker counts its own steps, schedulers on a server step when the slowest worker has done the
step. The parameters that a worker computed its gradient from may be older than those it is applied to: by how many
updates is reported at the end. Each worker changes its own buffers; evaluations and checkpoints see their mean. None of
it can be repeated bit by bit. Evaluations begin with what the owners hold, on all ranks, so that no rank changes what
they see.

Traffic, with M bytes of parameters, w workers and N servers: in each step a worker sends k*M and receives M, where k is
the number of its nodes (1 for an aligned run of micro-batches, and where sums are fast or asynchronous); a server
receives k*w*M/N and sends w*M/N. An all-reduce sends and receives 2*M*(n-1)/n on each of n ranks. So the busiest rank
carries less than with an all-reduce where N is greater than about w/2, and servers are the narrow place where it is
less. (The formula of Li et al., Scaling Distributed Machine Learning with the Parameter Server, OSDI 2014, for dense
pushes.)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import nn

from lockstep.batch import MicroBatchPosition
from lockstep.strategies.parameter_server.async_parameter_server import AsyncParameterServer
from lockstep.strategies.parameter_server.flat_buckets import set_gradients
from lockstep.strategies.parameter_server.served_parameters import (
    PULL,
    WITHOUT_GRADIENTS,
    CopiesLayout,
    ServedParameters,
)
from lockstep.strategies.parameter_server.served_strategy import Push, ServerRoles, SyncServers, sum_of
from lockstep.strategies.parts.gradient_accumulation import ParameterSet, TreeGradientAccumulator, add_into_left
from lockstep.strategies.replicated.single_process import SingleProcess
from lockstep.strategies.strategy import Strategy, StrategyContext, UpdateShare
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


class SyncParameterServer(SyncServers):
    """The strategy ``parameter-server`` in its synchronous mode."""

    pull = PULL

    def __init__(self, context: StrategyContext, roles: ServerRoles) -> None:
        super().__init__(context, roles)
        self._exact: Final = context.exact
        # All, on a server; of several, each has some of the parameters.
        self.update_share = UpdateShare(steps=self._serves, is_whole=len(roles.servers) == 1)
        self.state_layout = CopiesLayout(context, self._send_pushes)
        self._parameters: Final = ServedParameters(context.group, roles, self.state_layout, context.say)
        self._target: ParameterSet

    def setup_model(self, model: nn.Module, *, find_unused_parameters: bool, static_graph: bool = False) -> nn.Module:
        """``model`` itself, as it is on rank 0. Collective."""
        self._parameters.setup_model(model)
        self._buffers.setup_model(model)
        return model

    def backward(
        self, loss: torch.Tensor, weight: torch.Tensor | None, target: ParameterSet, position: MicroBatchPosition
    ) -> None:
        """Sum a worker's gradients; after its last micro-batch they are ready to be sent to the servers."""
        self._target = target
        if self._sums is None:
            self._parameters.check_copies()
            self._parameters.looks = position.is_checked
            self._sums = TreeGradientAccumulator(target, position.of)
        if not position.is_padding:
            target.backward(loss, weight)
            if self._exact or position.last:  # else autograd adds them up
                self._sums.accumulate(position)
        if position.last:
            self._unsent = self._parameters.pushes(target, self._sums, self._step, position.of)
            self._sums = None

    def end_loop(self, *, complete: bool) -> bool:
        """End the loop over micro-batches; whether it was complete. Collective."""
        complete = super().end_loop(complete=complete)  # first, for servers wait for it
        self._parameters.check_copies(ends=True)
        return complete

    def finish_training(self) -> None:
        """Give servers, too, the parameters that others own. Collective."""
        self._parameters.refresh()

    def _set_gradients(self, target: ParameterSet, of: int, pushes: Sequence[Push]) -> None:
        self._target = target
        total = sum_of(pushes, of, add_into_left, exact=self._exact)
        used = set().union(*(push.used for push in pushes))
        for bucket, flat in zip(self._parameters.buckets_of(self._group.rank, target), total, strict=True):
            set_gradients(bucket, flat, used)

    def _values(self) -> object:
        return self._parameters.values(self._target)

    def _update(self, server: int, values: Any) -> None:
        self._parameters.update_copies(self._target, server, values)
