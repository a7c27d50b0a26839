"""Broadcast of many tensors at once, each from the rank that owns and has changed the tensor.

before      rank 0   A' b  c        after      A' B' C'       each rank changes its own
            rank 1   a  B' c                   A' B' C'
            rank 2   a  b  C'                  A' B' C'
"""

from __future__ import annotations

import itertools
import mmap
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import torch
import torch.distributed as dist

from lockstep.collectives.group import Group, translating_peer_errors
from lockstep.collectives.shared_memory import SharedMemoryArena
from lockstep.torch_private import foreach_copy_

_ALIGN = 64  # bytes: each tensor begins on a cache line of its own, whatever its type
#: Bytes of a broadcast: enough to use the link well, and few compared with all tensors. Two broadcasts are under way.
_BATCH_BYTES = 16 << 20


class OwnerBroadcast(Protocol):
    """Broadcasts tensors from their owners to all ranks."""

    def __call__(self, tensors: Sequence[torch.Tensor], owners: Sequence[int]) -> None:
        """Copy each of ``tensors`` from its owner, bit for bit; on a GPU, visible to work that is queued afterwards.

        Collective, with tensors of the same shapes and types and the same owners on every rank.

        Raises:
            PeerLost: if a rank is gone.
        """

    def close(self) -> None:
        """End connections; no call may follow."""


def open_owner_broadcast(group: Group) -> OwnerBroadcast:
    """The implementation for the group: NCCL for GPUs, shared memory on one machine, else gloo. Collective."""
    if group.over_cpu and group.on_one_machine and sys.platform == "linux":
        return SharedMemoryOwnerBroadcast(group)
    return BroadcastFromOwner(group)


class BroadcastFromOwner(OwnerBroadcast):
    """Broadcasts batches of an owner's tensors; two broadcasts at a time, of two owners if there are several."""

    def __init__(self, group: Group) -> None:
        self._rank: Final = group.rank
        self._device: Final = torch.device("cpu") if group.over_cpu else group.device
        # Over gloo, messages to a rank wait behind the rank's own messages in the same process group.
        several = range(2 if group.over_cpu else 1)
        self._process_groups: Final = [group.new_process_group(backend=group.backend) for _ in several]

    def __call__(self, tensors: Sequence[torch.Tensor], owners: Sequence[int]) -> None:
        """Broadcast batch by batch. Collective."""
        under_way: list[tuple[int, list[torch.Tensor], list[torch.Tensor], dist.Work]] = []
        with torch.no_grad(), translating_peer_errors("the handing on of parameters"):
            for (owner, batch), process_group in zip(
                _batches(tensors, owners), itertools.cycle(self._process_groups), strict=False
            ):
                slots = _slots(batch)
                flat = torch.empty(slots.size, dtype=torch.uint8, device=self._device)
                views = slots.views(flat, batch)
                if owner == self._rank:
                    _copy(views, batch)
                work = dist.broadcast(flat, group=process_group, group_src=owner, async_op=True)
                under_way.append((owner, batch, views, work))
                if len(under_way) > 1:
                    self._arrive(*under_way.pop(0))
            for last in under_way:
                self._arrive(*last)

    def close(self) -> None:
        """Do nothing, since nothing is open."""

    def _arrive(self, owner: int, batch: list[torch.Tensor], views: list[torch.Tensor], work: dist.Work) -> None:
        work.wait()
        if owner != self._rank:
            _copy(batch, views)


class SharedMemoryOwnerBroadcast(OwnerBroadcast):
    """Each rank copies its tensors into shared memory, and copies the others' out when all ranks have done so.

    The memory is as large as all tensors together, once for the machine.
    """

    def __init__(self, group: Group) -> None:
        self._rank: Final = group.rank
        self._arena: Final = SharedMemoryArena(group, "the handing on of parameters")
        self._area: mmap.mmap | None = None
        self._in_use = False  # some rank may still read the tensors copied in last

    def __call__(self, tensors: Sequence[torch.Tensor], owners: Sequence[int]) -> None:
        """Copy own tensors into the shared memory, and others' out of it. Collective."""
        slots = _slots(tensors)
        if not slots.size:
            return
        if self._in_use:
            self._arena.wait()
        if self._area is None or len(self._area) < slots.size:
            self._area = self._arena.allocate(slots.size)
        views = slots.views(torch.frombuffer(self._area, dtype=torch.uint8, count=slots.size), tensors)
        own = [place for place, owner in enumerate(owners) if owner == self._rank]
        others = [place for place, owner in enumerate(owners) if owner != self._rank]
        with torch.no_grad():
            _copy([views[i] for i in own], [tensors[i] for i in own])
            self._arena.arrive()
            self._arena.wait()
            _copy([tensors[i] for i in others], [views[i] for i in others])
        self._arena.arrive()
        self._in_use = True

    def close(self) -> None:
        """Close the connections to the other ranks."""
        self._arena.close()


@dataclass(frozen=True, slots=True)
class _Slots:
    """The places of tensors in a block of bytes."""

    offsets: tuple[int, ...]  #: in bytes
    size: int  #: of the block, in bytes

    def views(self, block: torch.Tensor, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The places in ``block`` of ``tensors``, each of its type and shape."""
        return [
            block[offset : offset + t.numel() * t.element_size()].view(t.dtype).view(t.shape)
            for offset, t in zip(self.offsets, tensors, strict=True)
        ]


def _slots(tensors: Sequence[torch.Tensor]) -> _Slots:
    *offsets, size = itertools.accumulate(map(_aligned_bytes, tensors), initial=0)
    return _Slots(tuple(offsets), size)


def _copy(into: list[torch.Tensor], tensors: list[torch.Tensor]) -> None:
    if into:
        foreach_copy_(into, tensors)


def _aligned_bytes(tensor: torch.Tensor) -> int:
    return -(-tensor.numel() * tensor.element_size() // _ALIGN) * _ALIGN


def _batches(tensors: Sequence[torch.Tensor], owners: Sequence[int]) -> Iterator[tuple[int, list[torch.Tensor]]]:
    """Batches of tensors with their owners, which alternate: broadcasts at the same time have different senders.

    A batch has at most `_BATCH_BYTES`, or one tensor.
    """
    held: dict[int, list[torch.Tensor]] = {owner: [] for owner in sorted(owners)}
    for tensor, owner in zip(tensors, owners, strict=True):
        if tensor.numel():
            held[owner].append(tensor)
    for turns in itertools.zip_longest(*(_batched(tensors_of_owner) for tensors_of_owner in held.values())):
        yield from ((owner, batch) for owner, batch in zip(held, turns, strict=True) if batch)


def _batched(tensors: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    batch: list[torch.Tensor] = []
    room = 0
    for tensor in tensors:
        if batch and room + _aligned_bytes(tensor) > _BATCH_BYTES:
            yield batch
            batch, room = [], 0
        batch.append(tensor)
        room += _aligned_bytes(tensor)
    if batch:
        yield batch
