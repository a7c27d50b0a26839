"""Conversion of tensors to bytes and back; host memory to which GPUs copy without a wait for each tensor."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from lockstep.checkpoint.filesystem import LOCAL
from lockstep.checkpoint.json_state import Tree, decode, encode
from lockstep.checkpoint.layout import Box, Extent, File
from lockstep.checkpoint.manifest import Manifest, Piece, TensorRecord
from lockstep.checkpoint.reader import CheckpointReader
from lockstep.checkpoint.safetensors_file import FileTensor
from lockstep.collectives import StoredTensor, TensorShard, in_memory
from lockstep.errors import CheckpointError, DamagedCheckpoint, UnreadableCheckpoint
from lockstep.small_files import replacement
from lockstep.torch_private import foreach_copy_

Tensors = dict[str, torch.Tensor]
"""Tensors by their names in a model's ``state_dict()``."""


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A tensor's path in the tree, its type and shape, and the box that this rank holds."""

    path: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    box: Box | None  #: None: this rank holds no element
    divided: bool  #: whether the tensor is divided among ranks; else each rank holds the whole tensor

    @property
    def whole(self) -> Extent:
        """The size of the whole tensor, for the layout."""
        return Extent(math.prod(self.shape) * self.dtype.itemsize, self.dtype.itemsize)

    @property
    def here(self) -> Extent:
        """The size of this rank's box, for the layout."""
        elements = 0 if self.box is None else self.box.elements
        return Extent(elements * self.dtype.itemsize, self.dtype.itemsize)

    @property
    def in_file(self) -> FileTensor:
        """The entry of the box in its file."""
        whole = self.box is None or self.box.shape == self.shape
        ranges = () if self.box is None else zip(self.box.start, self.box.end, strict=True)
        name = self.path if whole else f"{self.path}[{','.join(f'{first}:{end}' for first, end in ranges)}]"
        return FileTensor(name, _name_of(self.dtype), () if self.box is None else self.box.shape, self.here.length)

    def leaf(self, tensor: torch.Tensor) -> torch.Tensor | TensorShard:
        """The leaf of the tree in this place, if ``tensor`` is this rank's box."""
        if not self.divided:
            return tensor
        if self.box is None:
            return TensorShard.absent(self.shape, self.dtype)
        return TensorShard(tensor, self.box.start, self.shape, self.dtype)

    def stored(self, pieces: Iterable[Piece]) -> TensorRecord:
        """The tensor's entry in a manifest."""
        return TensorRecord(self.path, _name_of(self.dtype), self.shape, tuple(pieces))


def flatten(tree: Tree) -> tuple[object, tuple[TensorEntry, ...], tuple[torch.Tensor, ...]]:
    """The tree in JSON with numbers in place of its tensors; the tensors' entries; and this rank's boxes.

    Raises:
        CheckpointError: for a value that cannot be saved, naming its path.
    """
    found: list[TensorEntry] = []
    tensors: list[torch.Tensor] = []

    def take(value: object, path: str) -> int | None:
        part = TensorShard.whole(value) if isinstance(value, torch.Tensor) else value
        if not isinstance(part, TensorShard):
            return None
        found.append(TensorEntry(path, part.dtype, tuple(part.shape), _box_of(part, path), divided=part is value))
        tensors.append(torch.empty(0, dtype=part.dtype, device="cpu") if part.tensor is None else part.tensor.detach())
        return len(found) - 1

    return encode(tree, take), tuple(found), tuple(tensors)


def _box_of(part: TensorShard, path: str) -> Box | None:
    """The box that this rank holds, after a check that it can be written."""
    if part.tensor is None:
        return None
    _check_dense(part.tensor, path)
    if part.tensor.dtype != part.dtype or not part.tensor.dim() == len(part.start) == len(part.shape):
        raise CheckpointError(
            f"state at {path!r}: a part of type {part.tensor.dtype} and shape {tuple(part.tensor.shape)} that begins "
            f"at {tuple(part.start)} cannot belong to a tensor of type {part.dtype} and shape {tuple(part.shape)}"
        )
    return Box(tuple(part.start), tuple(part.tensor.shape))


def _check_dense(value: torch.Tensor, path: str) -> None:
    plain = type(value) in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
    if not plain or value.layout is not torch.strided or value.is_quantized or value.is_meta:
        kind = type(value).__name__ if not plain else f"{value.layout} tensor on {value.device}"
        raise CheckpointError(
            f"state at {path!r} is a {kind}, of which this rank may hold a part only: save the whole dense tensor "
            "(full_tensor() of a DTensor, to_dense() of a sparse one)"
        )


class CpuStager:
    """Copies tensors into one private block of CPU memory.

    Page-locked memory, for tensors on GPUs, is kept for the next save, since locking takes longer than copying.
    """

    def __init__(self) -> None:
        self._block = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._length = 0
        self._stays = False  # whether the block is for tensors on GPUs

    def copy(self, file: File, tensors: Sequence[torch.Tensor]) -> None:
        """Set `content` to the bytes of ``file``; the tensors may change once `copy` returns.

        Tensors of all devices are copied at once, with one wait at the end.
        """
        sources = [tensors[placed.tensor] for placed in file.tensors]
        on_gpu = any(source.is_cuda for source in sources)
        if self._block.numel() < file.length or (on_gpu and not self._stays):
            self._block = torch.empty(file.length, dtype=torch.uint8, device="cpu")
            self._stays = on_gpu
            if on_gpu:
                lock_pages(self._block)
        self._length = file.length
        blocks = [self._block[placed.offset : placed.offset + placed.length] for placed in file.tensors]
        places = [b.view(source.dtype).view(source.shape) for b, source in zip(blocks, sources, strict=True)]
        copy_to_host(places, sources)

    @property
    def content(self) -> memoryview:
        """The bytes copied last, in the block's own memory."""
        return self._block.numpy().data[: self._length]

    def free(self) -> None:
        """Give back the memory of the copied bytes; no reference to `content` may be in use."""
        self._length = 0
        if not self._stays:
            self._block = torch.empty(0, dtype=torch.uint8, device="cpu")


def stored_tree(checkpoint: CheckpointReader) -> Tree:
    """The tree in a checkpoint, each tensor a `StoredTensor`, of which only needed parts are read, when needed.

    Read blocks are compared with their checksums; reading raises `DamagedCheckpoint` if they differ.

    Raises:
        DamagedCheckpoint: if the head of a file differs from the committed one, or the manifest contradicts itself.
        CheckpointError: if torch does not know the type of a tensor.
    """
    checkpoint.check_heads()
    manifest = checkpoint.manifest
    return decode(manifest.tree, [_stored(record, checkpoint) for record in manifest.tensors])


def load_tree(path: Path) -> Tree:
    """The tree in the checkpoint at ``path``, each tensor contiguous on the CPU, with memory of its own.

    Raises:
        DamagedCheckpoint: naming the file or tensor that differs from the committed one.
        CheckpointError: if a newer version of Lockstep or of torch wrote the checkpoint.
        OSError: if a file cannot be read.
    """
    return in_memory(stored_tree(CheckpointReader(path, LOCAL)))


def tensor_of(record: TensorRecord, checkpoint: CheckpointReader) -> torch.Tensor:
    """A tensor of a checkpoint, contiguous on the CPU, with memory of its own.

    Raises:
        DamagedCheckpoint: if the tensor differs from the committed one.
        CheckpointError: if torch does not know the tensor's type.
    """
    return _stored(record, checkpoint).whole()


def _stored(record: TensorRecord, checkpoint: CheckpointReader) -> StoredTensor:
    dtype = _dtype(record, checkpoint.path, checkpoint.manifest)
    if any(math.prod(piece.shape) * dtype.itemsize != piece.length for piece in record.pieces):
        raise DamagedCheckpoint(f"{checkpoint.path}: the manifest contradicts itself about {record.path}")

    def read(start: tuple[int, ...], shape: tuple[int, ...]) -> torch.Tensor:
        box = torch.empty(shape, dtype=dtype, device="cpu")
        if box.numel():
            try:
                checkpoint.read(record, Box(start, shape), box.reshape(-1).view(torch.uint8).numpy().data)
            except OSError as error:
                raise UnreadableCheckpoint(unreadable(checkpoint.path, error)) from error
        return box

    return StoredTensor(record.shape, dtype, read)


def unreadable(path: Path, error: OSError) -> str:
    """The message about a file system that fails while ``path`` is read."""
    return (
        f"{error.filename or path} cannot be read: {error.strerror or error}. The file system says so, and not the "
        "content, which may be whole: see that it works again; the run then goes on from there"
    )


def write_torch_file(path: Path, state: Tensors) -> None:
    """Write ``state`` by `torch.save`; an older file at ``path`` is replaced once the new one is complete."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # Given a name in place of a file, torch would write that of `beside` into the file.
    with replacement(path, durable=True) as beside, beside.open("wb") as file:
        torch.save(state, file)


def content_of(tensor: torch.Tensor) -> memoryview:
    """The bytes of a tensor in any memory, row-major."""
    plain = tensor.detach().cpu().contiguous().reshape(-1)
    return plain.resolve_conj().resolve_neg().view(torch.uint8).numpy().data


def in_file(name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> FileTensor:
    """The description of a tensor in a file."""
    return FileTensor(name, _name_of(dtype), shape, math.prod(shape) * dtype.itemsize)


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _dtype(entry: TensorRecord, path: Path, manifest: Manifest) -> torch.dtype:
    dtype = getattr(torch, entry.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise CheckpointError(
            f"{path}: {entry.path} has the type {entry.dtype}, which torch {torch.__version__} does not know; "
            f"torch {manifest.torch} wrote it"
        )
    return dtype


def lock_pages(memory: torch.Tensor) -> bool:
    """Lock the pages of ``memory``, contiguous bytes on the CPU, until the tensor is deleted.

    Memory that torch itself locks (``pin_memory=True``) is rounded up to a power of two: 8 GiB for a state of 5 GiB.

    Returns:
        Whether CUDA has locked the memory. If not, copies are also right, but wait one by one.
    """
    cuda, address = torch.cuda.cudart(), memory.data_ptr()
    if not memory.numel() or int(cuda.cudaHostRegister(address, memory.numel(), 0)):
        return False
    # The end of a process frees all memory, and CUDA may have ended before.
    weakref.finalize(memory, cuda.cudaHostUnregister, address).atexit = False
    return True


def copy_to_host(places: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    """Copy ``sources`` to ``places`` on the CPU; returns when all are copied, after one wait for each GPU."""
    if not sources:
        return
    with torch.no_grad():
        foreach_copy_(places, sources, non_blocking=True)
    for device in {source.device for source in sources if source.is_cuda}:
        torch.cuda.current_stream(device).synchronize()
