"""A reader of single tensors of a checkpoint, or boxes of tensors, as bytes; without torch, one tensor in memory."""

from __future__ import annotations

import io
import math
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from lockstep.checkpoint.commit import check_head, compare_sums, read_manifest
from lockstep.checkpoint.filesystem import LOCAL, FileSystem
from lockstep.checkpoint.json_state import Tree, decode
from lockstep.checkpoint.layout import Box, runs_within
from lockstep.checkpoint.manifest import Manifest, Piece, TensorRecord
from lockstep.errors import DamagedCheckpoint

_CHUNK_BYTES: Final = 4 << 20


class CheckpointReader:
    """A reader of a checkpoint, all of whose files have full size.

    Args:
        path: directory of the checkpoint.
        disk: the file system.

    Raises:
        DamagedCheckpoint: naming the file that is missing or differs from the committed one.
        CheckpointError: if a newer version of Lockstep wrote the checkpoint.
    """

    def __init__(self, path: Path, disk: FileSystem = LOCAL) -> None:
        self.path: Final = path
        self.manifest: Final[Manifest] = read_manifest(path, disk)
        #: the saved tree, with a `TensorRecord` in place of each tensor
        self.tree: Final[Tree] = decode(self.manifest.tree, self.manifest.tensors)
        self._disk: Final = disk

    def check_heads(self) -> None:
        """Compare the heads of all files with their sums.

        Raises:
            DamagedCheckpoint: if a head differs from the committed one.
        """
        for name in self.manifest.files:
            with self._disk.reader(self.path / name) as file:
                check_head(file, name, self.path, self.manifest)

    def content(self, tensor: TensorRecord) -> bytearray:
        """The bytes of a whole tensor, row-major and little-endian, compared with their sums.

        Raises:
            DamagedCheckpoint: if bytes differ from the committed ones.
        """
        whole = bytearray(sum(piece.length for piece in tensor.pieces))
        self.read(tensor, Box((0,) * len(tensor.shape), tensor.shape), memoryview(whole))
        return whole

    def read(self, tensor: TensorRecord, box: Box, into: memoryview) -> None:
        """Read the bytes of ``box``, row-major and little-endian; all read blocks are compared with their checksums.

        Takes `_CHUNK_BYTES` of memory in addition to ``into``, and reads only the blocks that have a part of the box.

        Raises:
            DamagedCheckpoint: if they are not what was committed.
        """
        elements, length = math.prod(tensor.shape), sum(piece.length for piece in tensor.pieces)
        element = length // max(1, elements)
        if element * elements != length or box.elements * element != len(into):
            raise DamagedCheckpoint(f"{self.path}: the manifest contradicts itself about {tensor.path}")
        for piece in tensor.pieces:
            self._read(piece, runs_within(Box(piece.start, piece.shape), box, element), into)

    def _read(self, piece: Piece, runs: Iterator[tuple[int, int, int]], into: memoryview) -> None:
        """Read the blocks of ``piece`` that have a part of the runs; the runs are in the order of its bytes."""
        run = next(runs, None)  # the first run that is not over
        if run is None:
            return
        scratch = memoryview(bytearray(min(piece.length, _CHUNK_BYTES)))
        with self._disk.reader(self.path / piece.file) as file:
            for block in piece.blocks:
                if run is None or run[0] >= block.end:
                    continue
                file.seek(piece.offset + block.first)
                found, at = block.sum_before, block.first
                while at < block.end:
                    end = min(at + len(scratch), block.end)
                    if in_place := run is not None and run[0] <= at and end <= run[1]:
                        chunk = into[run[2] + at - run[0] : run[2] + end - run[0]]
                    else:
                        chunk = scratch[: end - at]
                    taken = _fill(file, chunk)
                    found = zlib.crc32(chunk[:taken], found)
                    if taken < len(chunk):
                        break
                    while run is not None and run[0] < end:
                        first, last, place = run
                        if not in_place:
                            a, b = max(first, at), min(last, end)
                            into[place + a - first : place + b - first] = chunk[a - at : b - at]
                        if last > end:
                            break
                        run = next(runs, None)
                    at = end
                compare_sums(found, block.sum_behind, piece, self.path, self.manifest)


def _fill(file: io.BufferedIOBase, chunk: memoryview) -> int:
    """Read the next bytes of ``file`` into ``chunk``; returns their number."""
    taken = 0
    while taken < len(chunk) and (more := file.readinto(chunk[taken:])):
        taken += more
    return taken
