"""The journal of a search: append-only files, one for each worker, that hold all that is known about its trials.

    RUN/search.json                 the space and the settings, written once
    RUN/journal/worker-0000.jsonl   the trials of worker 0: one record in each line, with its checksum

Each file has one writer at a time, so that writing needs no lock, and any process may read. A line that a crash has cut
short is not a record: readers stop before it, and the next writer of the file removes it. Records are numbered within
their file, so a record that is read twice counts once. A kill loses no record; the end of a trial also survives a power
failure (see `JournalWriter.append`).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import gc
import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, Self, TypeVar

from lockstep.errors import SettingError
from lockstep.records import MOST_GROWN, of_kind, read_bytes, read_object
from lockstep.small_files import create_text, flush_names, replace_text
from lockstep.tune.record.records import AttemptCut, Entry, LossReported, Record, TrialBegan, TrialEnded, decode, encode
from lockstep.tune.record.trial import MadeMove, Trial
from lockstep.tune.record.trial_history import TrialHistory
from lockstep.tune.search.space import Space

T = TypeVar("T")

#: The file by which the directory of a search is recognized.
SEARCH_FILE = "search.json"
_JOURNAL = "journal"
_APPENDED = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
_FORMAT = 1
_FLUSH_EVERY_S = 0.1
#: For what passes by itself, such as a full disk, a worker waits so long.
_PATIENCE_S, _TRY_EVERY_S = 600.0, 0.2
_PASSING: Final = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ESTALE, errno.EAGAIN)
_WORKER = re.compile(r"worker-(\d+)")
_CLOCK_GRAIN_NS = 2 * 10**9
#: The settings that are read back.
_SETTING_KINDS: Final[Mapping[str, Any]] = {
    "trials": int,
    "options": dict[str, Any],
    "patience": int | None,
    "min_improvement": float,
    "repeats": int,
    "repeat_best": int,
    "warm_start": dict[str, dict[str, int]],
}


# ---- files -------------------------------------------------------------------------------------------------------


class JournalWriter:
    """The only writer of one worker's file, for as long as it is open.

    Args:
        directory: of the search.
        worker: the number of the worker whose file it is.

    Raises:
        SettingError: if another process has this file open for writing, or the file system has no locks.
    """

    def __init__(self, directory: Path, worker: int) -> None:
        self.worker: Final = worker
        self._path: Final = journal_file(directory, worker)
        path = self._path
        path.parent.mkdir(parents=True, exist_ok=True)
        is_new = not path.exists()
        self._file = os.open(path, _APPENDED, 0o666)
        try:
            if not try_lock(self._file):
                raise SettingError(
                    f"another process is worker {worker} of the search in {directory}; give another --run-dir, or let "
                    "its driver end"
                )
            last, end = _last_line(os.pread(self._file, os.fstat(self._file).st_size, 0), worker)
            # Removes a line that a crash has cut short.
            os.ftruncate(self._file, end)
        except BaseException:
            os.close(self._file)
            raise
        self._serial = 0 if last is None else last.serial + 1
        self._unflushed, self._flushed_s = False, float("-inf")
        if is_new:
            flush_names(path.parent)

    def append(self, record: Record) -> Entry:
        """Append ``record``, which no kill can lose from now on, and return it with its number.

        The end of a trial is flushed to the disk when this returns. Where trials end within 0.1 s of each other it is
        flushed with a later record.
        """
        self._put_back()
        entry = Entry(self.worker, self._serial, record)
        unwritten = memoryview(encode(self._serial, record))
        while unwritten:
            unwritten = unwritten[write_patiently("its journal", partial(os.write, self._file, unwritten)) :]
        self._serial += 1
        self._unflushed |= isinstance(record, TrialEnded)
        if self._unflushed and time.monotonic() - self._flushed_s >= _FLUSH_EVERY_S:
            write_patiently("its journal", partial(os.fsync, self._file))
            self._unflushed, self._flushed_s = False, time.monotonic()
        return entry

    def _put_back(self) -> None:
        """Write the file again where it was removed meanwhile: all that it held is still in the open one."""
        if os.fstat(self._file).st_nlink:
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        removed, self._file = self._file, os.open(self._path, _APPENDED, 0o666)
        try:
            if not try_lock(self._file):
                raise SettingError(f"{self._path} was removed, and another process has begun it again")
            content = memoryview(os.pread(removed, os.fstat(removed).st_size, 0))
            os.ftruncate(self._file, 0)
            while content:
                content = content[write_patiently("its journal", partial(os.write, self._file, content)) :]
            os.fsync(self._file)
        finally:
            os.close(removed)

    def close(self) -> None:
        """Flush the file to the disk and let other processes write it."""
        if self._file >= 0:
            self._put_back()
            os.fsync(self._file)
            os.close(self._file)
            self._file = -1


class JournalReader:
    """Follows the files of all workers while they are written.

    Args:
        directory: of the search.
    """

    def __init__(self, directory: Path) -> None:
        self._folder: Final = directory / _JOURNAL
        self._files: dict[int, tuple[int, int, int]] = {}  # by worker: descriptor, offset, newest serial number
        self._seen_ns = -1  # when a file was last added, as far as it is known

    def read(self) -> list[Entry]:
        """The records since the last call, each once, in the order of each file. About 1 µs a worker if none."""
        self._find_files()
        new: list[Entry] = []
        for worker in list(self._files):
            self._open_again(worker)
            file, offset, serial = self._files[worker]
            size = os.fstat(file).st_size
            if size - offset > MOST_GROWN:
                raise SettingError(
                    f"{journal_file(self._folder.parent, worker)} has {size} bytes, which no search has written: move "
                    "it aside"
                )
            lines = list(_whole_lines(os.pread(file, size - offset, offset), worker)) if size > offset else []
            if lines:
                last, end = lines[-1]
                new += [entry for entry, _ in lines if entry.serial > serial]
                self._files[worker] = (file, offset + end, last.serial)
        return new

    def close(self) -> None:
        """Close the files."""
        for file, _, _ in self._files.values():
            os.close(file)
        self._files.clear()

    def _open_again(self, worker: int) -> None:
        """Follow the file that ``worker`` has put back, where the one that was read until now was removed."""
        removed, _, serial = self._files[worker]
        if os.fstat(removed).st_nlink:
            return
        with contextlib.suppress(OSError):
            put_back = os.open(self._folder / f"worker-{worker:04d}.jsonl", os.O_RDONLY | os.O_CLOEXEC)
            os.close(removed)
            # Records that were read before have numbers that are not new.
            self._files[worker] = (put_back, 0, serial)

    def _find_files(self) -> None:
        try:
            changed_ns = self._folder.stat().st_mtime_ns
        except FileNotFoundError:
            return
        if changed_ns == self._seen_ns:
            return
        # Within the resolution of the file system's clock another file may be added at the same time.
        self._seen_ns = changed_ns if time.time_ns() - changed_ns > _CLOCK_GRAIN_NS else -1
        for path in sorted(self._folder.glob("worker-*.jsonl")):
            name = _WORKER.fullmatch(path.stem)
            if name is not None and (worker := int(name[1])) not in self._files and path.is_file():
                self._files[worker] = (os.open(path, os.O_RDONLY | os.O_CLOEXEC), 0, -1)


def _whole_lines(data: bytes, worker: int) -> Iterator[tuple[Entry, int]]:
    """The records in ``data``, each with the offset behind it; a damaged line between two whole ones is left out."""
    start = 0
    while (end := data.find(b"\n", start)) >= 0:
        decoded = decode(data[start:end])
        start = end + 1
        if decoded is not None:
            yield Entry(worker, *decoded), start


def _last_line(data: bytes, worker: int) -> tuple[Entry | None, int]:
    """The last of `_whole_lines`; (None, 0) if there is none."""
    end = data.rfind(b"\n")
    while end >= 0:
        start = data.rfind(b"\n", 0, end) + 1
        if (decoded := decode(data[start:end])) is not None:
            return Entry(worker, *decoded), end + 1
        end = start - 1
    return None, 0


def write_patiently(what: str, write: Callable[[], T]) -> T:
    """What ``write`` returns, once it can be done: a disk that is full for a while costs no trial, and no worker.

    Says so once in the log of this worker, whose trial waits meanwhile; others may go on.

    Raises:
        OSError: if it could not be done for ten minutes, or for another reason than the disk.
    """
    until_s, told = time.monotonic() + _PATIENCE_S, False
    while True:
        try:
            return write()
        except OSError as error:
            if error.errno not in _PASSING or time.monotonic() > until_s:
                raise
            if not told:
                told = True
                with contextlib.suppress(OSError):
                    sys.stderr.write(f"this worker cannot write {what} ({error.strerror}), and tries again\n")
                    sys.stderr.flush()
        time.sleep(_TRY_EVERY_S)


def journal_file(directory: Path, worker: int) -> Path:
    """The file of ``worker``."""
    return directory / _JOURNAL / f"worker-{worker:04d}.jsonl"


def is_within_trial(directory: Path, worker: int) -> bool:
    """Whether the newest record of ``worker`` is of a trial that has not ended."""
    try:
        newest, _ = _last_line(read_bytes(journal_file(directory, worker), MOST_GROWN), worker)
    except FileNotFoundError:
        return False
    return newest is not None and isinstance(newest.record, TrialBegan | LossReported)


def try_lock(file: int) -> bool:
    """Lock an open file for this process unless another one has it; the kernel unlocks it when this process ends.

    Raises:
        SettingError: on a file system without locks.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        raise lock_error(error) from error
    return True


def lock_error(error: OSError) -> SettingError:
    """The error for a file system that cannot lock files."""
    return SettingError(
        f"the file system of the run directory cannot lock files ({error.strerror}), by which the workers of a search "
        "share its trials; give a --run-dir on another"
    )


# ---- the whole search --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SearchRecord:
    """The search that a run directory holds, as it was when it was read."""

    space: Mapping[str, Any]  #: as JSON; `lockstep.tune.search` reads it
    settings: Mapping[str, Any]  #: of the search: seed, trials, islands, algorithm...
    trials: tuple[Trial, ...]  #: by their numbers
    moves: tuple[MadeMove, ...]  #: between islands, by time

    @property
    def evaluations(self) -> Iterator[Trial]:
        """All trials, each before its repeats."""
        for trial in self.trials:
            yield trial
            yield from trial.repeats

    @classmethod
    def of(cls, plan: SearchPlan, entries: Iterator[Entry] | list[Entry]) -> Self:
        """The record of a search of which ``entries`` are known, in any order that keeps each worker's own."""
        history = TrialHistory()
        for entry in entries:
            history.add(entry)
        return cls(plan.space, plan.settings, history.trials(), history.moves())


@dataclass(frozen=True, slots=True)
class SearchPlan:
    """The space and the settings of a search."""

    space: Mapping[str, Any]
    settings: Mapping[str, Any]

    def write(self, directory: Path) -> bool:
        """Write it to ``directory``; returns False, and writes nothing, if there is a plan already."""
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        return create_text(directory / SEARCH_FILE, self._text(), durable=True)

    def replace(self, directory: Path) -> None:
        """Write it to ``directory`` in place of the one that is there."""
        replace_text(directory / SEARCH_FILE, self._text(), durable=True)

    def _text(self) -> str:
        return json.dumps({"format": _FORMAT, "space": self.space, "settings": self.settings}, indent=2) + "\n"

    @classmethod
    def read(cls, directory: Path) -> Self | None:
        """The plan in ``directory``; None if there is none.

        Raises:
            SettingError: if it cannot be read.
        """
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            try:
                content = read_object(directory / SEARCH_FILE)
                if of_kind(int, content["format"]) > _FORMAT:
                    raise SettingError(
                        f"{directory / SEARCH_FILE} has format {content['format']}, and this Lockstep knows {_FORMAT}; "
                        "use a newer one"
                    )
                settings = of_kind(dict[str, Any], content["settings"], "settings")
                for name, kind in _SETTING_KINDS.items():
                    if name in settings:
                        of_kind(kind, settings[name], name)
                space = of_kind(dict[str, Any], content["space"], "space")
                if space:
                    Space.from_json(space)
                return cls(space, settings)
            except SettingError:
                raise
            except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
                raise SettingError(
                    f"{directory / SEARCH_FILE} cannot be read: {type(error).__name__}: {error}; it is damaged. Put it "
                    "back from a copy, or begin again with --fresh, which moves what is there aside"
                ) from error
        return None


def read_search(directory: str | os.PathLike[str]) -> SearchRecord:
    """The search in ``directory``, which may be running.

    Raises:
        SettingError: if ``directory`` holds no search, or one that cannot be read.
    """
    plan = SearchPlan.read(Path(directory))
    if plan is None:
        raise SettingError(f"{os.fspath(directory)} holds no search (no {SEARCH_FILE}); give the run directory of one")
    with contextlib.closing(JournalReader(Path(directory))) as reader, collector_paused():
        return SearchRecord.of(plan, reader.read())


@contextlib.contextmanager
def collector_paused() -> Iterator[None]:
    """Within it, Python does not look for cycles: millions of records that stay are looked at again and again else.

    So a long journal is read in half the time.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class FollowedSearch:
    """The search in ``directory``, which need not have begun; each look reads only new records."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._plan: SearchPlan | None = None
        self._reader, self._history = JournalReader(directory), TrialHistory()
        self._deaths: list[AttemptCut] = []

    def record(self) -> SearchRecord | None:
        """The search as it is now; None before it has begun."""
        # Each time: a resumed search may be asked for another number of trials.
        self._plan = SearchPlan.read(self._directory) or self._plan
        if self._plan is None:
            return None
        for entry in self._reader.read():
            if self._history.add(entry) and isinstance(entry.record, AttemptCut) and entry.record.reason:
                self._deaths.append(entry.record)
        return SearchRecord(self._plan.space, self._plan.settings, self._history.trials(), self._history.moves())

    def new_deaths(self) -> list[AttemptCut]:
        """What ended attempts whose ranks died or hung, of the records that `record` has read since the last call."""
        found, self._deaths = self._deaths, []
        return found

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._reader.close()
