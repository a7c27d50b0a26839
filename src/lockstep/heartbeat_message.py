"""The heartbeat: what a rank sends to its launcher twice a second, as a value and as text; and notes."""

from __future__ import annotations

import contextlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from lockstep.memory_use import UNKNOWN, MemoryUse
from lockstep.records import JsonRecord, from_known, object_from

#: What a rank may be doing. ``script`` is all that `Run` does not know about; in a script without `Run`, everything. In
#: ``input`` it waits for its user, in a debugger or for a line.
PHASES = (
    "script", "start", "data", "forward", "backward", "reduction", "update", "save", "evaluate", "input", "exit",
)  # fmt: skip


def note_to_text(note: str) -> str:
    """What a rank sends for the user to be told ``note`` by the launcher, where its own log does not take it."""
    return json.dumps({"note": note})


def note_from_text(text: bytes) -> str:
    """The note in ``text``; "" if it is none."""
    with contextlib.suppress(ValueError):
        if isinstance(note := object_from(text).get("note"), str):
            return note
    return ""


@dataclass(frozen=True, slots=True)
class SourceLine:
    """A line of the user's code."""

    file: str
    line: int
    function: str

    @property
    def short(self) -> str:
        """The file's name and the line, as ``train.py:12``; empty for no line."""
        return f"{Path(self.file).name}:{self.line}" if self.file else ""


@dataclass(frozen=True, slots=True)
class Heartbeat(JsonRecord):
    """What a rank sends to its launcher twice a second: that it is alive, and where it is."""

    rank: int
    process: int  #: its process id on its host
    step: int  #: optimizer steps done; -1 while nobody counts them
    phase_changes: int  #: grows whenever `Run` goes from one phase to the next
    phase: str  #: one of `PHASES`
    place: SourceLine  #: of the main thread
    call: str  #: what the line at ``place`` has called, such as ``all_reduce`` or ``next(loader)``; "": own code
    meets: bool  #: in a call in which ranks wait for each other
    collectives: int  #: how many this rank has begun, over groups of all ranks
    cpu_s: float  #: CPU time of the main thread
    at: float  #: on the clock of its host, seconds since 1970
    memory: MemoryUse = UNKNOWN

    @classmethod
    def from_text(cls, text: str | bytes) -> Self:
        """The heartbeat in ``text``.

        Raises:
            ValueError: if it is not a heartbeat.
        """
        beat = from_known(cls, object_from(text))
        if beat.phase not in PHASES:
            raise ValueError(f"no phase of a heartbeat: {beat.phase!r:.80}")
        return beat
