"""What the two modes of ``parameter-server`` share: who owns what, and what a worker pushes to a server."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import nn

from lockstep.collectives import Node
from lockstep.errors import UsageError
from lockstep.formatting import plural
from lockstep.size_balancing import owners_of
from lockstep.strategies.parameter_server.flat_buckets import (
    BucketGradients,
    FlatBucket,
    flat_buckets_of,
)
from lockstep.strategies.parameter_server.parameter_store import ParameterStore
from lockstep.strategies.parameter_server.rpc import (
    RpcEndpoint,
    ServerRoles,
)
from lockstep.strategies.parts.gradient_accumulation import ParameterSet
from lockstep.strategies.parts.module_states import checksum
from lockstep.strategies.parts.sparse_gradients import refuse_sparse
from lockstep.strategies.parts.state_layout import OwnerLayout
from lockstep.strategies.strategy import ReplicaAssignment, StrategyContext
from lockstep.torch_private import version_of

WITHOUT_GRADIENTS: Final = "the loss scale is adapted where gradients are, and workers have none"


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
        self._pulled: tuple[int, int | None] | None = None  # what tells changes after an answer; None: before the loop
        self.looks = False  #: whether copies are compared by value, too, from the next answer on
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
        self.say(f"{plural(len(self.roles.workers), 'worker')}; parameters on servers: {loads}")
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
        self._pulled = self._changes(looks=self.looks)
        return version

    def check_copies(self, *, ends: bool = False) -> None:
        """Check that a worker's copies are what the servers have answered last in this loop, which ``ends`` or not.

        Raises:
            UsageError: if the script has changed a parameter.
        """
        pulled = self._pulled
        if ends:
            self._pulled = None
        if pulled is not None and pulled != self._changes(looks=pulled[1] is not None):
            raise UsageError(
                "a parameter was changed in the loop of run.train(...), which servers do not run, and strategy "
                "parameter-server takes their values for the next step: change parameters between passes, on all "
                "ranks, or, with one server, in a hook of the optimizer (register_step_post_hook); a weight that "
                "forward() limits is a parametrization (torch.nn.utils.parametrize); or use ddp or zero"
            )

    def _changes(self, *, looks: bool) -> tuple[int, int | None]:
        """What counts changes in place of a worker's copies; where it ``looks``, a checksum, which tells all."""
        values = zlib.crc32(repr([checksum(parameter) for parameter in self._owners]).encode()) if looks else None
        return sum(version_of(parameter) for parameter in self._owners), values

    def _read(self, model: int | None) -> tuple[int, list[torch.Tensor]]:
        return self.store.read(model)

    def _owner_of(self, tensor: torch.Tensor) -> int:
        # Trained parameters are on servers. Rank 0 owns the rest: it is the same on all ranks, or workers change it.
        return self._owners.get(tensor, 0)


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
