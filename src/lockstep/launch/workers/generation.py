"""This node's ranks of one generation, as all parts of the launcher know them.

WorkerGroup   starts them, and notes how they ended             ──►┐
HangMonitor   makes this, hears them, and says where they are   ──►│  Generation  ──►  Agent: the report to other nodes
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from lockstep.launch.diagnosis.error_record import Failure
from lockstep.launch.diagnosis.hang_analysis import HeartbeatTracker, WaitShare
from lockstep.launch.diagnosis.rank_places import RankPlaces, merge_places
from lockstep.launch.diagnosis.root_cause import RankExit
from lockstep.launch.timeouts import FAILED_S


@dataclass(slots=True, eq=False)
class Generation:
    """What is known of them. A new one begins with each generation, and nothing of the last one is in it."""

    tracker: HeartbeatTracker  #: of their heartbeats
    number: int = -1  #: -1: none has begun
    ranks: range = range(0)  #: those of this node
    world_size: int = 0  #: ranks on all nodes
    host: str = ""  #: of this node, where there are several
    peers: Mapping[str, str] = field(default_factory=dict)  #: the other hosts, by each of their addresses
    waits: WaitShare = field(default_factory=WaitShare)  #: how much they wait for each other
    failures: dict[int, Failure] = field(default_factory=dict)  #: why ranks said that they fail, by rank
    places: str = ""  #: where they are, for the other nodes, once they make no progress
    elsewhere: RankPlaces = field(default_factory=RankPlaces)  #: where ranks of other nodes are
    exited: dict[int, RankExit] = field(default_factory=dict)
    endings: tuple[RankExit, ...] = ()  #: how all ranks ended, once they all have
    lost_part: str = ""  #: which process that all ranks need is gone
    hangs: bool = False  #: it is to be ended because its ranks hang
    severed: bool = False  #: ranks were ended because the network between their host and another one is cut
    left: bool = False  #: it has ended, and ranks that survived another one have left their state

    @property
    def living(self) -> set[int]:
        """The ranks whose end is not known."""
        return set(self.ranks) - self.exited.keys()

    @property
    def running(self) -> bool:
        """Whether some ranks live."""
        return bool(self.living)

    @property
    def errors(self) -> Mapping[int, Failure]:
        """Of the `failures` those of ranks that did not leave by an exit of their program's."""
        return {rank: failure for rank, failure in self.failures.items() if not failure.ends_well}

    def failed(self, now_s: float) -> bool:
        """Whether a rank has failed, or something that all of them need.

        Also one that has told so and does not end: its log may be on a file system that is not there.
        """
        late = (f for rank, f in self.errors.items() if rank not in self.exited and now_s - f.raised_s > FAILED_S)
        return self.lost_part != "" or any(not ending.well for ending in self.exited.values()) or any(late)

    @property
    def causes(self) -> tuple[bool, bool]:
        """Whether a rank says that its connection to another one broke; whether one failed for another reason."""
        told = self.errors
        silent = [e for e in self.exited.values() if not e.well and not e.ended_by_us and e.rank not in told]
        other = [failure for failure in told.values() if not failure.collateral]
        return len(other) < len(told), bool(other or silent or self.lost_part)

    def note_elsewhere(self, told: Mapping[str, str]) -> None:
        """Take in where the ranks of other nodes are, by host, as their `places` say."""
        self.elsewhere = merge_places(RankPlaces.from_text(text, host) for host, text in told.items())

    def note_exit(self, rank: int, status: int, at_s: float, *, ended_by_us: bool, part: str = "") -> None:
        """Rank ``rank`` has ended, as in `RankExit`."""
        self.tracker.rank_exited(rank, status)
        self.exited[rank] = RankExit(rank, status, at_s, ended_by_us=ended_by_us, host=self.host, part=part)
