"""The record of a run: ``metrics.jsonl``, one line of JSON for each time the run logged.

    {"step": 100, "epoch": 1, "wall_s": 1767225600.125, "loss": 0.69, "accuracy": 0.81}
    {"step": 200, "epoch": 2, "wall_s": 1767225612.5, "loss": null, "accuracy": 0.1}

Line by line it can be searched, followed while it grows, and read by whatever reads JSON lines, such as
``pandas.read_json(path, lines=True)``: one row for each time, one column of numbers for each name.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import re
import stat
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from lockstep.errors import SettingError, UsageError
from lockstep.formatting import plural
from lockstep.records import MOST_GROWN, of_kind, read_bytes, value_in

_RESERVED = ("step", "wall_s")
_MOST_WAITING = 10_000  # records for which there is no room
_BEGINNING = b'{"step": '  # of the first record, and so of the file
_STEP = re.compile(rb'\{"step": (\d+),')


class MetricsFile:
    r"""What a run logged, appended to a file that reads as one run however often the run was interrupted.

    Opening it for a run that goes on after ``step`` steps cuts off what was logged after that step, and a last line
    that a crash left unfinished; the run will log those again. What was logged at that very step stays, and if the
    run repeats it, as when it evaluates again, it is not written twice. At step 0 the file starts over. If the
    unfinished line is of an earlier step, no run logs it again, and ``say`` gets a line; also for each line before that
    is no record, such as one with a bit that the disk has lost, which stays as it is.

    Each record is one whole line, written at once and visible to readers at once: ``step`` (optimizer steps done),
    ``epoch`` (from 1), ``wall_s`` (seconds since 1970) and the values by name. JSON has no number for nan, which is
    written as ``null``; an infinity is written as a number greater than any float, and readers find the infinity.

    A file that cannot be written, such as on a full disk, never stops a run: ``say`` gets one line, and records wait
    in memory, the last 10 000 of them, until the file takes them. Only the leader opens it.

    Args:
        path: the file; made with its directories if there is none.
        step: optimizer steps that the run has done.
        say: takes a line for the user.
        wall: the clock, in seconds since 1970.

    Raises:
        SettingError: if ``path`` is something else than a record.
    """

    def __init__(
        self, path: Path, *, step: int, say: Callable[[str], None], wall: Callable[[], float] = time.time
    ) -> None:
        self._path, self._say, self._wall = path, say, wall
        self._told_failure = self._told_end_of_it = False
        self._at = step
        self._kept: Counter[tuple[str, ...]] = Counter()
        self._end = 0  # bytes of the whole records
        self._file: int | None = None
        self._waiting: deque[_Record] = deque(maxlen=_MOST_WAITING)  # for the file to take them
        self._lost = 0  # records that have waited too long
        self._write_waiting()

    def write(self, step: int, epoch: int, values: Mapping[str, object]) -> dict[str, float] | None:
        """Append what was measured after ``step`` steps, in ``epoch``.

        Args:
            step: optimizer steps done; never less than before.
            epoch: the epoch in work, from 1; a value named ``epoch`` takes its place.
            values: numbers and truth values; an array or tensor of one element counts as that element.

        Returns:
            The record, also where it waits; None for one that the file holds already.

        Raises:
            UsageError: for a value that is no number, or a name that the record itself uses.
        """
        row = record_row(step, epoch, values, self._wall())
        line = b"{%s}\n" % ", ".join(f"{json.dumps(name)}: {_text(value)}" for name, value in row.items()).encode()
        record = _Record(step, _names(row), line)
        if self._file is not None and self._is_there(record):
            return None
        self._lost += len(self._waiting) == _MOST_WAITING
        self._waiting.append(record)
        self._write_waiting()
        return row

    def flush(self) -> None:
        """What the file has taken survives a power cut afterwards, unless its file system cannot do that."""
        if self._file is not None:
            with contextlib.suppress(OSError):
                os.fsync(self._file)

    def close(self) -> None:
        """Close the file, once it has taken what waits; what it still does not take is lost, and that is said."""
        self._write_waiting()
        if self._waiting:
            self._say(f"{plural(len(self._waiting) + self._lost, 'record')} of metrics not written to {self._path}")
        if self._file is not None:
            os.close(self._file)

    @staticmethod
    def read(path: Path) -> list[dict[str, float]]:
        """Every whole record, in order, as numbers by name; lines that are no records are left out.

        Raises:
            SettingError: if ``path`` is something else than a record.
            OSError: if it cannot be read.
        """
        try:
            return [line.row for line in _lines(read_bytes(path, MOST_GROWN), path) if line.row is not None]
        except ValueError as error:
            raise SettingError(str(error)) from None

    def _is_there(self, record: _Record) -> bool:
        """Whether the file holds ``record`` since before this run went on; each of those is found once."""
        if record.step > self._at:
            self._kept.clear()
        there = self._kept[record.names] > 0
        self._kept[record.names] -= there
        return there

    def _write_waiting(self) -> None:
        """Have the file take what waits, as far as it does."""
        waited = len(self._waiting)
        try:
            file = self._open() if self._file is None else self._file
            while self._waiting:
                if not self._is_there(self._waiting[0]):
                    self._append(file, self._waiting[0].line)
                self._waiting.popleft()
        except OSError as error:
            # Once: a disk that is almost full takes a record now and then.
            if not self._told_failure:
                self._told_failure = True
                self._say(
                    f"metrics are not recorded in {self._path}: {error.strerror}; training goes on, and records wait "
                    f"in memory, the last {_MOST_WAITING}, until it works again"
                )
            return
        if self._told_failure and not self._told_end_of_it:
            self._told_end_of_it = True
            lost = f"; {plural(self._lost, 'record')} before these {'are' if self._lost > 1 else 'is'} lost"
            self._say(
                f"metrics are recorded in {self._path} again: {plural(waited, 'record')} had waited"
                + (lost if self._lost else "")
            )
        self._lost = 0

    def _open(self) -> int:
        """Open the file, find the end of what stays, and cut the rest off.

        Raises:
            SettingError: if it is something else than a record.
            OSError: if that is not possible now; nothing is open then.
        """
        # Steps never fall within the file, so what stays is its head. Cutting needs no room on the disk, happens
        # at once or not at all, and lets a reader that follows the file go on.
        self._path.parent.mkdir(parents=True, exist_ok=True)
        file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK, 0o666)
        with contextlib.ExitStack() as undo:
            undo.callback(os.close, file)
            found = os.fstat(file)
            if not stat.S_ISREG(found.st_mode):  # from a pipe nothing may come for ever
                raise OSError(errno.EINVAL, "no regular file", str(self._path))
            if found.st_size > MOST_GROWN:
                raise OSError(errno.EFBIG, f"{found.st_size} bytes, which no run has written", str(self._path))
            with open(file, "rb", closefd=False) as stream:
                content = stream.read()
            lines = list(_lines(content, self._path))  # also at step 0: another's file is refused, not emptied
            self._end = 0
            self._kept.clear()
            damaged = []
            for line in lines if self._at > 0 else ():
                if line.row is None:
                    damaged.append(line.begin)
                    continue
                if line.row["step"] > self._at:
                    break
                self._end = line.end
                if line.row["step"] == self._at:
                    self._kept[_names(line.row)] += 1
            self._say_lost(content, damaged)
            self._append(file, b"")
            undo.pop_all()
        self._file = file
        return file

    def _say_lost(self, content: bytes, damaged: Sequence[int]) -> None:
        """Tell of the lines that begin there, are no records, and will not be logged again."""
        for begin in damaged:
            step = _STEP.match(content, begin)
            if begin < self._end or (step is not None and int(step[1]) < self._at):
                which = "" if step is None else f" of step {int(step[1])}"
                self._say(f"a record{which} in {self._path} is damaged, and its values are lost")

    def _append(self, file: int, line: bytes) -> None:
        # What a write cut short by a full disk has left behind the last whole record goes first.
        if os.fstat(file).st_size > self._end:
            os.ftruncate(file, self._end)
        written = 0
        while written < len(line):
            written += os.pwrite(file, line[written:], self._end + written)
        self._end += written


class _Record(NamedTuple):
    """A line of the file."""

    step: int
    names: tuple[str, ...]
    line: bytes


def record_row(step: int, epoch: int, values: Mapping[str, object], wall_s: float) -> dict[str, float]:
    """One record; see `MetricsFile.write`.

    Raises:
        UsageError: for a value that is no number, or a name that the record itself uses.
    """
    row: dict[str, float] = {"step": step, "epoch": epoch, "wall_s": round(wall_s, 3)}
    for name, value in values.items():
        if name in _RESERVED:
            raise UsageError(f"log({name}=...): the record writes {name} itself; give the value another name")
        row[name] = _single(name, value)
    return row


class _Line(NamedTuple):
    """A line of the file as it is found."""

    begin: int
    end: int
    row: dict[str, float] | None  #: None if it is no record, as where a crash left it unfinished


def _lines(content: bytes, path: Path) -> Iterator[_Line]:
    """Each line."""
    first, newline, _ = content.partition(b"\n")
    if newline and not first.startswith(_BEGINNING):  # else a crash may have left anything of it
        raise SettingError(
            f"{path} is no record of a run (its first line is {first[:60]!r}, and would begin with a step); "
            "move it away or choose another run directory"
        )
    end = 0
    for line in content.splitlines(keepends=True):
        row = _parsed(line) if line.endswith(b"\n") else {}
        begin, end = end, end + len(line)
        yield _Line(begin, end, {name: math.nan if v is None else v for name, v in row.items()} or None)


def _parsed(line: bytes) -> dict[str, Any]:
    try:
        row: dict[str, Any] = of_kind(dict[str, float | bool | None], value_in(line))
    except ValueError:
        return {}
    return row if type(row.get("step")) in (int, float) else {}


def _names(row: Mapping[str, object]) -> tuple[str, ...]:
    return tuple(sorted(row))


def _text(value: float) -> str:
    """``value`` as JSON; nan as null, which tables hold for what is not there."""
    if not math.isfinite(value):
        return "null" if math.isnan(value) else f"{'-' if value < 0 else ''}1e999"
    return json.dumps(value)


def _single(name: str, value: object) -> float:
    item = getattr(value, "item", None)  # of NumPy or torch
    if item is not None:
        try:
            value = item()
        except (ValueError, RuntimeError):
            shape = tuple(getattr(value, "shape", ()))
            raise UsageError(f"log({name}=...): it has shape {shape}; log one number, such as its mean") from None
    if not isinstance(value, (bool, int, float)):
        raise UsageError(f"log({name}={value!r}): the record holds numbers; text belongs on the screen")
    return value
