"""A save by a single rank, of tensors that the rank holds whole, without another rank, thread or copy.

For a rank that has lost the others and is about to end: its tensors do not change any more, so each is written directly
from its memory.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lockstep import __version__
from lockstep.checkpoint.commit import (
    Committed,
    commit,
    list_checkpoints,
    make_directories,
    partial_saves,
    remove,
    scratch_path,
    write_file,
)
from lockstep.checkpoint.filesystem import LOCAL, FileSystem
from lockstep.checkpoint.json_state import Tree, decode
from lockstep.checkpoint.layout import lay_out
from lockstep.checkpoint.manifest import Head, Manifest, Piece, checksums
from lockstep.checkpoint.safetensors_file import head_of
from lockstep.checkpoint.tensors import TensorEntry, content_of, flatten
from lockstep.errors import CheckpointError

#: Bytes beside tensors: for the manifest, and a file system's names.
_BESIDE_BYTES = 64 << 10


@dataclass(frozen=True, slots=True)
class FlatTree:
    """A tree whose plain values are copied and whose tensors are the given ones, or boxes of these."""

    encoded: Any
    entries: tuple[TensorEntry, ...]
    tensors: tuple[torch.Tensor, ...]

    @classmethod
    def of(cls, tree: Tree) -> FlatTree:
        """The flat tree of ``tree``, with its present plain values.

        Raises:
            CheckpointError: for a value that cannot be saved, naming its path.
        """
        return cls(*flatten(tree))

    @property
    def size_bytes(self) -> int:
        """An upper bound of the bytes that `save_whole` writes."""
        beside = sum(512 + 2 * len(entry.path) for entry in self.entries)
        return sum(entry.whole.length for entry in self.entries) + beside + _BESIDE_BYTES

    def checksums(self) -> dict[str, int]:
        """The CRC-32 of each tensor's bytes, by its path, as in a manifest. Reads all bytes."""
        return {e.path: zlib.crc32(content_of(t)) for e, t in zip(self.entries, self.tensors, strict=True)}

    def tree(self, tensors: Sequence[torch.Tensor]) -> Tree:
        """The tree with ``tensors`` in place of its own tensors; divided tensors as `TensorShard`."""
        return decode(self.encoded, [e.leaf(t) for e, t in zip(self.entries, tensors, strict=True)])


def checksums_in(manifest: Manifest) -> dict[str, int]:
    """The CRC-32 of each tensor in a single piece, by its path."""
    return {tensor.path: tensor.pieces[0].crc32 for tensor in manifest.tensors if len(tensor.pieces) == 1}


def save_whole(
    root: Path, flat: FlatTree, step: int, about: Mapping[str, object], disk: FileSystem = LOCAL
) -> Committed:
    """Write and commit ``flat`` as the state after ``step``. No other save under ``root`` may run meanwhile.

    The tensors must not change until `save_whole` returns. Directories of interrupted saves and older checkpoints under
    ``root`` are removed.

    Raises:
        OSError: if the state cannot be written; then no checkpoint became visible.
        CheckpointError: if ``about`` holds a value that cannot be saved, or a tensor is divided among ranks.
    """
    if divided := [entry.path for entry in flat.entries if entry.divided]:
        raise CheckpointError(f"state at {divided[0]!r} is divided among ranks: one of them alone cannot save it")
    make_directories(root, disk)
    remove(partial_saves(root, disk), root, disk)
    scratch = scratch_path(root, step, "whole")
    disk.make_directory(scratch)
    file = lay_out(0, ((number, entry.whole) for number, entry in enumerate(flat.entries)))
    placed = [each for each in file.tensors if each.length]
    head = head_of(flat.entries[each.tensor].in_file for each in placed) if placed else b""
    sums: dict[int, tuple[int, tuple[int, ...]]] = {}

    def content() -> Iterator[memoryview]:
        yield memoryview(head)
        for each in placed:
            data = content_of(flat.tensors[each.tensor])
            sums[each.tensor] = checksums(data)
            yield data

    try:
        if placed:
            write_file(scratch / file.name, content(), disk)
        pieces: dict[int, Piece] = {}
        for each in placed:
            shape = flat.entries[each.tensor].shape
            start, (crc32, inner) = (0,) * len(shape), sums[each.tensor]
            pieces[each.tensor] = Piece(file.name, len(head) + each.offset, each.length, crc32, start, shape, inner)
        manifest = Manifest(
            step,
            flat.encoded,
            tuple(e.stored([pieces[n]] if n in pieces else []) for n, e in enumerate(flat.entries)),
            {file.name: len(head) + file.length} if placed else {},
            dict(about),
            lockstep=__version__,
            torch=torch.__version__,
            heads={file.name: Head(len(head), zlib.crc32(head))} if placed else {},
            ranks=1,
        )
        saved = commit(scratch, manifest, root, disk)
    except BaseException:
        remove([scratch], root, disk)
        raise
    remove([one.path for one in list_checkpoints(root, disk) if one != saved], root, disk)
    return saved
