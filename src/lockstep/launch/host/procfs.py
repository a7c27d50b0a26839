"""What psutil does not say of a process, or not fast enough, read from Linux's ``/proc``."""

from __future__ import annotations

import contextlib
import ipaddress
import sys
from pathlib import Path
from typing import Final

from lockstep.memory_use import text_of

#: A connection whose data was sent so often without an answer is not only slow: that takes more than a second.
_SENT_AGAIN: Final = 3
_RETRANSMITS: Final = "01"  # of a connection's timers: what was sent is not acknowledged


def unanswered() -> set[str]:
    """The addresses to which this host sends data over TCP again and again, and that do not acknowledge it.

    It is what the kernel knows of the connections that there are, of whatever process: nothing is sent to find out.
    """
    found = set[str]()
    for table in ("tcp", "tcp6"):
        for line in text_of(Path("/proc/net", table)).splitlines()[1:]:
            # sl, local and remote address, state, queues, timer:when, times that it was sent again...
            fields = line.split()
            if len(fields) > 6 and fields[5].startswith(f"{_RETRANSMITS}:") and int(fields[6], 16) >= _SENT_AGAIN:
                found.add(_address(fields[2].partition(":")[0]))
    return found


def _address(words: str) -> str:
    """An address as the kernel writes it there: words of 32 bits, in this machine's own order of bytes."""
    raw = b"".join(int(words[at : at + 8], 16).to_bytes(4, sys.byteorder) for at in range(0, len(words), 8))
    address = ipaddress.ip_address(raw)
    return str(getattr(address, "ipv4_mapped", None) or address)


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
