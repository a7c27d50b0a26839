"""The files that ranks of this node leave for the next generation: their places, and the room for them.

    MEMORY/lock                                 ranks of a node take turns in looking for room and writing a state
    MEMORY/run-5b1c22e0-generation-3-9d1f04c7/  of one generation:
        measures-0002          measured values of rank 2, see `measures_journal`
        copied-measures-0005   the same of a rank of another host, see `copied_measures`
        state-0/step-00001234  a checkpoint as in docs/format.md, by one rank of node 0
        mirror-0002            the part of rank 2 after the last two steps, see `mirror`; likewise rest-, copy-
        left-0002              the part of rank 2 when another rank died, as under hsdp
        left-state             a rank has left a state: the launcher looks for this file
        script-00001234-0001   what the script of rank 1 held in the step after 1234, see `resume_proof.LeftScript`
        suspect                its ranks held different bits: none of its states is used
        why-not-0001           why rank 1 has left no state when another rank died

If the memory has too little room, a state is written to the run directory, under ``emergency``.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from lockstep.checkpoint import LOCAL, checksums_in, list_checkpoints, read_manifest, read_part_head
from lockstep.errors import LockstepError
from lockstep.launch_contract import GENERATION_FILES, LEFT_STATE
from lockstep.memory_use import host_memory
from lockstep.records import read_object
from lockstep.run.recovery.copied_measures import COPIED
from lockstep.run.recovery.measures_journal import Journal, read_journal
from lockstep.run.recovery.mirror import MIRROR_PARTS
from lockstep.run.recovery.newest_state import NOT_USED, Left, LeftState
from lockstep.small_files import replace_text

#: How long a rank waits for others of its node, each of which may write a state.
_TURN_S = 60.0
_POLL_S = 0.01
_STATE = "state-"
_MEASURES = "measures-"
_LEFT = "left"
_WHY_NOT = "why-not-"
_SCRIPT = "script-"
#: The part of the free memory that a state may take.
_SHARE = 0.8


class EmergencyFiles:
    """The files of a run on this node; `own` is the directory of this generation.

    Args:
        memory: directory in the host's memory, which the ranks of one launcher share.
        run_dir: the run directory, which may be that of other nodes, too.
        run: distinguishes the runs of one script.
        generation: the number of this generation, and a mark that no other one has: ``3-9d1f04c7``.
    """

    def __init__(self, memory: Path, run_dir: Path, run: str, generation: str) -> None:
        self._memory: Final = memory
        self._run_dir: Final = run_dir / "emergency"
        self._run: Final = run
        self._name: Final = GENERATION_FILES.format(run=run, generation=generation)
        #: Directory of this generation in the memory.
        self.own: Final = memory / self._name
        with contextlib.suppress(OSError):
            self.own.mkdir(parents=True, exist_ok=True)

    def measures(self, rank: int) -> Path:
        """The file for the measured values of ``rank``."""
        return self.own / f"{_MEASURES}{rank:04d}"

    def part(self, rank: int) -> Path:
        """The directory for the part of a state that ``rank`` leaves."""
        return self.own / f"{_LEFT}-{rank:04d}"

    def state(self, node_rank: int, size_bytes: int) -> Path | None:
        """The directory for a whole state of ``size_bytes``, by a rank of ``node_rank``; None: no room."""
        place = self._memory
        if size_bytes > self.room():
            self._run_dir.mkdir(exist_ok=True)
            place = self._run_dir
            if size_bytes > LOCAL.free_bytes(place):
                return None
        # Ranks of other nodes, which may have the same run directory, have their own turns.
        return place / self._name / f"{_STATE}{node_rank}"

    def room(self) -> int:
        """The number of bytes of memory that may be used."""
        return int(_SHARE * min(LOCAL.free_bytes(self._memory), free_memory()))

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        """A context that one rank of this node holds at a time; the kernel releases the lock of a killed rank.

        Raises:
            BlockingIOError: if other ranks take too long.
        """
        lock = os.open(self._memory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            end_s = time.monotonic() + _TURN_S
            while True:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > end_s:
                        raise
                    time.sleep(_POLL_S)
            yield
        finally:
            os.close(lock)

    def suspect(self, why: str) -> None:
        """Note that no state of this generation may be used, and ``why``."""
        (self.own / "suspect").write_text(why)

    def note_script(self, step: int, rank: int, held: Mapping[str, object]) -> None:
        """Note what the script of ``rank`` ``held`` in the step after ``step``. Without room, nothing is noted."""
        with contextlib.suppress(OSError):
            replace_text(self.own / f"{_SCRIPT}{step:08d}-{rank:04d}", json.dumps(held))

    def note_why_not(self, rank: int, why_not: str) -> None:
        """Note the reason, for the user, why ``rank`` leaves no state. Without room for the file, nothing is noted."""
        text = f"rank {rank} left no state when another one died: {why_not}"
        # The reason may be that the memory is full.
        for place in (self.own, self._run_dir / self._name):
            with contextlib.suppress(OSError):
                place.mkdir(parents=True, exist_ok=True)
                (place / f"{_WHY_NOT}{rank:04d}").write_text(text)
                return

    def note_left(self) -> None:
        """Tell the launcher that a rank of this generation has left a state to resume from."""
        with contextlib.suppress(OSError):
            (self.own / LEFT_STATE).touch()

    def own_states(self) -> list[LeftState]:
        """The states that ranks of this generation have left so far."""
        return self._states(self._name)

    def left(self) -> Left:
        """The states, journals and notes of earlier generations on this node."""
        states: list[LeftState] = []
        journals, copied = dict[tuple[str, int], Journal](), dict[tuple[str, int], Journal]()
        suspect, why_not = [], []
        scripts = dict[tuple[str, int], Mapping[str, Any]]()
        for directory in self._before():
            states += self._states(directory.name)
            if (mark := directory / "suspect").exists():
                suspect.append(directory.name)
                why_not.append((directory.name, f"{NOT_USED}{mark.read_text()}"))
            why_not += [(directory.name, path.read_text()) for path in sorted(directory.glob(f"{_WHY_NOT}*"))]
            for path in directory.glob(f"{_SCRIPT}*"):
                with contextlib.suppress(LockstepError, OSError, ValueError):
                    scripts[directory.name, int(path.name.split("-")[1])] = read_object(path)
            for found, name in ((journals, _MEASURES), (copied, COPIED)):
                for path in directory.glob(f"{name}*"):
                    found[directory.name, int(path.name.rpartition("-")[2])] = read_journal(path)
        unique = {state.path: state for state in states}  # a generation may have written to both places
        return Left(tuple(unique.values()), journals, tuple(suspect), copied, tuple(why_not), scripts)

    def remove_before(self) -> None:
        """Remove the files of earlier generations."""
        for directory in self._before():
            shutil.rmtree(directory, ignore_errors=True)

    def _states(self, generation: str) -> list[LeftState]:
        found = []
        for place in (self._memory, self._run_dir):
            roots = sorted((place / generation).glob(f"{_STATE}*"))
            for one in (one for root in roots for one in list_checkpoints(root)):
                with contextlib.suppress(LockstepError, OSError):
                    manifest = read_manifest(one.path)
                    found.append(LeftState.of(generation, str(one.path), manifest.about, checksums_in(manifest)))
            for slot in (
                one for kind in (*MIRROR_PARTS, _LEFT) for one in (place / generation).glob(f"{kind}-*/slot-*")
            ):
                with contextlib.suppress(OSError):
                    if (head := read_part_head(slot)) is not None:
                        found.append(LeftState.of(generation, head.path, head.about, {}))
        return found

    def _before(self) -> list[Path]:
        """The directories of earlier generations, in the memory and in the run directory."""
        like = GENERATION_FILES.format(run=self._run, generation="*")
        every = [path for place in (self._memory, self._run_dir) for path in place.glob(like)]
        return [path for path in every if path.name != self._name]


def free_memory() -> int:
    """The free bytes of the host and this job's control groups, which count files in memory; 0 if unknown."""
    return host_memory().host_free or 0
