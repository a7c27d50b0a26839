"""The records of a search's journal, and their form as lines of text."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

from lockstep.records import from_known, object_from, of_kind
from lockstep.tune.record.trial import State
from lockstep.tune.search.individual import Point


@dataclass(frozen=True, slots=True)
class TrialBegan:
    """An attempt at a trial began; only that of the first attempt has the trial's point and origin."""

    number: int
    attempt: int  #: from 1
    ranks: int
    at_s: float  #: seconds since 1970
    params: Mapping[str, Any] | None = None
    point: Point | None = None
    island: int = 0
    parents: tuple[int, ...] = ()
    operator: str = ""
    inherits: int | None = None
    repeats: int | None = None  #: the trial of which this one is a further evaluation...
    repeat: int | None = None  #: ... and which of them, from 1


@dataclass(frozen=True, slots=True)
class LossReported:
    """A trial called `Run.report`."""

    number: int
    attempt: int
    step: int
    loss: float
    at_s: float


@dataclass(frozen=True, slots=True)
class AttemptCut:
    """An attempt was killed, or the search was stopped; the trial will be resumed."""

    number: int
    attempt: int
    at_s: float
    run_s: float
    reason: str = ""


@dataclass(frozen=True, slots=True)
class TrialEnded:
    """A trial has ended."""

    number: int
    attempt: int
    state: State
    at_s: float
    run_s: float  #: of this attempt
    losses: tuple[float, ...] = ()
    violation: float | None = None  #: of the constraints; None: unknown, since it was stopped
    reason: str = ""
    converged: bool = False


@dataclass(frozen=True, slots=True)
class MovePlanned:
    """An individual changes islands, or is replaced by one that arrived; the fields are those of `search.Move`."""

    what: Literal["moved", "copied", "replaced"]
    number: int
    source: int
    target: int
    responsible: int
    at_s: float
    step: int = 0
    replaced_by: int = -1


Record = TrialBegan | LossReported | AttemptCut | TrialEnded | MovePlanned
_KINDS: Mapping[str, type[Record]] = {
    "began": TrialBegan,
    "loss": LossReported,
    "cut": AttemptCut,
    "ended": TrialEnded,
    "move": MovePlanned,
}
_KIND_OF = {of: kind for kind, of in _KINDS.items()}
_NAMES = {of: tuple(field.name for field in fields(of)) for of in _KIND_OF}


@dataclass(frozen=True, slots=True)
class Entry:
    """A record with its place in the journal."""

    worker: int  #: whose file it is in
    serial: int  #: its number in that file, from 0
    record: Record


def encode(serial: int, record: Record) -> bytes:
    """The line of a record: eight hexadecimal digits of CRC-32, a space, JSON, a newline."""
    of = type(record)
    content: dict[str, Any] = {"serial": serial, "kind": _KIND_OF[of]}
    for name in _NAMES[of]:
        value = getattr(record, name)
        if value not in (None, (), ""):
            content[name] = value
    text = json.dumps(content, separators=(",", ":"), default=repr).encode("ascii")
    return b"%08x %b\n" % (zlib.crc32(text), text)


def decode(line: bytes) -> tuple[int, Record] | None:
    """The serial number and the record of a line without its newline; None if the line is damaged."""
    try:
        if line[8:9] != b" " or int(line[:8], 16) != zlib.crc32(line[9:]):
            return None
    except ValueError:
        return None
    try:
        content = object_from(line[9:])
        return of_kind(int, content["serial"]), from_known(_KINDS[content["kind"]], content)
    except (ValueError, KeyError, TypeError):
        return None
