"""The reports of the nodes of a job and the plan for all of them: values, and their text in the store."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import IntEnum
from typing import Final, Literal, Self

from lockstep.launch.diagnosis.root_cause import RankExit
from lockstep.launch.timeouts import LOST_AFTER_S, SUSPECT_AFTER_S, Silence
from lockstep.records import JsonRecord, from_known, object_from, of_kind

Phase = Literal["gather", "generation", "over"]


class StopMode(IntEnum):
    """How ranks are to end; it only ever grows within a generation."""

    NONE = 0
    GRACEFUL = 1  #: SIGTERM, and all the time that they need to save
    INTERRUPT = 2  #: SIGINT, and SIGKILL after the grace: the user has no time for a checkpoint
    TERMINATE = 3  #: SIGTERM, and SIGKILL after the grace: the generation has failed
    PEER_LOST = 4  #: as TERMINATE with a short grace: the peers that they wait for are gone
    KILL = 5


@dataclass(frozen=True, slots=True)
class ElasticLimits:
    """Which numbers of nodes, restarts and seconds the user allows."""

    min_nodes: int = 1  #: nothing runs with fewer
    max_nodes: int = 1
    max_restarts: int = 0  #: generations that may be started after failures
    max_changes: int = 0  #: generations that may be started after nodes were lost or joined
    join_timeout_s: float = 600.0  #: how long ``min_nodes`` are waited for
    lost_after_s: float = LOST_AFTER_S  #: a node that has reported nothing for so long is lost
    #: After so long it is lost, too, if ranks of others have lost their connections to it.
    suspect_after_s: float = SUSPECT_AFTER_S
    refill_after_s: float = 600.0  #: of training at new steps, until restarts and changes count from 0 again
    last_call_s: float = 3.0  #: how long ``max_nodes`` are waited for once ``min_nodes`` are there
    listen_s: float = 0.5  #: how long other ranks may fail after the first, so that the cause is among them
    hands_over: bool = False  #: another node takes over from a coordinator that leaves
    expected: tuple[str, ...] = ()  #: hosts of the allocation, where a scheduler names them


@dataclass(frozen=True, slots=True)
class NodeReport:
    """What one node reports of itself."""

    node_id: str  #: unique, one for each agent
    host: str
    ranks: int  #: that it can start
    address: str = ""  #: by which other nodes can reach it
    addresses: tuple[str, ...] = ()  #: all that its host has
    node_rank: int | None = None  #: that the user has given it
    generation: int = -1  #: of its ranks, living or ended
    running: bool = False  #: some of its ranks live
    failed: bool = False  #: a rank of this generation has failed
    lost_peer: bool = False  #: ... and says that its connection to another one broke
    own_cause: bool = False  #: a rank has failed, and says something else or nothing
    step: int = field(default=-1, compare=False)  #: the newest that a rank of this generation has done, as far as known
    #: Where its ranks are, once they make no progress, as `lockstep.launch.diagnosis.rank_places` writes it.
    places: str = field(default="", compare=False)
    hangs: bool = False  #: its ranks hang and are to be ended
    severed: bool = False  #: its ranks were ended, since the network between it and another node is cut
    final: bool = False  #: nothing is to be started after this generation
    left: bool = False  #: ranks of this generation that survived others have left the last finished step
    stops: int = 0  #: how often it was asked to stop
    stopped_by: int = 0  #: the first signal that asked
    stops_job: bool = False  #: that was meant for the whole job, as Ctrl-C is, and not for this node only
    leaving: bool = False
    plan_seen: int = 0  #: number of the last plan that it has read


@dataclass(frozen=True, slots=True)
class NodeView:
    """A node, as the coordinator sees it."""

    report: NodeReport
    silent_s: float = 0.0  #: since its last report
    endings: tuple[RankExit, ...] = ()  #: of its ranks of ``report.generation``, once all of them have ended

    def gone(self, limits: ElasticLimits) -> bool:
        """Whether it counts as lost."""
        return self.report.leaving or self.silent_s >= limits.lost_after_s

    def present(self, limits: ElasticLimits) -> bool:
        """Whether it was heard just now, so that a generation may begin with it."""
        return not self.report.leaving and self.silent_s < limits.suspect_after_s


@dataclass(frozen=True, slots=True)
class Member:
    """A node of one generation."""

    node_id: str
    host: str
    ranks: int
    address: str = ""
    addresses: tuple[str, ...] = ()

    @classmethod
    def of(cls, report: NodeReport) -> Self:
        """The node that has reported itself so."""
        addresses = tuple(map(str, report.addresses))
        return cls(report.node_id, report.host, report.ranks, report.address, addresses)


@dataclass(frozen=True, slots=True)
class NodePlacement:
    """Which node of a generation this one is, and how its ranks reach the others."""

    node_rank: int
    address: str  #: of the store where the ranks meet
    listening: socket.socket | None  #: the socket of that store, on the node that has it
    host: str = ""  #: this node's name, where there are several
    interface: str = ""  #: of this host, which leads to the others; "": the ranks find it out


@dataclass(frozen=True, slots=True)
class Plan(JsonRecord):
    """What every node does."""

    number: int = 0  #: grows with every change
    phase: Phase = "gather"
    generation: int = 0  #: the one that runs, or the next
    restart: int = 0  #: generations of this job before it, since it was started
    stop_mode: StopMode = StopMode.NONE
    stop_reason: str = ""  #: why, in words for the user
    members: tuple[Member, ...] = ()  #: in the order of their ranks
    lost: tuple[str, ...] = ()  #: ids of members that are lost, while the others end
    released: tuple[str, ...] = ()  #: ids of nodes that leave, once their ranks have ended, while the job goes on
    port: int = 0  #: of the store where the ranks meet
    save_only: str = ""  #: why this generation only saves what survivors have left; "": it trains
    code: int = 0  #: exit code of all agents, once the job is over
    notices: int = 0  #: how many were announced so far

    @property
    def ranks(self) -> int:
        """The number of ranks of all members."""
        return sum(member.ranks for member in self.members)

    def node_rank(self, node_id: str) -> int | None:
        """The node rank of ``node_id``; None if it is no member of this generation."""
        return next((rank for rank, member in enumerate(self.members) if member.node_id == node_id), None)

    def first_rank(self, node_rank: int) -> int:
        """The first rank on the node with this ``node_rank``."""
        return sum(member.ranks for member in self.members[:node_rank])

    def with_lost(self, lost: tuple[str, ...]) -> Self:
        """The plan that says so, too: the other end does not close the connections to members that are ``lost``."""
        return self if lost == self.lost else replace(self, number=self.number + 1, lost=lost)

    def addresses_of(self, members: Collection[str]) -> frozenset[str]:
        """The addresses by which one reaches these ``members``, by their ids, and no other one."""
        inside = {a for member in self.members if member.node_id in members for a in member.addresses}
        # Bridges of containers have the same address on every host, and in a rehearsal all nodes are one host.
        return frozenset(inside.difference(*(m.addresses for m in self.members if m.node_id not in members)))

    @classmethod
    def from_text(cls, text: str | bytes) -> Self:
        """The plan in ``text``.

        Raises:
            ValueError: if it is something else.
        """
        fields = object_from(text)
        if not {"members", "stop_mode"} <= fields.keys():
            raise ValueError(f"no plan: {text!r:.80}")
        return from_known(cls, fields)


def record_text(report: NodeReport, beat: int, written: Sequence[int]) -> str:
    """What a node writes: its report, its heartbeat, its clock, and the generations whose endings it has written."""
    return json.dumps({"report": asdict(report), "beat": beat, "now_s": time.monotonic(), "written": list(written)})


@dataclass(frozen=True, slots=True)
class NodeRecord:
    """What the coordinator's thread knows of one node."""

    report: NodeReport
    heard: Silence[int]  #: its heartbeat
    read_s: float = 0.0  #: when it was read last
    ahead_s: float = float("inf")  #: of our clock before its; too large by how long the quickest record was on its way
    written: tuple[int, ...] = ()  #: generations of which it has written the endings
    endings_of: int = -1  #: the generation of ``endings``
    endings: tuple[RankExit, ...] = ()

    def update(self, record: Mapping[str, object], now_s: float) -> NodeRecord:
        """The record after ``record`` was read.

        Raises:
            ValueError: if that is none, or older than this one.
        """
        report, beat = from_known(NodeReport, record.get("report")), record.get("beat")
        at_s, written = of_kind(float, record.get("now_s"), "now_s"), record.get("written")
        if not (isinstance(beat, int) and isinstance(written, list)):
            raise ValueError(f"no record of a node: {record!r:.80}")
        if beat < self.heard.said:
            raise ValueError("the record of a node in the store is an old one")
        heard = self.heard.after(beat, now_s)
        return replace(
            self,
            report=report,
            heard=heard,
            read_s=now_s,
            ahead_s=self.ahead_s if heard is self.heard else min(self.ahead_s, now_s - at_s),
            written=tuple(written),
        )

    def view(self) -> NodeView:
        """The node as `membership.decide` sees it."""
        # Silence counts up to the last read, not up to now: an agent that has slept knows nothing of the others.
        silent_s = self.heard.for_s(self.read_s)
        endings = self.endings if self.endings_of == self.report.generation else ()
        return NodeView(self.report, silent_s, tuple(_on_our_clock(ending, self.ahead_s) for ending in endings))


def beat_in(text: str) -> int:
    """The heartbeat in the record ``text``.

    Raises:
        ValueError: if it is none.
    """
    beat = object_from(text).get("beat")
    if not isinstance(beat, int):
        raise ValueError(f"no record of a node: {text:.80}")
    return beat


UNKNOWN: Final = NodeRecord(NodeReport("", "", 0), Silence(-1))


def _on_our_clock(ending: RankExit, ahead_s: float) -> RankExit:
    failure = ending.failure and replace(ending.failure, raised_s=ending.failure.raised_s + ahead_s)
    return replace(ending, at_s=ending.at_s + ahead_s, failure=failure)
