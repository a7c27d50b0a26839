"""What the nodes of a job must have in common."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal, Self

from lockstep.records import JsonRecord, from_known, object_from, read_bytes

#: In the run directory: the node id of the coordinator of the newest launch.
COORDINATOR_FILE: Final = ".coordinator"


@dataclass(frozen=True, slots=True)
class JobContract(JsonRecord):
    """What must be equal on all nodes of a job, and what the others take over from the coordinator."""

    coordinator: str  #: its node id
    host: str  #: of the coordinator
    must_match: Mapping[str, str]  #: versions, program and settings, by name
    run_dir: str
    begins: Literal["new", "resume", "fresh"]
    generation: int  #: the first one
    term: int = 0  #: of the coordinator's lease; 0: nobody takes over from it
    #: What may differ between nodes, but seldom does for a reason: variables of torch, NCCL and gloo.
    variables: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def from_text(cls, text: str | bytes) -> Self:
        """The contract in ``text``.

        Raises:
            ValueError: if it is something else.
        """
        values = object_from(text if isinstance(text, str) else text.decode(errors="replace"))
        if not isinstance(values.get("must_match"), dict):
            raise ValueError(f"no contract of a job: {text!r:.80}")
        return from_known(cls, values)


def version_in(text: str | bytes) -> str:
    """The version of Lockstep that wrote the contract ``text``, whatever else it says; "" if it does not say.

    Raises:
        ValueError: if it is no contract.
    """
    must_match = object_from(text if isinstance(text, str) else text.decode(errors="replace")).get("must_match")
    version = must_match.get("lockstep") if isinstance(must_match, dict) else None
    return version if isinstance(version, str) else ""


def differences(ours: Mapping[str, str], host: str, theirs: Mapping[str, str], their_host: str) -> list[str]:
    """Where this node differs from the coordinator, such as ``torch is 2.11 on n2, 2.12 on n1``."""
    return [
        f"{name} is {ours.get(name, 'none')} on {host}, {theirs.get(name, 'none')} on {their_host}"
        for name in sorted({*ours, *theirs})
        if ours.get(name) != theirs.get(name)
    ]


def is_newest_coordinator(run_dir: Path, node_id: str) -> bool:
    """Whether the newest launch in ``run_dir`` is that of the coordinator ``node_id``, as far as this node sees."""
    try:
        return read_bytes(run_dir / COORDINATOR_FILE) == node_id.encode("ascii")
    except (OSError, ValueError):
        return False
