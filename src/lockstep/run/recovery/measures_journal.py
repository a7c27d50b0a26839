"""What one rank alone has measured, step by step, in a file that outlives its process.

The means of an epoch are sums over all ranks, and each rank holds a part of them: it would be lost with the rank. So
each rank writes its part down, at a cost of some microseconds a step, where the next generation finds it:

    noted   step 45 | step 43 | step 44      each has the sums up to this step, and is written before its gradients are
                                             summed: where one rank has finished a step, every other one had noted it
    late    step 42 | step 43 | step 41      the same for what a body measures after that, where one does

Ranks are at most a step apart, so what may be needed of a rank is there, whatever the kill has cut short. The file is
mapped into memory: a process that is killed leaves what it has written.

All writes may be repeated elsewhere, in their order. Such a copy may be behind, and tells of a step only if that was
noted there as often as by the ranks that have finished it: once for each loss, and again if it was discarded.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from lockstep.records import of_kind, read_bytes, value_in
from lockstep.run.metrics.metric_means import Added, MetricMeans, State, plus

_KEPT = 3  # steps of each kind
_SLOT_BYTES = 64 << 10  # of about 90 means, and some hundred values of one step
_HEADER = struct.Struct("<qiiI")  # step, notes, bytes that follow, CRC-32 of those and of what is before it
_SUMMED_BYTES = 16
#: What the file of a journal takes.
JOURNAL_BYTES: Final = 2 * _KEPT * _SLOT_BYTES


@dataclass(frozen=True, slots=True)
class Sums:
    """Means that are being measured: those of the pass, and those since they were logged last."""

    train: State
    recent: State


@dataclass(frozen=True, slots=True)
class Part:
    """What one rank has measured up to a step."""

    step: int
    sums: Sums
    notes: int  #: how often it was noted before its gradients were summed
    late: bool  #: whether something of this step came after its gradients were summed


def journal_memory(path: Path) -> mmap.mmap:
    """Memory for a journal that nothing was written to, in a new file.

    Raises:
        OSError: if it cannot be made.
    """
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        # Not a file with holes: where the memory is full by then, the first write into one ends in SIGBUS.
        os.posix_fallocate(file, 0, JOURNAL_BYTES)
        return mmap.mmap(file, JOURNAL_BYTES)
    except OSError:
        path.unlink()  # it may be tried again
        raise
    finally:
        os.close(file)


class MeasuresJournal:
    """Written by one rank.

    Args:
        path: a new file, best in memory.
        repeat: called with each write, where it begins and its bytes: made one after the other into another
            `journal_memory`, they give the same journal.

    Raises:
        OSError: if it cannot be made.
    """

    def __init__(self, path: Path, repeat: Callable[[int, bytes], None] | None = None) -> None:
        self._memory: Final = journal_memory(path)
        self._repeat: Final = repeat
        self._step = self._notes = 0  # the step that was noted last, and how often

    def note(self, step: int, sums: Sums, measured: Iterable[Added] = (), *, late: bool = False) -> None:
        """``sums``, and ``measured`` beside them, are what was measured up to ``step``.

        ``late``: some of it after the gradients of the step were summed. Where there is no room for all, nothing is
        known of the step.
        """
        if not late:
            self._step, self._notes = step, self._notes + 1 if step == self._step else 1
        beside = [(name, float(value), *map(int, counts)) for name, value, *counts in measured]
        text = json.dumps((sums.train, sums.recent, beside), separators=(",", ":")).encode()
        text = text if len(text) <= _SLOT_BYTES - _HEADER.size else b""
        said = _HEADER.pack(step, self._notes, len(text), 0)[:_SUMMED_BYTES]
        content = said + struct.pack("<I", zlib.crc32(text, zlib.crc32(said))) + text
        at = (step % _KEPT + late * _KEPT) * _SLOT_BYTES
        self._memory[at : at + len(content)] = content
        if self._repeat is not None:
            self._repeat(at, content)

    def close(self) -> None:
        """The file stays as it is."""
        self._memory.close()


def read_journal(path: Path) -> tuple[Part, ...]:
    """What is in the journal at ``path``; nothing, if there is none."""
    try:
        return journal_in(read_bytes(path))
    except (OSError, ValueError):
        return ()


def journal_in(content: bytes) -> tuple[Part, ...]:
    """What is in the bytes of a journal, as far as it is whole."""
    slots = range(0, JOURNAL_BYTES, _SLOT_BYTES) if len(content) >= JOURNAL_BYTES else ()
    found = (_part(content[at : at + _SLOT_BYTES], late=at >= _KEPT * _SLOT_BYTES) for at in slots)
    return tuple(part for part in found if part is not None)


def _part(slot: bytes, *, late: bool) -> Part | None:
    step, notes, length, crc32 = _HEADER.unpack_from(slot)
    text = slot[_HEADER.size : _HEADER.size + max(0, length)]
    if not text or zlib.crc32(text, zlib.crc32(slot[:_SUMMED_BYTES])) != crc32:
        return None
    means = MetricMeans()
    try:
        train, recent, measured = of_kind(tuple[State, State, list[Any]], value_in(text), "a journal")
        for name, value, weight, items in measured:
            means.add_number(name, value, weight, items)
        more = means.own()
        return Part(step, Sums(plus(train, more), plus(recent, more)), notes, late)
    except (TypeError, ValueError):  # whole, and not by a rank
        return None


def part_after(journal: Sequence[Part], step: int) -> Part | None:
    """A rank's part after ``step``, with what came late; None if its ``journal`` does not say."""
    return max((part for part in journal if part.step == step), key=lambda part: part.late, default=None)


def is_closed(journal: Iterable[Part], step: int) -> bool:
    """Whether nothing of ``step`` can have come later than its ``journal`` says."""
    return any(part.step > step or (part.late and part.step == step) for part in journal)


def total(parts: Iterable[Sums]) -> Sums:
    """The sums over all ranks."""
    train: State = {}
    recent: State = {}
    for part in parts:
        train, recent = plus(train, part.train), plus(recent, part.recent)
    return Sums(train, recent)
