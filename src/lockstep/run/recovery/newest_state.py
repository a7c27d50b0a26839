"""The choice of the state to resume from, among the states that survivors have left on all nodes: pure functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from lockstep.run.recovery.measures_journal import Journal, Part, Sums, part_after, total

#: Beginning of the message about a generation whose ranks held different bits.
NOT_USED = "the states that survivors have left are not used, for one of the machines may be faulty: "

#: Journals of ranks' measured values, by generation and rank.
Journals = Mapping[tuple[str, int], Journal]


@dataclass(frozen=True, slots=True)
class LeftState:
    """The state after a step, or a part of this state, as written by a rank."""

    generation: str
    step: int
    turn: bool  #: whether an iteration of the outer loop begins at this state, in which nothing was measured yet
    rank: int
    ranks: int  #: number of ranks of its generation
    path: str
    checksums: Mapping[str, int]  #: of each tensor; empty if not known
    about: Mapping[str, Any]  #: identity of the run
    rows: Sequence[Any]  #: logged since the step ended, in the iteration that has ended, as (step, epoch, values)
    part: int = 0  #: number of the part
    parts: int = 1  #: number of parts of the whole state
    sums: Sums | None = None  #: this rank's measured values, if written with its part

    @classmethod
    def of(cls, generation: str, path: str, about: Mapping[str, Any], checksums: Mapping[str, int]) -> Self:
        """The state at ``path``, whose manifest has ``about`` and ``checksums``."""
        return cls(
            generation,
            about["step"],
            about["turn"],
            about["rank"],
            about["ranks"],
            path,
            checksums,
            about["identity"],
            about["rows"],
            about.get("part", 0),
            about.get("parts", 1),
            Sums(*about["sums"]) if about.get("sums") else None,
        )


@dataclass(frozen=True, slots=True)
class Left:
    """The states and journals that earlier generations have left on a node."""

    states: tuple[LeftState, ...] = ()
    journals: Journals = field(default_factory=dict)
    suspect: tuple[str, ...] = ()  #: generations whose ranks held different bits
    copied: Journals = field(default_factory=dict)  #: of ranks on another node, as far as received
    why_not: tuple[tuple[str, str], ...] = ()  #: by generation, why a rank has left no state


@dataclass(frozen=True, slots=True)
class Choice:
    """A complete state: the measurements of all ranks are known, also those of dead ranks."""

    state: LeftState
    parts: tuple[tuple[LeftState, ...], ...]  #: all parts of the state, each with its copies on all nodes
    sums: Sums  #: of all ranks

    @property
    def is_divided(self) -> bool:
        """Whether the parts are in files that are rewritten after each step, each with the state of one rank."""
        return self.state.parts > 1 or self.state.sums is not None


def choose(nodes: Sequence[Left], log_every: int | None) -> Choice | None:
    """The newest complete state among those on all ``nodes``; None if no state is complete.

    A state is incomplete if one of its parts or the measurements of some rank are missing. States of a generation in
    which two ranks have written different values after the same step are not used.

    Args:
        nodes: the findings on each node.
        log_every: number of steps after which recent means are logged; None: never.
    """
    states = [state for node in nodes for state in node.states]
    journals = {key: journal for node in nodes for key, journal in node.journals.items()}
    copied = {key: journal for node in nodes for key, journal in node.copied.items()}
    suspect = {generation for node in nodes for generation in node.suspect} | differing(nodes)
    newest_first = sorted(states, key=lambda s: (s.step, s.turn, s.generation, -s.parts, -s.rank), reverse=True)
    for state in newest_first:
        if state.generation in suspect:
            continue
        same = [one for one in newest_first if _belongs(one) == _belongs(state)]
        parts = tuple(tuple(one for one in same if one.part == number) for number in range(state.parts))
        if not all(parts):
            continue
        sums = _sums(state, journals, copied, log_every) if state.sums is None else _sums_of_parts(parts)
        if sums is not None:
            return Choice(state, parts, sums)
    return None


def _belongs(state: LeftState) -> tuple[object, ...]:
    """A key that is equal for all parts of a state."""
    return state.generation, state.step, state.turn, state.parts, state.sums is None


def _sums_of_parts(parts: Sequence[Sequence[LeftState]]) -> Sums:
    return total(copies[0].sums for copies in parts if copies[0].sums is not None)


def differing(nodes: Sequence[Left]) -> set[str]:
    """Generations with two different states after the same step; between iterations kept tensors may change."""
    states = [state for node in nodes for state in node.states]
    first: dict[tuple[object, ...], Mapping[str, int]] = {}
    found = set()
    for state in states:
        if first.setdefault((*_belongs(state), state.part), state.checksums) != state.checksums:
            found.add(state.generation)
    return found


def _sums(state: LeftState, journals: Journals, copied: Journals, log_every: int | None) -> Sums | None:
    """The measurements of all ranks after the state's step; None if those of one rank are missing."""
    logged = state.step if log_every is None else (state.step - 1) // log_every * log_every
    parts = [_part(state, rank, journals, copied, logged) for rank in range(state.ranks)]
    known = [part for part in parts if part is not None]
    # A script that measures after its step does so on all ranks; a rank killed before lacks these values.
    if len(known) < len(parts) or (any(part.late for part in known) and not all(part.closed for part in known)):
        return None
    sums = total(part.sums for part in known)
    if not state.turn:
        return sums
    # The means of the finished pass were logged, and also the recent ones if they are logged after this step.
    is_logged = log_every is not None and state.step % log_every == 0
    return Sums({}, {} if is_logged else sums.recent)


def _part(state: LeftState, rank: int, journals: Journals, copied: Journals, logged: int) -> Part | None:
    """The measured values of ``rank``, also if its node is lost; None if they are not known for certain."""
    key = state.generation, rank
    if key in journals:
        return part_after(journals[key], state.step, logged)
    if key not in copied or (state.generation, state.rank) not in journals:
        return None
    # A rank that has finished the step has noted all its values; a copy may lack a note, or have a note that was taken
    # back.
    made = journals[state.generation, state.rank].counts.get(state.step)
    return part_after(copied[key], state.step, logged) if made == copied[key].counts.get(state.step, -1) else None
