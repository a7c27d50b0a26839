"""Which ranks are overdue, who keeps the others waiting, and why: decided from heartbeats alone.

    heartbeats ─► HeartbeatTracker ─► RankState, each ─► overdue_ranks ─► diagnose_hang ─► HangDiagnosis ─► hang_report
                  the listener's                         a rank is too    who waits, who is
                  own clock                              long anywhere    waited for, and why

                     ┌─ no heartbeat comes from it ──────  stopped, gil_held, disk: the process state says which
    a rank that is ──┼─ in a call where ranks meet ──────  it waits
                     └─ somewhere else ──────────────────  it is waited for

All but `HeartbeatTracker` are functions of values, so that each kind of hang can be tested without causing it.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Final, Literal

from lockstep.formatting import grouped
from lockstep.heartbeat import NOTHING, Stacks
from lockstep.heartbeat_message import Heartbeat, SourceLine
from lockstep.launch.timeouts import ABSENT_S, SILENT_S, Silence

_STEPS_KEPT = 64
#: Phases that may take long without anything being wrong.
_LONG = frozenset({"script", "start", "save", "evaluate", "exit"})
#: A thread that uses less than this fraction of the elapsed time as CPU time does not compute.
_IDLE = 0.05
_STOPPED = frozenset({"stopped", "tracing-stop"})

Kind = Literal[
    "busy",  # a rank does something else, whatever it is, while the others wait or nobody does
    "loader",  # ... and it waits for the processes of its data loader
    "exited",  # the process of a rank has ended, and the others wait for it
    "mismatched",  # all wait, in different collectives
    "all_waiting",  # all wait, in the same collective
    "network",  # all wait, and what one host sends to another is not acknowledged
    "stopped",  # a rank's process is stopped, by SIGSTOP or a debugger
    "disk",  # it cannot be interrupted: the kernel waits for a disk or a driver
    "gil_held",  # it runs, but no heartbeat comes: compiled code holds Python's global interpreter lock
]

_BEATS = 40  # remembered: twenty seconds
_FEW = 4


@dataclass(frozen=True, slots=True)
class Link:
    """From one host to another one, by their names."""

    sender: str
    to: str


@dataclass(frozen=True, slots=True)
class HangTimeouts:
    """How long a rank may stay where it is, in seconds."""

    hang_after_s: float | None = None  #: given by the user, for everything; None: the values below
    floor_s: float = 30.0  #: within a step
    long_s: float = 120.0  #: outside of steps, and before the first one is done
    times: float = 10.0  #: a step may take this many times the median step

    def allowed_s(self, phase: str, step_times: Sequence[float]) -> float:
        """Seconds that a rank may stay in ``phase``, where steps have taken ``step_times`` seconds."""
        if phase == "input":
            return math.inf  # a user may think for an hour
        if self.hang_after_s is not None:
            return self.hang_after_s
        usual = self.times * statistics.median(step_times) if step_times else 0.0
        return max(self.long_s if phase in _LONG or not step_times else self.floor_s, usual)


@dataclass(frozen=True, slots=True)
class RankState:
    """What is known about one rank whose process has not ended."""

    rank: int
    beat: Heartbeat | None  #: the last one; None: none has come yet
    silent_s: float  #: since the last heartbeat
    same_place_s: float  #: since its last heartbeat from another line or phase
    same_phase_s: float  #: since it went to another phase or step, or began a collective
    idle: bool  #: at the same place it has used next to no CPU time

    @property
    def is_silent(self) -> bool:
        """No heartbeat comes from it."""
        return self.beat is None or self.silent_s > SILENT_S

    def late_s(self, allowed_s: float) -> float:
        """Seconds that it has been where it is, if that is more than ``allowed_s``; else 0."""
        if self.is_silent or self.beat is None:
            return self.silent_s if self.silent_s > allowed_s else 0.0
        at_a_place = (self.beat.meets or self.idle) and self.same_place_s > allowed_s
        in_a_phase = self.beat.phase != "script" and self.beat.phase_changes > 0 and self.same_phase_s > allowed_s
        return max(self.same_place_s * at_a_place, self.same_phase_s * in_a_phase)


@dataclass(slots=True)
class _Track:
    """What `HeartbeatTracker` stores about one rank."""

    heard: Silence[Heartbeat | None]
    place: Silence[tuple[object, ...]]
    phase: Silence[tuple[object, ...]]
    step: Silence[int]
    cpu_s: float = 0.0  # CPU time of the main thread when it came to this line
    steps: list[float] = field(default_factory=list)  # how long each took


class HeartbeatTracker:
    """Follows the ranks of one generation.

    Args:
        ranks: their numbers.
        now: the listener's clock; it must not run while the host sleeps.
    """

    def __init__(self, ranks: Iterable[int], now: float) -> None:
        nowhere: Silence[tuple[object, ...]] = Silence((), now)
        self._tracks: Final = {rank: _Track(Silence(None, now), nowhere, nowhere, Silence(-1, now)) for rank in ranks}
        self._exited: dict[int, int] = {}
        self._looked_at = now
        self._absent_s = 0.0  # the clock of the tracks does not run while the listener is stopped

    def hear(self, beat: Heartbeat, now: float) -> None:
        """Take in a heartbeat that has come. One from a rank that is not in this generation is ignored."""
        track = self._tracks.get(beat.rank)
        if track is None or beat.rank in self._exited:
            return
        now -= self._absent_s
        if not self.heard_any:
            # Ranks start together; how long that took says nothing about them.
            for other in self._tracks.values():
                other.heard = other.heard.restarted(now)
        last, track.heard = track.heard.said, Silence(beat, now)
        if last is not None and last.phase == "input" != beat.phase:
            # Ranks that waited for this one's user have not waited for the rank.
            for other in self._tracks.values():
                other.place, other.phase = other.place.restarted(now), other.phase.restarted(now)
                other.step = other.step.restarted(now)
        before, track.place = track.place, track.place.after(_where_it_is(beat), now)
        if track.place is not before:
            track.cpu_s = beat.cpu_s
        track.phase = track.phase.after(_progress_of(beat), now)
        if beat.step > track.step.said >= 0:
            track.steps.append(track.step.for_s(now) / (beat.step - track.step.said))
            del track.steps[:-_STEPS_KEPT]
        track.step = track.step.after(beat.step, now)

    def rank_exited(self, rank: int, status: int) -> None:
        """The process of ``rank`` has ended with ``status``."""
        self._exited[rank] = status

    def note_time(self, now: float) -> None:
        """To be called often: a pause between two calls means that the listener was stopped, not the ranks."""
        gap = now - self._looked_at
        self._looked_at = now
        if gap > ABSENT_S:
            self._absent_s += gap

    @property
    def heard_any(self) -> bool:
        """Whether a heartbeat of any rank has come."""
        return any(track.heard.said is not None for track in self._tracks.values())

    @property
    def step(self) -> int:
        """The newest step that a rank has done; -1 as long as none has said so."""
        return max((track.step.said for track in self._tracks.values()), default=-1)

    @property
    def saves(self) -> bool:
        """Whether a rank that lives is saving."""
        living = (track.heard.said for rank, track in self._tracks.items() if rank not in self._exited)
        return any(beat is not None and beat.phase == "save" for beat in living)

    def waits_for_user(self, rank: int) -> bool:
        """Whether ``rank`` is in a debugger, or waits for a line from its terminal."""
        beat = self._tracks[rank].heard.said if rank in self._tracks and rank not in self._exited else None
        return beat is not None and beat.phase == "input"

    @property
    def exited(self) -> dict[int, int]:
        """Ranks whose process has ended, with its exit status."""
        return dict(self._exited)

    def silent(self, now: float) -> set[int]:
        """The ranks that live and send no heartbeat, such as those that were stopped."""
        return {state.rank for state in self.rank_states(now) if state.is_silent}

    @property
    def step_times(self) -> list[float]:
        """How long the last steps of all ranks took, in seconds."""
        return [taken for track in self._tracks.values() for taken in track.steps]

    def rank_states(self, now: float) -> list[RankState]:
        """The state of every rank whose process has not ended, by rank."""
        now -= self._absent_s
        return [
            RankState(
                rank,
                beat := track.heard.said,
                silent_s=track.heard.for_s(now),
                same_place_s=track.place.for_s(now),
                same_phase_s=track.phase.for_s(now),
                idle=beat is not None and beat.cpu_s - track.cpu_s <= _IDLE * track.place.for_s(track.heard.since_s),
            )
            for rank, track in sorted(self._tracks.items())
            if rank not in self._exited
        ]


def with_stacks(diagnosis: HangDiagnosis, stacks: Mapping[int, Stacks]) -> HangDiagnosis:
    """``diagnosis`` with the line of each silent rank taken from its stack, since its last heartbeat is old."""
    return replace(
        diagnosis,
        rank_states=tuple(_informed(s, stacks.get(s.rank, NOTHING).main.own()) for s in diagnosis.rank_states),
    )


def _informed(rank_state: RankState, own: Sequence[SourceLine]) -> RankState:
    if not rank_state.is_silent or rank_state.beat is None or not own:
        return rank_state
    return replace(rank_state, beat=replace(rank_state.beat, place=own[0], call="", meets=False))


def overdue_ranks(rank_states: Sequence[RankState], timeouts: HangTimeouts, step_times: Sequence[float]) -> list[int]:
    """The ranks that have been where they are for too long.

    The longest time that any rank is allowed holds for all, since the others may wait for a rank that evaluates. Until
    the first heartbeat of any rank none is overdue: they are still being started.
    """
    heard = [rank_state for rank_state in rank_states if rank_state.beat is not None]
    if not heard:
        return []
    allowed_s = max(timeouts.allowed_s(_beat(rank_state).phase, step_times) for rank_state in heard)
    not_started_s = max(allowed_s, timeouts.long_s)
    return [
        rank_state.rank
        for rank_state in rank_states
        if rank_state.late_s(allowed_s if rank_state.beat else not_started_s)
    ]


@dataclass(frozen=True, slots=True)
class HangDiagnosis:
    """A hang: no rank makes progress. Which kind, and which ranks cause it."""

    kind: Kind
    culprits: tuple[int, ...]  #: the ranks that the others wait for; all that make no progress, if none is different
    waiting: tuple[int, ...]
    rank_states: tuple[RankState, ...]
    for_s: float  #: how long there has been no progress
    exited: Mapping[int, int] = field(default_factory=dict)  #: ranks that had ended, with their exit status
    hosts: Mapping[int, str] = field(default_factory=dict)  #: of ranks on other nodes, by rank
    cut: tuple[Link, ...] = ()  #: links over which nothing is acknowledged, where that explains it

    #: The ranks that are ended first if the hang is ended: those that live then leave what they hold.
    to_end: tuple[int, ...] = ()

    @property
    def nobody_differs(self) -> bool:
        """Whether no rank is different from the others: none of them is the cause by itself."""
        return not self.exited and set(self.culprits) == {s.rank for s in self.rank_states}

    @property
    def is_certain(self) -> bool:
        """Whether it cannot resolve itself: no culprit can be doing what the user wants."""
        return self.kind in ("stopped", "mismatched", "exited") or (
            self.kind in ("gil_held", "disk") and bool(self.waiting)
        )


def diagnose_hang(
    rank_states: Sequence[RankState],
    process_states: Mapping[int, str],
    exited: Mapping[int, int],
    cut: Sequence[Link] = (),
    hosts: Mapping[int, str] = MappingProxyType({}),
) -> HangDiagnosis:
    """Which ranks keep the others waiting, and how.

    A cause is only named if nothing else explains what was seen: ranks that all wait may wait for the network.

    Args:
        rank_states: of all ranks whose process has not ended.
        process_states: what each process does, by rank and in psutil's words (``running``, ``sleeping``,
            ``disk-sleep``, ``stopped``, ``tracing-stop``, ``zombie``); may be incomplete.
        exited: ranks that have ended, with their exit status.
        cut: links between their hosts over which nothing is acknowledged.
        hosts: of all ranks, by rank, where there are several.
    """
    silent = [s for s in rank_states if s.is_silent or process_states.get(s.rank, "") in _STOPPED]
    heard = [s for s in rank_states if s not in silent]
    waiting = [s for s in heard if _beat(s).meets] or _ahead_of_others(heard)
    others = [s for s in heard if s not in waiting]
    kind: Kind
    culprits: Sequence[RankState]
    if silent:
        kind, culprits = _kind_of_silence(silent, process_states), silent
    elif others:
        kind, culprits = "busy", others
        if not waiting:
            # Nobody waits, so the ranks that made progress last do not cause the hang.
            longest = max(s.same_phase_s if s.same_place_s < SILENT_S else s.same_place_s for s in others)
            culprits = [s for s in others if max(s.same_place_s, s.same_phase_s) >= longest / 2]
        if all(_beat(s).call == "next(loader)" for s in culprits):
            kind = "loader"
    elif cut and not exited:
        # In the middle of a collective some ranks are past it, and others are not: it looks like another collective.
        kind, culprits = "network", waiting
    else:
        kind, culprits = _all_wait(waiting, exited)
    blamed = {s.rank for s in culprits}
    idle = [s.same_place_s for s in waiting] or [max(s.silent_s, s.same_place_s) for s in culprits]
    return HangDiagnosis(
        kind=kind,
        culprits=tuple(sorted(blamed)) if kind != "exited" else tuple(sorted(exited)),
        waiting=tuple(s.rank for s in waiting if s.rank not in blamed or kind == "exited"),
        rank_states=tuple(rank_states),
        for_s=max(idle, default=0.0),
        exited=dict(exited),
        cut=tuple(cut) if kind == "network" else (),
        to_end=_to_end(blamed, [s.rank for s in rank_states], exited, cut, hosts),
    )


def _to_end(
    blamed: AbstractSet[int],
    living: Sequence[int],
    exited: Mapping[int, int],
    cut: Sequence[Link],
    hosts: Mapping[int, str],
) -> tuple[int, ...]:
    """The ranks to end first: those that are to blame; and if that is all or none of those that live, as few as do."""
    if not exited and blamed < set(living):
        return tuple(sorted(blamed))
    ends = [host for link in cut for host in (link.sender, link.to)]
    behind = [host for host in hosts.values() if host in ends]
    if not behind:
        return (max(living),) if living else ()
    # The host that most cut links lead to. Of two such hosts the one of the last rank: rank 0's is needed most.
    last = {host: max(rank for rank in living if hosts.get(rank) == host) for host in behind}
    worst = max(last, key=lambda host: (ends.count(host), last[host]))
    return tuple(rank for rank in living if hosts.get(rank) == worst)


def _kind_of_silence(silent: Sequence[RankState], process_states: Mapping[int, str]) -> Kind:
    found = {process_states.get(s.rank, "") for s in silent}
    if found <= _STOPPED:
        return "stopped"
    return "disk" if found <= {"disk-sleep"} else "gil_held"


def _ahead_of_others(heard: Sequence[RankState]) -> list[RankState]:
    """Ranks that have begun a collective which others have not, and do not move: they wait, though no call shows it."""
    counts = {_beat(s).collectives for s in heard}
    if len(counts) < 2:
        return []
    return [s for s in heard if _beat(s).collectives == max(counts) and s.same_place_s > SILENT_S / 2]


def _all_wait(waiting: Sequence[RankState], exited: Mapping[int, int]) -> tuple[Kind, Sequence[RankState]]:
    """The kind and the culprits where every rank waits for the others."""
    if exited:
        return "exited", waiting
    calls = grouped((_collective_of(_beat(rank_state)), rank_state) for rank_state in waiting)
    if len(calls) < 2:
        return "all_waiting", waiting
    fewest, most = min(map(len, calls.values())), max(map(len, calls.values()))
    # The smallest group is in the wrong collective. If all groups are equally large, nobody can say which is right.
    odd = [s for group in calls.values() if len(group) == fewest for s in group] if fewest < most else waiting
    return "mismatched", odd


def _collective_of(beat: Heartbeat) -> object:
    # What `Run` does in one call may be several collectives, and no script can part the ways of ranks in there.
    count = beat.collectives if beat.phase == "script" else 0
    return (beat.step, beat.phase, beat.call, beat.place, count)


def _beat(rank_state: RankState) -> Heartbeat:
    assert rank_state.beat is not None, "a rank that was never heard is silent"
    return rank_state.beat


def _progress_of(beat: Heartbeat) -> tuple[object, ...]:
    return (beat.step, beat.phase_changes, beat.phase, beat.collectives)


def _where_it_is(beat: Heartbeat) -> tuple[object, ...]:
    return (*_progress_of(beat), beat.place, beat.call)


@dataclass(frozen=True, slots=True)
class Waiting:
    """One rank, as it was last heard."""

    beat: Heartbeat
    waits: float | None  #: the part of its heartbeats in which it waited; None: too few are known
    silent_s: float


class WaitShare:
    """How much each rank waited in its last heartbeats. A rank that all others wait for waits least itself."""

    def __init__(self) -> None:
        self._waited: dict[int, deque[bool]] = {}
        self._last: dict[int, Silence[Heartbeat]] = {}

    def hear(self, beats: Iterable[Heartbeat], now: float) -> None:
        """Take in heartbeats that have come at ``now``."""
        for beat in beats:
            # Only while it trains: at the start and in an evaluation waiting is normal.
            if beat.step >= 0 and beat.phase not in ("start", "evaluate", "exit"):
                self._waited.setdefault(beat.rank, deque(maxlen=_BEATS)).append(beat.meets)
            self._last[beat.rank] = Silence(beat, now)

    def ranks(self, now: float) -> list[Waiting]:
        """Every rank that has sent a heartbeat, by rank."""
        return [Waiting(heard.said, self._part(rank), heard.for_s(now)) for rank, heard in sorted(self._last.items())]

    def _part(self, rank: int) -> float | None:
        waited = self._waited.get(rank, ())
        return sum(waited) / len(waited) if len(waited) >= _FEW else None
