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
updates is said at the end. Each worker changes its own buffers; evaluations and checkpoints see their mean. None of it
can be repeated bit by bit. Evaluations and checkpoints begin with a barrier, so that no rank changes what they see.

Traffic, with M bytes of parameters, w workers and N servers: in each step a worker sends k*M and receives M, where k is
the number of its nodes (1 for an aligned run of micro-batches, and where sums are fast or asynchronous); a server
receives k*w*M/N and sends w*M/N. An all-reduce sends and receives 2*M*(n-1)/n on each of n ranks. So the busiest rank
carries less than with an all-reduce where N is greater than about w/2, and servers are the narrow place where it is
less. (The formula of Li et al., Scaling Distributed Machine Learning with the Parameter Server, OSDI 2014, for dense
pushes.)
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from lockstep.collectives import Node, fold, open_all_reduce, translating_peer_errors
from lockstep.errors import MismatchError, SettingError, UsageError
from lockstep.size_balancing import owners_of
from lockstep.strategies.buffers import Buffers
from lockstep.strategies.gradient_accumulation import MicroBatchPosition, ParameterSet, divide_by_counts, total_count
from lockstep.strategies.parameter_server.flat_buckets import (
    BucketGradients,
    FlatBucket,
    flat_buckets_of,
    set_gradients,
)
from lockstep.strategies.parameter_server.parameter_store import PULL, LayoutWithHooks, ParameterStore
from lockstep.strategies.parameter_server.rpc import (
    Answer,
    EndOfLoop,
    RpcEndpoint,
    RpcRequest,
    ServerRoles,
    SyncRound,
    format_ranks,
    unexpected_end_of_loop,
)
from lockstep.strategies.protocol import (
    FinishesTraining,
    HasServerRanks,
    PreparesEvaluation,
    PreparesForward,
    PreparesOptimizerStep,
    ReplicaAssignment,
    Strategy,
    StrategyContext,
)
from lockstep.strategies.single_process import SingleProcess
from lockstep.strategies.sparse_gradients import refuse_sparse
from lockstep.strategies.state_layout import OwnerLayout, ReplicatedLayout

WITHOUT_GRADIENTS: Final = "the loss scale is adapted where gradients are, and workers have none"


@dataclass(frozen=True, slots=True)
class Options:
    """What ``parameter-server`` may be told."""

    servers: int = 1  #: how many of the ranks serve, the last ones
    mode: str = "sync"  #: sync: servers wait for all workers; async: they step with each push
    staleness: int | None = None  #: of async: by how many steps a worker may be ahead of the slowest; None: any number

    def __post_init__(self) -> None:
        """Check the values.

        Raises:
            SettingError: for a value that cannot be used.
        """
        if self.mode not in ("sync", "async"):
            raise SettingError(f"strategy parameter-server: mode={self.mode!r}; give sync or async")
        if self.staleness is not None and (self.mode == "sync" or self.staleness < 0):
            raise SettingError(
                f"strategy parameter-server: staleness={self.staleness}, mode={self.mode}; "
                "give a number from 0, with mode=async"
            )


def open_strategy(context: StrategyContext, options: Options) -> Strategy:
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


@dataclass(frozen=True, slots=True)
class Push:
    """What a worker sends to one server in a step."""

    step: int  #: of this worker, from 0
    micro_batches: int  #: of the step
    nodes: list[Node]  #: of the tree, whose sums these are; none if the worker had no micro-batch
    sums: list[torch.Tensor]  #: for each bucket of the server, of shape (nodes, elements)
    used: list[set[int]]  #: for each bucket, the indices of its parameters that had a part in some loss here
    counted: int | None = None  #: items of the step over all workers, where they are counted
    version: int = 0  #: of the server's parameters, from which the gradient was computed


class ServerContext:
    """What both modes have: roles, remote calls, the parameters with their owners, and the buckets they travel in."""

    def __init__(self, context: StrategyContext, roles: ServerRoles) -> None:
        group = context.group
        self.group: Final = group
        self.roles: Final = roles
        self.serves: Final = group.rank in roles.servers
        self.assignment: Final = ReplicaAssignment(None if self.serves else group.rank, len(roles.workers))
        self.say: Final = context.say
        self.endpoint: Final = RpcEndpoint(group, self._read)
        self.store: Final = ParameterStore(group, self.endpoint)
        self.owner_layout: Final = OwnerLayout(group)
        self._owners: Final[dict[torch.Tensor, int]] = {}  # of parameters that are trained
        self._loads: list[int] = [0] * len(roles.servers)  # bytes that each server owns
        #: the workers' group on a worker, the servers' group on a server
        self.role_group: Final = group.subgroup(roles.servers if self.serves else roles.workers)
        self._buckets: dict[ParameterSet, list[FlatBucket]] = {}
        if self.serves:
            self.endpoint.watch(roles.workers)

    def setup_model(self, model: nn.Module) -> None:
        """Divide ``model``, with rank 0's values, among the servers, about equally in bytes. Collective."""
        refuse_sparse(model, "parameter-server")
        servers = self.roles.servers
        new = [p for p in model.parameters() if p.requires_grad and p not in self._owners]
        owners, self._loads = owners_of([p.numel() * p.element_size() for p in new], self._loads)
        self._owners.update((p, servers[owner]) for p, owner in zip(new, owners, strict=True))
        loads = ", ".join(f"rank {rank} {load / 1e6:.3g} MB" for rank, load in zip(servers, self._loads, strict=True))
        self.say(f"{len(self.roles.workers)} workers; parameters on servers: {loads}")
        self.store.setup_model(model, self._owner_of)
        tensors = model.state_dict(keep_vars=True)
        self.owner_layout.setup_model(model, lambda name: (self._owner_of(tensors[name]),))

    def buckets(self, target: ParameterSet) -> list[FlatBucket]:
        """The buckets of the trained parameters.

        Raises:
            UsageError: where a run has several optimizers that step apart.
        """
        if target not in self._buckets:
            if not target.everything:
                raise UsageError(
                    "servers make one update in each step, and this loss is for some of the parameters only; give "
                    "run.step(loss, optimizer=[first, second]) all optimizers at once, or use strategy ddp"
                )
            self._buckets[target] = flat_buckets_of(target.parameters, map(self.store.owner_of, target.parameters))
        return self._buckets[target]

    def own_buckets(self, target: ParameterSet) -> list[FlatBucket]:
        """The buckets that this server owns."""
        return [bucket for bucket in self.buckets(target) if bucket.owner == self.group.rank]

    def values(self, target: ParameterSet) -> tuple[int, list[torch.Tensor]]:
        """What a server answers to a push."""
        return self.store.version, [bucket.values() for bucket in self.own_buckets(target)]

    def update_copies(self, target: ParameterSet, server: int, answer: tuple[int, list[torch.Tensor]]) -> int:
        """Set a worker's copies to what ``server`` answered, and return the version of that."""
        version, flats = answer
        for bucket, flat in zip(
            (bucket for bucket in self.buckets(target) if bucket.owner == server), flats, strict=True
        ):
            bucket.fill(flat)
        return version

    def _read(self, model: int | None) -> tuple[int, list[torch.Tensor]]:
        return self.store.read(model)

    def _owner_of(self, tensor: torch.Tensor) -> int:
        # Trained parameters are on servers. Rank 0 owns the rest: it is the same on all ranks, or workers change it.
        return self._owners.get(tensor, 0)


class SyncParameterServer(Strategy, HasServerRanks, PreparesOptimizerStep, FinishesTraining):
    """The strategy ``parameter-server`` in its synchronous mode."""

    def __init__(self, context: StrategyContext, roles: ServerRoles) -> None:
        self._context: Final = ServerContext(context, roles)
        self._group: Final = context.group
        self._exact: Final = context.exact
        self.assignment = self._context.assignment
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

    def end_loop(self, *, complete: bool) -> bool:
        """End the loop over micro-batches; whether it was complete. Collective."""
        return self._round.end_loop(complete=complete)

    def normalize_by_count(self, target: ParameterSet, samples: int, counted: int) -> None:
        """Let servers divide by the number of items, after their sum. All workers must call it."""
        total = total_count(self._role_group, counted)
        for server, push in self._round.unsent.items():
            self._round.unsent[server] = replace(push, counted=total)

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


class AsyncParameterServer(
    Strategy, HasServerRanks, PreparesForward, PreparesOptimizerStep, PreparesEvaluation, FinishesTraining
):
    """The strategy ``parameter-server`` in its asynchronous mode."""

    def __init__(self, context: StrategyContext, roles: ServerRoles, staleness: int | None) -> None:
        self._context: Final = ServerContext(context, roles)
        self._group: Final = context.group
        self._staleness: Final = staleness
        self.assignment = replace(self._context.assignment, in_step=False)
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

    def end_loop(self, *, complete: bool) -> bool:
        """End the loop over micro-batches; whether it was complete. Collective."""
        return self._round.end_loop(complete=complete)

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
            f"asynchronous: {updates} updates on {len(self._context.roles.servers)} servers; gradients were "
            f"{total / max(updates, 1):.1f} updates old in the mean, {most} at most"
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
            parted = self._round.arrived
            waiting = {rank for rank, steps in self._done.items() if steps <= self._step} - parted
            if not waiting:
                if len(parted) < len(self._done) or len(set(self._done.values())) > 1:
                    raise unexpected_end_of_loop(rank for rank in parted if self._done[rank] <= self._step)
                return None
            request = self._context.endpoint.take(f"the push of {format_ranks(waiting)}")
            if isinstance(request.content, EndOfLoop):
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


def make_push(server: int, buckets: Sequence[FlatBucket], sums: BucketGradients, step: int, micro_batches: int) -> Push:
    """The push to ``server``: its buckets of ``sums``."""
    numbers = [number for number, bucket in enumerate(buckets) if bucket.owner == server]
    return Push(
        step,
        micro_batches,
        sums.nodes,
        sums=[_rows(sums.rows(number), buckets[number]) for number in numbers],
        used=[sums.used(number) for number in numbers],
    )


def _rows(sums: Sequence[torch.Tensor], bucket: FlatBucket) -> torch.Tensor:
    """In the memory of the CPU, of shape (nodes, elements)."""
    if sums:
        return torch.stack(list(sums)).cpu()
    elements = sum(tensor.numel() for tensor in bucket.tensors)
    return torch.empty(0, elements, dtype=bucket.tensors[0].dtype)
