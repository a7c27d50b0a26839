"""Files in the host's memory with a rank's part of the state, rewritten after every step.

    slot 0    header: step 41 | plain values and a list of tensors, as JSON | bytes of the tensors    newest whole one
    slot 1    header: none    | ...                                         | ...                     writes step 42

A slot is whole once its header has a step, which is written last: a process that is killed meanwhile leaves the other
slot whole. Tensors that the next forward pass may change are copied at once, other large tensors by a thread, while the
ranks compute.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import struct
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

from lockstep.checkpoint.json_state import Tree, decode, encode
from lockstep.checkpoint.layout import Box, coverage_error
from lockstep.checkpoint.manifest import ITEM_BYTES, check_shape
from lockstep.checkpoint.tensors import TensorEntry, copy_to_host, lock_pages
from lockstep.checkpoint.whole_save import FlatTree
from lockstep.collectives import TensorShard
from lockstep.errors import CheckpointError
from lockstep.records import of_kind, open_regular, value_in
from lockstep.torch_private import version_of

_HEADER: Final = struct.Struct("<qqqI")  # step, room for the text, bytes of the text, CRC-32 of these
_STEP: Final = struct.Struct("<q")
#: The text of a slot: its description, the tree, and the type, shape and box of each tensor.
_TEXT: Final = tuple[Any, Any, list[tuple[str, tuple[int, ...], tuple[int, ...] | None, tuple[int, ...]]]]
_NONE: Final = -1  # the step of a slot that is not whole
_ALIGNED: Final = 64
#: Copying less takes no more time than a thread's start.
_SMALL_BYTES: Final = 64 << 10


@dataclass(frozen=True, slots=True)
class PartHead:
    """The description of a whole slot, without its state."""

    path: str
    step: int
    about: Mapping[str, Any]  #: the description given to `PartWriter.begin`


class PartWriter:
    """Writes a rank's parts into two slots in turn. Its methods are called from one thread.

    Args:
        directory: of the slots; made if missing, and must be this rank's own.
        whole: called with the step and the bytes of each slot that has become whole, for `PartCopies.take`, on the
            thread that completes the slot; the bytes must be released before the slot is written again, or closed.

    Raises:
        OSError: if the directory cannot be made.
    """

    def __init__(self, directory: Path, whole: Callable[[int, memoryview], None] | None = None) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._slots: Final = _slots_in(directory)
        self._newest = 1
        self._whole: Final = whole
        self._thread: Final = ThreadPoolExecutor(1, thread_name_prefix="lockstep-mirror")
        self._copying: Future[None] | None = None

    def begin(
        self, step: int, about: Mapping[str, object], part: FlatTree, *, at_once: Iterable[torch.Tensor] = ()
    ) -> None:
        """Begin to write ``part``, this rank's part of the state after ``step``.

        Tensors of more than 64 KiB must not change until `finish`, except those in ``at_once``; if a tensor changes
        meanwhile, this slot stays empty.

        Args:
            step: steps done.
            about: plain values that `read_part_head` gives.
            part: of a tree whose tensors may be `TensorShard`, of which this rank holds a box or no element.
            at_once: tensors that are copied before `begin` returns, such as running statistics, whose kernels do not
                raise the version counter.

        Raises:
            CheckpointError: for a value in ``about`` that cannot be saved.
            OSError: if the memory has no room.
        """
        self.finish()
        described = [[str(e.dtype).removeprefix("torch."), *_box(e)] for e in part.entries]
        text = json.dumps([encode(dict(about), lambda _value, _path: None), part.encoded, described]).encode()
        slot = self._slots[1 - self._newest]
        places = slot.prepare(text, part.tensors)
        now, large = _Copies(), _Copies()
        hurried = {tensor.data_ptr() for tensor in at_once}
        for tensor, place in zip(part.tensors, places, strict=True):
            is_small = place.numel() * place.element_size() <= _SMALL_BYTES
            (now if is_small or tensor.data_ptr() in hurried else large).add(place, tensor)
        now.make()
        if large.sources:
            self._copying = self._thread.submit(self._complete, step, slot, large, large.versions())
        else:
            self._commit(step, slot)

    def finish(self) -> None:
        """Wait for the copies of the last part, which is then whole and outlives the process."""
        copying, self._copying = self._copying, None
        if copying is not None:
            copying.result()

    def _complete(self, step: int, slot: _Slot, copies: _Copies, versions: Sequence[int]) -> None:
        copies.make()
        if copies.versions() == versions:
            self._commit(step, slot)

    def _commit(self, step: int, slot: _Slot) -> None:
        slot.commit(step)
        self._newest = 1 - self._newest
        if self._whole is not None:
            self._whole(step, slot.content())

    def close(self) -> None:
        """`finish`, and end the thread; the files stay."""
        self.finish()
        self._thread.shutdown()
        for slot in self._slots:
            slot.close()


class PartCopies:
    """Two slots with copies of another rank's slots, on another host. Used by one thread.

    Args:
        directory: of the slots; made if missing, and must be for this other rank alone.
    """

    def __init__(self, directory: Path) -> None:
        self._directory: Final = directory
        self._slots: list[_Slot] = []
        self._newest = 1

    def take(self, step: int, length: int, fill: Callable[[memoryview], None]) -> None:
        """Keep the bytes of a slot that was whole after ``step``, in the older of the two slots.

        Args:
            step: steps done.
            length: number of bytes.
            fill: is called with memory of this length; if it raises, this slot stays empty.

        Raises:
            OSError: if memory has no room.
        """
        if not self._slots:
            self._directory.mkdir(parents=True, exist_ok=True)
            self._slots = _slots_in(self._directory)
        slot = self._slots[1 - self._newest]
        with slot.room_for(length) as content:
            fill(content)
        slot.commit(step)
        self._newest = 1 - self._newest

    def close(self) -> None:
        """Close the slots; the files stay."""
        for slot in self._slots:
            slot.close()


def _slots_in(directory: Path) -> list[_Slot]:
    return [_Slot(directory / f"slot-{number}") for number in range(2)]


class _Copies:
    """Tensors and the places that they are copied to."""

    def __init__(self) -> None:
        self._places: Final[list[torch.Tensor]] = []
        self.sources: Final[list[torch.Tensor]] = []

    def add(self, place: torch.Tensor, source: torch.Tensor) -> None:
        if source.numel():
            self._places.append(place)
            self.sources.append(source)

    def make(self) -> None:
        copy_to_host(self._places, self.sources)

    def versions(self) -> list[int]:
        """The version counter of each source; 0 for a tensor without one."""
        return [0 if source.is_inference() else version_of(source) for source in self.sources]


class _Slot:
    """One file, mapped into memory."""

    def __init__(self, path: Path) -> None:
        self._path: Final = path
        self._memory: mmap.mmap | None = None
        self._length = 0
        self._used = 0  # bytes of the memory in use
        self._text = 0  # bytes for the text, with room to grow
        self._pages: torch.Tensor | None = None  # the memory, where GPUs copy to it
        self._shapes: list[tuple[torch.dtype, torch.Size]] = []  # of the tensors in `_places`
        self._places: list[torch.Tensor] = []

    def prepare(self, text: bytes, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Write ``text``, and return the places of ``tensors``; the slot is empty until `commit`."""
        shapes = [(tensor.dtype, tensor.shape) for tensor in tensors]
        if len(text) > self._text or shapes != self._shapes:
            self._lay_out(len(text), shapes)
        assert self._memory is not None
        if self._pages is None and any(tensor.is_cuda for tensor in tensors):
            self._pages = torch.frombuffer(self._memory, dtype=torch.uint8)
            lock_pages(self._pages)
        _STEP.pack_into(self._memory, 0, _NONE)
        self._memory[_HEADER.size : _HEADER.size + len(text)] = text
        _HEADER.pack_into(self._memory, 0, _NONE, self._text, len(text), zlib.crc32(text))
        return self._places

    def commit(self, step: int) -> None:
        """Mark the slot as whole, with the state after ``step``."""
        assert self._memory is not None
        _STEP.pack_into(self._memory, 0, step)

    def content(self) -> memoryview:
        """All bytes but the step, which marks the slot as whole."""
        assert self._memory is not None
        return memoryview(self._memory)[_STEP.size : self._used]

    def room_for(self, length: int) -> memoryview:
        """Room for ``length`` bytes of another slot's `content`; this slot is empty until `commit`."""
        memory = self._allocate(_STEP.size + length)
        _STEP.pack_into(memory, 0, _NONE)
        return memoryview(memory)[_STEP.size : self._used]

    def close(self) -> None:
        """Drop the memory; the file stays, and tensors in the memory keep it mapped until the last is deleted."""
        # `mmap.close` would unmap under tensors that are still held: `torch.frombuffer` does not prevent that.
        self._places, self._shapes, self._pages, self._memory = [], [], None, None

    def _lay_out(self, text: int, shapes: list[tuple[torch.dtype, torch.Size]]) -> None:
        self._text = _up(2 * text)
        offsets, length = _offsets(_HEADER.size + self._text, shapes)
        memory = self._allocate(length)
        self._shapes = shapes
        self._places = [_view(memory, o, d, s) for o, (d, s) in zip(offsets, shapes, strict=True)]

    def _allocate(self, length: int) -> mmap.mmap:
        """The memory, of at least ``length`` bytes; if it had less before, its content is lost."""
        if self._memory is None or length > self._length:
            self.close()
            file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                # Not a sparse file: if memory is full later, the first write into a hole ends in SIGBUS.
                os.posix_fallocate(file, 0, length)
                self._memory = mmap.mmap(file, length)
            finally:
                os.close(file)
            self._length = length
        self._used = length
        return self._memory


def _view(memory: mmap.mmap | memoryview, offset: int, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
    count = math.prod(shape)
    flat = (
        torch.frombuffer(memory, dtype=dtype, count=count, offset=offset)
        if count
        else torch.empty(0, dtype=dtype, device="cpu")
    )
    return flat.reshape(tuple(shape))


def _offsets(start: int, shapes: Sequence[tuple[torch.dtype, Sequence[int]]]) -> tuple[list[int], int]:
    """The offset of each tensor, and the end of the last tensor."""
    offsets, at = [], start
    for dtype, shape in shapes:
        at = _up(at)
        offsets.append(at)
        at += math.prod(shape) * dtype.itemsize
    return offsets, at


def _up(length: int) -> int:
    return -(-length // _ALIGNED) * _ALIGNED


def _box(entry: TensorEntry) -> tuple[Sequence[int], Sequence[int] | None, Sequence[int]]:
    """The shape of the whole tensor; the start of the box, None if not divided; the shape of this rank's box."""
    here = (0,) if entry.box is None else entry.box.shape
    start = None if not entry.divided else () if entry.box is None else entry.box.start
    return entry.shape, start, here


# ---- reading ---------------------------------------------------------------------------------------------------------


def read_part_head(path: Path) -> PartHead | None:
    """The description in the slot at ``path``; None if the slot is not whole.

    Raises:
        OSError: if the slot cannot be read.
    """
    with open_regular(path) as file:
        header = file.read(_HEADER.size)
        step, _, length, crc32 = _HEADER.unpack(header) if len(header) == _HEADER.size else (_NONE, 0, 0, 0)
        is_whole = step != _NONE and 0 < length <= os.fstat(file.fileno()).st_size
        text = file.read(length) if is_whole else b""
    if not text or zlib.crc32(text) != crc32:
        return None
    try:
        about, _, _ = of_kind(_TEXT, value_in(text))
        return PartHead(str(path), step, of_kind(dict[str, Any], decode(about, ())))
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError):
        return None


def load_part(content: mmap.mmap | memoryview) -> Tree:
    """The tree in the bytes of a whole slot; its tensors lie in ``content``, divided ones as `TensorShard`.

    Raises:
        CheckpointError: if the bytes are not those of a `PartWriter`.
    """
    try:
        _, room, length, _ = _HEADER.unpack_from(content, 0)
        _, encoded, described = of_kind(_TEXT, value_in(bytes(content[_HEADER.size : _HEADER.size + length])))
        for dtype, shape, _, here in described:
            for one in (shape, here):
                check_shape("a tensor of the slot", one, ITEM_BYTES[dtype])
        kinds = [(getattr(torch, dtype), here) for dtype, _, _, here in described]
        offsets, _ = _offsets(_HEADER.size + room, kinds)
        tensors = [_view(content, offset, *kind) for offset, kind in zip(offsets, kinds, strict=True)]
        leaves = [_leaf(tensor, one) for tensor, one in zip(tensors, described, strict=True)]
        return decode(encoded, leaves)
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError, struct.error) as error:
        raise CheckpointError(f"a part of a state that a rank has left is not understood: {error}") from error


def _leaf(tensor: torch.Tensor, described: Sequence[Any]) -> torch.Tensor | TensorShard:
    _, shape, start, here = described
    if start is None:
        return tensor
    box = Box(tuple(start), tuple(here)) if len(start) == len(shape) else None
    return TensorEntry("", tensor.dtype, tuple(shape), box, divided=True).leaf(tensor)


def merge_parts(parts: Sequence[Tree]) -> Tree:
    """The whole tree, from the parts of all ranks, with whole tensors in memory of their own.

    Dicts hold the keys of all parts; a value that several parts hold is taken from the first.

    Raises:
        CheckpointError: if the parts together lack elements of a tensor.
    """
    first = parts[0]
    if isinstance(first, dict):
        keys = dict.fromkeys(key for part in parts for key in part)
        ordered = sorted(keys) if all(isinstance(key, int) for key in keys) else keys
        kind: Any = type(first)
        return kind({key: merge_parts([part[key] for part in parts if key in part]) for key in ordered})
    if isinstance(first, list | tuple):
        return type(first)(merge_parts(items) for items in zip(*parts, strict=True))
    if isinstance(first, TensorShard):
        return _assembled([part for part in parts if isinstance(part, TensorShard)])
    return first.clone() if isinstance(first, torch.Tensor) else first


def _assembled(shards: Sequence[TensorShard]) -> torch.Tensor:
    shape = shards[0].shape
    whole = torch.empty(shape, dtype=shards[0].dtype, device="cpu")
    boxes = {}
    for shard in shards:
        if shard.tensor is not None:
            boxes[shard.start] = Box(shard.start, tuple(shard.tensor.shape))
            whole[tuple(slice(a, b) for a, b in zip(shard.start, boxes[shard.start].end, strict=True))] = shard.tensor
    if fault := coverage_error([(f"the box at {start}", box) for start, box in boxes.items()], tuple(shape)):
        raise CheckpointError(f"the parts of a tensor of shape {tuple(shape)} do not make it whole: {fault}")
    return whole
