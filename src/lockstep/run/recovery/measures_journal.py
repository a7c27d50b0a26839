"""A journal of a rank's measured values, step by step, in a file that outlives the rank's process.

The means of an epoch are sums over all ranks, and each rank holds a part, which would be lost with the rank. So each
rank writes its part into a file for the next generation, at a cost of some microseconds a step:

    area 0   sums after step 40 | step 41: loss 0.71 of 8 | step 42: ... | ... | step 296: ...     full
    area 1   sums after step 296 | step 297: ... |                                                  in use
                                                  ▲ noted: 297
    counts   step 296: after 301 notes | step 297: after 302 notes

The values of a step are written before the step's gradients are summed: once a rank has finished a step, every other
rank has noted its part. The areas are mapped into memory: a killed process leaves all that it has written.

All writes may be repeated elsewhere, in their order. Such a copy may be behind, and is valid for a step only if it has
as many notes as ranks that have finished the step: a step is noted once for each loss, and again if it was discarded.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

from lockstep.records import of_kind, read_bytes, value_in
from lockstep.run.metrics.metric_means import MetricMeans, State, plus

_AREA_BYTES = 64 << 10
_SUMS_BYTES = 32 << 10  # of about 90 means
_HEADER = struct.Struct("<qqqiiI")  # step of the sums, noted, late, entries, bytes of the sums, their CRC-32
_EMPTY = _HEADER.pack(-1, -1, -1, 0, 0, 0)
_ENTRY = struct.Struct("<qqdqq")  # step, number of the name, value, weight, items
_NOTED = struct.Struct("<qqi")
_STEP = struct.Struct("<q")
_NOTED_AT = 8
_ENTRIES = (_AREA_BYTES - _HEADER.size - _SUMS_BYTES) // _ENTRY.size
_ENTRIES_AT = _HEADER.size + _SUMS_BYTES
_COUNT = struct.Struct("<qq")  # step, number of notes after the step's last note; for odd and for even steps
_COUNTS_AT = 2 * _AREA_BYTES
#: The size of a journal's file.
JOURNAL_BYTES: Final = _COUNTS_AT + 2 * _COUNT.size
_NEVER = -1


class Measured(NamedTuple):
    """A measured value, and its weight in the mean."""

    name: str
    value: float
    weight: int  #: factor of the value
    items: int  #: added to the divisor of the sum


@dataclass(frozen=True, slots=True)
class Sums:
    """The sums of means: those of the pass, and those since means were logged last."""

    train: State
    recent: State


@dataclass(frozen=True, slots=True)
class JournalArea:
    """The content of an area of a journal."""

    begins: int  #: the step after which the sums were taken
    noted: int  #: the last step of which all values from before its gradients' sum are written
    late: int  #: the last step to which values were added after its gradients' sum
    sums: Sums
    entries: tuple[tuple[int, Measured], ...]  #: each with its step


@dataclass(frozen=True, slots=True)
class Journal:
    """The content of a journal."""

    areas: tuple[JournalArea, ...] = ()  #: whole areas
    counts: Mapping[int, int] = field(default_factory=dict)  #: notes after each of the last two steps' last note


def journal_memory(path: Path) -> mmap.mmap:
    """Memory of an empty journal, in a new file.

    Raises:
        OSError: if the file cannot be made.
    """
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        # Not a sparse file: if memory is full later, the first write into a hole ends in SIGBUS.
        os.posix_fallocate(file, 0, JOURNAL_BYTES)
        memory = mmap.mmap(file, JOURNAL_BYTES)
    except OSError:
        path.unlink()  # so that a later call can try again
        raise
    finally:
        os.close(file)
    for area in range(2):
        begin = area * _AREA_BYTES
        memory[begin : begin + _HEADER.size] = _EMPTY
    for begin in range(_COUNTS_AT, JOURNAL_BYTES, _COUNT.size):
        memory[begin : begin + _COUNT.size] = _COUNT.pack(_NEVER, 0)
    return memory


class MeasuresJournal:
    """The journal of a rank, to be written.

    Args:
        path: a new file, best in memory.
        repeat: called with the offset and bytes of each write: repeated in order in another `journal_memory`, the
            writes give the same journal.

    Raises:
        OSError: if it cannot be made.
    """

    def __init__(self, path: Path, repeat: Callable[[int, bytes], None] | None = None) -> None:
        self._memory: Final = journal_memory(path)
        self._repeat: Final = repeat
        self._notes = 0  # number of notes, without late ones
        self._at = 0  # the area in use, as an offset
        self._began = (_NEVER, False)  # the step after which the area begins, and whether with late values
        self._names: dict[str, int] = {}
        self._entries = _ENTRIES + 1  # in the area; too many for more, so the first step begins with sums
        self._late = _NEVER

    def takes(self, measured: Sequence[Measured]) -> bool:
        """Whether the area in use has room for ``measured``; if not, `begin` must be called first."""
        fits = self._entries + len(measured) <= _ENTRIES
        return fits and all(one.name in self._names for one in measured)

    def begin(self, step: int, sums: Sums, names: Iterable[str], *, late: bool = False) -> None:
        """Use the other area from now on, beginning with the ``sums`` after ``step``, the last finished step.

        Notes of later steps are taken back: these are incomplete, or their step was discarded.

        Args:
            step: steps done.
            sums: after these steps.
            names: of values to be measured.
            late: whether values of ``step`` came after its gradients were summed.
        """
        # Not that of the last step: an area that begins with late values of a step would be taken for an area of its
        # pass.
        self._late = step if late else _NEVER
        self._names = {name: number for number, name in enumerate(names)}
        text = json.dumps([list(self._names), sums.train, sums.recent]).encode()
        if self._began != (step, False):  # else the other area has this step, and is still needed
            self._take_back(step)
            self._at = _AREA_BYTES - self._at
        self._began = (step, late)
        self._write(self._at, _EMPTY)
        if len(text) > _SUMS_BYTES:
            self._entries = _ENTRIES + 1  # the area stays empty, and only the checkpoint is left
            return
        self._write(self._at + _HEADER.size, text)
        self._entries = 0
        self._write(self._at, _HEADER.pack(step, step, self._late, 0, len(text), zlib.crc32(text)))

    def _take_back(self, step: int) -> None:
        (noted,) = _STEP.unpack_from(self._memory, self._at + _NOTED_AT)
        if noted > step:
            self._write(self._at + _NOTED_AT, _STEP.pack(step))

    def note(self, step: int, measured: Sequence[Measured], *, late: bool = False) -> None:
        """Note ``measured`` of the current ``step``; ``late``: measured after the step's gradients were summed."""
        place = self._at + _ENTRIES_AT + self._entries * _ENTRY.size
        if self._entries + len(measured) > _ENTRIES:
            self._write(self._at + _NOTED_AT, _NOTED.pack(_NEVER, _NEVER, 0))
            return
        if measured:
            entries = [_ENTRY.pack(step, self._names[one.name], *one[1:]) for one in measured]
            self._write(place, b"".join(entries))
        self._entries += len(measured)
        if late:
            self._late = step
        # Only now, so that entries cut short by a kill do not count.
        self._write(self._at + _NOTED_AT, _NOTED.pack(step, self._late, self._entries))
        if not late:
            self._notes += 1
            # Last of all: a copy with this count has all notes of the step.
            self._write(_COUNTS_AT + step % 2 * _COUNT.size, _COUNT.pack(step, self._notes))

    def _write(self, at: int, content: bytes) -> None:
        self._memory[at : at + len(content)] = content
        if self._repeat is not None:
            self._repeat(at, content)

    def close(self) -> None:
        """Close the journal; the file stays."""
        self._memory.close()


def read_journal(path: Path) -> Journal:
    """The content of the journal at ``path``; empty if there is no such file."""
    try:
        return journal_in(read_bytes(path))
    except (OSError, ValueError):
        return Journal()


def journal_in(content: bytes) -> Journal:
    """The content of a journal's bytes; empty if there are too few bytes."""
    if len(content) < JOURNAL_BYTES:
        return Journal()
    found = (_area(content[start : start + _AREA_BYTES]) for start in (0, _AREA_BYTES))
    counts = dict(_COUNT.iter_unpack(content[_COUNTS_AT:JOURNAL_BYTES]))
    return Journal(tuple(area for area in found if area is not None), counts)


def _area(content: bytes) -> JournalArea | None:
    begins, noted, late, entries, length, crc32 = _HEADER.unpack_from(content)
    text = content[_HEADER.size : _HEADER.size + length]
    if begins == _NEVER or noted < begins or zlib.crc32(text) != crc32:
        return None
    found = []
    try:
        names, train, recent = of_kind(tuple[list[str], Any, Any], value_in(text), "a journal")
        for number in range(entries):
            step, name, *values = _ENTRY.unpack_from(content, _ENTRIES_AT + number * _ENTRY.size)
            found.append((step, Measured(names[name], *values)))
    except (ValueError, IndexError, struct.error):
        return None
    return JournalArea(begins, noted, late, Sums(train, recent), tuple(found))


@dataclass(frozen=True, slots=True)
class Part:
    """The measured values of a rank up to a step."""

    sums: Sums
    late: bool  #: whether values of this step came after its gradients were summed
    closed: bool  #: whether no value of this step can have come later


def part_after(journal: Journal, step: int, logged: int) -> Part | None:
    """A rank's part after ``step``; None if the rank's ``journal`` does not hold it.

    Args:
        journal: of this rank.
        step: steps done.
        logged: the last step before ``step`` after which measured values were logged, and ``recent`` began anew.
    """
    areas = journal.areas
    for area in areas:
        # An area that begins right after the step has the sums of the pass that begins there.
        if not area.begins < step <= area.noted and not area.begins == step == area.late:
            continue
        if area.begins < step and any(other.begins == step == other.late for other in areas):
            continue  # the other area has the late values
        train, recent = MetricMeans(), MetricMeans()
        for at, (name, value, weight, items) in area.entries:
            for means, after in ((train, area.begins), (recent, logged)):
                if after < at <= step:
                    means.add_number(name, value, weight, items)
        before = area.sums.recent if area.begins > logged else {}
        sums = Sums(plus(area.sums.train, train.own()), plus(before, recent.own()))
        closed = any(other.late >= step or other.noted > step for other in areas)
        return Part(sums, late=area.late == step, closed=closed)
    return None


def total(parts: Iterable[Sums]) -> Sums:
    """The sums over all ranks."""
    train: Mapping[str, list[int | float]] = {}
    recent: Mapping[str, list[int | float]] = {}
    for part in parts:
        train, recent = plus(train, part.train), plus(recent, part.recent)
    return Sums(dict(train), dict(recent))
