"""What the launcher's user sees: the leader's output, the view of its progress, and the launcher's own words."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TextIO

from lockstep.report import SilentView, Status, View, choose_view

_CHUNK_BYTES = 1 << 20


class Tail:
    """Reads on in a file that another process writes, in whole lines."""

    def __init__(self, path: Path, offset: int) -> None:
        self._file = path.open("rb")
        self._file.seek(offset)
        self._begun = b""

    def size(self) -> int:
        """Length of the file."""
        return os.fstat(self._file.fileno()).st_size

    def read(self, up_to: int) -> str:
        """The lines that were finished since the last call before byte ``up_to`` of the file, "" if none were.

        At most a mebibyte, so that a rank that floods its log does not keep the launcher from its other duties.
        """
        room = min(_CHUNK_BYTES, max(0, up_to - self._file.tell()))
        whole, newline, rest = (self._begun + self._file.read(room)).rpartition(b"\n")
        self._begun = rest
        return (whole + newline).decode(errors="replace")

    def begun(self) -> str:
        """The line that is not finished yet, "" if there is none."""
        return self._begun.decode(errors="replace")

    def close(self) -> None:
        """Let the file go."""
        self._file.close()


class Screen:
    """Writes whole lines, each where it belongs; a stream that goes away, such as a closed pipe, is no trouble.

    On a terminal everything passes through one view, so that a live display and lines do not tear each other. In a
    pipe or a file the leader's output goes to ``out`` and all else to ``err``.
    """

    def __init__(self, out: TextIO, err: TextIO, env: Mapping[str, str]) -> None:
        plain = {"LOCKSTEP_VIEW": "lines"}
        self._view = choose_view(out if out.isatty() else err, env)
        self._terminal = out if out.isatty() else None
        self._shows_begun = False
        self._encoding = err.encoding
        through = isinstance(self._view, SilentView)
        self._out: View = self._view if out.isatty() and not through else choose_view(out, plain)
        self._err: View = self._view if err.isatty() and not through else choose_view(err, plain)

    def leader(self, text: str) -> None:
        """Lines of the leader's output."""
        if text:
            self._wipe()
            self._out.line(text.removesuffix("\n"))

    def begun(self, text: str) -> None:
        r"""A line of the leader's that is not finished yet, such as a bar drawn over and over with ``\r``.

        Shown on a terminal, where no progress of the run's own is; a pipe gets whole lines only.
        """
        text = text.rstrip("\r").rpartition("\r")[2]
        if self._terminal is not None and text:
            with contextlib.suppress(OSError):
                self._terminal.write(f"\r\x1b[K{text[: shutil.get_terminal_size().columns - 1]}")
                self._terminal.flush()
            self._shows_begun = True

    def say(self, text: str) -> None:
        """The launcher's own words."""
        self._wipe()
        self._err.line(text)

    def fail(self, text: str) -> None:
        """As `say`, with a mark in front that stands out."""
        encoding = self._encoding or "ascii"
        self.say(f"{'✗'.encode(encoding, 'replace').decode(encoding).replace('?', 'x')} {text}")

    def show(self, status: Status) -> None:
        """How far the run is."""
        self._wipe()
        # Two things that draw over themselves cannot share a line.
        self._terminal = None
        self._view.show(status)

    def close(self) -> None:
        """Leave the terminal as it was; lines can still follow."""
        self._wipe()
        self._view.close()

    def _wipe(self) -> None:
        if self._shows_begun and self._terminal is not None:
            with contextlib.suppress(OSError):
                self._terminal.write("\r\x1b[K")
        self._shows_begun = False
