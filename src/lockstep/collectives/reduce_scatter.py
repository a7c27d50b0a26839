"""The tree's sum over all ranks, of which each rank receives its own part; and the groups of ranks for it.

    two nodes of two ranks; the sum is divided within a node: ranks 0 and 2 keep its first half, 1 and 3 the second

    rank 0     rank 1     rank 2     rank 3         each with the sums of its nodes of the tree
     a  a'      b  b'      c  c'      d  d'
     a+b        a'+b'      c+d        c'+d'         neighbours exchange halves, and fold them as far as they go
     a+b+c+d    a'+b'+...  a+b+c+d    a'+b'+...     then those that keep the same half

Without the second round it is a reduce-scatter whose additions are edges of one fixed tree.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final, Protocol

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore  # what torch.distributed exports, with types

from lockstep.collectives.all_reduce import open_all_reduce, wait_all
from lockstep.collectives.all_to_all import all_to_all
from lockstep.collectives.gloo_threads import destroy_process_groups
from lockstep.collectives.group import Group, translating_peer_errors
from lockstep.collectives.reduction_plan import ReductionPlans, Runs
from lockstep.collectives.reduction_tree import TreeAccumulator

# Torch 2.13 gave them new names, and warns of the old ones.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class ShardGroups:
    """Groups of neighbouring ranks, each of which holds one copy of a model in parts. Collective to make.

    Args:
        group: all ranks.
        ranks: how many hold a copy; a divisor of the number of all ranks.
    """

    def __init__(self, group: Group, ranks: int) -> None:
        self.copies: Final = group.size // ranks
        self.copy: Final = group.rank // ranks  #: the number of the one that this rank has a part of
        self.first: Final = self.copy * ranks  #: the first rank that has a part of it
        self.within: Final = group if self.copies == 1 else group.subgroup(range(self.first, self.first + ranks))
        self.across: Final = group.subgroup(range(group.rank % ranks, group.size, ranks))  #: those with the same part
        self._group: Final = group
        self._opened = False

    def new_process_group(self) -> dist.ProcessGroup:
        """A new process group of torch for the ranks of a copy, also for a single one; all of them must call it."""
        if self._group.size > 1:
            return self._group.new_process_group(range(self.first, self.first + self.within.size))
        on_gpu = self._group.device.type == "cuda"
        dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo", store=HashStore(), rank=0, world_size=1)
        self._opened = True
        whole: dist.ProcessGroup = dist.group.WORLD  # type: ignore[assignment]  # None only before it is made
        return whole

    def gather(self, part: torch.Tensor) -> torch.Tensor:
        """Concatenate the parts of a copy, which are one-dimensional and of one length. Collective."""
        if self.within.size == 1:
            return part
        whole = part.new_empty(part.numel() * self.within.size)
        with translating_peer_errors("the gathering of parts"):
            _all_gather(whole, part, group=self.within.process_group)
        return whole

    def close(self) -> None:
        """Nothing more is asked; the whole world's lines are closed with its group."""
        if self._opened:
            destroy_process_groups()


class ReduceScatter(Protocol):
    """Sums a flat tensor over all ranks, for each to keep a part; called in the same order on every rank."""

    def __call__(self, out: torch.Tensor, partials: Sequence[torch.Tensor], micro_batches: int) -> None:
        """Receive this rank's part of the sum over the micro-batches of a step; on a GPU, in the current stream.

        Args:
            out: one-dimensional, of a length that all ranks give, for the part.
            partials: the sums of this rank's nodes (`nodes_of` its run), each with the parts of all ranks of a copy,
                end to end; none for an empty run. They may be overwritten.
            micro_batches: of the step.
        """
        ...

    def close(self) -> None:
        """End threads and connections; no sum is asked for afterwards."""
        ...


class TreeReduceScatter(ReduceScatter):
    """Sums along the tree: the same bits for any number of ranks.

    A rank sends and receives the bytes of a ring's reduce-scatter, times its nodes.
    """

    def __init__(self, shard_groups: ShardGroups, runs: Runs) -> None:
        within, ranks = shard_groups.within, shard_groups.within.size
        self._shard_groups: Final = shard_groups
        self._plans: Final = ReductionPlans(within.rank, ranks, lambda rank, of: runs(shard_groups.first + rank, of))
        self._across: Final = open_all_reduce(
            shard_groups.across,
            lambda copy, of: range(runs(copy * ranks, of).start, runs(copy * ranks + ranks - 1, of).stop),
        )

    def __call__(self, out: torch.Tensor, partials: Sequence[torch.Tensor], micro_batches: int) -> None:
        """Exchange parts within a copy, fold them along the tree, and sum them over copies. Collective."""
        within, part = self._shard_groups.within, out.numel()
        plan = self._plans(micro_batches)
        if len(partials) == 1:
            sent = partials[0]
        else:
            cuts = range(0, part * within.size, part)
            sent = torch.cat([p[a : a + part] for a in cuts for p in partials]) if partials else out[:0]
        received = sent
        if within.size > 1:
            take = [len(nodes) * part for nodes in plan.nodes_by_rank]
            received = out.new_empty(sum(take))
            give = [len(partials) * part] * within.size
            wait_all(all_to_all(received, sent, take, give, within.process_group))
        sums = TreeAccumulator[torch.Tensor](micro_batches, lambda left, right: left.add_(right))
        for node, piece in zip(plan.all_nodes, received.view(len(plan.all_nodes), part), strict=True):
            sums.push(node, piece)
        self._across.begin(out, sums.sums, micro_batches)
        self._across.finish()

    def close(self) -> None:
        """End the threads and connections."""
        self._across.close()


class NativeReduceScatter(ReduceScatter):
    """Torch's own reduce-scatter: no promise of bits."""

    def __init__(self, shard_groups: ShardGroups) -> None:
        self._shard_groups: Final = shard_groups

    def __call__(self, out: torch.Tensor, partials: Sequence[torch.Tensor], micro_batches: int) -> None:
        """Reduce and scatter within a copy, and sum over copies. Collective."""
        within, across = self._shard_groups.within, self._shard_groups.across
        total = torch.stack(list(partials)).sum(0) if len(partials) > 1 else None
        if total is None:
            total = partials[0] if partials else out.new_zeros(out.numel() * within.size)
        if within.size > 1:
            _reduce_scatter(out, total, group=within.process_group)
        else:
            out.copy_(total)
        if across.size > 1:
            dist.all_reduce(out, group=across.process_group)

    def close(self) -> None:
        """Nothing is held open."""


def broadcast_from_rank0(group: Group, tensors: Iterable[torch.Tensor]) -> None:
    """Copy rank 0's ``tensors``, of the same shapes and types on every rank, to all others. Collective."""
    if group.size == 1:
        return
    with translating_peer_errors("the hand-over of what rank 0 begins with"), torch.no_grad():
        for tensor in tensors:
            if tensor.numel():
                # As bytes: transports do not support every type.
                flat = tensor.detach().contiguous()
                dist.broadcast(flat.view(-1).view(torch.uint8), group_src=0, group=group.process_group)
                if flat.data_ptr() != tensor.data_ptr():
                    tensor.copy_(flat)
