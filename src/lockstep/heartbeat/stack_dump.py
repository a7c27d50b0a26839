"""The Python stacks of a process, also of one that is stuck in compiled code and holds Python's lock.

A signal's handler writes them, from C, without the lock. It is inherited by processes that a rank forks, such as those
of a loader, which then write to the same file: one is asked at a time.
"""

from __future__ import annotations

import faulthandler
import os
import re
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from lockstep.heartbeat.frames import own_lines
from lockstep.heartbeat_message import SourceLine
from lockstep.launch_contract import STACKS_SIGNAL

_HEADER = "# main thread "
_THREAD = re.compile(r"^(?:Current thread|Thread) (0x[0-9a-f]+)", re.MULTILINE)
_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$', re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Stack:
    """The frames of one thread, innermost first."""

    frames: tuple[SourceLine, ...]

    def own(self) -> tuple[SourceLine, ...]:
        """The frames in the user's code; all frames if there are none."""
        outermost_first = self.frames[::-1]
        own = own_lines([frame.file for frame in outermost_first])
        return tuple(outermost_first[index] for index in reversed(own)) or self.frames


@dataclass(frozen=True, slots=True)
class Stacks:
    """The stacks of one process."""

    main: Stack
    text: str  #: of all threads, as they were written


NOTHING: Final = Stacks(Stack(()), "")


def register_stacks(path: Path) -> None:
    """Have `STACKS_SIGNAL` append the stacks of all threads of this process to ``path``, from now on.

    To be called in the main thread. The file stays open as long as the process exists.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    os.write(descriptor, f"{_HEADER}{threading.main_thread().ident or 0:#x} of process {os.getpid()}\n".encode())
    faulthandler.register(STACKS_SIGNAL, file=descriptor, all_threads=True)


def is_registered(status: str) -> bool:
    """Whether a process would answer `STACKS_SIGNAL` instead of dying of it, by its ``/proc/PID/status``."""
    found = re.search(r"^SigCgt:\s*([0-9a-f]+)", status, re.MULTILINE)
    return found is not None and bool(int(found[1], 16) >> (STACKS_SIGNAL - 1) & 1)


def read_stacks(before: str, written: str) -> Stacks:
    """The stacks that a process has written.

    Args:
        before: the file as it was, whose headers say which thread is the main one.
        written: what was appended since.
    """
    parts = _THREAD.split(written)
    threads = dict(zip((int(thread, 16) for thread in parts[1::2]), parts[2::2], strict=True))
    headers = [line for line in before.splitlines() if line.startswith(_HEADER)]
    main = int(headers[-1].removeprefix(_HEADER).split()[0], 16) if headers else 0
    # Without a header the last thread in the list, which is the oldest.
    text = threads.get(main) or (list(threads.values())[-1] if threads else "")
    return Stacks(Stack(tuple(_frames(text))), written)


def _frames(text: str) -> Sequence[SourceLine]:
    return [SourceLine(file, int(line), function) for file, line, function in _FRAME.findall(text)]
