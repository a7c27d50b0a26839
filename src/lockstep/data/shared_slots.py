"""How micro-batches come from a loader process to its rank: through shared memory that is used again and again.

    loader process   | batch 0 | batch 1 | batch 2 |         into a free slot, and a note of what lies where
    slots            |    0    |    1    |    0    |
    rank                       | batch 0 | batch 1 |         tensors over the slot; free when the last of them is gone

Torch's own way takes new memory for each tensor, which the kernel has to clear page by page, and hands over a file
descriptor: 60 us of CPU for an image of 64 x 64, more than half of what decoding it takes (`benchmarks/data.py`). It
remains for what fits no slot: when a script keeps more batches than there are slots, and for tensors that are not
plain.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import default_collate
from torch.utils.data._utils import worker

from lockstep.data.sampling import Data, Sample

_ALIGNED: Final = 64  # as an allocator would: some kernels round differently on memory that is not
_SPARE: Final = 2  # slots beside those of batches that wait: one that is computed with, and one on its way to a GPU
_PAGE: Final = 4096

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


class _Placed(NamedTuple):
    """Where a tensor lies in its slot."""

    offset: int
    dtype: torch.dtype
    shape: torch.Size


class _Region:
    """The slots of one loader process, all of one size, after a byte for each that says whether it is in use."""

    def __init__(self, memory: Tensor, slots: int) -> None:
        self.memory = memory
        self._bytes: Bytes = memory.numpy()
        self._slots = slots
        self._head = -(-slots // _PAGE) * _PAGE
        self.slot_bytes = (len(self._bytes) - self._head) // slots

    @classmethod
    def of(cls, slot_bytes: int, slots: int) -> _Region:
        """A new one.

        Raises:
            RuntimeError: if there is no room for it in shared memory.
        """
        size = -(-slots // _PAGE) * _PAGE + slots * (-(-slot_bytes // _PAGE) * _PAGE)
        storage = torch.UntypedStorage._new_shared(size)
        memory = torch.empty(0, dtype=torch.uint8).set_(storage)
        memory[:slots] = 0
        return cls(memory, slots)

    def take(self) -> int | None:
        """A slot that was free; None if there is none."""
        (free,) = np.nonzero(self._bytes[: self._slots] == 0)
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
        if self.collate is not default_collate:
            return self._packed(self.collate(samples))
        # In a loader process it takes new shared memory for each tensor, and tells one by this.
        info, worker._worker_info = worker._worker_info, None
        try:
            return self._packed(self.collate(samples))
        finally:
            worker._worker_info = info

    def __getstate__(self) -> dict[str, object]:
        return self.__dict__ | {"_region": None, "_is_told": False}

    def _packed(self, data: Data) -> Data:
        tensors: dict[int, Tensor] = {}
        _collect(data, tensors)
        ends = np.cumsum([0, *(-(-tensor.nbytes // _ALIGNED) * _ALIGNED for tensor in tensors.values())]).tolist()
        region = self._region_for(ends[-1]) if tensors else None
        number = None if region is None else region.take()
        if region is None or number is None:
            return data
        slot = torch.from_numpy(region.slot(number))
        places = {}
        for (name, tensor), offset in zip(tensors.items(), ends, strict=False):
            slot[offset : offset + tensor.nbytes].view(tensor.dtype).view(tensor.shape).copy_(tensor)
            places[name] = _Placed(offset, tensor.dtype, tensor.shape)
        memory = None if self._is_told else region.memory
        self._is_told = True
        return _Packed(os.getpid(), memory, self._slots, number, _exchanged(data, places))

    def _region_for(self, size: int) -> _Region | None:
        if self._has_room and (self._region is None or self._region.slot_bytes < size):
            room = size if self._region is None else size + size // 4
            try:
                self._region, self._is_told = _Region.of(room, self._slots), False
            except RuntimeError:  # such as in a container with little /dev/shm: torch's way needs less at once
                self._region, self._has_room = None, False
        return self._region


class _Packed:
    """A batch whose tensors lie in a slot; on the other side of a queue it is the batch."""

    def __init__(self, process: int, memory: Tensor | None, slots: int, number: int, data: Data) -> None:
        self._parts = process, memory, slots, number, data

    def __reduce__(self) -> tuple[Callable[..., Data], tuple[object, ...]]:
        return _unpacked, self._parts


#: In a rank: the slots of each of its loader processes, by process id; those that it was told of last.
_regions: dict[int, _Region] = {}


def _unpacked(process: int, memory: Tensor | None, slots: int, number: int, data: Data) -> Data:
    if memory is not None:
        _regions[process] = _Region(memory, slots)
    region = _regions[process]
    # A view that all tensors of the batch hold, and nothing else: it ends with the last of them.
    slot = region.slot(number)
    weakref.finalize(slot, _give_back, region, number, os.getpid()).atexit = False
    return _restored(data, slot)


def _give_back(region: _Region, number: int, rank: int) -> None:
    # A process that the rank has forked drops copies of its batches, which are in use all the same.
    if os.getpid() == rank:
        region.give_back(number)


def forget(process: int | None) -> None:
    """The loader ``process`` has ended: its memory is given back as soon as no batch lies there."""
    if process is not None:
        _regions.pop(process, None)


def forget_all() -> None:
    """In a loader process: forget the slots of other ones, which it inherited when it was forked."""
    _regions.clear()


def _is_plain(tensor: Tensor) -> bool:
    """Whether its bytes are all there is to know, and row-major; another memory format would be lost."""
    return (
        type(tensor) is Tensor
        and tensor.layout is torch.strided
        and tensor.device.type == "cpu"
        and not tensor.requires_grad
        and not tensor.is_quantized
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
        return flat.view(data.shape)
    return _rebuilt(data, lambda part: _restored(part, slot))


def _rebuilt(data: Data, part_of: Callable[[Data], Data]) -> Data:
    if type(data) is dict:
        return {name: part_of(part) for name, part in data.items()}
    if _is_row(data):
        parts = [part_of(part) for part in data]
        return getattr(type(data), "_make", type(data))(parts)
    return data


def _is_row(data: Data) -> bool:
    return type(data) in (list, tuple) or (isinstance(data, tuple) and hasattr(data, "_make"))
