"""Commit and removal of checkpoint directories, which appear and disappear as a whole.

    root/.saving-step-00000042-1f2e-1/     parts written and flushed; manifest written and flushed; names flushed
         |
         | rename, flush root              <- the commit: nothing is visible before, and everything after
         v
    root/step-00000042/                    manifest.json  part-00000.safetensors ...
         |
         | rename, flush root              <- retention: gone before the first byte is
         v
    root/.removing-step-00000042/          unlinked file by file

The newest checkpoint is not stored anywhere, but found by listing the directory, so that no pointer can be out of date.
A step that is saved again with another content does not replace the first checkpoint, which no system can do in one
act: the new checkpoint is committed beside it as ``step-00000042.1`` and outranks the first, which retention then
removes.
"""

from __future__ import annotations

import io
import itertools
import re
import zlib
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from lockstep.checkpoint.filesystem import LOCAL, FileSystem
from lockstep.checkpoint.layout import Box, coverage_error, share_of_blocks
from lockstep.checkpoint.manifest import MANIFEST, Manifest, Piece
from lockstep.errors import DamagedCheckpoint

_SAVING, _REMOVING = ".saving-", ".removing-"
_NAME = re.compile(r"step-(\d{8,})(?:\.(\d+))?")
_CHUNK_BYTES = 8 << 20


@dataclass(frozen=True, slots=True, order=True)
class Committed:
    """A checkpoint that is visible under ``root``, with unchecked content. The newer checkpoint is the greater."""

    step: int
    revision: int  #: number of earlier saves of the step with another content
    root: Path

    @property
    def path(self) -> Path:
        """The directory of the checkpoint."""
        return self.root / (f"step-{self.step:08d}" + (f".{self.revision}" if self.revision else ""))


def list_checkpoints(root: Path, disk: FileSystem = LOCAL) -> tuple[Committed, ...]:
    """The checkpoints committed under ``root``, newest first; empty if the directory does not exist."""
    if not disk.is_directory(root):
        return ()
    names = (_NAME.fullmatch(name) for name in disk.names(root))
    found = (Committed(int(match[1]), int(match[2] or 0), root) for match in names if match)
    return tuple(sorted((one for one in found if disk.is_directory(one.path)), reverse=True))


def scratch_path(root: Path, step: int, mark: str) -> Path:
    """The directory in which the save marked ``mark`` gathers its files until the commit."""
    return root / f"{_SAVING}step-{step:08d}-{mark}"


def make_directories(path: Path, disk: FileSystem) -> None:
    """Make ``path`` and its missing parents, which then survive a power cut."""
    missing = []
    while not disk.is_directory(path):
        missing.append(path)
        path = path.parent
    for directory in reversed(missing):
        try:
            disk.make_directory(directory)
        except FileExistsError:
            if not disk.is_directory(directory):
                raise
        disk.sync_directory(directory.parent)


def write_file(path: Path, content: Iterable[memoryview], disk: FileSystem) -> None:
    """Write a new file whose content survives a power cut; its name survives once the directory is flushed."""
    file = disk.create(path)
    try:
        for part in content:
            done = 0
            while done < len(part):
                done += disk.write(file, part[done : done + _CHUNK_BYTES])
        disk.sync(file)
    finally:
        disk.close(file)


def differing(path: Path, content: Iterable[memoryview], disk: FileSystem) -> str:
    """The place where the file at ``path`` has other bytes on the disk than ``content``, in words; "" if none."""
    at = 0
    with disk.reader_of_disk(path) as file:
        for part in content:
            for first in range(0, len(part), _CHUNK_BYTES):
                piece = part[first : first + _CHUNK_BYTES]
                if file.read(len(piece)) != piece:
                    return (
                        f"{path}, bytes {at} to {at + len(piece)}, were read back with other bytes than were written: "
                        "the disk, its cable or controller, or the memory between"
                    )
                at += len(piece)
    return ""


def commit(scratch: Path, manifest: Manifest, root: Path, disk: FileSystem) -> Committed:
    """Make the parts in ``scratch`` visible as one checkpoint; all parts must be written and flushed.

    If a whole checkpoint of the same step with the same state exists already, it stays and ``scratch`` is removed.

    Returns:
        The checkpoint, which survives a power cut from now on.

    Raises:
        OSError: then the new checkpoint is not visible, or is visible but may not survive a power cut.
    """
    rivals = [there for there in list_checkpoints(root, disk) if there.step == manifest.step]
    if rivals and _holds(rivals[0], manifest, disk):
        remove([scratch], root, disk)
        return rivals[0]
    place = Committed(manifest.step, rivals[0].revision + 1 if rivals else 0, root)
    write_file(scratch / MANIFEST, [memoryview(manifest.dump())], disk)
    disk.sync_directory(scratch)
    disk.rename(scratch, place.path)
    disk.sync_directory(root)
    return place


def _holds(there: Committed, manifest: Manifest, disk: FileSystem) -> bool:
    try:
        return verify(there.path, disk).same_state(manifest)
    except (DamagedCheckpoint, OSError):
        return False


def read_manifest(path: Path, disk: FileSystem = LOCAL) -> Manifest:
    """The manifest of the checkpoint in ``path``, after a check that all its files have full size. Reads no tensor.

    Called first by all code that lists, verifies, loads, exports or resumes from a checkpoint: after that, the
    checkpoint can be loaded, unless bytes of tensors differ from the committed ones.

    Raises:
        DamagedCheckpoint: naming the file that is missing or differs from the committed one.
        CheckpointError: if a newer version of Lockstep wrote the checkpoint.
    """
    try:
        length = disk.size(path / MANIFEST)
        if length < 0:
            raise DamagedCheckpoint(f"{path / MANIFEST} is no regular file")
        with disk.reader(path / MANIFEST) as file:
            manifest = Manifest.read(file, length, str(path / MANIFEST))
    except FileNotFoundError:
        raise DamagedCheckpoint(f"{path} has no {MANIFEST}") from None
    if (step := _NAME.fullmatch(path.name)) is not None and int(step[1]) != manifest.step:
        raise DamagedCheckpoint(f"{path} holds the checkpoint of step {manifest.step}: it was copied or linked there")
    for tensor in manifest.tensors:
        boxes = [(piece.file, Box(piece.start, piece.shape)) for piece in tensor.pieces]
        if fault := coverage_error(boxes, tensor.shape):
            raise DamagedCheckpoint(f"{path}: the manifest contradicts itself about {tensor.path}: {fault}")
    for name, length in manifest.files.items():
        try:
            size = disk.size(path / name)
        except FileNotFoundError:
            raise DamagedCheckpoint(f"{path / name} is missing") from None
        if size < 0:
            raise DamagedCheckpoint(f"{path / name} is no regular file")
        if size != length:
            raise DamagedCheckpoint(f"{path / name} has {size} bytes; {length} were committed")
    return manifest


def verify(path: Path, disk: FileSystem = LOCAL, *, rank: int = 0, ranks: int = 1) -> Manifest:
    """Read the checkpoint in ``path``, or this rank's share of it, and compare the bytes with their checksums.

    Args:
        path: directory of the checkpoint.
        disk: the file system.
        rank: among the ranks that verify the checkpoint together.
        ranks: their number: each rank reads about equally many bytes, and all together the whole checkpoint.

    Returns:
        The manifest of the checkpoint.

    Raises:
        DamagedCheckpoint: naming the file and the tensor that differ from the committed ones.
        CheckpointError: if a newer version of Lockstep wrote it.
        OSError: if a file cannot be read.
    """
    manifest = read_manifest(path, disk)
    for name in list(manifest.files)[rank::ranks]:
        with disk.reader(path / name) as file:
            check_head(file, name, path, manifest)
    for name, blocks in itertools.groupby(share_of_blocks(manifest, rank, ranks), key=lambda one: one[0].file):
        with disk.reader(path / name) as file:
            for piece, block in blocks:
                file.seek(piece.offset + block.first)
                found = _sum_of_next(file, block.end - block.first, block.sum_before)
                compare_sums(found, block.sum_behind, piece, path, manifest)
    return manifest


def check_head(file: io.BufferedIOBase, name: str, path: Path, manifest: Manifest) -> None:
    """Read the head of a file that was just opened, if it has a head, and compare the head with its checksum.

    Raises:
        DamagedCheckpoint: if the head differs from the committed one.
    """
    head = manifest.heads.get(name)
    if head is not None and (found := _sum_of_next(file, head.length)) != head.crc32:
        raise DamagedCheckpoint(
            f"{path / name}, bytes 0 to {head.length} (its head), are not what was committed: sum {found:08x} instead "
            f"of {head.crc32:08x}"
        )


def compare_sums(found: int, committed: int, piece: Piece, path: Path, manifest: Manifest) -> None:
    """Check that the bytes read for ``piece``, or for a block of the piece, are the committed ones.

    Raises:
        DamagedCheckpoint: if not.
    """
    if found != committed:
        whose = next(tensor.path for tensor in manifest.tensors if piece in tensor.pieces)
        raise DamagedCheckpoint(
            f"{path / piece.file}, bytes {piece.offset} to {piece.offset + piece.length} ({whose}), are not what was "
            f"committed: sum {found:08x} instead of {committed:08x}"
        )


def _sum_of_next(file: io.BufferedIOBase, length: int, before: int = 0) -> int:
    """The checksum of bytes whose checksum is ``before`` and of the next ``length`` bytes of ``file``."""
    total = before
    while length > 0 and (chunk := file.read(min(length, _CHUNK_BYTES))):
        total = zlib.crc32(chunk, total)
        length -= len(chunk)
    return total


def remove(directories: Iterable[Path], root: Path, disk: FileSystem) -> None:
    """Remove ``directories`` beneath ``root``; none is ever visible half removed under a checkpoint's name.

    Raises:
        OSError: if a directory cannot be removed; directories before it are removed.
    """
    doomed = []
    for directory in directories:
        visible = _NAME.fullmatch(directory.name)
        aside = root / f"{_REMOVING}{directory.name}" if visible else directory
        if visible:
            if disk.is_directory(aside) or disk.is_link(aside):  # an earlier removal of this name was interrupted
                _unlink_all(aside, disk)
            disk.rename(directory, aside)
        doomed.append(aside)
    if doomed:
        disk.sync_directory(root)
    for directory in doomed:
        _unlink_all(directory, disk)


def _unlink_all(directory: Path, disk: FileSystem) -> None:
    if disk.is_link(directory):
        # The target of a link is not ours.
        disk.unlink(directory)
        return
    for name in disk.names(directory):
        disk.unlink(directory / name)
    disk.remove_directory(directory)


def partial_saves(root: Path, disk: FileSystem) -> tuple[Path, ...]:
    """The directories that interrupted saves and removals have left in ``root``; no save may be in flight.

    A root belongs to one run at a time: such directories before the first save were left by runs that have ended.
    """
    if not disk.is_directory(root):
        return ()
    return tuple(root / name for name in sorted(disk.names(root)) if name.startswith((_SAVING, _REMOVING)))


def archive(root: Path, disk: FileSystem, *, after: int = -1) -> Path | None:
    """Move all checkpoints of steps later than ``after`` into a new directory under ``root``; None if there is none.

    Returns the directory. The oldest checkpoint is moved last: if cut short, some checkpoints stay where they were.
    """
    there = [one for one in list_checkpoints(root, disk) if one.step > after]
    if not there:
        return None
    taken = set(disk.names(root))
    aside = root / next(name for n in itertools.count(1) if (name := f"before-{n}") not in taken)
    make_directories(aside, disk)
    for one in there:
        disk.rename(one.path, aside / one.path.name)
    disk.sync_directory(aside)
    disk.sync_directory(root)
    return aside


def expired(
    there: Sequence[Committed],
    whole: Callable[[Committed], bool],
    just: Committed,
    keep: int,
    protected: Collection[int | None] = (),
) -> tuple[Committed, ...]:
    """The checkpoints that retention removes after ``just`` was committed; a pure function.

    All checkpoints of ``protected`` steps are kept and do not count, except one that ``just`` replaces. Also kept are
    ``just`` and, to make ``keep`` in all, the newest others that are ``whole``, one for each step. A checkpoint that is
    not whole does not count either, so that it never displaces a good one, and is removed once enough newer ones are
    whole.

    Args:
        there: All committed checkpoints, including ``just``.
        whole: Whether a checkpoint is whole, by a cheap check.
        just: The checkpoint committed just now.
        keep: Number of checkpoints to keep, at least 1.
        protected: Steps whose checkpoints stay in any case.
    """
    kept = {just.step: just} if just.step not in protected else {}
    gone = []
    for one in sorted(there, reverse=True):
        if one == just or (one.step in protected and one.step != just.step):
            continue
        if one.step in kept or one.step == just.step or len(kept) >= keep:
            gone.append(one)
        elif whole(one):
            kept[one.step] = one
    return tuple(gone)
