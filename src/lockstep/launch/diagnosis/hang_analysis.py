"""Which ranks are late, who keeps the others waiting, and why: decided from heartbeats alone.

    heartbeats ─► Watch ─► rank_states ─► late(...) ─► diagnose_hang(..., states) ─► Stall ─► report(...)
                  the listener's     somebody     who waits, who is       what one reads
                  own clock          is too long  waited for, and why

                     ┌─ none is heard from ──────────────  stopped, locked, disk: the process state says which
    a rank that is ──┼─ in a call where ranks meet ──────  it waits
                     └─ somewhere else ──────────────────  it is waited for

All but `HeartbeatTracker` are functions of values: each kind of trouble can be tried without having it.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Literal

from lockstep.heartbeat import NOTHING, Stack, Stacks
from lockstep.heartbeat_message import Heartbeat, SourceLine

#: From here on a rank counts as silent: it has missed this many seconds of heartbeats.
SILENT_S: Final = 2.0
#: A pause in the listener's own life from which on it does not blame the ranks for what it has not heard.
ABSENT_S: Final = 1.5
_STEPS_KEPT = 64
#: Phases of which nobody knows how long they take by right.
_LONG = frozenset({"script", "start", "save", "evaluate", "exit"})
#: CPU time, as a part of the time that went by, below which a thread does not compute.
_IDLE = 0.05

Kind = Literal["busy", "loader", "exited", "mismatched", "all_waiting", "stopped", "disk", "gil_held"]


@dataclass(frozen=True, slots=True)
class HangTimeouts:
    """How long a rank may take."""

    hang_after_s: float | None = None  #: the user's own word, for everything; None: what follows
    floor_s: float = 30.0  #: within a step
    long_s: float = 120.0  #: outside of steps, and before the first one is done
    times: float = 10.0  #: how many usual steps a step may take

    def allowed_s(self, phase: str, step_times: Sequence[float]) -> float:
        """Seconds that a rank may stay in ``phase``, where steps have taken ``step_times`` seconds."""
        if self.hang_after_s is not None:
            return self.hang_after_s
        usual = self.times * statistics.median(step_times) if step_times else 0.0
        return max(self.long_s if phase in _LONG or not step_times else self.floor_s, usual)


@dataclass(frozen=True, slots=True)
class RankState:
    """What is known about one rank that has not left."""

    rank: int
    beat: Heartbeat | None  #: the last one; None: nothing was ever heard
    silent_s: float  #: since the last heartbeat
    same_place_s: float  #: since it was seen anywhere else
    same_phase_s: float  #: since it went to another phase or step, or began a collective
    idle: bool  #: at the same place it has used next to no CPU time

    @property
    def is_silent(self) -> bool:
        """No heartbeat comes any more."""
        return self.beat is None or self.silent_s > SILENT_S

    def late_s(self, allowed_s: float) -> float:
        """For how long it has been where it should have left by now; 0 if it is not late."""
        if self.is_silent or self.beat is None:
            return self.silent_s if self.silent_s > allowed_s else 0.0
        at_a_place = (self.beat.meets or self.idle) and self.same_place_s > allowed_s
        in_a_phase = self.beat.phase != "script" and self.beat.phase_changes > 0 and self.same_phase_s > allowed_s
        return max(self.same_place_s * at_a_place, self.same_phase_s * in_a_phase)


@dataclass(slots=True)
class _Track:
    """What `HeartbeatTracker` remembers of one rank; times are of the listener's clock."""

    heard_at: float
    place_since: float
    phase_since: float
    stepped_at: float
    cpu_s: float = 0.0  # when it came to this place
    beat: Heartbeat | None = None
    steps: list[float] = field(default_factory=list)


class HeartbeatTracker:
    """Follows the ranks of one generation.

    Args:
        ranks: their numbers.
        now: the listener's clock; it must not run while the host sleeps.
    """

    def __init__(self, ranks: Iterable[int], now: float) -> None:
        self._tracks: Final = {rank: _Track(now, now, now, now) for rank in ranks}
        self._exited: dict[int, int] = {}
        self._looked_at = now

    def hear(self, beat: Heartbeat, now: float) -> None:
        """A heartbeat has come. One of a rank that is not of this generation says nothing."""
        track = self._tracks.get(beat.rank)
        if track is None or beat.rank in self._exited:
            return
        if all(other.beat is None for other in self._tracks.values()):
            # Ranks come to life together; how long that took says nothing about them.
            for other in self._tracks.values():
                other.heard_at = now
        last, track.beat, track.heard_at = track.beat, beat, now
        if last is None or _where_it_is(last) != _where_it_is(beat):
            track.place_since, track.cpu_s = now, beat.cpu_s
        if last is None or _progress_of(last) != _progress_of(beat):
            track.phase_since = now
        if last is None or beat.step != last.step:
            if last is not None and beat.step > last.step >= 0:
                track.steps.append((now - track.stepped_at) / (beat.step - last.step))
                del track.steps[:-_STEPS_KEPT]
            track.stepped_at = now

    def rank_exited(self, rank: int, status: int) -> None:
        """A rank's process has ended."""
        self._exited[rank] = status

    def note_time(self, now: float) -> None:
        """To be called often: a pause between two looks means that the listener was away, not the ranks."""
        gap = now - self._looked_at
        self._looked_at = now
        if gap > ABSENT_S:
            for track in self._tracks.values():
                track.heard_at += gap
                track.place_since += gap
                track.phase_since += gap
                track.stepped_at += gap

    @property
    def exited(self) -> dict[int, int]:
        """Ranks whose process has ended, with its exit status."""
        return dict(self._exited)

    @property
    def step_times(self) -> list[float]:
        """How long the last steps took, of all ranks."""
        return [taken for track in self._tracks.values() for taken in track.steps]

    def rank_states(self, now: float) -> list[RankState]:
        """Every rank that lives, by rank."""
        return [
            RankState(
                rank,
                track.beat,
                silent_s=max(0.0, now - track.heard_at),
                same_place_s=max(0.0, now - track.place_since),
                same_phase_s=max(0.0, now - track.phase_since),
                idle=track.beat is not None
                and track.beat.cpu_s - track.cpu_s <= _IDLE * max(0.0, track.heard_at - track.place_since),
            )
            for rank, track in sorted(self._tracks.items())
            if rank not in self._exited
        ]


def with_stacks(diagnosis: HangDiagnosis, stacks: Mapping[int, Stacks]) -> HangDiagnosis:
    """``diagnosis`` with the places of silent ranks as their stacks tell them: their last heartbeats are old."""
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

    What one rank does by right, such as a long evaluation, the others may wait for. While no rank was ever heard,
    none is late: whoever is to start them is not ready yet.
    """
    heard = [rank_state for rank_state in rank_states if rank_state.beat is not None]
    if not heard:
        return []
    allowed_s = max(timeouts.allowed_s(_beat(rank_state).phase, step_times) for rank_state in heard)
    unborn_s = max(allowed_s, timeouts.long_s)
    return [
        rank_state.rank for rank_state in rank_states if rank_state.late_s(allowed_s if rank_state.beat else unborn_s)
    ]


@dataclass(frozen=True, slots=True)
class HangDiagnosis:
    """A world that does not get on."""

    kind: Kind
    culprits: tuple[int, ...]  #: who is waited for; all that stand still, if nobody can be told from the others
    waiting: tuple[int, ...]
    rank_states: tuple[RankState, ...]
    for_s: float  #: since when nothing has moved
    exited: Mapping[int, int] = field(default_factory=dict)  #: ranks that had ended, with their exit status

    @property
    def is_certain(self) -> bool:
        """It cannot end well by itself: none of the culprits can be doing what the user wants."""
        return self.kind in ("stopped", "mismatched", "exited") or (
            self.kind in ("gil_held", "disk") and bool(self.waiting)
        )


@dataclass(frozen=True, slots=True)
class Recovered:
    """A stalled world moves again."""

    ranks: tuple[int, ...]
    after_s: float

    def __str__(self) -> str:
        moves = "moves" if len(self.ranks) == 1 else "move"
        return f"{format_ranks(self.ranks)} {moves} again, after {self.after_s:.0f} s: the run goes on"


def diagnose_hang(
    rank_states: Sequence[RankState], states: Mapping[int, str], exited: Mapping[int, int]
) -> HangDiagnosis:
    """Who keeps whom waiting.

    Args:
        rank_states: of all ranks that live.
        states: the letters by which the kernel tells what a process does (``R S D T Z``), by rank; may be incomplete.
        exited: ranks that have ended, with their exit status.
    """
    silent = [s for s in rank_states if s.is_silent or states.get(s.rank, "")[:1] in ("T", "t")]
    heard = [s for s in rank_states if s not in silent]
    waiting = [s for s in heard if _beat(s).meets] or _ahead_of_others(heard)
    others = [s for s in heard if s not in waiting]
    kind: Kind
    culprits: Sequence[RankState]
    if silent:
        kind, culprits = _kind_of_silence(silent, states), silent
    elif others:
        kind, culprits = "busy", others
        if not waiting:
            # Nobody waits, so those that moved last are not to blame for the rest.
            longest = max(s.same_phase_s if s.same_place_s < SILENT_S else s.same_place_s for s in others)
            culprits = [s for s in others if max(s.same_place_s, s.same_phase_s) >= longest / 2]
        if all(_beat(s).call == "next(loader)" for s in culprits):
            kind = "loader"
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
    )


def _kind_of_silence(silent: Sequence[RankState], states: Mapping[int, str]) -> Kind:
    letters = {states.get(s.rank, "")[:1] for s in silent}
    if letters <= {"T", "t"}:
        return "stopped"
    return "disk" if letters <= {"D"} else "gil_held"


def _ahead_of_others(heard: Sequence[RankState]) -> list[RankState]:
    """Those that have begun a collective which others have not, and stay where they are: they wait without a sign."""
    counts = {_beat(s).collectives for s in heard}
    if len(counts) < 2:
        return []
    return [s for s in heard if _beat(s).collectives == max(counts) and s.same_place_s > SILENT_S / 2]


def _all_wait(waiting: Sequence[RankState], exited: Mapping[int, int]) -> tuple[Kind, Sequence[RankState]]:
    """Every rank that lives waits for the others."""
    if exited:
        return "exited", waiting
    calls: dict[object, list[RankState]] = {}
    for rank_state in waiting:
        calls.setdefault(_collective_of(_beat(rank_state)), []).append(rank_state)
    if len(calls) < 2:
        return "all_waiting", waiting
    fewest, most = min(map(len, calls.values())), max(map(len, calls.values()))
    # One against many is the odd one out; halves are not told apart.
    odd = [s for group in calls.values() if len(group) == fewest for s in group] if fewest < most else waiting
    return "mismatched", odd


def _collective_of(beat: Heartbeat) -> object:
    return (beat.step, beat.phase, beat.call, beat.place, beat.collectives)


def _beat(rank_state: RankState) -> Heartbeat:
    assert rank_state.beat is not None, "a rank that was never heard is silent"
    return rank_state.beat


def _progress_of(beat: Heartbeat) -> tuple[object, ...]:
    return (beat.step, beat.phase_changes, beat.phase, beat.collectives)


def _where_it_is(beat: Heartbeat) -> tuple[object, ...]:
    return (*_progress_of(beat), beat.place, beat.call)


# ---- words ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Worker:
    """A process that a rank has started, such as one of a loader."""

    process: int
    state: str  #: as the kernel says it, such as ``S``
    stacks: Stacks = NOTHING


def headline(diagnosis: HangDiagnosis, shown: Callable[[str], str]) -> str:
    """Who waits where, in one line.

    Such as ``ranks 0, 1, 3 in the reduction of step 412 (train.py:88); rank 2 in next(loader) for 61 s (data.py:17)``.
    """
    waits = [s for s in diagnosis.rank_states if s.rank in diagnosis.waiting]
    blamed = [s for s in diagnosis.rank_states if s.rank in diagnosis.culprits]
    rest = [s for s in diagnosis.rank_states if s not in waits and s not in blamed]
    parts = [*_by_activity(waits, shown, since=False), *_by_activity(blamed, shown, since=True)]
    parts += _by_activity(rest, shown, since=False)
    parts += [f"rank {rank} had left with exit code {status}" for rank, status in sorted(diagnosis.exited.items())]
    return "; ".join(parts)


def sentence(diagnosis: HangDiagnosis, shown: Callable[[str], str]) -> str:
    """What the culprits do, and who waits for them where; for the last block on the screen."""
    blamed = _by_activity([s for s in diagnosis.rank_states if s.rank in diagnosis.culprits], shown, since=True)
    waits = _by_activity([s for s in diagnosis.rank_states if s.rank in diagnosis.waiting], shown, since=False)
    said = "; ".join(blamed) or f"{format_ranks(diagnosis.culprits)} had left"
    return f"{said}; waiting: {'; '.join(waits)}" if waits else said


def why(diagnosis: HangDiagnosis) -> str:
    """What it means, in one line."""
    who, one = format_ranks(diagnosis.culprits), len(diagnosis.culprits) == 1
    match diagnosis.kind:
        case "stopped":
            return f"{who} {'is' if one else 'are'} stopped (SIGSTOP, by a debugger, a scheduler or by hand)"
        case "disk":
            return f"{who} cannot be interrupted: the kernel waits for a disk, a network file system or a driver"
        case "gil_held":
            return f"{who} {'is' if one else 'are'} in compiled code that holds Python's lock: no heartbeat comes"
        case "mismatched" if not diagnosis.waiting:
            return f"ranks have parted ways: {who} wait in different collectives"
        case "mismatched":
            return f"ranks have parted ways: {who} wait{'s' * one} in another collective than the others"
        case "exited":
            return f"{who} {'has' if one else 'have'} left, and the others wait for {'it' if one else 'them'}"
        case "all_waiting":
            return "all ranks wait in the same call for each other: the network between them, or a lost message"
        case "loader":
            return f"{who} wait{'s' * one} for the processes of {'its' if one else 'their'} data loader"
        case "busy" if diagnosis.waiting:
            return f"{who} keep{'s' * one} the others waiting"
        case _:
            return f"{who} {'does' if one else 'do'} not get on, and nobody waits for another rank"


def remedy(diagnosis: HangDiagnosis) -> str:
    """What the user can do."""
    match diagnosis.kind:
        case "stopped":
            pids = " ".join(
                str(s.beat.process) for s in diagnosis.rank_states if s.rank in diagnosis.culprits and s.beat
            )
            return f"to let it go on: kill -CONT {pids}"
        case "mismatched" | "exited":
            return (
                "every rank must make the same calls in the same order: look for one inside `if rank == 0`, and for "
                "loops of different length"
            )
        case "all_waiting":
            return "look at the links between the machines; lockstep run --hang-after SECONDS waits longer"
        case "disk":
            return "look at the file systems that the script reads and writes"
        case "gil_held":
            return "its stack says which call it is; an endless loop in an extension, or a lock taken twice"
        case "loader":
            return "look at the dataset's code and its locks; workers=0 loads in the rank itself, where it can be seen"
        case _:
            return "if it takes so long by right: lockstep run --hang-after SECONDS waits longer"


def report(
    diagnosis: HangDiagnosis,
    stacks: Mapping[int, Stacks],
    workers: Mapping[int, Sequence[Worker]],
    *,
    shown: Callable[[str], str],
    source: Callable[[str, int], str],
    most: int = 12,
) -> str:
    """All of it: who waits where, why, each rank's stack (equal ones once), and what can be done.

    Args:
        diagnosis: what `diagnose_hang` has found.
        stacks: by rank, of those that have answered.
        workers: the processes of a rank that waits for its data.
        shown: a file as the user would write it.
        source: the text of a line of a file, "" if it is not known.
        most: lines of one stack.
    """
    lines = [
        f"hang: no progress for {diagnosis.for_s:.0f} s",
        f"  {headline(diagnosis, shown)}",
        f"  => {why(diagnosis)}",
    ]
    folded: dict[tuple[SourceLine, ...], list[int]] = {}
    for rank_state in sorted(diagnosis.rank_states, key=lambda s: (s.rank not in diagnosis.culprits, s.rank)):
        folded.setdefault(_stack(stacks.get(rank_state.rank, NOTHING).main, rank_state), []).append(rank_state.rank)
    for frames, ranks in folded.items():
        told = _stack_lines(frames, shown, source, most)
        lines += (
            [f"  {format_ranks(ranks)}, innermost first:", *told]
            if told
            else [f"  {format_ranks(ranks)}: no stack came"]
        )
    for rank, children in workers.items():
        for child in children:
            state = _STATES.get(child.state[:1], child.state)
            who = f"  a process that rank {rank} has started ({child.process}, {state})"
            told = _stack_lines(child.stacks.main.own(), shown, source, most)
            lines += [f"{who}, innermost first:", *told] if told else [f"{who}: no stack came"]
    return "\n".join([*lines, f"  {remedy(diagnosis)}"])


def _stack(stack: Stack, rank_state: RankState) -> tuple[SourceLine, ...]:
    """What the rank wrote itself, or else its place when it was last heard."""
    return stack.own() or ((rank_state.beat.place,) if rank_state.beat and rank_state.beat.place.file else ())


def _stack_lines(
    frames: Sequence[SourceLine], shown: Callable[[str], str], source: Callable[[str, int], str], most: int
) -> list[str]:
    lines = []
    for frame in frames[:most]:
        text = source(frame.file, frame.line)
        at = f"{shown(frame.file)}:{frame.line} in {frame.function}"
        lines.append(f"      {at}" + (f"    {text}" if text else ""))
    if len(frames) > most:
        lines.append(f"      ... {len(frames) - most} more")
    return lines


def _by_activity(rank_states: Sequence[RankState], shown: Callable[[str], str], *, since: bool) -> list[str]:
    groups: dict[tuple[str, str], list[RankState]] = {}
    for rank_state in rank_states:
        groups.setdefault(_activity(rank_state, shown), []).append(rank_state)
    told = []
    for (doing, at), members in groups.items():
        seconds = max(max(s.silent_s, s.same_place_s, s.same_phase_s) for s in members)
        told.append(f"{format_ranks([s.rank for s in members])} {doing}" + (f" for {seconds:.0f} s" * since) + at)
    return told


def _activity(rank_state: RankState, shown: Callable[[str], str]) -> tuple[str, str]:
    """Such as ``in the reduction of step 412`` and `` (train.py:88)``."""
    beat = rank_state.beat
    if beat is None:
        return "not heard of", ""
    at = f" ({shown(beat.place.file)}:{beat.place.line})" if beat.place.file else ""
    of = f" of step {beat.step + 1}" if beat.step >= 0 else ""
    if rank_state.is_silent:
        return "silent" + (f" in step {beat.step + 1}" if beat.step >= 0 else ""), at.replace("(", "(at ", 1)
    if beat.call == "next(loader)":
        return "in next(loader)", at
    if beat.phase in ("reduction", "forward", "backward", "update", "save"):
        inner = f" in {beat.call}" if beat.meets and beat.phase != "reduction" else ""
        return f"in the {beat.phase}{of}{inner}", at
    if beat.call:
        return f"in {beat.call}{_DURING.get(beat.phase, '')}", at
    return f"in {beat.place.function or 'Python'}{_DURING.get(beat.phase, '')}", at


_DURING = {"evaluate": " of the evaluation", "start": " at the start", "exit": " at its end"}
_STATES = {"T": "stopped", "D": "waits for a disk", "S": "sleeps", "R": "computes", "Z": "has ended"}


def format_ranks(ranks: Sequence[int]) -> str:
    """Such as ``ranks 0-2, 5``."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    words = [f"{run[0]}-{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs]
    return f"rank{'s' if len(ranks) != 1 else ''} {', '.join(words)}"
