"""What a run did, step by step, as checksums: what `run` writes on each rank, so that `verify` can compare two runs.

    rank-0000.jsonl    about | state after 0 steps | micro-batches 0, 1 of step 0 | state after 1 step | ...
    rank-0001.jsonl         | parts of that state | micro-batches 2, 3 of step 0 | ...
                       ──► one `Transcript`, by steps and micro-batches, in which no rank is named

These are values with a JSON form, which is in no way a public format: the rooms are of one version.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NamedTuple, Self

from lockstep.records import JsonRecord, value_in

STATE: Final = "state"  #: what a checkpoint would hold after so many steps; sums, whose parts lie on all ranks
SAID: Final = "said"  #: what was measured and logged after so many steps, as the leader has it
MICRO_BATCH: Final = "micro-batch"  #: what one was computed from, and what came of it
VARIABLES: Final = "variables"  #: what the script held as a micro-batch was handed out
ABOUT: Final = "about"  #: of the run as a whole: how steps are divided, how it ended
STOPPED: Final = "stopped"  #: the name under which a run says there that it ended since no more steps were asked for
SECONDS: Final = "seconds"  #: ... and how long its steps took
_ORDER: Final = (STATE, SAID, MICRO_BATCH)  #: in which they follow each other after the same number of steps
_MASK: Final = (1 << 64) - 1

Notes = Mapping[str, tuple[str, str]]
"""By name, in the order in which they came: a mark, equal for equal bits, and the value as text if it is a number."""


@dataclass(frozen=True, slots=True)
class TranscriptRequest(JsonRecord):
    """What each rank of a run writes down before it ends, with exit code 0."""

    directory: str  #: where each rank writes
    steps: int  #: after which the run ends
    pass_steps: int | None = None  #: a pass over a data set ends after so many, so that ends of epochs are reached
    budget_s: float = math.inf  #: the run also ends once its steps have taken so long; for one rank
    least_steps: int = 1  #: but not before so many
    saves: bool = False  #: whether checkpoints are saved, and there is anything to resume from
    kill_after: int | None = None  #: rank 0 kills itself once so many steps are saved, and one more is done
    evaluates: bool = True  #: whether evaluations get any data
    detail: int | None = None  #: of which step outputs of modules are written down, and variables of the script

    def file(self, rank: int) -> Path:
        """Where a rank writes."""
        return Path(self.directory, f"rank-{rank:04d}.jsonl")


class Place(NamedTuple):
    """Where notes belong; in the order in which a run comes there."""

    step: int  #: steps done before
    part: int  #: see `kind`
    micro_batch: int = 0  #: its index in its step

    @classmethod
    def of(cls, kind: str, step: int, micro_batch: int = 0) -> Self:
        """The place of notes of one ``kind``."""
        return cls(step, _ORDER.index(kind), micro_batch)

    @property
    def kind(self) -> str:
        """`STATE`, `SAID` or `MICRO_BATCH`."""
        return _ORDER[self.part]

    def __str__(self) -> str:
        if self.kind == MICRO_BATCH:
            return f"micro-batch {self.micro_batch} of step {self.step + 1}"
        return f"after step {self.step}" if self.step else "before the first step"


def line_of(kind: str, step: int, index: int, notes: Notes) -> str:
    """One line of a rank's file."""
    return json.dumps([kind, step, index, notes], separators=(",", ":"))


@dataclass(slots=True)
class Transcript:
    """What all ranks of a run wrote."""

    about: dict[str, tuple[str, str]] = field(default_factory=dict)
    notes: dict[Place, dict[str, tuple[str, str]]] = field(default_factory=dict)
    variables: dict[Place, dict[str, tuple[str, str]]] = field(default_factory=dict)  #: by the micro-batch's place
    resumed_at: int = 0  #: the step from whose checkpoint the run went on; 0: it did not

    @classmethod
    def read(cls, directory: Path) -> Self:
        """What lies in ``directory``; a rank that was killed may have left half a line, which is left out."""
        found = cls()
        for path in sorted(directory.glob("rank-*.jsonl")):
            for kind, step, index, values in _lines(path):
                found._add(kind, step, index, {name: (mark, value) for name, (mark, value) in values.items()})
        return found

    @property
    def steps(self) -> int:
        """After how many steps the last state was."""
        return max((place.step for place in self.notes if place.kind == STATE), default=0)

    def followed_by(self, rest: Self) -> Self:
        """This one up to where ``rest`` was resumed, and that."""
        at = rest.first_step()
        before = {place: notes for place, notes in self.notes.items() if place.step < at}
        return type(self)(self.about | rest.about, before | rest.notes, self.variables | rest.variables, at)

    def first_step(self) -> int:
        """After how many steps the first state was: more than 0 in a run that was resumed."""
        return min((place.step for place in self.notes if place.kind == STATE), default=0)

    def _add(self, kind: str, step: int, index: int, notes: dict[str, tuple[str, str]]) -> None:
        if kind == ABOUT:
            self.about |= notes
        elif kind == VARIABLES:
            self.variables.setdefault(Place.of(MICRO_BATCH, step, index), notes)
        else:
            there = self.notes.setdefault(Place.of(kind, step, index), {})
            for name, (mark, value) in notes.items():
                if kind == STATE and name in there and not value:
                    there[name] = str((int(there[name][0]) + int(mark)) & _MASK), value
                else:
                    there.setdefault(name, (mark, value))


def _lines(path: Path) -> Iterator[tuple[str, int, int, dict[str, list[str]]]]:
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            kind, step, index, values = value_in(line)
        except ValueError:
            return
        yield kind, step, index, values
