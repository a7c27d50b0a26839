"""Exchange and gather of parts of flat tensors, in memory that the ranks of one machine share.

    exchange    each rank writes its values into its slot    | rank 0: a0 a1 | rank 1: b0 b1 |
    ---------   all have written
                each rank works on its part of each     rank 0: a0 b0       rank 1: a1 b1

    gather      each rank writes its part in its place     | rank 0 | rank 1 |
    ---------   all have written: every rank may copy the whole out

A dashed line is the only barrier: areas take turns, and an area is written again once all ranks have shown, by coming
to a later barrier, that they are done with it.
"""

from __future__ import annotations

import mmap
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
import torch.distributed as dist

from lockstep.collectives.group import Group
from lockstep.collectives.shared_memory import SharedMemoryArena
from lockstep.errors import MismatchError

_WORDS: Final = 4  # that each rank writes about a gather
_WORD: Final = 8  # bytes
_MOST_REUSED: Final = 62  # areas with a bit in a word; further areas are not written again


class SharedMemoryExchange:
    """A `PartExchange` without a copy: other ranks read the values that a rank writes into its slot."""

    def __init__(self, group: Group) -> None:
        self._rank, self._size = group.rank, group.size
        self._arena: Final = SharedMemoryArena(group, "the reduction of gradients")
        self._areas: Final[list[mmap.mmap | None]] = [None, None]
        self._number = 0  # of the next exchange

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """This rank's slot of the next area, for one value per rank. Collective if the area grows."""
        return self._slots(1, numel, dtype)[self._rank, 0]

    def __call__(
        self, values: Sequence[torch.Tensor], counts: Sequence[int], like: torch.Tensor
    ) -> Sequence[torch.Tensor]:
        """Copy in values that are not in the slot yet, wait for the other ranks, and return this rank's parts."""
        part = like.numel() // self._size
        slots = self._slots(max(counts), like.numel(), like.dtype)
        for slot, value in zip(slots[self._rank], values, strict=False):
            if slot.data_ptr() != value.data_ptr():
                slot.copy_(value)
        self._number += 1
        self._arena.arrive()
        self._arena.wait()
        mine = slice(self._rank * part, (self._rank + 1) * part)
        return [slots[rank, place, mine] for rank, count in enumerate(counts) for place in range(count)]

    def close(self) -> None:
        """Close the connections."""
        self._arena.close()

    def _slots(self, values: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """The next area, of shape (ranks, values, elements)."""
        turn, count = self._number % 2, self._size * values * numel
        area = self._areas[turn]
        if area is None or len(area) < count * dtype.itemsize:
            area = self._areas[turn] = self._arena.allocate(count * dtype.itemsize)
        return torch.frombuffer(area, dtype=dtype, count=count).view(self._size, values, numel)


@dataclass(slots=True)
class _Area:
    """Memory for a whole tensor."""

    memory: mmap.mmap
    tensor: weakref.ref[torch.Tensor] | None = None  #: the tensor handed out; dead once this rank is done with it
    is_free: bool = True  #: whether every rank was done with the area before the newest gather


class SharedMemoryGather:
    """Gathers parts of one length from all ranks, in the protocol of torch's ``FSDPModule.set_custom_all_gather``.

    Ranks gather the same tensors in the same order, which is compared in each gather. The time at which a rank releases
    a tensor depends on Python and autograd, and differs between ranks. So each rank tells in a gather which areas it is
    done with, and later gathers reuse the areas with which all ranks are done.
    """

    def __init__(self, group: Group) -> None:
        self._rank, self._size = group.rank, group.size
        self._arena: Final = SharedMemoryArena(group, "the gathering of parameters")
        # The words of ranks about a gather; two rows per rank, since the next gather may begin before all have read the
        # words.
        self._said: Final = memoryview(self._arena.allocate(2 * self._size * _WORDS * _WORD)).cast("q")
        self._areas: Final[list[_Area]] = []
        self._number = 0  # of the next gather
        self._next = 0  # the area of the next gather

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Allocate a whole tensor, into which this rank copies its part. Collective if no area is free."""
        count = int(size[0])
        needed = count * dtype.itemsize
        free = [i for i, area in enumerate(self._areas) if area.is_free]
        if not free:
            self._areas.append(_Area(self._arena.allocate(needed)))
        self._next = free[0] if free else len(self._areas) - 1
        area = self._areas[self._next]
        if len(area.memory) < needed:
            area.memory = self._arena.allocate(needed)
        whole = torch.frombuffer(area.memory, dtype=dtype, count=count)
        area.tensor, area.is_free = weakref.ref(whole), False
        return whole

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> None:
        """Wait until each rank's part is in ``output_tensor``. Collective.

        Raises:
            MismatchError: if ranks gather different tensors.
        """
        reused = enumerate(self._areas[:_MOST_REUSED])
        free = sum(1 << i for i, area in reused if _is_dead(area) and i != self._next)
        row = self._number % 2 * self._size
        words = (self._number, self._next, output_tensor.numel(), free)
        for place, word in enumerate(words, (row + self._rank) * _WORDS):
            self._said[place] = word
        self._number += 1
        self._arena.arrive()
        self._arena.wait()
        for rank in range(self._size):
            said = tuple(self._said[(row + rank) * _WORDS : (row + rank + 1) * _WORDS])
            if said[:-1] != words[:-1]:
                raise MismatchError(
                    f"rank {rank} gathers {said[2]} numbers in gather {said[0]}, and rank {self._rank} {words[2]} in "
                    f"gather {words[0]}: forward() must call the same blocks in the same order on all ranks; where "
                    "that depends on the data, say run.model(model, find_unused_parameters=True), which gathers the "
                    "whole model at once"
                )
            free &= said[-1]
        for i, area in enumerate(self._areas):
            area.is_free = bool(free >> i & 1)

    def close(self) -> None:
        """Close the connections."""
        self._arena.close()


def _is_dead(area: _Area) -> bool:
    return area.tensor is None or area.tensor() is None
