"""Who coordinates a job when the endpoint's host is lost, decided through the run directory that all nodes share.

    RUN_DIR/leases/term-000001     {"node_id": ..., "endpoint": "n1:29400", "beat": 812}    by n1, while it lives
    RUN_DIR/leases/term-000002     {"node_id": ..., "endpoint": "10.0.0.2:29400", ...}      by n2, which has taken over

A term is a file that exactly one node can make. Its holder writes a new beat into it again and again; the holder of the
highest term is the coordinator. Two worlds never train at once:

- A holder whose last beat *began* more than `lost_after_s` ago has no ranks: its launcher ends them, and where the
  launcher itself is stopped, the fork server does.
- A node that follows it ends its own ranks when it has not heard it for `lost_after_s`.
- Another node makes the next term only if it has itself seen the same beat for longer than both together.
- A holder that sees a higher term, whenever it wakes up, ends its ranks and follows the new one.

Clocks of different nodes are never compared. All of it but `LeaseFiles` are functions of values.
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from lockstep.launch.timeouts import NodeTimeouts, Silence
from lockstep.records import from_known, read_object
from lockstep.small_files import create_text, replace_text

_DIRECTORY = "leases"
_NAME = re.compile(r"term-(\d{6,})")


@dataclass(frozen=True, slots=True)
class Lease:
    """The right to coordinate a job."""

    term: int
    node_id: str
    host: str
    endpoint: str  #: where its store listens, ``host:port``
    beat: int = 0
    left: bool = False  #: its holder has ended its ranks, and left the job to the others


def holder_acts(
    held: Lease, newest: Lease | None, renewed_s: float, times: NodeTimeouts, now_s: float
) -> Literal["lead", "suspend", "follow"]:
    """What the holder of ``held`` does: decide for all, have no ranks until it can renew, or follow a newer holder.

    Args:
        held: its lease.
        newest: the lease of the highest term, as it read it last; None: it could not.
        renewed_s: when it began to write the last beat that it knows to be written.
        times: of the job.
        now_s: on its own clock.
    """
    if newest is not None and newest.term > held.term:
        return "follow"
    return "lead" if now_s - renewed_s < times.lost_after_s else "suspend"


def follower_acts(
    followed: int, seen: Silence[Lease | None], silent_s: float, running: bool, times: NodeTimeouts, now_s: float
) -> Literal["wait", "claim", "follow"]:
    """What a node does that is not the coordinator: nothing, make the next term, or follow a newer holder.

    Args:
        followed: the term of the coordinator whose plans it follows.
        seen: of the highest term.
        silent_s: for how long it has not heard that coordinator over the network.
        running: whether ranks of its own live.
        times: of the job.
        now_s: on its own clock.
    """
    if running or seen.said is None:
        return "wait"
    if seen.said.left:
        return "claim"
    if silent_s < times.lost_after_s:
        return "wait"
    if seen.said.term > followed:
        return "follow"
    return "claim" if seen.for_s(now_s) >= times.over_after_s else "wait"


class LeaseFiles:
    """The leases in a run directory. Each method may wait for the file system, and raises what that raises.

    Args:
        run_dir: of the job, which all nodes see.
    """

    def __init__(self, run_dir: Path) -> None:
        self.path = run_dir / _DIRECTORY

    def newest(self) -> Lease | None:
        """The lease of the highest term; None if there is none, or if it cannot be understood."""
        terms = self._terms()
        return self._read(max(terms)) if terms else None

    def claim(self, node_id: str, host: str, endpoint: str, after: int | None = None) -> Lease | None:
        """Make the next term; None if another node did so first.

        Args:
            node_id: of the claiming node.
            host: its name.
            endpoint: where its store listens.
            after: the term that must be the highest one; None: whatever there is.
        """
        self.path.mkdir(exist_ok=True)
        before = max(self._terms(), default=0)
        if after is not None and before != after:
            return None
        lease = Lease(before + 1, node_id, host, endpoint)
        return lease if create_text(self._file(lease.term), json.dumps(asdict(lease))) else None

    def renew(self, lease: Lease) -> Lease | None:
        """Write the beat of ``lease``; returns the lease of the highest term afterwards."""
        replace_text(self._file(lease.term), json.dumps(asdict(lease)))
        return self.newest()

    def _terms(self) -> list[int]:
        names = os.listdir(self.path) if self.path.is_dir() else []
        return [int(match[1]) for name in names if (match := _NAME.fullmatch(name))]

    def _read(self, term: int) -> Lease | None:
        try:
            return from_known(Lease, read_object(self._file(term)), term=term)
        except ValueError:
            return None

    def _file(self, term: int) -> Path:
        return self.path / f"term-{term:06d}"
