"""A rank's log as Python's streams write to it: one that cannot be written ends no training.

print(...)  ──►  LogStream  ──►  the log
                    │   a full disk, an error of the device, a directory that is not there
                    └─ at most `_MOST_BYTES` are kept, and written before whatever comes next, once it works again
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from typing import Any, Final

_MOST_BYTES: Final = 1 << 20


class LogStream(io.FileIO):
    """What is written to the standard ``descriptor``, 1 or 2, of this process; `write` never fails.

    Args:
        descriptor: refers to the log, or to nothing if that could not be opened.
        log: to be opened at the next try; "": it is open.
        tell: is told once, in one line, that the log cannot be written.
    """

    def __init__(self, descriptor: int, log: str, tell: Callable[[str], None]) -> None:
        super().__init__(descriptor, "w", closefd=False)
        self._descriptor: Final = descriptor
        self._missing = log
        self._tell: Final = tell
        self._told = False
        self._kept = bytearray()  # what is not in the log
        self._lost = 0  # bytes that were kept before these, and are not any more
        self._process = os.getpid()

    def write(self, data: Any, /) -> int:
        """Write ``data`` after all that was kept, or keep it, too; returns its length."""
        if os.getpid() != self._process:  # a copy of the rank, which writes what is kept itself
            self._process, self._lost = os.getpid(), 0
            self._kept.clear()
        whole = memoryview(data).cast("B")
        self._kept += whole
        self._write_kept()
        return len(whole)

    def _write_kept(self) -> None:
        try:
            if self._missing:
                self._open_log()
            if self._lost:
                super().write(f"--- {self._lost} bytes could not be written here, and are lost ---\n".encode())
                self._lost = 0
            while self._kept and (done := super().write(self._kept)):
                del self._kept[:done]
        except OSError as error:
            self._keep_the_last()
            if not self._told:
                self._told = True
                self._tell(
                    f"logs cannot be written ({error.strerror}): training goes on, and the last "
                    f"{_MOST_BYTES >> 20} MiB that each rank prints are kept until it works again"
                )

    def _open_log(self) -> None:
        log = os.open(self._missing, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        os.dup2(log, self._descriptor)
        os.close(log)
        self._missing = ""

    def _keep_the_last(self) -> None:
        """Of what is kept, drop whole lines from the beginning, as far as there are too many."""
        if (excess := len(self._kept) - _MOST_BYTES) > 0:
            gone = self._kept.find(b"\n", excess - 1) + 1 or excess
            self._lost += gone
            del self._kept[:gone]
