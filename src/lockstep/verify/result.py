"""What was found, as a value, as a table for people, and as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final, Literal

from lockstep.formatting import duration, plural
from lockstep.small_files import replace_text

Status = Literal["equal", "differs", "note", "left out"]
_MARKS: Final[dict[Status, str]] = {"equal": "equal", "differs": "DIFFERS", "note": "note", "left out": "left out"}


@dataclass(frozen=True, slots=True)
class WayResult:
    """How one way to run the script ended."""

    way: str
    status: Status
    steps: int = 0  #: that were compared
    took_s: float = 0.0
    place: str = ""  #: where it differs first: a step, a micro-batch
    what: str = ""  #: what differs first there, with its values
    module: str = ""  #: the first module whose output or gradient differs, from a second pass
    reason: str = ""  #: the most likely one; or why the way was left out
    file: str = ""  #: of the script's own
    line: int = 0
    source: str = ""  #: that line


@dataclass(frozen=True, slots=True)
class StandsInTheWay:
    """A line of a script in plain torch that would have to change for `Run`."""

    file: str
    line: int
    source: str
    instead: str


@dataclass(frozen=True, slots=True)
class VerifyResult:
    """What `verify` has found."""

    script: str
    sha256: str  #: of the script's own files
    steps: int  #: that each way trained
    took_s: float
    uses_run: bool
    ways: tuple[WayResult, ...]
    to_change: tuple[StandsInTheWay, ...] = ()  #: of a script in plain torch

    @property
    def differing(self) -> tuple[WayResult, ...]:
        """The ways that gave something else."""
        return tuple(way for way in self.ways if way.status == "differs")

    @property
    def is_equal(self) -> bool:
        """Whether all ways that were run gave the same."""
        return not self.differing

    def to_json(self) -> str:
        """All of it, as text; in no way a public format yet but for its names."""
        return json.dumps({"equal": self.is_equal, **asdict(self)}, indent=1)

    def write(self, path: Path) -> None:
        """Write `to_json` to ``path``, completely or not at all."""
        replace_text(path, f"{self.to_json()}\n")


def report(result: VerifyResult) -> list[str]:
    """The lines of a table, then each difference, then the verdict."""
    width = max((len(way.way) for way in result.ways), default=0)
    lines = [f"{way.way:<{width}}  {_MARKS[way.status]:<8}  {_said_of(way)}".rstrip() for way in result.ways]
    for way in result.differing:
        lines += ["", *_explained(way)]
    for each in result.to_change:
        lines += [*([""] if each is result.to_change[0] else []), f"{Path(each.file).name}:{each.line}  {each.source}"]
        lines.append(f"    {each.instead}")
    lines += ["", verdict(result)]
    return lines


def _said_of(way: WayResult) -> str:
    if way.status == "equal":
        return f"{plural(way.steps, 'step')}, {duration(way.took_s)}"
    return f"{way.place}: {way.what}" if way.what and way.status == "differs" else way.reason


def _explained(way: WayResult) -> Iterator[str]:
    yield f"{way.way}: differs first in {way.place}" if way.place[:5] == "micro" else f"{way.way}: differs {way.place}"
    if way.what:
        yield f"    {way.what}"
    if way.module:
        yield f"    in modules: {way.module}"
    if way.reason:
        yield f"    likely: {way.reason}"
    if way.file:
        yield f"    {Path(way.file).name}:{way.line}  {way.source}"


def verdict(result: VerifyResult) -> str:
    """One line."""
    run = [way for way in result.ways if way.status in ("equal", "differs")]
    where = f"{plural(result.steps, 'step')}, {duration(result.took_s)}"
    if result.is_equal:
        return f"{result.script}: equal in {plural(len(run), 'way')} to run it ({where})"
    found = _listed([way.way for way in result.differing])
    return f"{result.script}: NOT the same in {len(result.differing)} of {plural(len(run), 'way')}: {found} ({where})"


def _listed(names: Sequence[str]) -> str:
    return "; ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
