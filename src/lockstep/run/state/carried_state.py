"""State that the script carries from step to step, such as the hidden state of a recurrent model.

step            1   2   3   ...
micro-batch 0   a ► a ► a ►          state carried at a place of the step comes back at the same place,
micro-batch 1   b ► b ► b ►          whichever rank computes it then: in a short step, after a resume on
micro-batch 2   c ► c ► c ►          another number of ranks
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any, Final

import torch

from lockstep.batch import MicroBatchPosition
from lockstep.checkpoint import SavedTree, StateTree
from lockstep.collectives import Group, Runs, as_absent_shards, as_owned_shards
from lockstep.errors import UsageError
from lockstep.torch_private import pytree

_NOT_HERE: Final = (
    "run.carry: under this strategy not every rank has micro-batches of its own; use ddp, zero, or fsdp without tensor="
)


class CarriedState(MutableMapping[str, Any]):
    """In the loop's body, a dict for the place of the current micro-batch; outside of the body, only `clear` works.

    Values are tensors, plain values, and dicts, lists and tuples of these. Values are saved, and follow their place to
    the rank that computes it. Tensors should be detached. All ranks must use the dict in the same way, in each body or
    in none.
    """

    def __init__(self, group: Group, runs: Runs, *, has_server_ranks: bool) -> None:
        self._group: Final = group
        self._runs: Final = runs
        self._has_server_ranks: Final = has_server_ranks  # some ranks have no body, or share one
        self._by_index: dict[int, StateTree] = {}  # of this rank, by the micro-batch's index in its step
        self._written: dict[int, StateTree] = {}  # in the current step
        self._of = 0  # micro-batches of the step for which places were distributed
        self._current: StateTree | None = None
        self._used = False

    def __getitem__(self, name: str) -> Any:
        return self._in_body()[name]

    def __setitem__(self, name: str, value: object) -> None:
        self._in_body()[name] = value

    def __delitem__(self, name: str) -> None:
        del self._in_body()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._in_body())

    def __len__(self) -> int:
        return len(self._in_body())

    def clear(self) -> None:
        """Drop the state of the current micro-batch; outside of the body, of all micro-batches. Collective."""
        if self._current is not None:
            self._current.clear()
        self._by_index = {} if self._current is None else self._by_index

    def micro_batch_begins(self, position: MicroBatchPosition) -> None:
        """Begin the micro-batch at ``position``. Collective if the script carries state."""
        if self._used and position.of != self._of:
            self._move(position.of)
        self._of = position.of
        if position.is_replay:
            self._current = _copied(self._by_index.get(position.index, {}))
        elif position.is_padding:
            self._current = {}
        else:
            held = self._by_index.get(position.index)
            # A copy, in which the body may change anything: the step may be discarded.
            self._current = self._written[position.index] = _copied(held) if held else {}

    @property
    def is_used(self) -> bool:
        """Whether the script carries state."""
        return self._used

    @property
    def current(self) -> Mapping[str, object]:
        """The state that the current micro-batch carries to the next step so far; empty outside of the body."""
        return {} if self._current is None or not self._used else self._current

    def step_is_done(self) -> None:
        """Carry on the state that the bodies of the step have written."""
        self._by_index |= self._written
        self._written = {}
        self._current = None

    def forget_step(self) -> None:
        """Discard the state that the bodies of the discarded step have written."""
        self._written = {}
        self._current = None

    @contextlib.contextmanager
    def out_of_reach(self) -> Iterator[None]:
        """A context without carried state, for an evaluation inside of a body."""
        current, self._current = self._current, None
        try:
            yield
        finally:
            self._current = current

    def state(self) -> StateTree:
        """The carried state at each place; `TensorShard` for tensors. Collective."""
        if not self._group.sum_int(int(self._used), "whether something is carried"):
            return {}
        outlines = {index: as_absent_shards(held) for index, held in self._by_index.items()}
        by_rank = self._group.gather_objects(outlines, "what is carried")
        state = {index: held for outline in by_rank for index, held in outline.items()}
        own = {index: as_owned_shards(held) for index, held in self._by_index.items()}
        return {"places": {str(index): (state | own)[index] for index in sorted(state)}}

    def own_state(self) -> StateTree:
        """The carried state of this rank's places; asks no other rank."""
        own = {str(index): self._by_index[index] for index in sorted(self._by_index)}
        return {"places": own} if self._used else {}

    def load(self, state: SavedTree) -> None:
        """Load a ``state`` of `state` with whole tensors; the leader has all places, until the first step.

        Raises:
            UsageError: on all ranks, if state was carried, which this strategy does not support.
        """
        if self._has_server_ranks and any(state.get("places", {}).values()):
            raise UsageError(f"the checkpoint holds what the script carried. {_NOT_HERE}")
        self._written, self._current = {}, None
        self._used, self._of = bool(state) and not self._has_server_ranks, 0
        self._by_index = {int(index): self._on_device(held) for index, held in state.get("places", {}).items()}
        if not self._group.leads:
            self._by_index = {}

    def _in_body(self) -> StateTree:
        if self._has_server_ranks:
            raise UsageError(_NOT_HERE)
        if self._current is None:
            raise UsageError(
                "run.carry outside of the loop over run.train(...): there is no micro-batch that it could belong to"
            )
        self._used = True
        return self._current

    def _move(self, of: int) -> None:
        """Move each place to the rank that computes it in a step of ``of`` micro-batches. Collective."""
        on_cpu = pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.detach().cpu(), self._by_index)
        by_rank = self._group.gather_objects(on_cpu, "what is carried to a step of another size")
        # In a short step some places are not computed, and stay on their rank.
        waiting = {index: held for index, held in self._by_index.items() if index >= of}
        self._by_index = waiting | self._computed_here(
            {index: held for values in by_rank for index, held in values.items()}, of
        )

    def _computed_here(self, everything: Mapping[int, StateTree], of: int) -> dict[int, StateTree]:
        run = self._runs(self._group.rank, of) if everything else range(0)
        return {index: self._on_device(held) for index, held in everything.items() if index in run}

    def _on_device(self, held: StateTree) -> StateTree:
        moved: StateTree = pytree.tree_map_only(torch.Tensor, lambda t: t.to(self._group.device), held)
        return moved


def _copied(held: StateTree) -> StateTree:
    copy: StateTree = pytree.tree_map_only(torch.Tensor, torch.clone, held)
    return copy
