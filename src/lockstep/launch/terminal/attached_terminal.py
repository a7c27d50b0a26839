"""The user's terminal, lent to one rank, so that debuggers, `input` and progress bars work there.

    terminal ── keys ──►  launcher  ──►  pseudo terminal ── standard input ──────────►  rank
             ◄─ screen ──           ◄──                  ◄─ standard output and error ──
                                     └─►  the rank's log

Keys are handed on unchanged, and the rank's own terminal echoes and edits them. Ctrl-C stays the launcher's, unless
the rank waits for its user: it interrupts that prompt then, as it does without a launcher.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct
import termios
from pathlib import Path
from typing import Any, Final, TextIO

from lockstep.launch.host.timed_calls import FileThread

_CHUNK_BYTES = 1 << 16
_MOST_BYTES = 1 << 20
_SIZE = struct.Struct("HHHH")


def has_terminal(*streams: TextIO | None) -> bool:
    """Whether each of the ``streams`` is a terminal."""
    return all(stream and not stream.closed and stream.isatty() for stream in streams)


class AttachedTerminal:
    """The terminal behind the launcher's standard input, as the terminal of one rank.

    Args:
        rank: that has it.
        keys: a descriptor of the terminal, open for reading.
        files: writes the rank's log.
    """

    def __init__(self, rank: int, keys: int, files: FileThread) -> None:
        self.rank: Final = rank
        self._files = files
        self._keys: int | None = keys
        self._before: list[Any] = termios.tcgetattr(keys)
        self._ours, self._theirs = -1, -1
        self._log: Any = None
        self._size = b""
        self._prompts = False
        self._lent = False

    def begin(self, log: Path) -> str:
        """A new terminal for the rank of the next generation, whose output goes to ``log`` too; returns its path."""
        self._end()
        self._ours, self._theirs = os.openpty()
        termios.tcsetattr(self._theirs, termios.TCSANOW, self._before)
        os.set_blocking(self._ours, False)
        self._size, self._log = b"", log.open("ab")
        self.prompts(False)
        self.hand_on()  # the rank may ask for the window's size at once
        return os.ttyname(self._theirs)

    @property
    def descriptors(self) -> list[int]:
        """What to wait for: keys, and the rank's output."""
        keys = [self._keys] if self._keys is not None and self._is_foreground() else []
        return [*keys, self._ours] if self._log is not None else []

    def prompts(self, prompts: bool) -> None:
        """Whether the rank waits for its user."""
        if prompts != self._prompts:
            self._prompts, self._lent = prompts, False

    def hand_on(self) -> None:
        """Hand keys and the size of the window on to the rank."""
        if self._log is None or self._keys is None:
            return
        try:
            if (size := fcntl.ioctl(self._keys, termios.TIOCGWINSZ, bytes(_SIZE.size))) != self._size:
                fcntl.ioctl(self._ours, termios.TIOCSWINSZ, size)
                self._size = size
            if not self._is_foreground():
                self._lent = False
                return
            self._lend(self._keys)
            waiting = struct.unpack("i", fcntl.ioctl(self._keys, termios.FIONREAD, bytes(4)))[0]
            if waiting:
                # Keys for a rank that does not read are lost once its terminal is full.
                with contextlib.suppress(BlockingIOError):
                    os.write(self._ours, os.read(self._keys, min(waiting, _CHUNK_BYTES)))
        except (OSError, termios.error):
            self._keys = None  # the window was closed

    def read(self) -> bytes:
        """What the rank has written since the last call, b"" if nothing; at most about a mebibyte."""
        parts: list[bytes] = []
        while self._log is not None and sum(map(len, parts)) < _MOST_BYTES:
            try:
                parts.append(os.read(self._ours, _CHUNK_BYTES))
            except OSError:  # nothing more now, or ever
                break
        data = b"".join(parts)
        if data:
            # A full disk must not keep the rank from the terminal.
            self._files.ask(lambda: self._write(data), None, of=Path(self._log.name))
        return data

    def _write(self, data: bytes) -> None:
        self._log.write(data.replace(b"\r\n", b"\n"))
        self._log.flush()

    def close(self) -> None:
        """Give the terminal back as it was."""
        self._end()
        if self._keys is not None and self._is_foreground():
            with contextlib.suppress(OSError, termios.error):
                termios.tcsetattr(self._keys, termios.TCSADRAIN, self._before)
        self._keys = None

    def _end(self) -> None:
        if self._log is not None:
            self._log.close()
            os.close(self._ours)
            os.close(self._theirs)
            self._log = None

    def _is_foreground(self) -> bool:
        # A process in the background that reads a terminal or sets it up is stopped.
        try:
            return self._keys is not None and os.tcgetpgrp(self._keys) == os.getpgrp()
        except OSError:
            return False

    def _lend(self, keys: int) -> None:
        """Have the terminal give each key as it is. A shell that had the terminal meanwhile has undone that."""
        if self._lent and not termios.tcgetattr(keys)[3] & termios.ICANON:
            return
        mode = list(self._before)
        mode[0] &= ~(termios.ICRNL | termios.INLCR | termios.IXON)
        mode[3] &= ~(termios.ICANON | termios.ECHO | termios.IEXTEN)
        if self._prompts:
            mode[3] &= ~termios.ISIG
        mode[6] = list(mode[6])
        mode[6][termios.VMIN], mode[6][termios.VTIME] = 1, 0
        termios.tcsetattr(keys, termios.TCSADRAIN, mode)
        self._lent = True
