"""What the coordinator announces to all nodes, as values: each agent puts them into words and shows each of them once.

A notice is written to the store once, under its number. The plan only says how many there are.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from lockstep.launch.diagnosis.root_cause import Diagnosis, RankExit
from lockstep.records import from_known, object_from


@dataclass(frozen=True, slots=True)
class Message:
    """A text for the user."""

    text: str
    failure: bool = False  #: it says why the job failed, and is shown as the last block


Notice = Message | Diagnosis
"""A diagnosis is announced where a generation failed, or was trained to its end and could not save that: each agent
names paths as its own user would write them."""


@dataclass(frozen=True, slots=True)
class _Endings:
    endings: tuple[RankExit, ...]


def notice_to_json(notice: Notice) -> str:
    """The notice as text for the store."""
    return json.dumps(asdict(notice))


def notice_from_json(text: str) -> Notice:
    """The notice that `notice_to_json` turned into ``text``.

    Raises:
        ValueError: if it is something else.
    """
    fields = object_from(text)
    if "text" in fields:
        return from_known(Message, fields)
    return from_known(Diagnosis, fields)


def endings_to_json(endings: Sequence[RankExit]) -> str:
    """Endings as text for the store."""
    return json.dumps(asdict(_Endings(tuple(endings))))


def endings_from_json(text: str) -> tuple[RankExit, ...]:
    """The endings that `endings_to_json` turned into ``text``.

    Raises:
        ValueError: if it is something else.
    """
    return from_known(_Endings, object_from(text)).endings
