"""Reduce-scatter along the tree: the sum over all ranks, of which each rank receives its part; and its groups.

    two nodes of two ranks; the sum is divided within a node: ranks 0 and 2 keep its first half, 1 and 3 the second

    rank 0     rank 1     rank 2     rank 3         each with the sums of its nodes of the tree
     a  a'      b  b'      c  c'      d  d'
     a+b        a'+b'      c+d        c'+d'         neighbours exchange halves, and add siblings of the tree
     a+b+c+d    a'+b'+...  a+b+c+d    a'+b'+...     then ranks that keep the same half

Without the second round it is a reduce-scatter whose additions are edges of one fixed tree.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Final, Protocol

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore  # what torch.distributed exports, with types

from lockstep.collectives.all_reduce import AllReduce, open_all_reduce, wait_all
from lockstep.collectives.all_to_all import all_to_all
from lockstep.collectives.gathered_objects import all_gather_flat
from lockstep.collectives.gloo_threads import destroy_process_groups
from lockstep.collectives.group import Group, translating_peer_errors
from lockstep.collectives.reduction_plan import Runs, turns_of
from lockstep.collectives.reduction_tree import Node, TreeAccumulator
from lockstep.collectives.shared_memory import SharedMemoryExchange, SharedMemoryGather

# Torch 2.13 gave it a new name, and warns of the old one.
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class ShardGroups:
    """Groups of neighbouring ranks, each of which holds one copy of a model in parts. The constructor is collective.

    Args:
        group: all ranks.
        ranks: number of ranks that hold a copy; a divisor of the number of all ranks.
    """

    def __init__(self, group: Group, ranks: int) -> None:
        self.copies: Final = group.size // ranks
        self.copy: Final = group.rank // ranks  #: the number of the copy of which this rank has a part
        self.first: Final = self.copy * ranks  #: the first rank with a part of this copy
        self.within: Final = group if self.copies == 1 else group.subgroup(range(self.first, self.first + ranks))
        self.across: Final = group.subgroup(range(group.rank % ranks, group.size, ranks))  #: ranks with the same part
        #: whether each copy is on the CPUs of one machine, on several ranks
        self.shares_memory: Final = (
            sys.platform == "linux"
            and group.device.type == "cpu"
            and ranks > 1
            and all(len(set(group.nodes[first : first + ranks])) == 1 for first in range(0, group.size, ranks))
        )
        self._group: Final = group
        self._opened = False

    def new_process_group(self) -> dist.ProcessGroup:
        """A new process group of torch for the ranks of a copy, also for a single rank; all must call the method."""
        if self._group.size > 1:
            return self._group.new_process_group(range(self.first, self.first + self.within.size))
        on_gpu = self._group.device.type == "cuda"
        dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo", store=HashStore(), rank=0, world_size=1)
        self._opened = True
        whole: dist.ProcessGroup = dist.group.WORLD  # type: ignore[assignment]  # None only before it is initialised
        return whole

    def gather(self, part: torch.Tensor) -> torch.Tensor:
        """Concatenate the parts of a copy, which are one-dimensional and of one length. Collective."""
        if self.within.size == 1:
            return part
        whole = part.new_empty(part.numel() * self.within.size)
        with translating_peer_errors("the gathering of parts"):
            all_gather_flat(whole, part, group=self.within.process_group)
        return whole

    def close(self) -> None:
        """Close the process group of a single rank; those of the whole world are closed with its group."""
        if self._opened:
            destroy_process_groups()


class ScatteredSum(Protocol):
    """The sum of one flat tensor over the micro-batches of a step, of which each rank keeps a part."""

    def allocate(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Memory on the device for the next value of `add`, which avoids a copy."""

    def add(self, value: torch.Tensor, index: int | None) -> None:
        """Add the value of this rank's next micro-batch. Collective, once for each pass of a rank in the step.

        Args:
            value: one-dimensional, with the parts of all ranks of a copy, end to end; may be overwritten.
            index: of the micro-batch in its step; None: padding, which counts for nothing.
        """

    def finish(self, out: torch.Tensor) -> None:
        """Write this rank's part of the sum into ``out``, after the last value. Collective."""


class ReduceScatter(Protocol):
    """Sums flat tensors over all ranks, for each to keep a part; called in the same order on every rank."""

    def begin(self, micro_batches: int) -> ScatteredSum:
        """Begin a sum over the micro-batches of a step; on a GPU, all work is in the current stream."""

    def close(self) -> None:
        """End threads and connections; no sum may follow."""


def open_reduce_scatter(shard_groups: ShardGroups, runs: Runs, *, exact: bool) -> ReduceScatter:
    """The reduce-scatter for the groups: along the tree, or torch's own if not ``exact``. Collective.

    On the CPUs of one machine the tree costs nothing, and is used in any case.
    """
    if exact or shard_groups.shares_memory:
        return TreeReduceScatter(shard_groups, runs)
    return NativeReduceScatter(shard_groups)


def open_gather(shard_groups: ShardGroups) -> SharedMemoryGather | None:
    """The gather of parts within a copy, in place of torch's own; None where torch's is used. Collective."""
    return SharedMemoryGather(shard_groups.within) if shard_groups.shares_memory else None


class PartExchange(Protocol):
    """Gives each rank of a copy its part of the other ranks' values."""

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Memory for the only value that this rank brings to the next exchange."""

    def __call__(
        self, values: Sequence[torch.Tensor], counts: Sequence[int], like: torch.Tensor
    ) -> Sequence[torch.Tensor]:
        """This rank's part of each value of each rank, rank after rank. Collective.

        Args:
            values: of this rank, each of one dimension and with the parts of all ranks, end to end.
            counts: number of values of each rank.
            like: any tensor of the shape and type of a value.

        Returns:
            The parts, in memory that is valid until the next exchange.
        """

    def close(self) -> None:
        """End connections."""


class LinkExchange(PartExchange):
    """The exchange over a link: a rank sends and receives the bytes of a ring's reduce-scatter for each value."""

    def __init__(self, group: Group) -> None:
        self._group: Final = group

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """New memory."""
        return torch.empty(numel, dtype=dtype, device=device)

    def __call__(
        self, values: Sequence[torch.Tensor], counts: Sequence[int], like: torch.Tensor
    ) -> Sequence[torch.Tensor]:
        """Exchange parts by an all-to-all."""
        size = self._group.size
        if size == 1:
            return values
        part = like.numel() // size
        if len(values) == 1:
            sent = values[0]
        else:
            cuts = range(0, like.numel(), part)
            sent = torch.cat([value[a : a + part] for a in cuts for value in values]) if values else like[:0]
        received = sent.new_empty(sum(counts) * part)
        take, give = [count * part for count in counts], [len(values) * part] * size
        wait_all(all_to_all(received, sent, take, give, self._group.process_group))
        return received.view(-1, part).unbind()

    def close(self) -> None:
        """Nothing is held open."""


class TreeReduceScatter(ReduceScatter):
    """The reduce-scatter along the tree, with equal bits for any number of ranks.

    If ranks take micro-batches in turn, each turn is exchanged at once, and a rank holds its part of about log2(M) + 1
    sums between turns. Else a rank holds as many sums of whole values, and exchanges them in the last turn.
    """

    def __init__(self, shard_groups: ShardGroups, runs: Runs) -> None:
        within, first, ranks = shard_groups.within, shard_groups.first, shard_groups.within.size
        self._device: Final = within.device
        self._runs: Final = runs
        self._world: Final = range(ranks * shard_groups.copies)
        self._here: Final = range(first, first + ranks)
        self._turns: Final[dict[int, list[list[list[Node]]]]] = {}  # by the number of micro-batches
        self._exchange: Final[PartExchange] = (
            SharedMemoryExchange(within) if shard_groups.shares_memory else LinkExchange(within)
        )
        self._across: Final = open_all_reduce(
            shard_groups.across, lambda copy, of: _block_of(runs, range(copy * ranks, (copy + 1) * ranks), of)
        )

    def begin(self, micro_batches: int) -> ScatteredSum:
        """Begin a sum along the tree over ``micro_batches``."""
        if micro_batches not in self._turns:
            passes = max(len(self._runs(rank, micro_batches)) for rank in self._world)
            runs = [self._runs(rank, micro_batches) for rank in self._here]
            self._turns[micro_batches] = turns_of(micro_batches, runs, passes)
        return _TreeSum(micro_batches, self._turns[micro_batches], self._exchange, self._across, self._device)

    def close(self) -> None:
        """End the threads and connections."""
        self._exchange.close()
        self._across.close()


class _TreeSum(ScatteredSum):
    """A sum of `TreeReduceScatter`."""

    def __init__(
        self,
        micro_batches: int,
        turns: Sequence[list[list[Node]]],
        exchange: PartExchange,
        across: AllReduce,
        device: torch.device,
    ) -> None:
        self._micro_batches, self._turns, self._turn = micro_batches, turns, 0
        self._exchange, self._across, self._device = exchange, across, device
        self._whole = self._tree()  # of values that are not exchanged yet
        self._parts = self._tree()  # of received parts

    def allocate(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Memory of the exchange, if the value is exchanged without an addition before; else new memory."""
        if max(map(len, self._turns[self._turn])) == 1 and not self._whole.nodes:
            return self._exchange.allocate(numel, dtype, self._device)
        return torch.empty(numel, dtype=dtype, device=self._device)

    def add(self, value: torch.Tensor, index: int | None) -> None:
        """Add ``value`` along the tree, and exchange the nodes of this turn. Collective."""
        if index is not None:
            self._whole.push((index, index + 1), value)
        nodes = self._turns[self._turn]
        self._turn += 1
        if not any(nodes):
            return
        values, self._whole = self._whole.sums, self._tree()
        pieces = self._exchange(values, list(map(len, nodes)), value)
        brought = zip((node for of_rank in nodes for node in of_rank), pieces, strict=True)
        before = {id(held) for held in self._parts.sums}
        for node, piece in brought:  # rank after rank is from left to right
            self._parts.push(node, piece)
        if self._turn < len(self._turns):
            # Kept parts get memory of their own, so that the received memory can be freed.
            self._parts.sums = [held if id(held) in before else held.clone() for held in self._parts.sums]

    def finish(self, out: torch.Tensor) -> None:
        """Sum over copies. Collective."""
        self._across.begin(out, self._parts.sums, self._micro_batches)
        self._across.finish()

    def _tree(self) -> TreeAccumulator[torch.Tensor]:
        return TreeAccumulator(self._micro_batches, lambda left, right: left.add_(right))


class NativeReduceScatter(ReduceScatter):
    """Torch's own reduce-scatter after each micro-batch, without a promise of bits."""

    def __init__(self, shard_groups: ShardGroups) -> None:
        self._shard_groups: Final = shard_groups

    def begin(self, micro_batches: int) -> ScatteredSum:
        """Begin a sum in any order."""
        return _NativeSum(self._shard_groups)

    def close(self) -> None:
        """Nothing is held open."""


class _NativeSum(ScatteredSum):
    """A sum of `NativeReduceScatter`."""

    def __init__(self, shard_groups: ShardGroups) -> None:
        self._within, self._across = shard_groups.within, shard_groups.across
        self._part: torch.Tensor | None = None

    def allocate(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """New memory."""
        return torch.empty(numel, dtype=dtype, device=self._within.device)

    def add(self, value: torch.Tensor, index: int | None) -> None:
        """Reduce and scatter within a copy. Collective."""
        if index is None:
            value.zero_()
        received = value
        if self._within.size > 1:
            received = value.new_empty(value.numel() // self._within.size)
            _reduce_scatter(received, value, group=self._within.process_group)
        self._part = received if self._part is None else self._part.add_(received)

    def finish(self, out: torch.Tensor) -> None:
        """Sum over copies. Collective."""
        assert self._part is not None
        out.copy_(self._part)
        if self._across.size > 1:
            dist.all_reduce(out, group=self._across.process_group)


def _block_of(runs: Runs, ranks: Iterable[int], micro_batches: int) -> range:
    """The neighbouring micro-batches that the ranks of a copy compute together, in whatever division."""
    own = [run for run in (runs(rank, micro_batches) for rank in ranks) if run]
    return range(min(run[0] for run in own), max(run[-1] for run in own) + 1) if own else range(0)


def broadcast_from_rank0(group: Group, tensors: Iterable[torch.Tensor]) -> None:
    """Copy rank 0's ``tensors``, of equal shapes and types on every rank, to all other ranks. Collective."""
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
