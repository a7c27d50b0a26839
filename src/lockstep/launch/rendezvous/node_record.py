"""The record that a node writes to the store, and the coordinator's view of it."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

from lockstep.launch.diagnosis.root_cause import RankExit
from lockstep.launch.rendezvous.plan import NodeReport, NodeView
from lockstep.records import from_known, object_from


def record_text(report: NodeReport, beat: int, written: Sequence[int]) -> str:
    """What a node writes: its report, its heartbeat, its clock, and the generations whose endings it has written."""
    return json.dumps({"report": asdict(report), "beat": beat, "now_s": time.monotonic(), "written": list(written)})


@dataclass(frozen=True, slots=True)
class NodeRecord:
    """What the coordinator's thread knows of one node."""

    report: NodeReport
    beat: int = -1
    since_s: float = 0.0  #: when the beat was new, on our clock
    read_s: float = 0.0  #: when it was read last
    ahead_s: float = float("inf")  #: of our clock before its; too large by how long the quickest record was on its way
    written: tuple[int, ...] = ()  #: generations of which it has written the endings
    endings_of: int = -1  #: the generation of ``endings``
    endings: tuple[RankExit, ...] = ()

    def update(self, record: Mapping[str, Any], now_s: float) -> NodeRecord:
        """The record after ``record`` was read.

        Raises:
            ValueError: if that is none, or older than this one.
        """
        report, beat = from_known(NodeReport, record.get("report")), record.get("beat")
        at_s, written = record.get("now_s"), record.get("written")
        if not (isinstance(beat, int) and isinstance(at_s, int | float) and isinstance(written, list)):
            raise ValueError(f"no record of a node: {record!r:.80}")
        if beat < self.beat:
            raise ValueError("the record of a node in the store is an old one")
        new = beat != self.beat
        return replace(
            self,
            report=report,
            beat=beat,
            since_s=now_s if new else self.since_s,
            read_s=now_s,
            ahead_s=min(self.ahead_s, now_s - at_s) if new else self.ahead_s,
            written=tuple(written),
        )

    def view(self) -> NodeView:
        """The node as `membership.decide` sees it."""
        # Silence counts up to the last read, not up to now: an agent that has slept knows nothing of the others.
        silent_s = self.read_s - self.since_s
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


UNKNOWN: Final = NodeRecord(NodeReport("", "", 0))


def _on_our_clock(ending: RankExit, ahead_s: float) -> RankExit:
    failure = ending.failure and replace(ending.failure, raised_s=ending.failure.raised_s + ahead_s)
    return replace(ending, at_s=ending.at_s + ahead_s, failure=failure)
