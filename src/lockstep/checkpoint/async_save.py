"""The checkpoints of a run, saved in the background: a step waits only for a copy, and a thread does the rest.

    every rank, in the step       wait for the save before; encode the tree; copy this rank's part
    every rank's thread           `save_thread`: write the part; the leader commits when all parts are there

Ranks exchange messages through the store, never by a collective: a save that fails on one rank delays no other rank,
and a dead rank is noticed by a deadline.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import threading
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch

from lockstep import __version__
from lockstep.checkpoint.commit import (
    Committed,
    archive,
    list_checkpoints,
    partial_saves,
    remove,
    scratch_path,
    verify,
)
from lockstep.checkpoint.filesystem import LOCAL, FileSystem
from lockstep.checkpoint.json_state import StateTree, Tree, encode
from lockstep.checkpoint.layout import File, lay_out
from lockstep.checkpoint.lock import Holder, lock_root
from lockstep.checkpoint.manifest import PROTECTED, Manifest
from lockstep.checkpoint.next_step import NEXT_STEP, read_next_step
from lockstep.checkpoint.reader import CheckpointReader
from lockstep.checkpoint.save_thread import Outcome, SaveMessages, SaveRequest, SaveThread, SaveWriter
from lockstep.checkpoint.tensors import CpuStager, TensorEntry, flatten, stored_tree, unreadable
from lockstep.collectives import Group
from lockstep.errors import CheckpointError, DamagedCheckpoint, SettingError, UnreadableCheckpoint
from lockstep.formatting import format_ranks, plural
from lockstep.size_balancing import owners_of


@dataclass(frozen=True, slots=True)
class Saved:
    """A checkpoint that was found whole."""

    path: Path
    step: int
    about: Mapping[str, Any]  #: the argument of `Checkpoints.save`
    protected: frozenset[int] = frozenset()  #: steps that `Checkpoints.protect_newest` had protected when it was saved


@dataclass(frozen=True, slots=True)
class _Verified:
    """The findings of a rank in its share of a checkpoint."""

    saved: Saved | None  #: from the manifest; None: the checkpoint is not whole, or cannot be used
    damage: str = ""  #: differences from what was committed
    refused: str = ""  #: why this rank cannot tell whether the checkpoint is whole
    unreadable: str = ""  #: an error of the file system, which does not mean that the checkpoint is damaged
    manifest_sum: int = 0  #: of the whole manifest

    @classmethod
    def of(cls, one: Committed, group: Group, disk: FileSystem) -> Self:
        """Read this rank's share of ``one``. Not collective."""
        try:
            if not disk.is_directory(one.path):
                return cls(
                    None,
                    refused=f"rank {group.rank} does not see {one.path}, which the leader does: checkpoints must be in "
                    "a directory that all nodes share",
                )
            manifest = verify(one.path, disk, rank=group.rank, ranks=group.size)
        except PermissionError as error:
            return cls(None, refused=str(error))
        except (DamagedCheckpoint, FileNotFoundError, NotADirectoryError, IsADirectoryError) as error:
            return cls(None, damage=str(error))
        except OSError as error:
            return cls(None, unreadable=unreadable(one.path, error))
        except CheckpointError as error:
            return cls(None, refused=str(error))
        about = {name: value for name, value in manifest.about.items() if name != PROTECTED}
        saved = Saved(one.path, one.step, about, manifest.protected_steps)
        return cls(saved, manifest_sum=zlib.crc32(manifest.dump()))


class Checkpoints:
    """The checkpoints of a run in a directory that all ranks share.

    The constructor is collective. ``say`` is called only on the leader, and only from within a call of these methods,
    never from another thread.

    Args:
        root: Directory for the checkpoints of one run at a time; made at the first save.
        group: The ranks that save together.
        keep: How many checkpoints retention leaves, at least 1.
        say: Is told, in one line each, what the user must know.
        peer_timeout_s: How long one rank's thread waits for another's.
        disk: The file system.
        reads_back: Whether each rank compares the content of the disk with what it has written, before a commit.
    """

    def __init__(
        self,
        root: Path,
        group: Group,
        *,
        keep: int,
        say: Callable[[str], None],
        peer_timeout_s: float = 600.0,
        disk: FileSystem = LOCAL,
        reads_back: bool = False,
    ) -> None:
        self.root = root.absolute()
        self._group, self._disk = group, disk
        self._say: Callable[[str], None] = say if group.leads else _ignore
        self._peer_timeout_s = peer_timeout_s
        # Distinguishes this run's scratch directories and store keys from those of ended runs and of other instances.
        self._mark = group.broadcast_object(secrets.token_hex(4), "name of this run's saves")
        self._store = group.store(f"checkpoint-{self._mark}")
        self._stager = CpuStager()
        self._writer = SaveWriter(
            self.root,
            group.rank,
            group.size,
            keep=keep,
            protected=lambda: self._protected,
            disk=disk,
            reads_back=reads_back,
        )
        self._saves = 0
        self._give_up = threading.Event()
        self._closing = False
        self._thread: SaveThread | None = None
        self._last: Outcome | None = None
        self._unreported: list[Outcome] = []
        self._finished: list[Outcome] = []
        self._last_committed_step: int | None = None
        self._protected: frozenset[int] = frozenset()  # replaced, never changed: a save's thread reads it
        self._lock = contextlib.ExitStack()

    def claim(self, job: str = "", generation: int = 0) -> None:
        """Reserve the root for this run, until `release` or the end of the leader. Collective.

        Call `claim` before other methods. If the root cannot be made or locked, such as on a file system without locks,
        no lock is held.

        Args:
            job: unique name of the launcher's job, whose earlier generations are over, or about to end. "" without a
                job.
            generation: of that job.

        Raises:
            SettingError: if another run works in the root.
        """
        why_not = ""
        if self._group.leads:
            try:
                self._lock = lock_root(self.root, Holder.here(job, generation), self._say)
            except SettingError as error:
                why_not = str(error)
        why_not = self._group.broadcast_object(why_not, "claim on the directory of checkpoints")
        if why_not:
            raise SettingError(why_not)

    def before_commit(self, flush: Callable[[], object]) -> None:
        """Let the leader call ``flush`` in the thread of each save, before the checkpoint becomes visible."""
        self._writer.before_commit = flush

    def release(self) -> None:
        """Free the root for another run; no save may follow. Not collective; also allowed after `abandon`."""
        self.abandon()
        self._lock.close()

    @property
    def last_committed_step(self) -> int | None:
        """The newest step known to be committed and whole. After `wait`, equal on every living rank."""
        self._collect(wait=False)
        return self._last_committed_step

    def newest(self) -> Saved | None:
        """The newest whole checkpoint, equal on every rank; None if no checkpoint was ever committed. Collective.

        The ranks together read the checkpoint completely, each about the same number of bytes, and compare it with its
        checksums. Damaged checkpoints are skipped and reported. Files of interrupted saves are removed.

        Raises:
            CheckpointError: if checkpoints exist and none is whole, if a newer version of Lockstep wrote the newest, or
                if a rank does not see it, or sees another checkpoint: training from the start, or from two checkpoints,
                would be wrong in silence.
            UnreadableCheckpoint: if the file system fails: the newest checkpoint may be whole, and is not given up.
        """
        self.wait()
        there, failed = self._group.broadcast_object(self._listed(), "which checkpoints there are")
        saved, refused = None, ""
        for one in there:
            found = _Verified.of(one, self._group, self._disk)
            damage, refused, failed = self._agree(found, one)
            if refused or failed or not damage:
                saved = found.saved
                break
            self._say(f"DAMAGED checkpoint of step {one.step}: {damage}. Falling back to the one before")
        if failed and not refused:
            raise UnreadableCheckpoint(f"cannot resume from {self.root}: {failed}")
        if refused:
            raise CheckpointError(f"cannot resume from {self.root}: {refused}")
        if self._group.leads:
            self._remove_partial_saves()
        if there and saved is None:
            raise CheckpointError(
                f"none of {plural(len(there), 'checkpoint')} in {self.root} is whole: restore one from a backup, or "
                "start over with --fresh"
            )
        if saved is not None:
            self._last_committed_step = saved.step
            self._protected |= saved.protected
        return saved

    def _agree(self, found: _Verified, one: Committed) -> tuple[str, str, str]:
        """The findings of all ranks about ``one``: damage, reason to refuse it, error in reading; or "". Collective."""
        told = (found.damage, found.refused, found.unreadable, found.manifest_sum)
        *texts, sums = zip(*self._group.gather_objects(told, "whether a checkpoint is whole"), strict=True)
        damage, refused, failed = (next(filter(None, of_ranks), "") for of_ranks in texts)
        strangers = [rank for rank, found_sum in enumerate(sums) if found_sum != sums[0]]
        if strangers and not damage and not refused and not failed:
            refused = (
                f"{one.path} is another checkpoint for {format_ranks(strangers)} than for the leader: checkpoints must "
                "be in a directory that all nodes share"
            )
        return damage, refused, failed

    def _listed(self) -> tuple[tuple[Committed, ...], str]:
        """The committed checkpoints, newest first, on the leader; or the error in listing them."""
        try:
            return (list_checkpoints(self.root, self._disk) if self._group.leads else ()), ""
        except OSError as error:
            return (), unreadable(self.root, error)

    def _remove_partial_saves(self) -> None:
        try:
            remove(partial_saves(self.root, self._disk), self.root, self._disk)
        except OSError as error:
            self._say(f"cannot remove what interrupted saves left in {self.root}: {error}")

    def archive(self, *, after: int = -1) -> Path | None:
        """Move checkpoints of steps later than ``after`` into a new directory under the root, where no run finds them.

        Collective.

        Returns:
            The new directory; None if no checkpoint was moved.

        Raises:
            CheckpointError: if a checkpoint cannot be moved.
        """
        self.wait()
        place: Path | None = None
        why_not = ""
        if self._group.leads:
            try:
                place = archive(self.root, self._disk, after=after)
            except OSError as error:
                why_not = f"cannot set aside the checkpoints in {self.root}: {error}"
            self._remove_partial_saves()
        place, why_not = self._group.broadcast_object((place, why_not), "setting aside of checkpoints")
        if why_not:
            raise CheckpointError(why_not)
        self._last_committed_step = None
        self._protected = frozenset(step for step in self._protected if step <= after)
        return place

    def steps(self) -> tuple[int, ...]:
        """The steps of the committed checkpoints, newest first, as the leader sees them. Collective."""
        found: list[int] = []
        if self._group.leads:
            with contextlib.suppress(OSError):
                found = list(dict.fromkeys(one.step for one in list_checkpoints(self.root, self._disk)))
        return tuple(self._group.broadcast_object(found, "steps of the checkpoints"))

    def protect_newest(self) -> None:
        """Keep the newest checkpoint from now on, and a checkpoint being saved, once it is committed.

        Both do not count towards ``keep``. Each later checkpoint names them, so runs that resume know them, too. To be
        called on all ranks; costs no time and waits for no other rank.
        """
        self._collect(wait=False)
        steps = (self._last_committed_step, self._thread.step if self._thread else None)
        self._protected |= {step for step in steps if step is not None}

    def load(self, saved: Saved) -> StateTree:
        """The saved tree, with a `StoredTensor` for each tensor, which is read only when used.

        Each rank reads only the boxes that it needs, also of tensors that another number of ranks has divided
        differently, and compares them with their checksums. Not collective. Tensors must be read before the next save.

        Raises:
            DamagedCheckpoint: if the manifest on this rank's disk is not the committed one.
        """
        tree: StateTree = stored_tree(CheckpointReader(saved.path, self._disk))
        return tree

    def note_next_step(self, step: int, content: Mapping[str, object]) -> None:
        """Write ``content``, plain values, beside the checkpoint of ``step``, once the checkpoint is committed.

        The content is no part of the checkpoint, and is lost silently if it cannot be written. Only the leader writes.
        """
        if self._group.leads:
            self._writer.next_step.put(step, content)

    def next_step(self, saved: Saved) -> tuple[Path, dict[str, object] | None]:
        """The file and content that `note_next_step` has written beside ``saved``; None: no content. Collective."""
        content = read_next_step(saved.path, self._disk) if self._group.leads else None
        return saved.path / NEXT_STEP, self._group.broadcast_object(content, "what came after the checkpoint")

    def save(self, tree: Tree, step: int, about: Mapping[str, object], *, protect: int | None = None) -> None:
        """Begin to save ``tree`` as the state after ``step``. Call it on all ranks, with equal trees.

        No rank waits for another.

        Each rank writes a share of the tensors that every rank gives whole, and its own part of tensors given as
        `TensorShard`. If one rank gives a shard, all ranks must, with equal shape and type of the whole tensor; a save
        of parts that do not make whole tensors fails.

        Returns once this rank's share is copied: afterwards the tensors may change. First waits for an unfinished save
        before. A save that fails is reported, leaves nothing behind and does not stop the training.

        Args:
            tree: Nested dicts, lists and tuples of tensors, parts of tensors, and plain values.
            step: Optimizer steps done.
            about: Plain values to be found in the manifest.
            protect: A step whose checkpoint is kept from this commit on, until the commit of a save that does not name
                it, and does not count towards ``keep``.

        Raises:
            CheckpointError: if the tree holds a value that cannot be saved; the message names its path.
        """
        self._collect(wait=True, before=step)
        self._report()
        encoded, names, tensors = flatten(tree)
        encode(dict(about), _refuse)
        file = _file_of(self._group.rank, self._group.size, names)
        self._stager.copy(file, tensors)
        self._saves += 1
        described = {**about, PROTECTED: sorted(self._protected)} if self._protected else dict(about)
        manifest = Manifest(step, encoded, (), {}, described, lockstep=__version__, torch=torch.__version__)
        save = SaveRequest(
            manifest=manifest,
            names=names,
            file=file,
            ranks=self._group.size,
            scratch=scratch_path(self.root, step, f"{self._mark}-{self._saves}"),
            digest=_digest(encoded, names),
            protect=protect,
        )
        messages = SaveMessages(self._store, str(self._saves), self._give_up, self._peer_timeout_s)
        self._thread = SaveThread(save, lambda: self._writer.write(save, self._stager, messages))

    def finished_saves(self) -> tuple[Outcome, ...]:
        """The saves that ended since the last call, in order; failures are reported. Cheap enough for each step."""
        self._collect(wait=False)
        self._report()
        finished = tuple(self._finished)
        self._finished.clear()
        return finished

    def wait(self) -> None:
        """Wait until the current save has ended, successfully or not; a failure is reported."""
        self._collect(wait=True)
        self._report()

    def close(self) -> Outcome | None:
        """Wait for the last save; no save may follow. Collective.

        Returns:
            The outcome of the last save, from the leader; None if no save was begun. The outcome and
            `last_committed_step` are equal on every rank, also if a rank was not told of the end in time.
        """
        self._closing = True
        self.wait()
        known = self._group.broadcast_object((self._last, self._last_committed_step), "outcome of the last checkpoint")
        self._last, self._last_committed_step = known
        # The leader may serve the store: it must leave only when no rank waits for a message any more.
        self._group.barrier("end of the checkpoints")
        return self._last

    def abandon(self) -> None:
        """Give up waiting for other ranks, after a rank is lost; returns soon. Not collective.

        A save of which all parts are written is still committed. No save may follow.
        """
        self._give_up.set()
        self.wait()

    def _collect(self, *, wait: bool, before: int | None = None) -> None:
        """Take the outcome of the current save, if the save has ended or ``wait`` is true."""
        thread = self._thread
        if thread is None or not (wait or thread.ended):
            return
        began = time.monotonic()
        outcome = thread.outcome()
        waited_s = time.monotonic() - began
        if before is not None and waited_s > 1:
            self._say(
                f"step {before}: waited {waited_s:.1f} s for the checkpoint of step {outcome.step} to be written; "
                "save less often, or on a faster disk"
            )
        self._thread, self._last = None, outcome
        if outcome.committed:
            self._last_committed_step = outcome.step
        self._unreported.append(outcome)
        self._finished.append(outcome)

    def _report(self) -> None:
        unreported, self._unreported = self._unreported, []
        for outcome in unreported:
            for remark in outcome.remarks:
                self._say(f"checkpoint of step {outcome.step}: {remark}")
            if not outcome.committed:
                then = "The run is ending" if self._closing or self._give_up.is_set() else "Training goes on"
                good = self._last_committed_step
                self._say(
                    f"checkpoint of step {outcome.step} not saved: {outcome.why_not}. {then}; "
                    + (f"last good: step {good}" if good is not None else "there is none yet")
                )


def _file_of(rank: int, ranks: int, names: Sequence[TensorEntry]) -> File:
    """The file of ``rank``: its share of tensors that all ranks hold, and its boxes of divided tensors."""
    divided = [number for number, named in enumerate(names) if named.divided and named.here.length]
    common = [number for number, named in enumerate(names) if not named.divided]
    owners, _ = owners_of([names[number].whole.length for number in common], [0] * ranks)
    share = [number for number, owner in zip(common, owners, strict=True) if owner == rank]
    return lay_out(rank, ((number, names[number].here) for number in [*divided, *share]))


def _digest(encoded: object, names: tuple[TensorEntry, ...]) -> list[int]:
    shapes = [(named.path, str(named.dtype), named.shape, named.divided) for named in names]
    return [zlib.crc32(repr(shapes).encode()), zlib.crc32(json.dumps(encoded).encode())]


def _ignore(_text: str) -> None:
    pass


def _refuse(_value: object, _path: str) -> None:
    return None
