"""Saving beside the training: the step pays for a copy, a thread does the rest.

    every rank, in the step       wait for the save before; encode the tree; copy my share
    every rank's thread           wait for "go"; write my share, flush it; post its pieces and their sums
    the leader's thread           room on the disk? scratch; post "go"; wait for all pieces, which must make whole
                                  tensors; commit; post; retention

Ranks talk over the board, never by a collective: a save that fails on one rank holds up no other, and a rank that died
is noticed by a deadline.
"""

from __future__ import annotations

import contextlib
import errno
import json
import secrets
import threading
import time
import zlib
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from lockstep import __version__
from lockstep.checkpoint.commit import (
    Committed,
    archive,
    commit,
    expired,
    list_checkpoints,
    make_directories,
    partial_saves,
    read_manifest,
    remove,
    scratch_path,
    verify,
    write_file,
)
from lockstep.checkpoint.filesystem import LOCAL, FileSystem
from lockstep.checkpoint.json_state import Tree, encode
from lockstep.checkpoint.layout import Box, File, Placed, coverage_error, lay_out
from lockstep.checkpoint.lock import Holder, lock_root
from lockstep.checkpoint.manifest import Manifest, Piece
from lockstep.checkpoint.tensors import CpuStager, TensorEntry, flatten, load_tree
from lockstep.collectives import Group, KeyValueStore
from lockstep.errors import CheckpointError, DamagedCheckpoint, LockstepError, SettingError
from lockstep.size_balancing import owners_of

#: Between two looks at the board, so that a thread which waits for a peer can be told to give up.
_LOOK_EVERY_S = 0.02
_FULL = (errno.ENOSPC, errno.EDQUOT)
#: In a manifest's ``about``: steps whose checkpoints retention leaves alone.
_PROTECTED = "protected_steps"


@dataclass(frozen=True, slots=True)
class Saved:
    """A checkpoint that was found whole."""

    path: Path
    step: int
    about: Mapping[str, Any]  #: what `Checkpoints.save` was given
    protected: frozenset[int] = frozenset()  #: steps that `Checkpoints.protect_newest` had protected when it was saved


@dataclass(frozen=True, slots=True)
class Outcome:
    """How one save ended."""

    step: int
    size_bytes: int  #: of the state
    why_not: str = ""  #: empty if it was committed
    remarks: tuple[str, ...] = ()
    took_s: float = 0.0  #: from the copy to the end

    @property
    def committed(self) -> bool:
        """Whether the checkpoint is visible and survives a power cut."""
        return not self.why_not


class Checkpoints:
    """The checkpoints of one run in one directory, which all ranks see.

    All ranks make one, at the same time. ``say`` is called only on the leader, and only from within a call of these
    methods, never from another thread.

    Args:
        root: Directory for the checkpoints of one run at a time; made when the first one is saved.
        group: The ranks that save together.
        keep: How many checkpoints retention leaves, at least 1.
        say: Is told, in one line each, what the user must know.
        peer_timeout_s: How long one rank's thread waits for another's.
        disk: The file system.
        clock: Seconds, from any start.
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
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.root = root.absolute()
        self._group, self._keep, self._disk, self._clock = group, keep, disk, clock
        self._say: Callable[[str], None] = say if group.leads else _hush
        self._peer_timeout_s = peer_timeout_s
        # Tells this run's scratch, and its words on the board, from those of the dead and of other instances.
        self._mark = group.broadcast_object(secrets.token_hex(4), "name of this run's saves")
        self._board = group.store(f"checkpoint-{self._mark}")
        self._copier = CpuStager()
        self._saves = 0
        self._give_up = threading.Event()
        self._closing = False
        self._flight: SaveThread | None = None
        self._last: Outcome | None = None
        self._untold: list[Outcome] = []
        self._news: list[Outcome] = []
        self._last_committed_step: int | None = None
        self._protected: frozenset[int] = frozenset()  # replaced, never changed: a save's thread reads it
        self._lock = contextlib.ExitStack()

    def claim(self, job: str = "", generation: int = 0) -> None:
        """Make the root this run's own, until `release` or the end of the leader. All ranks, before all else.

        Where the root cannot be made or locked, such as on a file system without locks, nothing is held.

        Args:
            job: names the launcher's job, and no other: its earlier generations are over, or about to be. "" without.
            generation: of that job.

        Raises:
            SettingError: if another run works there.
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

    def release(self) -> None:
        """The root is free for another run; nothing is saved afterwards. Each rank by itself, also after `abandon`."""
        self.abandon()
        self._lock.close()

    @property
    def last_committed_step(self) -> int | None:
        """The newest step known to be committed and whole. After `settle`, the same on every rank that lives."""
        self._land(wait=False)
        return self._last_committed_step

    def newest(self) -> Saved | None:
        """The newest whole checkpoint; None if none was ever committed. All ranks; each gets the same answer.

        The leader reads it through and compares it with its sums. Damaged ones are passed over, and said. What
        interrupted saves left behind is removed.

        Raises:
            CheckpointError: if there are checkpoints and none is whole, or a newer version of Lockstep wrote the
                newest: training from the start instead would be wrong in silence.
        """
        self.settle()
        saved, why_not = self._look() if self._group.leads else (None, "")
        saved, why_not = self._group.broadcast_object((saved, why_not), "newest checkpoint")
        if why_not:
            raise CheckpointError(why_not)
        if saved is not None:
            self._last_committed_step = saved.step
            self._protected |= saved.protected
        return saved

    def _look(self) -> tuple[Saved | None, str]:
        """The newest whole checkpoint, or why there is an error to raise on all ranks."""
        try:
            there = list_checkpoints(self.root, self._disk)
            for one in there:
                try:
                    manifest = verify(one.path, self._disk)
                except (DamagedCheckpoint, OSError) as error:
                    if isinstance(error, PermissionError):
                        raise
                    self._say(f"DAMAGED checkpoint of step {one.step}: {error}. Falling back to the one before")
                    continue
                self._sweep()
                about = dict(manifest.about)
                protected = frozenset(about.pop(_PROTECTED, ()))
                return Saved(one.path, one.step, about, protected), ""
            self._sweep()
        except (OSError, CheckpointError) as error:
            return None, f"cannot resume from {self.root}: {error}"
        if there:
            return None, (
                f"none of the {len(there)} checkpoints in {self.root} is whole: restore one from a backup, or start "
                "anew with --fresh"
            )
        return None, ""

    def _sweep(self) -> None:
        try:
            remove(partial_saves(self.root, self._disk), self.root, self._disk)
        except OSError as error:
            self._say(f"cannot remove what interrupted saves left in {self.root}: {error}")

    def archive(self) -> Path | None:
        """Start anew: what is committed moves into a new directory under the root, where no later run finds it.

        Collective.

        Returns:
            That directory; None if there was nothing to move.

        Raises:
            CheckpointError: if it cannot be moved.
        """
        self.settle()
        place: Path | None = None
        why_not = ""
        if self._group.leads:
            try:
                place = archive(self.root, self._disk)
            except OSError as error:
                why_not = f"cannot set aside the checkpoints in {self.root}: {error}"
            self._sweep()
        place, why_not = self._group.broadcast_object((place, why_not), "setting aside of checkpoints")
        if why_not:
            raise CheckpointError(why_not)
        self._last_committed_step, self._protected = None, frozenset()
        return place

    def protect_newest(self) -> None:
        """Retention leaves the newest checkpoint alone from now on, and the one in flight, should it be committed.

        They do not count towards ``keep``. Each later checkpoint names them, so runs that resume from one know, too.
        All ranks; costs nothing, and waits for nobody.
        """
        self._land(wait=False)
        steps = (self._last_committed_step, self._flight.step if self._flight else None)
        self._protected |= {step for step in steps if step is not None}

    def load(self, saved: Saved) -> Tree:
        """The tree that was saved, all tensors whole and contiguous on the CPU, with memory of their own.

        Each rank by itself.

        Raises:
            DamagedCheckpoint: if what this rank reads is not what was committed.
            CheckpointError: if this rank does not see the directory.
        """
        if not self._disk.is_directory(saved.path):
            raise CheckpointError(
                f"rank {self._group.rank} does not see {saved.path}, which the leader does: checkpoints must be in a "
                "directory that all nodes share"
            )
        return load_tree(saved.path, self._disk)

    def save(self, tree: Tree, step: int, about: Mapping[str, Any]) -> None:
        """Begin to save ``tree`` as the state after ``step``. All ranks, with equal trees; no collective.

        Of the tensors that every rank gives whole, each rank writes a share; of those given as `TensorShard`, each rank
        writes the part that it holds. Where one rank gives a shard, all must, with the same shape and type of the
        whole; a save of parts that do not make whole tensors fails.

        Returns once this rank's share is copied: the tensors may change from then on. If the save before is not
        finished, waits for it first. A save that fails is said, leaves nothing behind and does not stop the training.

        Args:
            tree: Nested dicts, lists and tuples of tensors, parts of tensors, and plain values.
            step: Optimizer steps done.
            about: Plain values to be found in the manifest.

        Raises:
            CheckpointError: if the tree holds something that cannot be saved; the message names its path.
        """
        self._land(wait=True, before=step)
        self._tell()
        encoded, names, tensors = flatten(tree)
        encode(dict(about), _refuse)
        file = _file_of(self._group.rank, self._group.size, names)
        content = self._copier.copy(file, tensors)
        self._saves += 1
        told = {**about, _PROTECTED: sorted(self._protected)} if self._protected else dict(about)
        manifest = Manifest(step, encoded, (), {}, told, lockstep=__version__, torch=torch.__version__)
        save = _Save(
            manifest=manifest,
            names=names,
            file=file,
            ranks=self._group.size,
            scratch=scratch_path(self.root, step, f"{self._mark}-{self._saves}"),
            digest=_digest(encoded, names),
        )
        talk = SaveMessages(self._board, str(self._saves), self._give_up, self._peer_timeout_s, self._clock)
        self._flight = SaveThread(self._clock, save, lambda: self._write(save, content, talk))

    def news(self) -> tuple[Outcome, ...]:
        """The saves that ended since this was last asked, in order. Cheap: for every step. Failures are said, too."""
        self._land(wait=False)
        self._tell()
        news = tuple(self._news)
        self._news.clear()
        return news

    def settle(self) -> None:
        """Wait until the save in flight has ended, well or not; a failure is said."""
        self._land(wait=True)
        self._tell()

    def close(self) -> Outcome | None:
        """Wait for the last save. All ranks; nothing is saved afterwards.

        Returns:
            How that save ended, in the leader's words; None if there was none. It and `last_committed_step` are the
            same on every rank, also where one did not hear of the end in time.
        """
        self._closing = True
        self.settle()
        known = self._group.broadcast_object((self._last, self._last_committed_step), "outcome of the last checkpoint")
        self._last, self._last_committed_step = known
        # The leader may serve the board: it leaves when nobody waits for a word on it any more.
        self._group.barrier("end of the checkpoints")
        return self._last

    def abandon(self) -> None:
        """Give up what waits for other ranks, for when one of them is lost; returns soon. Each rank by itself.

        A save of which all parts are written is still committed. Nothing is saved afterwards.
        """
        self._give_up.set()
        self.settle()

    def _land(self, *, wait: bool, before: int | None = None) -> None:
        """Take the outcome of the save in flight, if it has ended or is to be waited for."""
        flight = self._flight
        if flight is None or not (wait or flight.ended):
            return
        began = self._clock()
        outcome = flight.outcome()
        waited_s = self._clock() - began
        if before is not None and waited_s > 1:
            self._say(
                f"step {before}: waited {waited_s:.1f} s for the checkpoint of step {outcome.step} to be written; "
                "save less often, or on a faster disk"
            )
        self._flight, self._last = None, outcome
        if outcome.committed:
            self._last_committed_step = outcome.step
        self._untold.append(outcome)
        self._news.append(outcome)

    def _tell(self) -> None:
        untold, self._untold = self._untold, []
        for outcome in untold:
            for remark in outcome.remarks:
                self._say(f"checkpoint of step {outcome.step}: {remark}")
            if not outcome.committed:
                then = "The run is ending" if self._closing or self._give_up.is_set() else "Training goes on"
                good = self._last_committed_step
                self._say(
                    f"checkpoint of step {outcome.step} not saved: {outcome.why_not}. {then}; "
                    + (f"last good: step {good}" if good is not None else "there is none yet")
                )

    # What follows runs in the thread of a save.

    def _write(self, save: _Save, content: memoryview, talk: SaveMessages) -> Outcome:
        """One rank's side of a save. Whatever goes wrong is told to the others and becomes the outcome."""
        return self._lead(save, content, talk) if self._group.leads else self._follow(save, content, talk)

    def _follow(self, save: _Save, content: memoryview, talk: SaveMessages) -> Outcome:
        part = _part_of(self._group.rank)
        try:
            if talk.hear("leader's word to go"):
                talk.tell(part, self._write_part(save, content))
            why_not = talk.hear("leader's outcome")
            talk.tell(part, None)  # the leader has read it: the store need not hold the sums of every save for ever
        except (LockstepError, RuntimeError) as error:
            why_not = _line(error)
        return save.outcome(why_not)

    def _lead(self, save: _Save, content: memoryview, talk: SaveMessages) -> Outcome:
        remarks: tuple[str, ...] = ()
        try:
            why_not = self._open(save)
            talk.tell("leader's word to go", not why_not)
            if not why_not:
                why_not, remarks = self._gather(save, self._write_part(save, content), talk)
        except (OSError, LockstepError, RuntimeError) as error:
            why_not = self._explain(error, save)
        if why_not:
            self._clean(save)
        try:
            talk.tell("leader's outcome", why_not)
        except (LockstepError, RuntimeError) as error:
            remarks += (f"the other ranks could not be told how it ended: {_line(error)}",)
        if not why_not:
            remarks += self._retain(save.manifest.step)
        return save.outcome(why_not, remarks)

    def _open(self, save: _Save) -> str:
        """Make the scratch; why not, if it cannot be, or if the disk has no room."""
        try:
            make_directories(self.root, self._disk)
            free = self._disk.free_bytes(self.root)
            if free < save.needed_bytes:
                return _full(self.root, free, save.needed_bytes)
            self._disk.make_directory(save.scratch)
        except OSError as error:
            return self._explain(error, save)
        return ""

    def _write_part(self, save: _Save, content: memoryview) -> dict[str, Any]:
        """Write this rank's part; what to tell the leader about it. Never raises."""
        try:
            if save.file.length:
                write_file(save.scratch / save.file.name, content, self._disk)
        except OSError as error:
            return {"why_not": self._explain(error, save)}
        return {
            "why_not": "",
            "digest": save.digest,
            "file": save.file.name,
            "length": save.file.length,
            "pieces": [
                _told(box, placed, content)
                for placed in save.file.tensors
                if placed.length and (box := save.names[placed.tensor].box)
            ],
        }

    def _gather(self, save: _Save, own: dict[str, Any], talk: SaveMessages) -> tuple[str, tuple[str, ...]]:
        """Wait for all parts and commit them; why not, and remarks."""
        told = [own] + [talk.hear(_part_of(rank)) for rank in range(1, self._group.size)]
        for rank, word in enumerate(told):
            if word["why_not"]:
                return f"rank {rank}: {word['why_not']}" if rank else word["why_not"], ()
        shape, values = save.digest
        strangers = [rank for rank, word in enumerate(told) if word["digest"][0] != shape]
        if strangers:
            return f"{_ranks(strangers)} would save other tensors than rank 0", ()
        others = [rank for rank, word in enumerate(told) if word["digest"][1] != values]
        remarks = (f"{_ranks(others)} held other plain values than rank 0, whose were saved",) if others else ()
        files = {word["file"]: word["length"] for word in told if word["length"]}
        for name, length in files.items():
            if self._disk.size(save.scratch / name) != length:
                return f"{save.scratch / name} is not in full where the leader looks", ()
        pieces = _pieces_by_tensor(told)
        for number, named in enumerate(save.names):
            fault = coverage_error([(f"rank {rank}", Box(p.start, p.shape)) for rank, p in pieces[number]], named.shape)
            if fault:
                return f"{named.path}: {fault}", ()
        stored = tuple(named.stored(p for _, p in pieces[number]) for number, named in enumerate(save.names))
        commit(save.scratch, replace(save.manifest, tensors=stored, files=files), self.root, self._disk)
        return "", remarks

    def _retain(self, step: int) -> tuple[str, ...]:
        """Remove what is superseded; a remark, if that fails."""
        try:
            there = list_checkpoints(self.root, self._disk)
            just = next(one for one in there if one.step == step)
            gone = expired(there, self._whole, just, self._keep, self._protected)
            remove([one.path for one in gone], self.root, self._disk)
        except OSError as error:
            return (f"cannot remove older checkpoints: {error}",)
        return ()

    def _whole(self, one: Committed) -> bool:
        try:
            read_manifest(one.path, self._disk)
        except (DamagedCheckpoint, OSError):
            return False
        except CheckpointError:  # of a newer version: not ours to judge
            return True
        return True

    def _clean(self, save: _Save) -> None:
        try:
            if self._disk.is_directory(save.scratch):
                remove([save.scratch], self.root, self._disk)
        except OSError:
            pass  # the next start sweeps it away

    def _explain(self, error: Exception, save: _Save) -> str:
        if isinstance(error, OSError) and error.errno in _FULL:
            try:
                return _full(self.root, self._disk.free_bytes(self.root), save.needed_bytes)
            except OSError:
                pass
        return _line(error)


@dataclass(frozen=True, slots=True)
class _Save:
    """One save, as a rank knows it before a byte is written."""

    manifest: Manifest  #: without tensors
    names: tuple[TensorEntry, ...]
    file: File  #: of this rank
    ranks: int  #: that save together
    scratch: Path
    digest: list[int]  #: sums of the tree's shape and of its plain values

    @property
    def size_bytes(self) -> int:
        return sum(named.whole.length for named in self.names)

    @property
    def needed_bytes(self) -> int:
        """An upper bound of what the files take, the manifest included."""
        more_pieces = sum(min(self.ranks, n.whole.length // n.whole.element) for n in self.names if n.divided)
        manifest = 512 * len(self.names) + 256 * more_pieces + 2 * len(self.manifest.dump())
        return self.size_bytes + manifest + 4096 * (self.ranks + 2)

    def outcome(self, why_not: str = "", remarks: tuple[str, ...] = ()) -> Outcome:
        return Outcome(self.manifest.step, self.size_bytes, why_not, remarks)


def _file_of(rank: int, ranks: int, names: Sequence[TensorEntry]) -> File:
    """What ``rank`` writes: its share of what all ranks hold, and its boxes of what is divided."""
    divided = [number for number, named in enumerate(names) if named.divided and named.here.length]
    common = [number for number, named in enumerate(names) if not named.divided]
    owners, _ = owners_of([names[number].whole.length for number in common], [0] * ranks)
    share = [number for number, owner in zip(common, owners, strict=True) if owner == rank]
    return lay_out(rank, ((number, names[number].here) for number in [*divided, *share]))


def _told(box: Box, placed: Placed, content: memoryview) -> list[Any]:
    """A piece as a rank tells the leader about it."""
    crc32 = zlib.crc32(content[placed.offset : placed.offset + placed.length])
    return [placed.tensor, placed.offset, placed.length, crc32, box.start, box.shape]


def _pieces_by_tensor(told: Sequence[Mapping[str, Any]]) -> dict[int, list[tuple[int, Piece]]]:
    """The pieces that the ranks told of, each with its rank, by the number of its tensor."""
    found: dict[int, list[tuple[int, Piece]]] = defaultdict(list)
    for rank, word in enumerate(told):
        for number, offset, length, crc32, start, shape in word["pieces"]:
            found[number].append((rank, Piece(word["file"], offset, length, crc32, tuple(start), tuple(shape))))
    return found


class SaveMessages:
    """Words of one save on the board."""

    def __init__(
        self, board: KeyValueStore, save: str, give_up: threading.Event, timeout_s: float, clock: Callable[[], float]
    ) -> None:
        self._board, self._save, self._give_up = board, save, give_up
        self._timeout_s, self._clock = timeout_s, clock

    def tell(self, word: str, value: object) -> None:
        """Every rank that waits for ``word`` of this save gets ``value``."""
        self._board.set(f"{self._save} {word}", json.dumps(value))

    def hear(self, word: str) -> Any:
        """What a rank told; waits for it, within bounds."""
        key = f"{self._save} {word}"
        deadline = self._clock() + self._timeout_s
        while not self._board.is_set(key):
            if self._give_up.wait(_LOOK_EVERY_S) or self._clock() > deadline:
                limit = "before the run gave up" if self._give_up.is_set() else f"within {self._timeout_s:g} s"
                raise CheckpointError(f"the {word} did not come {limit}")
        return json.loads(self._board.get(key, self._timeout_s))


class SaveThread:
    """A save in its thread. Not a daemon: an interpreter that ends waits for it."""

    def __init__(self, clock: Callable[[], float], save: _Save, write: Callable[[], Outcome]) -> None:
        self.step = save.manifest.step
        self._outcome = save.outcome("its thread ended early")
        self._clock, self._began, self._deed = clock, clock(), write
        self._thread = threading.Thread(target=self._run, name="lockstep-checkpoint", daemon=False)
        self._thread.start()

    def _run(self) -> None:
        self._outcome = replace(self._deed(), took_s=self._clock() - self._began)

    @property
    def ended(self) -> bool:
        """Whether the thread is over."""
        return not self._thread.is_alive()

    def outcome(self) -> Outcome:
        """How it ended; waits for the end."""
        self._thread.join()
        return self._outcome


def _digest(encoded: Any, names: tuple[TensorEntry, ...]) -> list[int]:
    shapes = [(named.path, str(named.dtype), named.shape, named.divided) for named in names]
    return [zlib.crc32(repr(shapes).encode()), zlib.crc32(json.dumps(encoded).encode())]


def _full(root: Path, free: int, needed: int) -> str:
    return f"{root} is full ({_amount(free)} free, {_amount(needed)} needed)"


def _amount(size_bytes: int) -> str:
    for unit, name in ((1e9, "GB"), (1e6, "MB")):
        if size_bytes >= unit / 10:
            return f"{size_bytes / unit:.1f} {name}"
    return f"{size_bytes / 1e3:.1f} kB"


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _part_of(rank: int) -> str:
    return f"part of rank {rank}"


def _line(error: Exception) -> str:
    kind = "" if isinstance(error, LockstepError) else f"{type(error).__name__}: "
    return f"{kind}{error}".splitlines()[0]


def _hush(_text: str) -> None:
    pass


def _refuse(_value: object, _path: str) -> None:
    return None
