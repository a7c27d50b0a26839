"""The launcher's output for its user: the leader's output, the view of its progress, and the launcher's messages."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TextIO

from lockstep.report import SilentView, Status, View, choose_view, ignoring_write_errors, is_notebooks

_CHUNK_BYTES = 1 << 20
#: A line of the stack of torch's C++ code, and what stands above these lines.
_CPP_FRAME = re.compile(r"frame #\d+: .+ \(0x[0-9a-f]+ in .+\)\s*")
_CPP_FRAMES_BEGIN = re.compile(r"Exception raised from .+ \(most recent call first\):\s*")


class Tail:
    """Follows a file that another process writes, in whole lines."""

    def __init__(self, path: Path, offset: int) -> None:
        self._file = path.open("rb")
        self._at = offset
        self._unfinished = b""

    def size(self) -> int:
        """The length of the file, in bytes."""
        return os.fstat(self._file.fileno()).st_size

    def new(self, up_to: int) -> bytes:
        """What `take` has not had yet of the file before its byte ``up_to``; changes nothing.

        At most a mebibyte, so that a rank that writes much does not keep the launcher from its other tasks.
        """
        return os.pread(self._file.fileno(), min(_CHUNK_BYTES, max(0, up_to - self._at)), self._at)

    def take(self, new: bytes) -> str:
        """The lines that ``new`` finishes, "" if none; each byte that is no UTF-8 in them is a surrogate."""
        self._at += len(new)
        whole, newline, rest = (self._unfinished + new).rpartition(b"\n")
        self._unfinished = rest
        return (whole + newline).decode(errors="surrogateescape")

    def read(self, up_to: int) -> str:
        """The lines that were finished since the last call before byte ``up_to`` of the file, "" if none were."""
        return self.take(self.new(up_to))

    def unfinished(self) -> str:
        """The line that is not finished yet, "" if there is none."""
        return self._unfinished.decode(errors="surrogateescape")

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class Screen:
    """Writes whole lines, each to its stream; a stream that was closed, such as a pipe, is ignored.

    On a terminal everything goes through one view, so that a live display and lines do not mix. In a pipe or a file
    the leader's output goes to ``out`` as it is, and all else to ``err``. In a notebook, which marks all of ``err`` as
    errors, only failures go there. Stacks of torch's C++ code are left out.
    """

    def __init__(self, out: TextIO, err: TextIO, env: Mapping[str, str]) -> None:
        plain = {"LOCKSTEP_VIEW": "lines"}
        self._view = choose_view(out if out.isatty() or is_notebooks(out) else err, env)
        self._terminal = out if out.isatty() else None
        self._pipe = None if out.isatty() else out
        self._piped = 0  # how much of the leader's unfinished line is in the pipe
        self._unfinished = ""  # a line that is shown and will be drawn over
        self._attached = b""  # a line of the attached rank that is not finished, and not shown
        self._torn = False  # the cursor stands behind such a line that is shown
        self._status: Status | None = None  # shown last
        self._plain_mark = env.get("TERM", "").lower() in ("dumb", "unknown")
        self._encoding = err.encoding
        through = isinstance(self._view, SilentView)
        self._out: View = self._view if out.isatty() and not through else choose_view(out, plain)
        self._err: View = self._view if err.isatty() and not through else choose_view(err, plain)
        self._said = self._out if is_notebooks(out) else self._err

    def leader(self, text: str) -> None:
        """Show lines of the leader's output, the last of which may have no end."""
        if not text:
            return
        if self._pipe is not None:
            self._pass_on(self._pipe, _without_cpp_frames(text[self._piped :]))
            self._piped = 0
        else:
            self._wipe()
            self._out.line(_readable(_without_cpp_frames(text)).removesuffix("\n"))

    def unfinished(self, text: str) -> None:
        r"""Show a line of the leader's that is not finished yet, such as a progress bar with a ``\r`` for each state.

        A pipe gets what stands before the last ``\r``. A terminal shows the last state, as long as the run shows no
        progress of its own.
        """
        if self._pipe is not None:
            states = text.rfind("\r") + 1
            self._pass_on(self._pipe, text[self._piped : states])
            self._piped = max(self._piped, states)
        text = _readable(text.rstrip("\r").rpartition("\r")[2])
        if self._terminal is not None and text and text != self._unfinished:
            with contextlib.suppress(OSError):
                self._terminal.write(f"\r\x1b[K{text[: shutil.get_terminal_size().columns - 1]}")
                self._terminal.flush()
            self._unfinished = text

    def say(self, text: str) -> None:
        """Show a message of the launcher."""
        self._wipe()
        self._said.line(_without_cpp_frames(text))

    def fail(self, text: str) -> None:
        """Show a message as `say` does, with a mark in front of it."""
        encoding = "ascii" if self._plain_mark else self._encoding or "ascii"
        mark = "✗".encode(encoding, "replace").decode(encoding).replace("?", "x")
        self._wipe()
        self._err.line(_without_cpp_frames(f"{mark} {text}"))

    def attached(self, data: bytes, out: TextIO, *, prompts: bool) -> None:
        """Show what the rank that has the terminal ``out`` wrote: as it is, or in whole lines above the run's progress.

        As long as it ``prompts``, that is waits for its user, nothing else is drawn.
        """
        if self._status is not None and not prompts and not self._torn:
            whole, newline, self._attached = (self._attached + data).rpartition(b"\n")
            if newline:
                self._out.line(whole.replace(b"\r\n", b"\n").decode(errors="replace"))
            return
        data, self._attached = self._attached + data, b""
        if data:
            # Both terminals, the rank's and this one, turn a new line into two signs.
            data = data.replace(b"\r\n", b"\n")
            if not self._torn:
                self._wipe()
                self._view.close()
            with contextlib.suppress(OSError):
                out.flush()
                unwritten = memoryview(data)
                while unwritten:
                    unwritten = unwritten[os.write(out.fileno(), unwritten) :]
            self._torn = not data.endswith(b"\n")

    def show(self, status: Status) -> None:
        """Show how far the run is, unless the attached rank has not finished its line."""
        if self._torn:
            return
        self._status = status
        self._wipe()
        # Two displays that draw over themselves cannot share a line.
        self._terminal = None
        self._view.show(status)

    def close(self) -> None:
        """Restore the terminal; lines can still be shown afterwards."""
        self._wipe()
        self._view.close()

    @staticmethod
    def _pass_on(pipe: TextIO, text: str) -> None:
        """Have ``pipe`` hold what ``text`` was read from, to the byte, whatever the locale."""
        if text and not pipe.closed:
            with ignoring_write_errors(pipe):
                if (raw := getattr(pipe, "buffer", None)) is None:  # a stream in memory, as notebooks have
                    pipe.write(_readable(text))
                else:
                    raw.write(text.encode(errors="surrogateescape"))
                pipe.flush()

    def _wipe(self) -> None:
        if self._torn:
            self._torn = False
            self._out.line("")
        if self._unfinished and self._terminal is not None:
            with contextlib.suppress(OSError):
                self._terminal.write("\r\x1b[K")
                self._terminal.flush()
        self._unfinished = ""


def say(text: str) -> None:
    """Tell the user, where nothing is shown yet."""
    Screen(sys.stdout, sys.stderr, os.environ).say(text)


def _readable(text: str) -> str:
    """``text`` with a sign in the place of each byte that is no UTF-8."""
    return text.encode(errors="surrogateescape").decode(errors="replace")


def _without_cpp_frames(text: str) -> str:
    """``text`` without the stacks that torch's C++ code adds to its errors; in the rank's log they are whole."""
    if "frame #" not in text:
        return text
    kept = []
    for line in text.splitlines(keepends=True):
        if _CPP_FRAMES_BEGIN.fullmatch(line):
            kept.append(f"(the stack of torch's C++ code is in the log){line[len(line.rstrip()) :]}")
        elif not _CPP_FRAME.fullmatch(line):
            kept.append(line)
    return "".join(kept)
