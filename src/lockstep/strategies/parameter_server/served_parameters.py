"""Parameters that servers own, whole, and of which all ranks have copies.

    parameters    a 40   b 30   c 20   d 6   e 4   buffers
    rank 2        a 40              d 6   e 4
    rank 3               b 30   c 20
    rank 0                                         buffers    and what is not trained

Whole parameters are divided, not their rows, so that an optimizer finds on the owner all that it needs of one.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Final

import torch
from torch import nn

from lockstep.collectives import Group
from lockstep.errors import UsageError
from lockstep.formatting import plural
from lockstep.size_balancing import owners_of
from lockstep.strategies.parameter_server.flat_buckets import FlatBucket, flat_buckets_of
from lockstep.strategies.parameter_server.served_strategy import Push, ServedLayout, ServerRoles, require_everything
from lockstep.strategies.parts.gradient_accumulation import ParameterSet, TreeGradientAccumulator
from lockstep.strategies.parts.module_states import checksum, sync_module_states
from lockstep.strategies.parts.sparse_gradients import refuse_sparse
from lockstep.strategies.parts.state_layout import ReplicatedLayout
from lockstep.strategies.strategy import StateDict
from lockstep.torch_private import version_of

#: The operation during which workers receive parameters, as errors name it.
PULL: Final = "the pull of parameters"
WITHOUT_GRADIENTS: Final = "the loss scale is adapted where gradients are, and workers have none"


class ServedParameters:
    """The parameters of a run with their owners, and the buckets they travel in.

    Args:
        group: all ranks.
        roles: which ranks are workers and which are servers.
        layout: learns where parameters lie.
        say: shows the user one line.
    """

    def __init__(self, group: Group, roles: ServerRoles, layout: ServedLayout, say: Callable[[str], None]) -> None:
        self._group: Final = group
        self._roles: Final = roles
        self._layout: Final = layout
        self._say: Final = say
        self._owners: Final[dict[torch.Tensor, int]] = {}  # of parameters that are trained
        self._tensors: Final[dict[torch.Tensor, None]] = {}  # all parameters and buffers, in order
        self._loads: list[int] = [0] * len(roles.servers)  # bytes that each server owns
        self._buckets: Final[dict[ParameterSet, list[FlatBucket]]] = {}
        self._pulled: tuple[int, int | None] | None = None  # what tells changes after an answer; None: before the loop
        self.looks = False  #: whether copies are compared by value, too, from the next answer on

    def setup_model(self, model: nn.Module) -> None:
        """Divide ``model``, with rank 0's values, among the servers, about equally in bytes. Collective."""
        refuse_sparse(model, "parameter-server")
        servers = self._roles.servers
        new = [p for p in model.parameters() if p.requires_grad and p not in self._owners]
        owners, self._loads = owners_of([p.numel() * p.element_size() for p in new], self._loads)
        self._owners.update((p, servers[owner]) for p, owner in zip(new, owners, strict=True))
        loads = ", ".join(f"rank {rank} {load / 1e6:.3g} MB" for rank, load in zip(servers, self._loads, strict=True))
        self._say(f"{plural(len(self._roles.workers), 'worker')}; parameters on servers: {loads}")
        sync_module_states(self._group, model)
        self._tensors.update(dict.fromkeys((*model.parameters(), *model.buffers())))
        tensors = model.state_dict(keep_vars=True)
        self._layout.setup_model(model, lambda name: (self._owner_of(tensors[name]),))

    def buckets(self, target: ParameterSet) -> list[FlatBucket]:
        """The buckets of the trained parameters.

        Raises:
            UsageError: where a run has several optimizers that step apart.
        """
        if target not in self._buckets:
            require_everything(target)
            self._buckets[target] = flat_buckets_of(target.parameters, map(self._owner_of, target.parameters))
        return self._buckets[target]

    def buckets_of(self, server: int, target: ParameterSet) -> list[FlatBucket]:
        """The buckets that ``server`` owns."""
        return [bucket for bucket in self.buckets(target) if bucket.owner == server]

    def pushes(
        self, target: ParameterSet, gradients: TreeGradientAccumulator, step: int, micro_batches: int
    ) -> dict[int, Push]:
        """What a worker sends to each server: its buckets of ``gradients``."""
        pushes = {}
        for server in self._roles.servers:
            buckets, tree = self.buckets_of(server, target), gradients.tree
            sums = [[bucket.pack(row) for bucket in buckets] for row in tree.sums]
            pushes[server] = Push(step, micro_batches, tree.nodes, sums, gradients.used)
        return pushes

    def values(self, target: ParameterSet) -> list[torch.Tensor]:
        """What this server answers to a push: the values of its buckets."""
        return [bucket.values() for bucket in self.buckets_of(self._group.rank, target)]

    def update_copies(self, target: ParameterSet, server: int, flats: list[torch.Tensor]) -> None:
        """Set a worker's copies to what ``server`` answered."""
        for bucket, flat in zip(self.buckets_of(server, target), flats, strict=True):
            bucket.fill(flat)
        self._pulled = self._changes(looks=self.looks)

    def refresh(self) -> None:
        """Copy what the owners hold to all ranks. Collective."""
        for bucket in flat_buckets_of(self._tensors, map(self._owner_of, self._tensors)):
            flat = bucket.values()
            self._group.broadcast_bytes(flat.view(torch.uint8), bucket.owner, PULL)
            if bucket.owner != self._group.rank:
                bucket.fill(flat)

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

    def _owner_of(self, tensor: torch.Tensor) -> int:
        # Trained parameters are on servers. Rank 0 owns the rest: it is the same on all ranks, or workers change it.
        return self._owners.get(tensor, 0)


class CopiesLayout(ServedLayout):
    """The layout of served parameters: copies are loaded, too, not only what the owners hold."""

    def load_model(self, model: nn.Module, state: StateDict) -> None:
        """Load the whole state."""
        ReplicatedLayout().load_model(model, state)
