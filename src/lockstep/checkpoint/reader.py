"""Single tensors of a checkpoint, as bytes: without torch, and without the rest of it in memory."""

from __future__ import annotations

import itertools
import math
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from lockstep.checkpoint.commit import compare_sums, read_manifest
from lockstep.checkpoint.filesystem import LOCAL, FileSystem
from lockstep.checkpoint.json_state import Tree, decode
from lockstep.checkpoint.layout import Box, coverage_error
from lockstep.checkpoint.manifest import Manifest, Piece, TensorRecord
from lockstep.errors import DamagedCheckpoint


class CheckpointReader:
    """One checkpoint, of which all files are there in full size.

    Args:
        path: its directory.
        disk: the file system.

    Raises:
        DamagedCheckpoint: naming the file that is missing or not what was committed.
        CheckpointError: if a newer version of Lockstep wrote it.
    """

    def __init__(self, path: Path, disk: FileSystem = LOCAL) -> None:
        self.path: Final = path
        self.manifest: Final[Manifest] = read_manifest(path, disk)
        #: the tree that was saved, with a `TensorRecord` in place of each tensor
        self.tree: Final[Tree] = decode(self.manifest.tree, self.manifest.tensors)
        self._disk: Final = disk

    def content(self, tensor: TensorRecord) -> bytearray:
        """The bytes of a whole tensor, row-major and little-endian, compared with their sums.

        Raises:
            DamagedCheckpoint: if they are not what was committed.
        """
        boxes = [(piece.file, Box(piece.start, piece.shape)) for piece in tensor.pieces]
        elements = math.prod(tensor.shape)
        length = sum(piece.length for piece in tensor.pieces)
        if coverage_error(boxes, tensor.shape) or (elements and length % elements):
            raise DamagedCheckpoint(f"{self.path}: the manifest contradicts itself about {tensor.path}")
        whole = bytearray(length)
        element = length // max(1, elements)
        for piece in tensor.pieces:
            if piece.shape == tensor.shape:
                self._read(piece, whole)
                continue
            content = bytearray(piece.length)
            self._read(piece, content)
            for start, end, place in _runs(piece, tensor.shape, element):
                whole[place : place + end - start] = content[start:end]
        return whole

    def _read(self, piece: Piece, into: bytearray) -> None:
        with self._disk.reader(self.path / piece.file) as file:
            file.seek(piece.offset)
            place, taken = memoryview(into), 0
            while taken < len(place) and (more := file.readinto(place[taken:])):
                taken += more
        compare_sums(zlib.crc32(place[:taken]), piece, self.path, self.manifest)


def _runs(piece: Piece, shape: Sequence[int], element: int) -> Iterator[tuple[int, int, int]]:
    """The stretches of a piece's bytes that are neighbours in the tensor: first, one past the last, place there."""
    split = len(shape)  # the piece has all of the dimensions behind it
    while split and piece.shape[split - 1] == shape[split - 1]:
        split -= 1
    split = max(0, split - 1)
    strides = [math.prod(shape[dim + 1 :]) * element for dim in range(len(shape))]
    length = math.prod(piece.shape[split:]) * element
    outer = (range(first, first + size) for first, size in zip(piece.start[:split], piece.shape[:split], strict=True))
    inner = sum(first * stride for first, stride in zip(piece.start[split:], strides[split:], strict=True))
    for number, index in enumerate(itertools.product(*outer)):
        place = inner + sum(i * stride for i, stride in zip(index, strides, strict=False))
        yield number * length, (number + 1) * length, place
