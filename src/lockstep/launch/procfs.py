"""What psutil does not say of a process, or not fast enough, read from Linux's ``/proc``."""

from __future__ import annotations

import contextlib
from pathlib import Path

from lockstep.memory_use import text_of


def children(process: int) -> list[int]:
    """The processes that ``process`` has started and that still exist; none where the kernel does not list them.

    psutil looks through all processes of the machine for them. On a large node that takes tens of milliseconds, and
    this is asked every second.
    """
    found: list[int] = []
    with contextlib.suppress(OSError):
        for thread in Path(f"/proc/{process}/task").iterdir():
            found += map(int, text_of(thread / "children").split())
    return found


def descendants(process: int) -> list[int]:
    """The children of ``process``, their children, and so on."""
    return [each for child in children(process) for each in (child, *descendants(child))]


def status(process: int) -> str:
    """The text of ``/proc/PID/status``, which says what signals a process catches; psutil has no word for that."""
    return text_of(Path(f"/proc/{process}/status"))


def state(process: int) -> str:
    """The kernel's letter for what ``process`` does, such as ``S``, ``T`` or ``Z``; "" if there is none."""
    return _stat(process)[:1]


def begun(process: int) -> str:
    """When ``process`` was started, in the kernel's clock ticks; with its number this identifies it."""
    fields = _stat(process).split()
    return fields[19] if len(fields) > 19 else ""


def _stat(process: int) -> str:
    # The name of the program, in brackets, may hold anything.
    return text_of(Path(f"/proc/{process}/stat")).rpartition(") ")[2]
