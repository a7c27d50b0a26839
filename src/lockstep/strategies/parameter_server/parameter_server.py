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

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Final

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from lockstep.batch import MicroBatchPosition
from lockstep.errors import MismatchError
from lockstep.formatting import plural
from lockstep.strategies.parameter_server.flat_buckets import set_gradients
from lockstep.strategies.parameter_server.served_parameters import (
    PULL,
    WITHOUT_GRADIENTS,
    CopiesLayout,
    ServedParameters,
)
from lockstep.strategies.parameter_server.served_strategy import (
    Push,
    ServedStrategy,
    ServerRoles,
    SyncServers,
    sum_of,
    unexpected_end_of_loop,
)
from lockstep.strategies.parts.gradient_accumulation import (
    ParameterSet,
    TreeGradientAccumulator,
    add_into_left,
    divide_by_counts,
)
from lockstep.strategies.parts.state_layout import ReplicatedLayout
from lockstep.strategies.replicated.single_process import SingleProcess
from lockstep.strategies.strategy import StateDict, Strategy, StrategyContext, UpdateShare
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


class AsyncParameterServer(ServedStrategy):
    """The strategy ``parameter-server`` in its asynchronous mode."""

    repeats_bits = False  # buffers go on from one micro-batch of a worker to its next one
    pull = PULL

    def __init__(self, context: StrategyContext, roles: ServerRoles, staleness: int | None) -> None:
        super().__init__(context, roles)
        self._staleness: Final = staleness
        self.assignment = replace(self.assignment, in_step=False)
        # All, on a server; of several, each has some of the parameters. A worker has its own gradient until then.
        self.update_share = UpdateShare(steps=self._serves, has_gradients=True, is_whole=len(roles.servers) == 1)
        self.state_layout = _AsyncLayout(context, self._average_buffers, serves=self._serves)
        self._parameters: Final = ServedParameters(context.group, roles, self.state_layout, context.say)
        self._buffers: Final[list[torch.Tensor]] = []
        self._before: list[torch.Tensor] = []  # what the buffers held when the step began
        self._target: ParameterSet
        # Of a worker:
        self._samples: int | None = None  # of its micro-batches of the step so far; None: before the first one
        self._versions: Final[dict[int, int]] = dict.fromkeys(roles.servers, 0)  # of the parameters here, by owner
        # Of a server:
        self._version = 0  # how often what it owns has been updated
        self._done: Final = dict.fromkeys(roles.workers, 0)  # how many steps each has pushed
        self._applying: int | None = None  # the worker whose gradient is in `.grad`
        self._held_back: list[int] = []  # workers that are too far ahead to be answered
        self._ages: Final[list[int]] = []  # how many updates behind each gradient was
        self._optimizers: Final[list[torch.optim.Optimizer]] = []  # that the run steps
        # A run steps its optimizers once in a step, and there are several pushes: they step again for the others.
        self._hook: Final = register_optimizer_step_pre_hook(self._note_optimizer) if self._serves else None

    def setup_model(self, model: nn.Module, *, find_unused_parameters: bool, static_graph: bool = False) -> nn.Module:
        """``model`` itself, as it is on rank 0. Collective."""
        self._parameters.setup_model(model)
        known = set(map(id, self._buffers))
        self._buffers.extend(b for b in model.buffers() if id(b) not in known)
        return model

    def begin_micro_batch(self, position: MicroBatchPosition) -> None:
        """Remember the buffers that the step begins with."""
        if self._samples is None:
            self._before = [buffer.detach().clone() for buffer in self._buffers]

    def backward(
        self, loss: torch.Tensor, weight: torch.Tensor | None, target: ParameterSet, position: MicroBatchPosition
    ) -> None:
        """After a worker's last micro-batch, ``.grad`` holds the mean over its own micro-batches of the step."""
        self._target = target
        if self._samples is None:
            self._parameters.check_copies()
            self._parameters.looks = position.is_checked
            self._samples = 0
        if not position.is_padding:
            target.backward(loss, weight)
            self._samples += position.samples
        if position.last and self._samples:
            divide_by_counts(target, position.step_samples, self._samples)

    def serve(self, target: ParameterSet, position: MicroBatchPosition) -> bool:
        """Set ``.grad`` to the step's first push; `end_micro_batch` applies the others."""
        self._target = target
        self._applying = self._next_push()
        return self._applying is not None or min(self._done.values()) > self._step

    def end_loop(self, *, complete: bool) -> bool:
        """End the loop over micro-batches; whether it was complete. Collective."""
        complete = super().end_loop(complete=complete)  # first, for servers wait for it
        self._parameters.check_copies(ends=True)
        return complete

    def normalize_by_count(self, target: ParameterSet, samples: int, counted: int) -> None:
        """Turn ``.grad`` into the mean over the worker's own items; not collective."""
        if self._samples and counted:
            divide_by_counts(target, self._samples, counted)

    def before_optimizer_step(self, target: ParameterSet) -> None:
        """Push a worker's gradients; a server makes the step."""
        self._optimizers.clear()
        if self._serves:
            return
        gradients = TreeGradientAccumulator(target, 1)
        if self._samples:
            gradients.accumulate(MicroBatchPosition(0, 1, last=True))
        pushes = self._parameters.pushes(target, gradients, self._step, 1)
        self._send({s: replace(push, version=self._versions[s]) for s, push in pushes.items()}, "the push")
        self._samples = None

    def end_micro_batch(self, position: MicroBatchPosition) -> None:
        """After the last micro-batch, a worker pulls; a server goes on until each worker has pushed the step."""
        if not position.last:
            return
        for server, (version, values) in self._answers(PULL):
            self._versions[server] = version
            self._parameters.update_copies(self._target, server, values)
        if self._serves:
            self._apply_remaining_pushes()
        self._step += 1

    def end_replay(self) -> None:
        """Nothing is replayed here."""

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        """Give every rank the newest parameters, and the mean of buffers. Collective."""
        self._refresh()
        yield

    def finish_training(self) -> None:
        """Give every rank the newest parameters; say how many updates there were, and how old gradients. Collective."""
        self._refresh()
        ages = self._group.gather_objects((len(self._ages), sum(self._ages), max(self._ages, default=0)), "staleness")
        updates, total, most = (sum(a for a, _, _ in ages), sum(a for _, a, _ in ages), max(a for _, _, a in ages))
        self._say(
            f"asynchronous: {plural(updates, 'update')} on {plural(len(self._roles.servers), 'server')}; "
            f"gradients were {total / max(updates, 1):.1f} updates old in the mean, {most} at most"
        )

    def discard_step(self) -> None:
        """Drop gradients that were not pushed, and restore buffers."""
        self._samples = None
        with torch.no_grad():
            for buffer, before in zip(self._buffers, self._before, strict=True):
                buffer.copy_(before)

    def close(self) -> None:
        """Remove the hook on optimizers, and end the connections. Collective."""
        if self._hook is not None:
            self._hook.remove()
        super().close()

    def _refresh(self) -> None:
        """Give every rank the newest parameters. Collective."""
        self._average_buffers()
        self._parameters.refresh()
        versions = self._group.gather_objects(self._version, "the versions of parameters")
        self._versions.update((server, versions[server]) for server in self._roles.servers)

    def _next_push(self) -> int | None:
        """Put the next push that has gradients into ``.grad``, and return whose it is.

        None, if each worker has pushed this step or ended the loop.
        """
        while min(self._done.values()) <= self._step:
            waiting = {rank for rank, steps in self._done.items() if steps <= self._step} - self._arrived.keys()
            if not waiting:
                if len(self._arrived) < len(self._done) or len(set(self._done.values())) > 1:
                    raise unexpected_end_of_loop(rank for rank in self._arrived if self._done[rank] <= self._step)
                return None
            worker, push = self._mailbox.receive(waiting, "the push")
            if not isinstance(push, Push):
                self._arrived[worker] = push
                continue
            if push.step != self._done[worker]:
                raise MismatchError(f"rank {worker} pushed its step {push.step}, after {self._done[worker]} steps")
            if push.nodes:
                self._ages.append(self._version - push.version)
                buckets = self._parameters.buckets_of(self._group.rank, self._target)
                for bucket, flat in zip(buckets, push.sums[0], strict=True):
                    set_gradients(bucket, flat, push.used)
                return worker
            self._answer_push(worker)
        return None

    def _apply_remaining_pushes(self) -> None:
        worker, self._applying = self._applying, None
        while worker is not None:
            self._version += 1
            self._answer_push(worker)
            worker = self._next_push()
            if worker is not None:
                for optimizer in tuple(self._optimizers):
                    optimizer.step()
                for parameter in self._target.parameters:
                    parameter.grad = None

    def _answer_push(self, worker: int) -> None:
        """Count the step of ``worker``; answer the workers that are not too far ahead of the slowest."""
        self._done[worker] += 1
        slowest = min(self._done.values())
        ready, self._held_back = [*self._held_back, worker], []
        values = self._version, self._parameters.values(self._target)
        for held in ready:
            if self._staleness is None or self._done[held] - slowest <= self._staleness:
                self._mailbox.send(held, values, PULL)
            else:
                self._held_back.append(held)

    def _note_optimizer(self, optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
        if not any(optimizer is known for known in self._optimizers):
            self._optimizers.append(optimizer)

    def _average_buffers(self) -> None:
        """Set buffers to their mean over the workers; those of integers to the greatest value. Collective."""
        if self._serves:
            return
        for buffer in self._buffers:
            if buffer.is_floating_point():
                buffer.copy_(self._role_group.sum_tensor(buffer, "the mean of buffers") / self._role_group.size)
            elif buffer.dtype is not torch.bool:
                counts = self._role_group.gather_objects(buffer.cpu(), "buffers of whole numbers")
                buffer.copy_(torch.stack(counts).amax(0))


class _AsyncLayout(CopiesLayout):
    """The layout of served parameters, where ranks hold values of their own until a model is saved."""

    def __init__(self, context: StrategyContext, prepare: Callable[[], None], *, serves: bool) -> None:
        super().__init__(context, prepare)
        self._zero: Final = torch.zeros((), device=context.group.device) if serves else None

    def norm(self, parameters: Sequence[nn.Parameter]) -> torch.Tensor:
        """The norm of what a worker pushes; 0 on a server, so that it does not clip again."""
        return ReplicatedLayout().norm(parameters) if self._zero is None else self._zero.clone()

    def model_state(self, model: nn.Module) -> StateDict:
        """The tensors that this rank owns, with the mean of buffers. Collective."""
        self._prepare()
        return super().model_state(model)
