"""Where the ranks of a node are while they make no progress, as text for the launchers of the other nodes.

A rank that waits on one node waits for a rank that may be on another: only together do their places say which.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from lockstep.heartbeat_message import Heartbeat
from lockstep.launch.diagnosis.hang_analysis import Link, RankState
from lockstep.records import object_from


@dataclass(frozen=True, slots=True)
class RankPlaces:
    """The ranks of one or several nodes."""

    rank_states: tuple[RankState, ...] = ()  #: of those whose process has not ended
    process_states: Mapping[int, str] = field(default_factory=dict)  #: what each process does, in psutil's words
    exited: Mapping[int, int] = field(default_factory=dict)  #: of the others: exit status, by rank
    hosts: Mapping[int, str] = field(default_factory=dict)  #: by rank
    cut: tuple[Link, ...] = ()  #: links between hosts over which nothing is acknowledged

    @property
    def ranks(self) -> set[int]:
        """All of them."""
        return {rank_state.rank for rank_state in self.rank_states} | set(self.exited)

    def to_text(self) -> str:
        """One line, which `from_text` reads; some hundred characters for each rank."""
        states = [
            {
                "rank": s.rank,
                "beat": s.beat and s.beat.to_text(),
                "seconds": [s.silent_s, s.same_place_s, s.same_phase_s],
                "idle": s.idle,
                "process": self.process_states.get(s.rank, ""),
            }
            for s in self.rank_states
        ]
        exited = {str(rank): status for rank, status in self.exited.items()}
        return json.dumps({"states": states, "exited": exited, "cut": [link.to for link in self.cut]})

    @classmethod
    def from_text(cls, text: str, host: str) -> RankPlaces:
        """The places that a node on ``host`` has told as ``text``; nothing if that cannot be read."""
        try:
            values = object_from(text)
            states = tuple(map(_state, values["states"]))
            processes = {int(each["rank"]): str(each["process"]) for each in values["states"]}
            exited = {int(rank): int(status) for rank, status in values["exited"].items()}
            cut = tuple(Link(host, str(to)) for to in values.get("cut", ()))
        except (ArithmeticError, ValueError, TypeError, KeyError, AttributeError):
            return cls()
        return cls(states, processes, exited, dict.fromkeys([*processes, *exited], host), cut)


def _state(values: Mapping[str, Any]) -> RankState:
    silent_s, same_place_s, same_phase_s = map(float, values["seconds"])
    beat = None if values["beat"] is None else Heartbeat.from_text(values["beat"])
    return RankState(int(values["rank"]), beat, silent_s, same_place_s, same_phase_s, bool(values["idle"]))


def merge_places(places: Iterable[RankPlaces]) -> RankPlaces:
    """All these places as one; of a rank that is in several of them, the first counts."""
    states: dict[int, RankState] = {}
    processes: dict[int, str] = {}
    exited: dict[int, int] = {}
    hosts: dict[int, str] = {}
    cut: list[Link] = []
    for each in places:
        states = {s.rank: s for s in each.rank_states} | states
        processes, exited = {**each.process_states, **processes}, {**each.exited, **exited}
        hosts = {**each.hosts, **hosts}
        cut += each.cut
    return RankPlaces(tuple(states[rank] for rank in sorted(states)), processes, exited, hosts, tuple(cut))
