"""Transport of micro-batches from a loader process to its rank, through shared memory that is used repeatedly.

    loader process   | batch 0 | batch 1 | batch 2 |         into a free slot, and a note of each tensor's place
    slots            |    0    |    1    |    0    |
    rank                       | batch 0 | batch 1 |         tensors over the slot; free when the last is deleted

Torch's own transport takes new memory for each tensor, which the kernel has to clear page by page, and hands over a
file descriptor, of which a process may have 1024: 60 us of CPU for an image of 64 x 64, more than half of the time of
decoding it (`benchmarks/data.py`). Torch's transport remains in use for tensors that are not plain, and where shared
memory is scarce. A batch that finds no free slot, as where the script keeps many batches, gets memory of its own: one
descriptor for all its tensors.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import default_collate
from torch.utils.data._utils import worker

from lockstep.data.indexed.sampling import Data, Sample
from lockstep.data.seen_samples import SeenBatch
from lockstep.torch_private import shared_storage, without_worker_info

_ALIGNED: Final = 64  # bytes, as in an allocator: some kernels round differently on unaligned memory
_SPARE: Final = 2  # slots in addition to those of waiting batches: one for the batch in use, one for a copy to a GPU
_PAGE: Final = 4096
_SHARED_MEMORY: Final = "/dev/shm"

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


class _Placed(NamedTuple):
    """The place of a tensor in its slot."""

    offset: int
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]  # row-major; still tells the memory format where a dimension is 1


class _Region:
    """The slots of a loader process, all of one size, after one byte per slot that says whether the slot is in use."""

    def __init__(self, memory: Tensor, slots: int) -> None:
        self.memory = memory
        self._bytes: Bytes = memory.numpy()
        self.slots = slots
        self._head = -(-slots // _PAGE) * _PAGE
        self.slot_bytes = (len(self._bytes) - self._head) // slots

    @classmethod
    def of(cls, slot_bytes: int, slots: int, *, room_for: int = 1) -> _Region:
        """A new region.

        Args:
            slot_bytes: that a batch takes.
            slots: number of slots.
            room_for: number of regions of this size that must fit into shared memory, which other processes need as
                well.

        Raises:
            RuntimeError: if shared memory has no room for these.
        """
        size = -(-slots // _PAGE) * _PAGE + slots * (-(-slot_bytes // _PAGE) * _PAGE)
        if room_for * size > (free := _free_bytes()):
            raise RuntimeError(f"{free} bytes of shared memory are free, and {room_for} times {size} are wanted")
        storage = shared_storage(size)
        memory = torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage)
        memory[:slots] = 0
        return cls(memory, slots)

    def take(self) -> int | None:
        """Take a free slot, and return its number; None if no slot is free."""
        (free,) = np.nonzero(self._bytes[: self.slots] == 0)
        if not len(free):
            return None
        self._bytes[free[0]] = 1
        return int(free[0])

    def slot(self, number: int) -> Bytes:
        """The memory of a slot."""
        start = self._head + number * self.slot_bytes
        return self._bytes[start : start + self.slot_bytes]

    def give_back(self, number: int) -> None:
        """Mark the slot as free."""
        self._bytes[number] = 0


class SlotCollate:
    """A collate function whose batches travel through slots; for a loader that holds ``ready`` batches a process."""

    def __init__(self, collate: Callable[[list[Sample]], Data], ready: int) -> None:
        self.collate = collate
        self._slots = ready + _SPARE
        self._region: _Region | None = None
        self._is_told = False  # whether the rank was told of the region
        self._has_room = True

    def __call__(self, samples: list[Sample]) -> Data:
        """The batch of ``samples``, packed into a slot if possible."""
        if isinstance(samples, SeenBatch):
            return samples
        if self.collate is not default_collate:
            return self._packed(self.collate(samples))
        # `default_collate` takes new shared memory for each tensor if worker info says that this is a loader process.
        with without_worker_info():
            data = self.collate(samples)
        return self._packed(data)

    def __getstate__(self) -> dict[str, object]:
        return self.__dict__ | {"_region": None, "_is_told": False}

    def _packed(self, data: Data) -> Data:
        tensors: dict[int, Tensor] = {}
        _collect(data, tensors)
        ends = np.cumsum([0, *(-(-tensor.nbytes // _ALIGNED) * _ALIGNED for tensor in tensors.values())]).tolist()
        region = self._region_for(ends[-1]) if tensors else None
        if region is None:
            return data
        process: int | None = os.getpid()
        number, memory = region.take(), None
        if number is None:
            try:
                region = _Region.of(ends[-1], 1)
            except RuntimeError:
                return data
            number, process, memory = 0, None, region.memory
        elif not self._is_told:
            memory, self._is_told = region.memory, True
        slot = torch.from_numpy(region.slot(number))
        places = {}
        for (name, tensor), offset in zip(tensors.items(), ends, strict=False):
            slot[offset : offset + tensor.nbytes].view(tensor.dtype).view(tensor.shape).copy_(tensor)
            places[name] = _Placed(offset, tensor.dtype, tensor.shape, tensor.stride())
        return _Packed(process, memory, region.slots, number, _exchanged(data, places))

    def _region_for(self, size: int) -> _Region | None:
        if self._has_room and (self._region is None or self._region.slot_bytes < size):
            room = size if self._region is None else size + size // 4
            try:
                self._region, self._is_told = _Region.of(room, self._slots, room_for=_loader_processes() + 1), False
            except RuntimeError:  # such as in a container with little /dev/shm: torch's way needs less at once
                self._region, self._has_room = None, False
        return self._region


class _Packed:
    """A batch whose tensors lie in a slot; unpickling in the rank gives the batch itself."""

    def __init__(self, process: int | None, memory: Tensor | None, slots: int, number: int, data: Data) -> None:
        self._parts = process, memory, slots, number, data

    def __reduce__(self) -> tuple[Callable[..., Data], tuple[object, ...]]:
        return _unpacked, self._parts


#: In a rank: the newest slots of each of its loader processes, by process id.
_regions: dict[int, _Region] = {}


class _Copies:
    """The number of forks of this process: each forked process may read the batches of that time while it lives."""

    def __init__(self) -> None:
        self.count = 0
        self.are_workers = False  # whether forks make loader processes, which read no batches

    def note(self) -> None:
        """Count a fork, unless it makes a loader process."""
        self.count += not self.are_workers


_copies: Final = _Copies()
os.register_at_fork(before=_copies.note)


def _unpacked(process: int | None, memory: Tensor | None, slots: int, number: int, data: Data) -> Data:
    if memory is None:
        assert process is not None
        region = _regions[process]
    else:
        region = _Region(memory, slots)
        if process is not None:  # else the memory is of this batch alone
            _regions[process] = region
    # A view that only the tensors of the batch refer to, so it is deleted with the last tensor.
    slot = region.slot(number)
    weakref.finalize(slot, _give_back, region, number, os.getpid(), _copies.count).atexit = False
    return _restored(data, slot)


def _give_back(region: _Region, number: int, rank: int, copies: int) -> None:
    # A process that the rank has forked drops copies of batches that the rank still uses, and may keep batches that the
    # rank drops, such as to draw or save them. In both cases the slot is not used again.
    if os.getpid() == rank and copies == _copies.count:
        region.give_back(number)


@contextmanager
def beginning_workers() -> Iterator[None]:
    """A context in which this process forks only loader processes, which do not read its batches."""
    before, _copies.are_workers = _copies.are_workers, True
    try:
        yield
    finally:
        _copies.are_workers = before


def forget(process: int | None) -> None:
    """Forget the slots of the ended loader ``process``, freed as soon as no batch lies in them."""
    if process is not None:
        _regions.pop(process, None)


def forget_all() -> None:
    """Forget all slots, in a loader process, which was forked with a copy of those of other loader processes."""
    _regions.clear()


def _is_plain(tensor: Tensor) -> bool:
    """Whether ``tensor`` is given by its bytes, row-major, its type and shape; other properties would be lost."""
    return (
        type(tensor) is Tensor
        and tensor.layout is torch.strided
        and tensor.device.type == "cpu"
        and not tensor.requires_grad
        and not tensor.is_quantized
        and not tensor.is_nested
        and not tensor.is_conj()
        and not tensor.is_neg()
        and tensor.is_contiguous()
        and tensor.nbytes > 0
    )


def _collect(data: Data, found: dict[int, Tensor]) -> None:
    """Add the tensors in ``data`` that can lie in a slot to ``found``, by their ids."""
    if isinstance(data, Tensor):
        if _is_plain(data):
            found[id(data)] = data
    elif type(data) is dict:
        for part in data.values():
            _collect(part, found)
    elif _is_row(data):
        for part in data:
            _collect(part, found)


def _exchanged(data: Data, places: dict[int, _Placed]) -> Data:
    """``data`` with ``places`` in place of its tensors."""
    return places[id(data)] if id(data) in places else _rebuilt(data, lambda part: _exchanged(part, places))


def _restored(data: Data, slot: Bytes) -> Data:
    """``data`` with tensors over ``slot`` in place of their places."""
    if type(data) is _Placed:
        flat = torch.frombuffer(slot, dtype=data.dtype, count=data.shape.numel(), offset=data.offset)
        return flat.as_strided(data.shape, data.stride)
    return _rebuilt(data, lambda part: _restored(part, slot))


def _rebuilt(data: Data, part_of: Callable[[Data], Data]) -> Data:
    if type(data) is dict:
        return {name: part_of(part) for name, part in data.items()}
    if _is_row(data):
        parts = [part_of(part) for part in data]
        return getattr(type(data), "_make", type(data))(parts)
    return data


def _is_row(data: Data) -> bool:
    if isinstance(data, tuple) and hasattr(data, "_make"):
        return not getattr(data, "__dict__", None)  # attributes other than fields would be lost
    return type(data) in (list, tuple)


def _loader_processes() -> int:
    """The approximate number of loader processes of all ranks on this machine."""
    info = worker.get_worker_info()
    return (1 if info is None else info.num_workers) * int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def _free_bytes() -> float:
    """The free bytes of shared memory; infinite if the system does not say."""
    try:
        found = os.statvfs(_SHARED_MEMORY)
    except OSError:
        return float("inf")
    return found.f_bavail * found.f_frsize
