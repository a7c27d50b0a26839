"""States that earlier generations have left in memory, read on nodes that have them and sent to the others."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import torch

from lockstep.checkpoint import FlatTree, SavedTree, StateTree, load_part, load_tree, merge_parts
from lockstep.collectives import Group
from lockstep.errors import LockstepError
from lockstep.run.recovery.newest_state import Choice, LeftState


class LeftBehind:
    """The newest complete state that earlier generations have left, the same state on all ranks.

    Args:
        group: all ranks.
        choice: the chosen state, the same on all ranks.
    """

    def __init__(self, group: Group, choice: Choice) -> None:
        self._group: Final = group
        self._choice: Final = choice
        self.step: Final = choice.state.step
        self.about: Final[SavedTree] = choice.state.about  #: the description that `Checkpoints.save` would have got
        self.turn: Final = choice.state.turn  #: whether an iteration of the outer loop begins at this state
        self.rows: Final[Sequence[Any]] = choice.state.rows  #: logged since the step ended, before that iteration

    @property
    def origin(self) -> str:
        """The writers of the state, in words."""
        state = self._choice.state
        return f"state of rank {state.rank}" if state.parts == 1 else f"put together from {state.ranks} ranks"

    def load(self) -> StateTree | None:
        """The tree of the state, on every rank; None on all ranks if the state cannot be read. Collective."""
        loaded = [self._load_part(copies) for copies in self._choice.parts]
        found = [part for part in loaded if part is not None]
        if len(found) < len(loaded):  # equally on all ranks
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
        """A part of the state, on every rank; None on all ranks if the part cannot be read. Collective."""
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
