"""Watches the processes that the launcher itself stands on, so that no rank is blamed for what befell one of them.

looked at twice a second:   runs ─► stopped, `PART_LOOKS` times ─► told to go on ─► still stopped ─► lost
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace

from lockstep.launch.host import procfs
from lockstep.launch.timeouts import PART_LOOK_EVERY_S, PART_LOOKS

_STOPPED = ("T", "t")


@dataclass(frozen=True, slots=True)
class Part:
    """A process of the launcher's, and how often in a row it was found stopped."""

    name: str
    process: int
    looks: int = 0


class PartMonitor:
    """Looks whether processes of the launcher are stopped, by a signal, a debugger or a freezer.

    Args:
        say: tells the user.
        state: the kernel's letter for what a process does.
        now: the clock.
    """

    def __init__(
        self,
        say: Callable[[str], None],
        state: Callable[[int], str] = procfs.state,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._say, self._state, self._now = say, state, now
        self._parts: dict[int, Part] = {}
        self._next_s = now()

    @property
    def suspects(self) -> bool:
        """Whether one of them was found stopped: what ranks do then is not their fault."""
        return any(part.looks for part in self._parts.values())

    def watch(self, parts: dict[int, str]) -> None:
        """Watch these processes, and no others: their names by their process ids."""
        self._parts = {
            process: self._parts.get(process, Part(name, process)) for process, name in parts.items() if process
        }

    def poll(self) -> Part | None:
        """To be called often. Returns a process that is stopped and does not go on, though it was told to."""
        # Counted in looks and not in seconds: a launcher that was stopped itself has seen nothing meanwhile.
        if self._now() < self._next_s:
            return None
        self._next_s = self._now() + PART_LOOK_EVERY_S
        for process, before in self._parts.items():
            stopped = self._state(process) in _STOPPED
            part = replace(before, looks=before.looks + 1 if stopped else 0)
            self._parts[process] = part
            if part.looks == PART_LOOKS:
                self._say(f"note: {part.name} was stopped, by a signal, a debugger or a freezer: telling it to go on")
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(process, signal.SIGCONT)
            if part.looks >= 2 * PART_LOOKS:
                return part
        return None
