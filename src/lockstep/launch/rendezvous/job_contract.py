"""What the nodes of a job must have in common."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Literal, Self


@dataclass(frozen=True, slots=True)
class JobContract:
    """What must be equal on all nodes of a job, and what the others take over from the coordinator."""

    coordinator: str  #: its node id
    host: str  #: of the coordinator
    must_match: Mapping[str, str]  #: versions, program and settings, by name
    run_dir: str
    begins: Literal["new", "resume", "fresh"]
    generation: int  #: the first one

    def to_json(self) -> str:
        """The contract as text for the store."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """The contract that `to_json` turned into ``text``."""
        return cls(**json.loads(text))


def differences(ours: Mapping[str, str], host: str, theirs: Mapping[str, str], their_host: str) -> list[str]:
    """Where this node differs from the coordinator, such as ``torch is 2.11 on n2, 2.12 on n1``."""
    return [
        f"{name} is {ours.get(name, 'none')} on {host}, {theirs.get(name, 'none')} on {their_host}"
        for name in sorted({*ours, *theirs})
        if ours.get(name) != theirs.get(name)
    ]
