"""Chooses the state to resume from among those that survivors have left: a pure function of what is on all nodes.

What is chosen is read on the nodes that have it and sent to the others.
"""

from __future__ import annotations

import mmap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Self

import torch

from lockstep.checkpoint import FlatTree, SavedTree, StateTree, load_part, load_tree, merge_parts
from lockstep.collectives import Group
from lockstep.errors import LockstepError
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
    #: By generation and step, what the script of a rank held in the next step, see `resume_proof.LeftScript`.
    scripts: Mapping[tuple[str, int], Mapping[str, Any]] = field(default_factory=dict)


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


class LeftBehind:
    """The newest complete state that earlier generations have left, the same one on all ranks.

    Args:
        group: all ranks.
        choice: what was chosen, the same on all.
        script: what a script held in the next step, see `resume_proof.LeftScript`; the same on all.
    """

    def __init__(self, group: Group, choice: Choice, script: Mapping[str, Any] | None) -> None:
        self._group: Final = group
        self._choice: Final = choice
        self.step: Final = choice.state.step
        self.about: Final[SavedTree] = choice.state.about  #: what `Checkpoints.save` would have been given
        self.turn: Final = choice.state.turn  #: whether an iteration of the outer loop begins there
        self.rows: Final[Sequence[Any]] = choice.state.rows  #: what was logged before that, since the step ended
        self.script: Final = script

    @property
    def origin(self) -> str:
        """Who has written it, in words."""
        state = self._choice.state
        return f"state of rank {state.rank}" if state.parts == 1 else f"put together from {state.ranks} ranks"

    def load(self) -> StateTree | None:
        """Its tree, on every rank; None on all of them if it cannot be read. Collective."""
        loaded = [self._load_part(copies) for copies in self._choice.parts]
        found = [part for part in loaded if part is not None]
        if len(found) < len(loaded):  # on all ranks alike
            return None
        why_not = ""
        try:
            tree: StateTree = merge_parts(found) if self._choice.is_divided else found[0]
        except LockstepError as error:
            why_not, tree = str(error), {}
        if any(self._group.gather_objects(why_not, "whether the parts make a state whole")):
            return None
        sums = self._choice.sums
        return {**tree, "measures": sums.train, "recent": sums.recent}

    def _load_part(self, copies: Sequence[LeftState]) -> StateTree | None:
        """One part, on every rank; None on all of them if it cannot be read. Collective."""
        group, why_not = self._group, "it is on another node"
        tree: StateTree | None = None
        for path in (Path(copy.path) for copy in copies):
            if path.exists():
                try:
                    tree = load_tree(path) if path.is_dir() else load_part(_mapped(path))
                    break
                except (LockstepError, OSError, RuntimeError, ValueError) as error:
                    why_not = str(error)
        answers = group.gather_objects("" if tree is not None else why_not, "what survivors have left")
        holders = [rank for rank, answer in enumerate(answers) if not answer]
        if not holders:
            return None
        if tree is None or len(holders) < group.size:
            tree = _sent_from(group, holders[0], tree)
        return tree


def _mapped(path: Path) -> mmap.mmap:
    with path.open("rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)


def _sent_from(group: Group, source: int, tree: StateTree | None) -> StateTree:
    """The tree of rank ``source``, on all ranks. Collective."""
    flat = FlatTree.of(tree) if group.rank == source else None
    outline = None if flat is None else (flat.encoded, flat.entries, [tuple(t.shape) for t in flat.tensors])
    encoded, entries, shapes = group.gather_objects(outline, "the outline of a state")[source] or (None, (), [])
    tensors = (
        tuple(torch.empty(shape, dtype=entry.dtype, device="cpu") for entry, shape in zip(entries, shapes, strict=True))
        if flat is None
        else flat.tensors
    )
    for tensor in tensors:
        if tensor.numel():
            group.broadcast_bytes(tensor.reshape(-1).view(torch.uint8), source, "the state of a survivor")
    received: StateTree = FlatTree(encoded, entries, tensors).tree(tensors)
    return received
