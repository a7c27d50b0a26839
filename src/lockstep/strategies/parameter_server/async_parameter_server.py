"""The asynchronous mode of ``parameter-server``: each push is applied at once, alone."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Final

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from lockstep.batch import MicroBatchPosition
from lockstep.errors import MismatchError
from lockstep.formatting import format_ranks, plural
from lockstep.strategies.parameter_server.flat_buckets import (
    BucketGradients,
    set_gradients,
)
from lockstep.strategies.parameter_server.parameter_store import PULL, LayoutWithHooks
from lockstep.strategies.parameter_server.rpc import (
    Answer,
    EndOfLoop,
    LoopGoesOn,
    RpcRequest,
    ServerRoles,
    SyncRound,
    unexpected_end_of_loop,
)
from lockstep.strategies.parameter_server.server_context import Push, ServerContext, make_push
from lockstep.strategies.parts.gradient_accumulation import ParameterSet, divide_by_counts
from lockstep.strategies.parts.state_layout import ReplicatedLayout
from lockstep.strategies.strategy import ServerStrategy, StrategyContext, UpdateShare


class AsyncParameterServer(ServerStrategy):
    """The strategy ``parameter-server`` in its asynchronous mode."""

    repeats_bits = False  # buffers go on from one micro-batch of a worker to its next one

    def __init__(self, context: StrategyContext, roles: ServerRoles, staleness: int | None) -> None:
        self._context: Final = ServerContext(context, roles)
        self._group: Final = context.group
        self._staleness: Final = staleness
        self.assignment = replace(self._context.assignment, in_step=False)
        # All, on a server; of several, each has some of the parameters. A worker has its own gradient until then.
        self.update_share = UpdateShare(
            steps=self._context.serves, has_gradients=True, is_whole=len(roles.servers) == 1
        )
        # Copies are loaded, too, not only what the owners hold.
        self.state_layout = LayoutWithHooks(
            self._context.owner_layout, self._norm, ReplicatedLayout().load_model, self._average_buffers
        )
        self._buffers: Final[list[torch.Tensor]] = []
        self._before: list[torch.Tensor] = []  # what the buffers held when the step began
        self._step = 0  # of this worker; on a server, of the slowest one
        self._target: ParameterSet
        # Of a worker:
        self._sums: BucketGradients | None = None
        self._unanswered: dict[int, Answer] = {}
        self._round: Final = SyncRound(self._context.endpoint, roles)  # used only at the end of the loop
        self._versions: Final[dict[int, int]] = dict.fromkeys(roles.servers, 0)  # of the parameters here, by owner
        # Of a server:
        self._done: Final = dict.fromkeys(roles.workers, 0)  # how many steps each has pushed
        self._applying: RpcRequest | None = None  # its gradient is in `.grad`
        self._held_back: list[RpcRequest] = []
        self._ages: Final[list[int]] = []  # how many updates behind each gradient was
        self._optimizers: Final[list[torch.optim.Optimizer]] = []  # that the run steps
        # A run steps its optimizers once in a step, and there are several pushes: they step again for the others.
        self._hook: Final = register_optimizer_step_pre_hook(self._note_optimizer) if self._context.serves else None

    def setup_model(self, model: nn.Module, *, find_unused_parameters: bool, static_graph: bool = False) -> nn.Module:
        """``model`` itself, as it is on rank 0. Collective."""
        self._context.setup_model(model)
        known = set(map(id, self._buffers))
        self._buffers.extend(b for b in model.buffers() if id(b) not in known)
        return model

    def begin_micro_batch(self, position: MicroBatchPosition) -> None:
        """Remember the buffers that the step begins with."""
        if self._sums is None:
            self._before = [buffer.detach().clone() for buffer in self._buffers]

    def backward(
        self, loss: torch.Tensor, weight: torch.Tensor | None, target: ParameterSet, position: MicroBatchPosition
    ) -> None:
        """After a worker's last micro-batch, ``.grad`` holds the mean over its own micro-batches of the step."""
        self._target = target
        if self._sums is None:
            self._context.check_copies()
            self._context.looks = position.is_checked
            self._sums = BucketGradients(self._context.buckets(target), position.of, exact=False)
        target.backward(loss, weight)
        self._sums.accumulate(position)
        if position.last:
            self._sums.write_gradients()
            if self._sums.samples:
                divide_by_counts(target, position.step_samples, self._sums.samples)

    def serve(self, target: ParameterSet, position: MicroBatchPosition) -> bool:
        """Set ``.grad`` to the step's first push; `end_micro_batch` applies the others."""
        self._target = target
        self._applying = self._next_push()
        return self._applying is not None or min(self._done.values()) > self._step

    def goes_on(self) -> bool:
        """Whether the loop goes on with the next epoch. Collective."""
        return self._round.goes_on()

    def end_loop(self, *, complete: bool) -> bool:
        """End the loop over micro-batches; whether it was complete. Collective."""
        complete = self._round.end_loop(complete=complete)  # first, for servers wait for it
        self._context.check_copies(ends=True)
        return complete

    def normalize_by_count(self, target: ParameterSet, samples: int, counted: int) -> None:
        """Turn ``.grad`` into the mean over the worker's own items; not collective."""
        if self._sums is not None and counted:
            divide_by_counts(target, self._sums.samples, counted)

    def before_optimizer_step(self, target: ParameterSet) -> None:
        """Push a worker's gradients; a server makes the step."""
        self._optimizers.clear()
        if self._context.serves:
            return
        assert self._sums is not None
        buckets = self._context.buckets(target)
        push = BucketGradients(buckets, 1, exact=False)
        push.accumulate(MicroBatchPosition(0, 1, last=True, is_padding=not self._sums.samples))
        for server in self._context.roles.servers:
            content = replace(make_push(server, buckets, push, self._step, 1), version=self._versions[server])
            self._unanswered[server] = self._context.endpoint.send(server, content)
        self._sums = None

    def end_micro_batch(self, position: MicroBatchPosition) -> None:
        """After the last micro-batch, a worker pulls; a server goes on until each worker has pushed the step."""
        if not position.last:
            return
        unanswered, self._unanswered = self._unanswered, {}
        for server, answer in unanswered.items():
            values = self._context.endpoint.wait(server, answer, PULL)
            self._versions[server] = self._context.update_copies(self._target, server, values)
        if self._context.serves:
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
        self._context.say(
            f"asynchronous: {plural(updates, 'update')} on {plural(len(self._context.roles.servers), 'server')}; "
            f"gradients were {total / max(updates, 1):.1f} updates old in the mean, {most} at most"
        )

    def discard_step(self) -> None:
        """Drop gradients that were not pushed, and restore buffers."""
        self._sums = None
        with torch.no_grad():
            for buffer, before in zip(self._buffers, self._before, strict=True):
                buffer.copy_(before)

    def resync(self) -> None:
        """Wait until servers have ended the loop before."""
        self._round.rejoin()

    def close(self) -> None:
        """Remove the hook on optimizers, and end the connections. Collective."""
        if self._hook is not None:
            self._hook.remove()
        self._context.endpoint.close()

    def _refresh(self) -> None:
        """Give every rank the newest parameters. Collective."""
        self._average_buffers()
        versions = self._context.store.refresh(range(self._group.size))
        self._versions.update((rank, version) for rank, version in versions.items() if rank in self._versions)

    def _next_push(self) -> RpcRequest | None:
        """Put the next push that has gradients into ``.grad``; None, if each worker has pushed this step or ended."""
        while min(self._done.values()) <= self._step:
            ended = self._round.arrived
            waiting = {rank for rank, steps in self._done.items() if steps <= self._step} - ended
            if not waiting:
                if len(ended) < len(self._done) or len(set(self._done.values())) > 1:
                    raise unexpected_end_of_loop(rank for rank in ended if self._done[rank] <= self._step)
                return None
            request = self._context.endpoint.take(f"the push of {format_ranks(waiting)}")
            if isinstance(request.content, EndOfLoop | LoopGoesOn):
                self._round.keep(request)
                continue
            push: Push = request.content
            if push.step != self._done[request.sender]:
                raise MismatchError(
                    f"rank {request.sender} pushed its step {push.step}, after {self._done[request.sender]} steps"
                )
            if push.nodes:
                self._ages.append(self._context.store.version - push.version)
                for bucket, sums, used in zip(
                    self._context.own_buckets(self._target), push.sums, push.used, strict=True
                ):
                    set_gradients(bucket, sums[0], used)
                return request
            self._answer(request)
        return None

    def _apply_remaining_pushes(self) -> None:
        request, self._applying = self._applying, None
        while request is not None:
            self._context.store.version += 1
            self._answer(request)
            request = self._next_push()
            if request is not None:
                for optimizer in tuple(self._optimizers):
                    optimizer.step()
                for parameter in self._target.parameters:
                    parameter.grad = None

    def _answer(self, request: RpcRequest) -> None:
        """Count the step of ``request``; answer the workers that are not too far ahead of the slowest."""
        self._done[request.sender] += 1
        slowest = min(self._done.values())
        ready, self._held_back = [*self._held_back, request], []
        values = self._context.values(self._target)
        for held in ready:
            ahead = self._done[held.sender] - slowest
            if self._staleness is None or ahead <= self._staleness:
                held.answer(values)
            else:
                self._held_back.append(held)

    def _note_optimizer(self, optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
        if not any(optimizer is known for known in self._optimizers):
            self._optimizers.append(optimizer)

    def _norm(self, parameters: Sequence[nn.Parameter]) -> torch.Tensor:
        """The norm of what a worker pushes; 0 on a server, so that it does not clip again."""
        if self._context.serves:
            return torch.zeros((), device=self._group.device)
        return ReplicatedLayout().norm(parameters)

    def _average_buffers(self) -> None:
        """Set buffers to their mean over the workers; those of integers to the greatest value. Collective."""
        if self._context.serves:
            return
        role_group = self._context.role_group
        for buffer in self._buffers:
            if buffer.is_floating_point():
                buffer.copy_(role_group.sum_tensor(buffer, "the mean of buffers") / role_group.size)
            elif buffer.dtype is not torch.bool:
                counts = role_group.gather_objects(buffer.cpu(), "buffers of whole numbers")
                buffer.copy_(torch.stack(counts).amax(0))
