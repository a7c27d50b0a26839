"""What an agent needs of the store through which the nodes of a job agree, and the store of a job on one machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from lockstep.launch.diagnosis.root_cause import RankExit
from lockstep.launch.rendezvous.notices import Notice
from lockstep.launch.rendezvous.plan import NodeReport, NodeView, Plan


class RendezvousStore(Protocol):
    """Where each node writes its report and reads the plan. No call waits for the network."""

    @property
    def is_coordinator(self) -> bool:
        """Whether this agent decides for all."""

    @property
    def coordinator(self) -> str:
        """The id of the node that decides; it changes when a new agent takes the store over."""

    def report(self, report: NodeReport, endings: Sequence[RankExit]) -> None:
        """Set what this node reports from now on; ``endings`` once all ranks of ``report.generation`` have ended."""

    def beat(self) -> None:
        """The agent's loop goes on. A node whose loop does not call this is silent for the others."""

    def nodes(self) -> Sequence[NodeView]:
        """All nodes that ever joined, in the order of their joining. For the coordinator only."""

    def publish(self, plan: Plan, notices: Sequence[Notice]) -> None:
        """Set what all nodes do from now on, and all that was ever announced. For the coordinator only."""

    def plan(self) -> Plan:
        """What to do, as far as it is known here."""

    def notices(self) -> Sequence[Notice]:
        """All that the coordinator has announced: at least what belongs to the `plan` that was read before."""

    def places(self) -> Mapping[str, str]:
        """Where ranks of the other members of the generation are that make no progress, by the name of their host.

        Other nodes are asked for it while this node's own report says it.
        """

    def refused(self) -> Sequence[str]:
        """What nodes said that could not take part, in one line each. For the coordinator only; anybody may say so."""

    def silent_s(self) -> float:
        """For how many seconds the coordinator has not been heard."""

    def close(self) -> None:
        """Report nothing more."""


class LocalStore(RendezvousStore):
    """The store of a job on one machine: three variables."""

    is_coordinator = True
    coordinator = "local"

    def __init__(self) -> None:
        self._node = NodeView(NodeReport(self.coordinator, "", 0))
        self._plan = Plan()
        self._notices: Sequence[Notice] = ()

    def report(self, report: NodeReport, endings: Sequence[RankExit]) -> None:
        """Keep the report."""
        self._node = NodeView(report, 0.0, tuple(endings))

    def beat(self) -> None:
        """Do nothing: there are no other nodes."""

    def nodes(self) -> Sequence[NodeView]:
        """The only node."""
        return [self._node]

    def publish(self, plan: Plan, notices: Sequence[Notice]) -> None:
        """Keep the plan and the notices."""
        self._plan, self._notices = plan, notices

    def plan(self) -> Plan:
        """The plan that was published last."""
        return self._plan

    def notices(self) -> Sequence[Notice]:
        """All notices that were published."""
        return self._notices

    def places(self) -> Mapping[str, str]:
        """Nothing: there are no other nodes."""
        return {}

    def refused(self) -> Sequence[str]:
        """Nothing: there are no other nodes."""
        return ()

    def silent_s(self) -> float:
        """Always 0: the coordinator is this process."""
        return 0.0

    def close(self) -> None:
        """Do nothing."""
