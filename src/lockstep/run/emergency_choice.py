"""Which of the states that survivors have left is gone on from: a function of what lies on all nodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from lockstep.run.measures_journal import JournalArea, Sums, part_after, total


@dataclass(frozen=True, slots=True)
class LeftState:
    """The state after a step, as one rank has left it."""

    generation: str
    step: int
    turn: bool  #: whether a turn of the outer loop begins there, and nothing was measured in it
    rank: int
    ranks: int  #: of its generation
    path: str
    checksums: Mapping[str, int]  #: of each tensor
    about: Mapping[str, Any]  #: what the bits of the run depend on
    rows: Sequence[Any]  #: what was logged in the turn since the step ended, as (step, epoch, values)

    @classmethod
    def of(cls, generation: str, path: str, about: Mapping[str, Any], checksums: Mapping[str, int]) -> Self:
        """The one at ``path`` with what its manifest says."""
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
        )


@dataclass(frozen=True, slots=True)
class Left:
    """What lies on one node."""

    states: tuple[LeftState, ...] = ()
    journals: Mapping[tuple[str, int], tuple[JournalArea, ...]] = field(default_factory=dict)  #: by generation and rank
    suspect: tuple[str, ...] = ()  #: generations whose ranks had come to differ


@dataclass(frozen=True, slots=True)
class Choice:
    """A state that is whole: what was measured by ranks that are gone is known, too."""

    state: LeftState
    copies: tuple[LeftState, ...]  #: equal ones, itself among them, on whatever nodes
    sums: Sums  #: of all ranks


def choose(nodes: Sequence[Left], log_every: int | None) -> Choice | None:
    """The newest state that is whole; None if there is none.

    Not whole is one that lacks what some rank has measured, and nothing is used of a generation in which two ranks
    have left different values after the same step.

    Args:
        nodes: what lies on each node.
        log_every: after how many steps recent means are logged; None: never.
    """
    states = [state for node in nodes for state in node.states]
    journals = {key: areas for node in nodes for key, areas in node.journals.items()}
    suspect = {generation for node in nodes for generation in node.suspect} | _differing(states)
    for state in sorted(states, key=lambda one: (one.step, one.turn, one.generation, -one.rank), reverse=True):
        if state.generation in suspect:
            continue
        sums = _sums(state, journals, log_every)
        if sums is not None:
            same = (state.generation, state.step, state.turn)
            copies = tuple(one for one in states if (one.generation, one.step, one.turn) == same)
            return Choice(state, copies, sums)
    return None


def _differing(states: Sequence[LeftState]) -> set[str]:
    """Generations of which two states differ after the same step. At the turn of a loop kept tensors may move."""
    first: dict[tuple[str, int, bool], Mapping[str, int]] = {}
    found = set()
    for state in states:
        if first.setdefault((state.generation, state.step, state.turn), state.checksums) != state.checksums:
            found.add(state.generation)
    return found


def _sums(
    state: LeftState, journals: Mapping[tuple[str, int], tuple[JournalArea, ...]], log_every: int | None
) -> Sums | None:
    """What all ranks had measured after the state's step; None if it is not known of one of them."""
    logged = state.step if log_every is None else (state.step - 1) // log_every * log_every
    parts = [part_after(journals.get((state.generation, rank), ()), state.step, logged) for rank in range(state.ranks)]
    known = [part for part in parts if part is not None]
    # A script that measures after its step does so on all ranks: one that was killed before had not measured yet.
    if len(known) < len(parts) or (any(part.late for part in known) and not all(part.closed for part in known)):
        return None
    sums = total(part.sums for part in known)
    if not state.turn:
        return sums
    # The pass is over, whose means were told; and so are those of a step after which they are logged.
    is_logged = log_every is not None and state.step % log_every == 0
    return Sums({}, {} if is_logged else sums.recent)
