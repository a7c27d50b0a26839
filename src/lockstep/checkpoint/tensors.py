"""Tensors as bytes, and bytes as tensors."""

from __future__ import annotations

import io
import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lockstep.checkpoint.commit import compare_sums, read_manifest
from lockstep.checkpoint.disk import Disk
from lockstep.checkpoint.layout import Extent, Part, reads
from lockstep.checkpoint.manifest import Manifest, Piece, Stored
from lockstep.checkpoint.tree import Tree, decode, encode
from lockstep.errors import CheckpointError, DamagedCheckpoint


@dataclass(frozen=True, slots=True)
class Named:
    """A tensor and its path in the tree."""

    path: str
    tensor: torch.Tensor

    @property
    def extent(self) -> Extent:
        """What the layout needs to know of it."""
        return Extent(self.tensor.numel() * self.tensor.element_size(), self.tensor.element_size())

    def stored(self, piece: Piece) -> Stored:
        """Its entry in a manifest."""
        return Stored(self.path, str(self.tensor.dtype).removeprefix("torch."), tuple(self.tensor.shape), (piece,))


def flatten(tree: Tree) -> tuple[Any, tuple[Named, ...]]:
    """The tree in JSON with numbers in place of its tensors, and the tensors.

    Raises:
        CheckpointError: for what cannot be saved, naming its path.
    """
    found: list[Named] = []

    def take(value: object, path: str) -> int | None:
        if not isinstance(value, torch.Tensor):
            return None
        plain = type(value) in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
        if not plain or value.layout is not torch.strided or value.is_quantized or value.is_meta:
            kind = type(value).__name__ if not plain else f"{value.layout} tensor on {value.device}"
            raise CheckpointError(
                f"state at {path!r} is a {kind}, of which only one rank's part or none is here: save the whole dense "
                "tensor (full_tensor() of a DTensor, to_dense() of a sparse one)"
            )
        found.append(Named(path, value))
        return len(found) - 1

    return encode(tree, take), tuple(found)


class Copier:
    """Takes private copies of tensors in one block of the CPU's memory, which it keeps for the next time."""

    def __init__(self) -> None:
        self._block = torch.empty(0, dtype=torch.uint8)

    def copy(self, part: Part, tensors: Sequence[Named]) -> memoryview:
        """The bytes of ``part``; the tensors may change once this returns.

        Tensors of all devices are copied at once, with one wait at the end. The bytes are valid until the next call.
        """
        devices = {tensors[placed.tensor].tensor.device for placed in part.tensors}
        cuda = [device for device in devices if device.type == "cuda"]
        if self._block.numel() < part.length or (cuda and not self._block.is_pinned()):
            self._block = torch.empty(part.length, dtype=torch.uint8, pin_memory=bool(cuda))
        for placed in part.tensors:
            source = tensors[placed.tensor].tensor.detach()
            place = self._block[placed.offset : placed.offset + placed.length]
            place.view(source.dtype).view(source.shape).copy_(source, non_blocking=True)
        for device in cuda:
            torch.cuda.current_stream(device).synchronize()
        return self._block.numpy().data[: part.length]


def load_tree(path: Path, disk: Disk) -> Tree:
    """The tree in the checkpoint at ``path``, each tensor contiguous on the CPU, with memory of its own.

    Raises:
        DamagedCheckpoint: naming what is not as it was committed.
        CheckpointError: if a newer version of Lockstep or of torch wrote it.
        OSError: if it cannot be read.
    """
    manifest = read_manifest(path, disk)
    for entry in manifest.tensors:
        if (
            sum(piece.length for piece in entry.pieces)
            != math.prod(entry.shape) * _dtype(entry, path, manifest).itemsize
        ):
            raise DamagedCheckpoint(f"{path}: the manifest contradicts itself about {entry.path}")
    tensors = [torch.empty(entry.shape, dtype=_dtype(entry, path, manifest)) for entry in manifest.tensors]
    plan = reads(manifest)
    for name in manifest.files:
        with disk.reader(path / name) as file:
            for read in (read for read in plan if read.piece.file == name):
                compare_sums(_fill(tensors[read.tensor], read.piece, file), read.piece, path, manifest)
    return decode(manifest.tree, tensors)


def _fill(tensor: torch.Tensor, piece: Piece, file: io.BufferedIOBase) -> int:
    """Read the next piece of ``file`` into its place in ``tensor``; the sum of what was read."""
    whole = piece.shape == tuple(tensor.shape)
    box = tensor if whole else torch.empty(piece.shape, dtype=tensor.dtype)
    content = box.reshape(-1).view(torch.uint8).numpy().data
    taken = 0
    while taken < len(content) and (more := file.readinto(content[taken:])):
        taken += more
    if not whole:
        tensor[_box(piece)] = box
    return zlib.crc32(content[:taken])


def _box(piece: Piece) -> tuple[slice, ...]:
    return tuple(slice(start, start + size) for start, size in zip(piece.start, piece.shape, strict=True))


def _dtype(entry: Stored, path: Path, manifest: Manifest) -> torch.dtype:
    dtype = getattr(torch, entry.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise CheckpointError(
            f"{path}: {entry.path} has the type {entry.dtype}, which torch {torch.__version__} does not know; "
            f"torch {manifest.torch} wrote it"
        )
    return dtype
