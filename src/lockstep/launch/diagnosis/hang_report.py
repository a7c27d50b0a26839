"""The report of a hang for the user: which rank waits where, why, each rank's stack, and what to do about it.

Functions of a `HangDiagnosis`; they read no process and no file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from lockstep.formatting import format_ranks, grouped
from lockstep.heartbeat import NOTHING, Stack, Stacks
from lockstep.heartbeat_message import SourceLine
from lockstep.launch.diagnosis.hang_analysis import HangDiagnosis, RankState

_DURING = {"evaluate": " of the evaluation", "start": " at the start", "exit": " at its end"}
_PROCESS_STATES = {
    "stopped": "stopped",
    "tracing-stop": "stopped by a debugger",
    "disk-sleep": "waits for a disk",
    "sleeping": "sleeps",
    "running": "computes",
    "zombie": "has ended",
}


@dataclass(frozen=True, slots=True)
class Recovered:
    """Ranks that hung make progress again."""

    ranks: tuple[int, ...]
    after_s: float

    def __str__(self) -> str:
        moves = "moves" if len(self.ranks) == 1 else "move"
        return f"{format_ranks(self.ranks)} {moves} again, after {self.after_s:.0f} s: the run goes on"


@dataclass(frozen=True, slots=True)
class Worker:
    """A process that a rank has started, such as one of a loader."""

    process: int
    state: str  #: what it does, in psutil's words, such as ``sleeping``
    stacks: Stacks = NOTHING


def headline(diagnosis: HangDiagnosis, shown: Callable[[str], str]) -> str:
    """Which rank waits where, in one line.

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
    """What the culprits do, and which ranks wait for them where; for the failure that is reported at the end."""
    blamed = _by_activity([s for s in diagnosis.rank_states if s.rank in diagnosis.culprits], shown, since=True)
    waits = _by_activity([s for s in diagnosis.rank_states if s.rank in diagnosis.waiting], shown, since=False)
    said = "; ".join(blamed) or f"{format_ranks(diagnosis.culprits)} had left"
    return f"{said}; waiting: {'; '.join(waits)}" if waits else said


def cut_links(diagnosis: HangDiagnosis) -> str:
    """Which hosts do not reach each other, such as ``what n2 sends to n3 does not arrive``."""
    pairs = sorted({(link.sender, link.to) for link in diagnosis.cut})
    both = [pair for pair in pairs if pair < pair[::-1] and pair[::-1] in pairs]
    one_way = [pair for pair in pairs if pair[::-1] not in pairs]
    told = [f"{a} and {b} do not reach each other" for a, b in both]
    return "; ".join([*told, *(f"what {a} sends to {b} is not acknowledged" for a, b in one_way)])


def why(diagnosis: HangDiagnosis) -> str:
    """The reason of the hang, in one line."""
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
        case "network":
            return f"all ranks wait for each other: {cut_links(diagnosis)}"
        case "loader":
            return f"{who} wait{'s' * one} for the processes of {'its' if one else 'their'} data loader"
        case "busy" if diagnosis.waiting:
            return f"{who} keep{'s' * one} the others waiting"
        case _:
            return f"{who} make{'s' * one} no progress, and nobody waits for another rank"


def remedy(diagnosis: HangDiagnosis) -> str:
    """What the user can do about it, in one line."""
    match diagnosis.kind:
        case "stopped":
            pids = " ".join(
                str(s.beat.process) for s in diagnosis.rank_states if s.rank in diagnosis.culprits and s.beat
            )
            hosts = ", ".join(sorted({diagnosis.hosts[rank] for rank in diagnosis.culprits if rank in diagnosis.hosts}))
            return f"to let it go on{f' (on {hosts})' if hosts else ''}: kill -CONT {pids}"
        case "mismatched" | "exited":
            return (
                "every rank must make the same calls in the same order: look for one inside `if rank == 0`, and for "
                "loops of different length"
            )
        case "all_waiting" | "network":
            return "look at the links between the machines; lockstep run --hang-after SECONDS waits longer"
        case "disk":
            return "look at the file systems that the script reads and writes"
        case "gil_held":
            return "its stack says which call it is; an endless loop in an extension, or a lock taken twice"
        case "loader":
            return "look at the dataset's code and its locks; workers=0 loads in the rank itself, where it can be seen"
        case _:
            return "if it is meant to take so long: lockstep run --hang-after SECONDS waits longer"


def report(
    diagnosis: HangDiagnosis,
    stacks: Mapping[int, Stacks],
    workers: Mapping[int, Sequence[Worker]],
    *,
    shown: Callable[[str], str],
    source: Callable[[str, int], str],
    most: int = 12,
) -> str:
    """The whole report: who waits where, why, each rank's stack (equal ones once), and what can be done.

    Args:
        diagnosis: of `diagnose_hang`.
        stacks: by rank, of those that have answered.
        workers: by rank, the processes that a rank has started which waits for its data.
        shown: a file as the user would write it.
        source: the text of a line of a file, "" if it is not known.
        most: lines of one stack.
    """
    lines = [
        f"hang: no progress for {diagnosis.for_s:.0f} s",
        f"  {headline(diagnosis, shown)}",
        f"  => {why(diagnosis)}",
    ]
    folded: dict[tuple[str, tuple[SourceLine, ...]], list[int]] = {}
    for rank_state in sorted(diagnosis.rank_states, key=lambda s: (s.rank not in diagnosis.culprits, s.rank)):
        stack = _stack(stacks.get(rank_state.rank, NOTHING).main, rank_state)
        folded.setdefault((diagnosis.hosts.get(rank_state.rank, ""), stack), []).append(rank_state.rank)
    for (host, frames), ranks in folded.items():
        told = _stack_lines(frames, shown, source, most)
        who = f"  {format_ranks(ranks)}{f' on {host}' if host else ''}"
        lines += [f"{who}, innermost first:", *told] if told else [f"{who}: no stack came"]
    for rank, children in workers.items():
        for child in children:
            state = _PROCESS_STATES.get(child.state, child.state)
            who = f"  a process that rank {rank} has started ({child.process}, {state})"
            told = _stack_lines(child.stacks.main.own(), shown, source, most)
            lines += [f"{who}, innermost first:", *told] if told else [f"{who}: no stack came"]
    return "\n".join([*lines, f"  {remedy(diagnosis)}"])


def _stack(stack: Stack, rank_state: RankState) -> tuple[SourceLine, ...]:
    """The stack that the rank has written, or else the line of its last heartbeat."""
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
    groups = grouped((_activity(rank_state, shown), rank_state) for rank_state in rank_states)
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
