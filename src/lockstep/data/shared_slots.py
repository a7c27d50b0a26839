"""How micro-batches come from a loader process to its rank: through shared memory that is used again and again.

    loader process   | batch 0 | batch 1 | batch 2 |         into a free slot, and a note of what lies where
    slots            |    0    |    1    |    0    |
    rank                       | batch 0 | batch 1 |         tensors over the slot; free when the last of them is gone

Torch's own way takes new memory for each tensor, which the kernel has to clear page by page, and hands over a file
descriptor, of which a process may have 1024: 60 us of CPU for an image of 64 x 64, more than half of what decoding it
takes (`benchmarks/data.py`). It remains for tensors that are not plain, and where shared memory is scarce. A batch that
finds no free slot, as the script keeps many, gets memory of its own: one descriptor for all its tensors.
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

_ALIGNED: Final = 64  # as an allocator would: some kernels round differently on memory that is not
_SPARE: Final = 2  # slots beside those of batches that wait: one that is computed with, and one on its way to a GPU
_PAGE: Final = 4096
_SHARED_MEMORY: Final = "/dev/shm"

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


class _Placed(NamedTuple):
    """Where a tensor lies in its slot."""

    offset: int
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]  # row-major; it still says the memory format where a dimension is 1


class _Region:
    """The slots of one loader process, all of one size, after a byte for each that says whether it is in use."""

    def __init__(self, memory: Tensor, slots: int) -> None:
        self.memory = memory
        self._bytes: Bytes = memory.numpy()
        self.slots = slots
        self._head = -(-slots // _PAGE) * _PAGE
        self.slot_bytes = (len(self._bytes) - self._head) // slots

    @classmethod
    def of(cls, slot_bytes: int, slots: int, *, room_for: int = 1) -> _Region:
        """A new one.

        Args:
            slot_bytes: that a batch takes.
            slots: how many.
            room_for: so many of its size must fit into shared memory, which other processes need as well.

        Raises:
            RuntimeError: if there is no room for it in shared memory.
        """
        size = -(-slots // _PAGE) * _PAGE + slots * (-(-slot_bytes // _PAGE) * _PAGE)
        if room_for * size > (free := _free_bytes()):
            raise RuntimeError(f"{free} bytes of shared memory are free, and {room_for} times {size} are wanted")
        storage = shared_storage(size)
        memory = torch.empty(0, dtype=torch.uint8).set_(storage)
        memory[:slots] = 0
        return cls(memory, slots)

    def take(self) -> int | None:
        """A slot that was free; None if there is none."""
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
        """The slot is free."""
        self._bytes[number] = 0


class SlotCollate:
    """A collate function whose batches travel through slots; for a loader that holds ``ready`` batches a process."""

    def __init__(self, collate: Callable[[list[Sample]], Data], ready: int) -> None:
        self.collate = collate
        self._slots = ready + _SPARE
        self._region: _Region | None = None
        self._is_told = False  # whether the rank has the region
        self._has_room = True

    def __call__(self, samples: list[Sample]) -> Data:
        """The batch, which is packed where that can be done."""
        if isinstance(samples, SeenBatch):
            return samples
        if self.collate is not default_collate:
            return self._packed(self.collate(samples))
        # In a loader process it takes new shared memory for each tensor, and tells one by this.
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
    """A batch whose tensors lie in a slot; on the other side of a queue it is the batch."""

    def __init__(self, process: int | None, memory: Tensor | None, slots: int, number: int, data: Data) -> None:
        self._parts = process, memory, slots, number, data

    def __reduce__(self) -> tuple[Callable[..., Data], tuple[object, ...]]:
        return _unpacked, self._parts


#: In a rank: the slots of each of its loader processes, by process id; those that it was told of last.
_regions: dict[int, _Region] = {}


class _Copies:
    """How many copies of this process were made by a fork: each may look at the batches of then while it lives."""

    def __init__(self) -> None:
        self.count = 0
        self.are_workers = False  # such do not

    def note(self) -> None:
        """One is being made."""
        self.count += not self.are_workers


_copies: Final = _Copies()
os.register_at_fork(before=_copies.note)


def _unpacked(process: int | None, memory: Tensor | None, slots: int, number: int, data: Data) -> Data:
    if memory is None:
        assert process is not None
        region = _regions[process]
    else:
        region = _Region(memory, slots)
        if process is not None:  # else it is the memory of this batch alone
            _regions[process] = region
    # A view that all tensors of the batch hold, and nothing else: it ends with the last of them.
    slot = region.slot(number)
    weakref.finalize(slot, _give_back, region, number, os.getpid(), _copies.count).atexit = False
    return _restored(data, slot)


def _give_back(region: _Region, number: int, rank: int, copies: int) -> None:
    # A process that the rank has forked drops copies of its batches, which are in use all the same. And it may keep
    # what the rank drops, such as to draw or to save it: then the slot is not used again.
    if os.getpid() == rank and copies == _copies.count:
        region.give_back(number)


@contextmanager
def beginning_workers() -> Iterator[None]:
    """Within, this process forks loader processes only, which do not look at its batches."""
    before, _copies.are_workers = _copies.are_workers, True
    try:
        yield
    finally:
        _copies.are_workers = before


def forget(process: int | None) -> None:
    """The loader ``process`` has ended: its memory is free as soon as no batch lies there."""
    if process is not None:
        _regions.pop(process, None)


def forget_all() -> None:
    """In a loader process: those of other ones, of which it was born with a copy."""
    _regions.clear()


def _is_plain(tensor: Tensor) -> bool:
    """Whether its bytes are all there is to know, and row-major; another memory format would be lost."""
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
    """The tensors in ``data`` that can lie in a slot, by their identity."""
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
    """``data`` with these in place of its tensors."""
    return places[id(data)] if id(data) in places else _rebuilt(data, lambda part: _exchanged(part, places))


def _restored(data: Data, slot: Bytes) -> Data:
    """``data`` with its tensors, over ``slot``."""
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
        return not getattr(data, "__dict__", None)  # attributes beside its fields would be lost
    return type(data) in (list, tuple)


def _loader_processes() -> int:
    """About how many there are on this machine, of all ranks alike."""
    info = worker.get_worker_info()
    return (1 if info is None else info.num_workers) * int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def _free_bytes() -> float:
    """Of shared memory; without end where the system does not say."""
    try:
        found = os.statvfs(_SHARED_MEMORY)
    except OSError:
        return float("inf")
    return found.f_bavail * found.f_frsize
