"""The thread of a save, from the copied bytes to a committed checkpoint.

every rank's thread           wait for the leader's go-ahead; write this rank's part, flush it; publish its pieces
                              and their checksums
the leader's thread           check the room on the disk; make the scratch directory; publish the go-ahead; wait for
                              all parts, which must make whole tensors; commit; publish the outcome; retention
"""

from __future__ import annotations

import errno
import json
import threading
import time
import zlib
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lockstep.checkpoint.commit import (
    Committed,
    commit,
    differing,
    expired,
    list_checkpoints,
    make_directories,
    read_manifest,
    remove,
    write_file,
)
from lockstep.checkpoint.filesystem import FileSystem
from lockstep.checkpoint.layout import Box, File, Placed, coverage_error
from lockstep.checkpoint.lock import superseded_by
from lockstep.checkpoint.manifest import BLOCK_BYTES, Head, Manifest, Piece, checksums
from lockstep.checkpoint.next_step import NextStepFile
from lockstep.checkpoint.safetensors_file import head_of
from lockstep.checkpoint.tensors import CpuStager, TensorEntry
from lockstep.collectives import KeyValueStore
from lockstep.errors import CheckpointError, DamagedCheckpoint, LockstepError
from lockstep.formatting import format_ranks, size

#: Time between two looks at the store, so that a thread that waits for a peer can be told to give up.
_POLL_S = 0.02
_FULL = (errno.ENOSPC, errno.EDQUOT)


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of a save."""

    step: int
    size_bytes: int  #: of the state
    why_not: str = ""  #: empty if the save was committed
    remarks: tuple[str, ...] = ()
    took_s: float = 0.0  #: from the copy to the end

    @property
    def committed(self) -> bool:
        """Whether the checkpoint is visible and survives a power cut."""
        return not self.why_not


@dataclass(frozen=True, slots=True)
class SaveRequest:
    """The request of a save, as known to a rank before a byte is written."""

    manifest: Manifest  #: without tensors
    names: tuple[TensorEntry, ...]
    file: File  #: of this rank
    ranks: int  #: that save together
    scratch: Path
    digest: list[int]  #: sums of the tree's shape and of its plain values
    protect: int | None = None  #: a step that retention keeps once this save is committed

    @property
    def size_bytes(self) -> int:
        """The bytes of the whole state."""
        return sum(named.whole.length for named in self.names)

    @property
    def needed_bytes(self) -> int:
        """An upper bound of the bytes of all files, including the manifest."""
        pieces = {n: min(self.ranks, n.whole.length // n.whole.element) if n.divided else 1 for n in self.names}
        heads = sum((160 + 2 * len(named.path)) * count for named, count in pieces.items())
        manifest = 512 * len(self.names) + 256 * sum(pieces.values()) + 2 * len(self.manifest.dump()) + heads
        manifest += 11 * (self.size_bytes // BLOCK_BYTES)
        return self.size_bytes + manifest + 4096 * (self.ranks + 2)

    def outcome(self, why_not: str = "", remarks: tuple[str, ...] = ()) -> Outcome:
        """The outcome of the save, with ``why_not`` if it failed."""
        return Outcome(self.manifest.step, self.size_bytes, why_not, remarks)


class SaveWriter:
    """A rank's work for its saves, in their threads. No method raises: an error becomes the outcome.

    Args:
        root: directory for the checkpoints of the run.
        rank: of this process.
        ranks: that save together.
        keep: number of checkpoints that retention keeps.
        protected: gives the steps whose checkpoints retention keeps, at the time of retention.
        disk: the file system.
        reads_back: whether written bytes are compared with the content of the disk.
    """

    def __init__(
        self,
        root: Path,
        rank: int,
        ranks: int,
        *,
        keep: int,
        protected: Callable[[], frozenset[int]],
        disk: FileSystem,
        reads_back: bool,
    ) -> None:
        self._reads_back = reads_back
        self.root = root
        self._rank, self._ranks, self._keep, self._protected, self._disk = rank, ranks, keep, protected, disk
        self.next_step = NextStepFile(disk)  #: of the checkpoint committed last
        #: Called on the leader before a checkpoint becomes visible.
        self.before_commit: Callable[[], object] = lambda: None

    def write(self, save: SaveRequest, staged: CpuStager, messages: SaveMessages) -> Outcome:
        """Do this rank's part of a save. An error is reported to the other ranks and becomes the outcome.

        The bytes in ``staged`` are freed as soon as they are written, or known not to be needed.
        """
        try:
            return self._lead(save, staged, messages) if self._rank == 0 else self._follow(save, staged, messages)
        finally:
            staged.free()

    def _follow(self, save: SaveRequest, staged: CpuStager, messages: SaveMessages) -> Outcome:
        part = _part_of(self._rank)
        try:
            if messages.wait_for("go-ahead of the leader"):
                messages.publish(part, self._write_part(save, staged))
            why_not = messages.wait_for("outcome of the leader")
            messages.publish(part, None)  # the leader has read the report, and the store need not hold it any longer
        except (LockstepError, RuntimeError) as error:
            why_not = _one_line(error)
        return save.outcome(why_not)

    def _lead(self, save: SaveRequest, staged: CpuStager, messages: SaveMessages) -> Outcome:
        remarks: tuple[str, ...] = ()
        try:
            why_not = self._open(save)
            messages.publish("go-ahead of the leader", not why_not)
            if not why_not:
                why_not, remarks = self._gather(save, self._write_part(save, staged), messages)
        except (OSError, LockstepError, RuntimeError) as error:
            why_not = self._explain(error, save)
        if why_not:
            self._clean(save)
        try:
            messages.publish("outcome of the leader", why_not)
        except (LockstepError, RuntimeError) as error:
            remarks += (f"the other ranks could not be told how it ended: {_one_line(error)}",)
        if not why_not:
            # The step itself is kept anyway, and counts, as the newest one.
            best = {save.protect} - {save.manifest.step}
            remarks += self._retain(save.manifest.step, self._protected() | best)
        return save.outcome(why_not, remarks)

    def _open(self, save: SaveRequest) -> str:
        """Make the scratch directory; returns the reason if this fails or the disk has no room, else ""."""
        if taken := _taken_over(self.root):
            return taken
        try:
            make_directories(self.root, self._disk)
            free = self._disk.free_bytes(self.root)
            if free < save.needed_bytes:
                return _full(self.root, free, save.needed_bytes)
            self._disk.make_directory(save.scratch)
        except OSError as error:
            return self._explain(error, save)
        return ""

    def _write_part(self, save: SaveRequest, staged: CpuStager) -> dict[str, object]:
        """Write this rank's part, and free the staged bytes; returns the report for the leader. Never raises."""
        report = self._written(save, staged.content)
        staged.free()
        return report

    def _written(self, save: SaveRequest, content: memoryview) -> dict[str, object]:
        placed = [each for each in save.file.tensors if each.length]
        head = head_of(save.names[each.tensor].in_file for each in placed) if placed else b""
        try:
            if placed:
                write_file(save.scratch / save.file.name, [memoryview(head), content], self._disk)
            read_back = ""
            if placed and self._reads_back:
                read_back = differing(save.scratch / save.file.name, (memoryview(head), content), self._disk)
        except OSError as error:
            return {"why_not": self._explain(error, save)}
        return {
            "why_not": read_back,
            "digest": save.digest,
            "file": save.file.name,
            "length": len(head) + save.file.length,
            "head": [len(head), zlib.crc32(head)],
            "pieces": [
                _piece_report(box, each, content, len(head)) for each in placed if (box := save.names[each.tensor].box)
            ],
        }

    def _gather(self, save: SaveRequest, own: dict[str, object], messages: SaveMessages) -> tuple[str, tuple[str, ...]]:
        """Wait for all parts and commit them; returns why this failed, or "", and remarks."""
        reports = [own] + [messages.wait_for(_part_of(rank)) for rank in range(1, self._ranks)]
        for rank, report in enumerate(reports):
            if report["why_not"]:
                return f"rank {rank}: {report['why_not']}" if rank else report["why_not"], ()
        shape, values = save.digest
        mismatched = [rank for rank, report in enumerate(reports) if report["digest"][0] != shape]
        if mismatched:
            return f"{format_ranks(mismatched)} would save other tensors than rank 0", ()
        others = [rank for rank, report in enumerate(reports) if report["digest"][1] != values]
        remarks = (f"{format_ranks(others)} held other plain values than rank 0, whose were saved",) if others else ()
        files = {report["file"]: report["length"] for report in reports if report["length"]}
        heads = {report["file"]: Head(*report["head"]) for report in reports if report["length"]}
        for name, length in files.items():
            if self._disk.size(save.scratch / name) != length:
                return f"{save.scratch / name} is not in full where the leader looks", ()
        pieces = _pieces_by_tensor(reports)
        for number, named in enumerate(save.names):
            fault = coverage_error([(f"rank {rank}", Box(p.start, p.shape)) for rank, p in pieces[number]], named.shape)
            if fault:
                return f"{named.path}: {fault}", ()
        stored = tuple(named.stored(p for _, p in pieces[number]) for number, named in enumerate(save.names))
        whole = replace(save.manifest, tensors=stored, files=files, heads=heads, ranks=self._ranks)
        if taken := _taken_over(self.root):
            return taken, ()
        self.before_commit()
        self.next_step.before_commit(save.scratch, save.manifest.step)
        self.next_step.committed(commit(save.scratch, whole, self.root, self._disk))
        return "", remarks

    def _retain(self, step: int, protected: Collection[int | None]) -> tuple[str, ...]:
        """Remove superseded checkpoints; returns a remark if this fails."""
        try:
            found = list_checkpoints(self.root, self._disk)
            newest = next(one for one in found if one.step == step)
            superseded = expired(found, self._whole, newest, self._keep, protected)
            remove([one.path for one in superseded], self.root, self._disk)
        except OSError as error:
            return (f"cannot remove older checkpoints: {error}",)
        return ()

    def _whole(self, one: Committed) -> bool:
        try:
            read_manifest(one.path, self._disk)
        except (DamagedCheckpoint, OSError):
            return False
        except CheckpointError:  # of a newer version, whose checkpoints this version cannot judge
            return True
        return True

    def _clean(self, save: SaveRequest) -> None:
        try:
            if self._disk.is_directory(save.scratch):
                remove([save.scratch], self.root, self._disk)
        except OSError:
            pass  # the next start removes it

    def _explain(self, error: Exception, save: SaveRequest) -> str:
        if isinstance(error, OSError) and error.errno in _FULL:
            try:
                return _full(self.root, self._disk.free_bytes(self.root), save.needed_bytes)
            except OSError:
                pass
        return _one_line(error)


class SaveMessages:
    """The messages that ranks exchange about a save, through the store."""

    def __init__(self, store: KeyValueStore, save: str, give_up: threading.Event, timeout_s: float) -> None:
        self._store, self._save, self._give_up = store, save, give_up
        self._timeout_s = timeout_s

    def publish(self, key: str, value: object) -> None:
        """Send ``value``, which JSON can hold, to every rank that waits for ``key`` of this save."""
        self._store.set(f"{self._save} {key}", json.dumps(value))

    def wait_for(self, key: str) -> Any:
        """Wait for the value that a rank publishes under ``key``.

        Raises:
            CheckpointError: if no value comes in time, or the run gives up.
        """
        full_key = f"{self._save} {key}"
        deadline = time.monotonic() + self._timeout_s
        while not self._store.is_set(full_key):
            if self._give_up.wait(_POLL_S) or time.monotonic() > deadline:
                limit = "before the run gave up" if self._give_up.is_set() else f"within {self._timeout_s:g} s"
                raise CheckpointError(f"the {key} did not come {limit}")
        return json.loads(self._store.get(full_key, self._timeout_s))


class SaveThread:
    """A save in its thread, which is no daemon: the interpreter waits for the thread before it ends."""

    def __init__(self, save: SaveRequest, write: Callable[[], Outcome]) -> None:
        self.step = save.manifest.step
        self._outcome = save.outcome("its thread ended early")
        self._began, self._write = time.monotonic(), write
        self._thread = threading.Thread(target=self._run, name="lockstep-checkpoint", daemon=False)
        self._thread.start()

    def _run(self) -> None:
        self._outcome = replace(self._write(), took_s=time.monotonic() - self._began)

    @property
    def ended(self) -> bool:
        """Whether the thread is over."""
        return not self._thread.is_alive()

    def outcome(self) -> Outcome:
        """The outcome of the save; waits for its end."""
        self._thread.join()
        return self._outcome


def _piece_report(box: Box, placed: Placed, content: memoryview, head: int) -> list[object]:
    """A rank's report to the leader about a piece, in a file with a head of ``head`` bytes."""
    crc32, sums = checksums(content[placed.offset : placed.offset + placed.length])
    return [placed.tensor, head + placed.offset, placed.length, crc32, box.start, box.shape, sums]


def _pieces_by_tensor(reports: Sequence[Mapping[str, Any]]) -> dict[int, list[tuple[int, Piece]]]:
    """The pieces in the reports, each with its rank, by the number of the tensor."""
    found: dict[int, list[tuple[int, Piece]]] = defaultdict(list)
    for rank, report in enumerate(reports):
        for number, offset, length, crc32, start, shape, sums in report["pieces"]:
            piece = Piece(report["file"], offset, length, crc32, tuple(start), tuple(shape), tuple(sums))
            found[number].append((rank, piece))
    return found


def _taken_over(root: Path) -> str:
    by = superseded_by(root)
    return f"{root} was taken over by {by}: this process was given up, such as with a host that slept" if by else ""


def _full(root: Path, free: int, needed: int) -> str:
    return f"{root} is full ({size(free)} free, {size(needed)} needed)"


def _part_of(rank: int) -> str:
    return f"part of rank {rank}"


def _one_line(error: Exception) -> str:
    kind = "" if isinstance(error, LockstepError) else f"{type(error).__name__}: "
    return f"{kind}{error}".splitlines()[0]
