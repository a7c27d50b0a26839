"""Which worker has which trial: a file of one record for each trial, in the order of their numbers.

The number of a trial is the position of its record. So any number of workers claim exactly as many trials as the search
has, without a server. A worker that is killed keeps its trials and continues them when it is started again; otherwise
another worker takes them over.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from lockstep.records import MOST_BYTES
from lockstep.tune.record.journal import lock_error, write_patiently

_FILE = "claims"
_FORM = re.compile(rb"[0-9]{7}\n")
_RECORD = 8  # bytes: the worker's number in decimal, and a newline


class TrialClaims:
    """The claims of one search; a change takes about 10 us, and all workers of this machine see it at once.

    Args:
        directory: of the search.
    """

    def __init__(self, directory: Path) -> None:
        self._file: Final = os.open(directory / _FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)

    def claim(self, worker: int, most: int) -> int | None:
        """Claim a new trial for ``worker`` and return its number; None if ``most`` are claimed already.

        Raises:
            SettingError: on a file system without locks.
        """
        with self.locked() as number:
            if number >= most:
                return None
            self._write(number, worker)
            return number

    def take_over(self, number: int, before: int | None, worker: int) -> bool:
        """Give the trial ``number`` of worker ``before`` to ``worker``; False if it is no longer that worker's.

        ``before`` is what `owners` says, also where that is None.
        """
        with self.locked():
            if _owner_in(os.pread(self._file, _RECORD, number * _RECORD)) != before:
                return False
            self._write(number, worker)
            return True

    @contextlib.contextmanager
    def locked(self) -> Iterator[int]:
        """Within, no other process claims a trial, also until this one is killed; gives how many are claimed.

        Raises:
            SettingError: on a file system without locks.
        """
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX)
        except OSError as error:
            raise lock_error(error) from error
        try:
            # A record that a crash has cut short is no claim: its number was not returned.
            yield self.count()
        finally:
            fcntl.flock(self._file, fcntl.LOCK_UN)

    def count(self) -> int:
        """How many trials are claimed."""
        return os.fstat(self._file).st_size // _RECORD

    def owners(self) -> tuple[int | None, ...]:
        """The worker of each trial, by number; None where the record is damaged, and the journal has to say."""
        data = os.pread(self._file, min(os.fstat(self._file).st_size, MOST_BYTES), 0)
        return tuple(_owner_in(data[at : at + _RECORD]) for at in range(0, len(data) // _RECORD * _RECORD, _RECORD))

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)

    def _write(self, number: int, worker: int) -> None:
        write_patiently("the claims", lambda: os.pwrite(self._file, _record(worker), number * _RECORD))


def _record(worker: int) -> bytes:
    return b"%07d\n" % worker


def _owner_in(record: bytes) -> int | None:
    return int(record[:-1]) if _FORM.fullmatch(record) else None
