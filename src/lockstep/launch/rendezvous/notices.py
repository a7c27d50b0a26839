"""What the coordinator announces to all nodes, as values: each agent puts them into words and shows each of them once.

A notice is written to the store once, under its number. The plan only says how many there are.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from lockstep.launch.diagnosis.error_record import Failure
from lockstep.launch.diagnosis.root_cause import RankExit, has_failed
from lockstep.launch.rendezvous.known_fields import from_known, object_from
from lockstep.launch_contract import EXIT_NOT_SAVED


@dataclass(frozen=True, slots=True)
class Message:
    """A text for the user."""

    text: str
    failure: bool = False  #: it says why the job failed, and is shown as the last block


@dataclass(frozen=True, slots=True)
class GenerationFailed:
    """A generation failed, or was trained to its end and could not save that.

    Each agent finds the cause among the endings and names paths as its own user would write them.
    """

    ranks: int  #: of the generation
    endings: tuple[RankExit, ...]  #: of the ranks that failed; if none did, of those that could not save

    @classmethod
    def of(cls, ranks: int, endings: Sequence[RankExit]) -> GenerationFailed:
        """The notice for a generation whose ranks ended as ``endings`` say."""
        failed = tuple(filter(has_failed, endings))
        return cls(ranks, failed or tuple(ending for ending in endings if ending.status == EXIT_NOT_SAVED))


Notice = Message | GenerationFailed


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
    return from_known(GenerationFailed, fields, endings=_endings(fields.get("endings")))


def endings_to_json(endings: Sequence[RankExit]) -> str:
    """Endings as text for the store."""
    return json.dumps({"endings": [asdict(ending) for ending in endings]})


def endings_from_json(text: str) -> tuple[RankExit, ...]:
    """The endings that `endings_to_json` turned into ``text``.

    Raises:
        ValueError: if it is something else.
    """
    return _endings(object_from(text).get("endings"))


def _endings(values: object) -> tuple[RankExit, ...]:
    if not isinstance(values, list) or not all(isinstance(value, dict) for value in values):
        raise ValueError(f"no endings of ranks: {values!r:.80}")
    failures = [value.get("failure") for value in values]
    return tuple(
        from_known(RankExit, value, failure=failure and from_known(Failure, failure))
        for value, failure in zip(values, failures, strict=True)
    )
