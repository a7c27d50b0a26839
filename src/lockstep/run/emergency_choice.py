"""Chooses the state to resume from among those that survivors have left: a pure function of what is on all nodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from lockstep.run.measures_journal import JournalArea, Sums, part_after, total


@dataclass(frozen=True, slots=True)
class LeftState:
    """The state after a step, as one rank has written it."""

    generation: str
    step: int
    turn: bool  #: whether an iteration of the outer loop begins there, in which nothing was measured yet
    rank: int
    ranks: int  #: number of ranks of its generation
    path: str
    checksums: Mapping[str, int]  #: of each tensor
    about: Mapping[str, Any]  #: what the bits of the run depend on
    rows: Sequence[Any]  #: logged in that iteration since the step ended, as (step, epoch, values)

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
        )


@dataclass(frozen=True, slots=True)
class Left:
    """What earlier generations have left on one node."""

    states: tuple[LeftState, ...] = ()
    journals: Mapping[tuple[str, int], tuple[JournalArea, ...]] = field(default_factory=dict)  #: by generation and rank
    suspect: tuple[str, ...] = ()  #: generations whose ranks held different bits


@dataclass(frozen=True, slots=True)
class Choice:
    """A complete state: the measurements of all ranks are known, also those of dead ranks."""

    state: LeftState
    copies: tuple[LeftState, ...]  #: equal states on all nodes, this one included
    sums: Sums  #: of all ranks


def choose(nodes: Sequence[Left], log_every: int | None) -> Choice | None:
    """The newest complete state; None if there is none.

    A state is incomplete if the measurements of some rank are missing. No state is used of a generation in which two
    ranks have written different values after the same step.

    Args:
        nodes: what was found on each node.
        log_every: number of steps after which recent means are logged; None: never.
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
    """Generations with two different states after the same step; between iterations kept tensors may change."""
    first: dict[tuple[str, int, bool], Mapping[str, int]] = {}
    found = set()
    for state in states:
        if first.setdefault((state.generation, state.step, state.turn), state.checksums) != state.checksums:
            found.add(state.generation)
    return found


def _sums(
    state: LeftState, journals: Mapping[tuple[str, int], tuple[JournalArea, ...]], log_every: int | None
) -> Sums | None:
    """The measurements of all ranks after the state's step; None if those of one rank are missing."""
    logged = state.step if log_every is None else (state.step - 1) // log_every * log_every
    parts = [part_after(journals.get((state.generation, rank), ()), state.step, logged) for rank in range(state.ranks)]
    known = [part for part in parts if part is not None]
    # A script that measures after its step does so on all ranks; a rank that was killed before that lacks its part.
    if len(known) < len(parts) or (any(part.late for part in known) and not all(part.closed for part in known)):
        return None
    sums = total(part.sums for part in known)
    if not state.turn:
        return sums
    # The means of the finished pass were logged, and also the recent ones if they are logged after this step.
    is_logged = log_every is not None and state.step % log_every == 0
    return Sums({}, {} if is_logged else sums.recent)
