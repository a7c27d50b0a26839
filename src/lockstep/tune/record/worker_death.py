"""How the ranks of a worker died, as its launcher records it for the next generation."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

from lockstep.launch import RankExit, failure_line, how_it_ended, next_generation
from lockstep.records import from_known, read_object
from lockstep.small_files import replace_text


@dataclass(frozen=True, slots=True)
class Death:
    """The end of one generation of a worker that failed."""

    generation: int
    at_s: float  #: seconds since 1970
    reason: str  #: in one line
    #: The objective raised an error, which it would raise again; False after a kill or a hang.
    is_of_objective: bool

    @classmethod
    def of(cls, exits: Sequence[RankExit], generation: int, at_s: float) -> Self:
        """The death of a generation whose ranks ended by ``exits``."""
        failure = failure_line(exits)
        return cls(generation, at_s, failure.text, failure.raised)

    @classmethod
    def within_trial(cls, worker_dir: Path, at_s: float) -> Self:
        """The death of a worker whose objective has ended the process as if all were well."""
        reason = "the objective ended its process with exit code 0"
        return cls(next_generation(worker_dir) - 1, at_s, reason, is_of_objective=True)

    @classmethod
    def of_launcher(cls, worker_dir: Path, code: int, at_s: float) -> Self:
        """The death of a worker whose launcher has ended with ``code`` in the middle of a trial, and its ranks with it.

        A trial may do that to its launcher, and would do it again at each attempt.
        """
        reason = f"the launcher of its worker {how_it_ended(code)}"
        return cls(next_generation(worker_dir) - 1, at_s, reason, is_of_objective=False)

    def write(self, worker_dir: Path) -> None:
        """Write it into the run directory of the worker."""
        replace_text(worker_dir / "death.json", json.dumps(asdict(self)))

    @classmethod
    def read(cls, worker_dir: Path, generation: int) -> Self | None:
        """How the generation before ``generation`` died; None if it did not die, or was stopped."""
        try:
            death = from_known(cls, read_object(worker_dir / "death.json"))
        except (OSError, ValueError):
            return None
        return death if death.generation == generation - 1 else None
