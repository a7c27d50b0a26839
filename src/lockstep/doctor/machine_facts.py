"""What ranks that were really started have seen of their hosts and of each other, and how the parent reads it.

rank 0 of a node      PLACE/node-0000.json     before ranks connect
rank 0                PLACE/ranks.json         after they have
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Self

from lockstep.doctor.host_facts import FileFacts, HostFacts
from lockstep.formatting import plural
from lockstep.records import from_known, read_object
from lockstep.small_files import replace_text

_RANKS = "ranks.json"


@dataclass(frozen=True, slots=True)
class ReachFacts:
    """A connection that one node has tried to open to another, at a port that the system chose."""

    host: str
    to: str  #: host
    address: str
    seconds: float | None  #: None: it was not opened


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """What a node has seen before its ranks connect."""

    host: HostFacts
    files: FileFacts
    reached: tuple[ReachFacts, ...] = ()

    def write(self, place: Path, number: int) -> None:
        """Write it as those of the node with this number."""
        (place / f"node-{number:04d}.json").write_text(json.dumps(asdict(self)), encoding="utf-8")


@dataclass(frozen=True, slots=True)
class RankFacts:
    """One rank."""

    rank: int
    node: int
    host: str
    device: str  #: name of the GPU, or of the CPU's kernels
    on_gpu: bool = False
    backend: str = "gloo"
    nccl: str = ""
    threads: int = 1
    cpus: tuple[int, ...] = ()  #: on which it may run
    interface: str = ""  #: by which it talks to the others
    bits: str = ""  #: digest of what it has computed, the same thing on all ranks
    clock_s: float = 0.0  #: by which its clock is ahead of that of rank 0
    seen_s: float | None = 0.0  #: until it saw a file that rank 0 had written to the run directory; None: it did not
    lock: str = "refused"  #: what it got for a lock that rank 0 held: refused, granted, or the error


@dataclass(frozen=True, slots=True)
class PairFacts:
    """Two ranks."""

    first: int
    second: int
    latency_s: float
    bytes_per_s: float


@dataclass(frozen=True, slots=True)
class RanksFacts:
    """All ranks together."""

    ranks: tuple[RankFacts, ...] = ()
    pairs: tuple[PairFacts, ...] = ()
    sum_bytes: int = 0  #: of each rank, in a sum over all ranks
    sum_s: float = 0.0

    def write(self, place: Path) -> None:
        """Write it for the parent, completely or not at all."""
        replace_text(place / _RANKS, json.dumps(asdict(self)))


@dataclass(frozen=True, slots=True)
class MachineFacts:
    """All that is known of the machine, or of several; judged in `lockstep.doctor.machine_findings`."""

    nodes: tuple[NodeFacts, ...]
    seen: RanksFacts = RanksFacts()
    failure: str = ""  #: why ranks did not start, or did not finish

    @classmethod
    def read(cls, place: Path, own: NodeFacts, failure: str) -> Self:
        """What was written to ``place``, with the parent's ``own`` for the first node."""
        files = sorted(place.glob("node-*.json"))
        nodes = [from_known(NodeFacts, read_object(file)) for file in files]
        # In the environment of a rank there is what the launcher has set.
        first = replace(nodes[0], host=own.host, files=own.files) if nodes else own
        ranks = place / _RANKS
        seen = from_known(RanksFacts, read_object(ranks)) if ranks.exists() else RanksFacts()
        return cls((first, *nodes[1:]), seen, failure)

    @property
    def tested(self) -> str:
        """How many ranks and nodes have really taken part."""
        ranks, nodes = self.seen.ranks, {rank.node for rank in self.seen.ranks}
        if not ranks:
            here = self.nodes[0].host.host
            return "no ranks: they did not start" if self.failure else f"{here}; the node where all meet tells the rest"
        moved = f"; {plural(len(self.seen.pairs), 'pair')} of ranks moved data over {ranks[0].backend}"
        return f"{plural(len(ranks), 'rank')} on {plural(len(nodes), 'node')}{moved if len(ranks) > 1 else ''}"
