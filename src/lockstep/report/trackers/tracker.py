"""The protocol of a tracker, and what it gets when it is opened."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol, runtime_checkable

Row = Mapping[str, float]
"""One line of the record: ``step``, ``epoch``, ``wall_s`` and values by name."""


@runtime_checkable
class LogsValues(Protocol):
    """What a script may give as a tracker of its own. It may have ``close()``, too."""

    def log(self, values: dict[str, float], step: int) -> object:
        """Take ``values``, among them ``epoch``, measured after ``step`` steps. Called from a thread of its own."""


class Tracker(Protocol):
    """Takes the rows of a record; all calls come from one thread."""

    run_id: str  #: under which it will know the run again; "": it does without
    replays: bool  #: whether it wants every row of the record at each opening, and not only those that it has not had

    def write(self, row: Row) -> None:
        """Store one more row; it is stored when this returns."""

    def close(self) -> None:
        """The run has ended, as far as this process knows."""


@dataclass(frozen=True, slots=True)
class TrackerContext:
    """What a tracker is opened with."""

    directory: Path  #: of the run; may have to be made
    settings: Mapping[str, Any]  #: of the run, plain values
    step: int  #: steps done: 0 for a run that begins
    goes_on: bool = False  #: one that was open in this process could not write, and this one writes what follows
    run_id: str = ""  #: under which an earlier life of the run is known to the tracker; "": there was none


class OwnTracker:
    """An object of the script's as a `Tracker`."""

    replays = False
    run_id = ""

    def __init__(self, given: LogsValues) -> None:
        self._given: Final = given

    def write(self, row: Row) -> None:
        """Hand it over."""
        self._given.log(values_of(row), int(row["step"]))

    def close(self) -> None:
        """Close the object, if it can be."""
        close = getattr(self._given, "close", None)
        if close is not None:
            close()


def values_of(row: Row) -> dict[str, float]:
    """The values of ``row``, among them ``epoch``."""
    return {name: value for name, value in row.items() if name not in ("step", "wall_s")}
