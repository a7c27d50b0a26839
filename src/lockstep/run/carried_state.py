"""What the script carries from one step to the next, such as the hidden state of a recurrent model.

step            1   2   3   ...
micro-batch 0   a ► a ► a ►          what was carried at a place of the step comes back at the same place,
micro-batch 1   b ► b ► b ►          whichever rank computes it then: in a short step, after a resume on
micro-batch 2   c ► c ► c ►          another number of ranks
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any, Final

import torch
from torch.utils import _pytree as pytree

from lockstep.batch import MicroBatchPosition
from lockstep.collectives import Group, Runs, elsewhere, owned
from lockstep.errors import UsageError


class CarriedState(MutableMapping[str, Any]):
    """In the loop's body: a dict for the place of the micro-batch in hand; outside of it, only `clear` works.

    Values are tensors, plain values, and dicts, lists and tuples of them. They are saved, and follow the place to the
    rank that computes it. Tensors should be detached. All ranks use it alike, in each body or in none.
    """

    def __init__(self, group: Group, runs: Runs, *, has_server_ranks: bool) -> None:
        self._group: Final = group
        self._runs: Final = runs
        self._has_server_ranks: Final = has_server_ranks  # some ranks have no body, and others have the same one
        self._places: dict[int, dict[str, Any]] = {}  # of this rank, by the micro-batch's index in its step
        self._written: dict[int, dict[str, Any]] = {}  # in the step in work
        self._of = 0  # micro-batches of the step for which places lie where they are
        self._here: dict[str, Any] | None = None
        self._used = False

    def __getitem__(self, name: str) -> Any:
        return self._slot()[name]

    def __setitem__(self, name: str, value: Any) -> None:
        self._slot()[name] = value

    def __delitem__(self, name: str) -> None:
        del self._slot()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._slot())

    def __len__(self) -> int:
        return len(self._slot())

    def clear(self) -> None:
        """In the body: nothing is carried on from this micro-batch; outside of it: from none. Collective."""
        if self._here is not None:
            self._here.clear()
        self._places = {} if self._here is None else self._places

    def micro_batch_begins(self, position: MicroBatchPosition) -> None:
        """The micro-batch at ``position`` is handed to the user. Collective, where the script carries something."""
        if self._used and position.of != self._of:
            self._move(position.of)
        self._of = position.of
        if position.is_padding:
            self._here = {}
        else:
            # A copy, in which the body may change anything: the step may be given up.
            self._here = self._written[position.index] = _copied(self._places.get(position.index, {}))

    def step_is_done(self) -> None:
        """What the bodies of the step have written is carried on."""
        self._places |= self._written
        self._written = {}
        self._here = None

    def forget_step(self) -> None:
        """The step in work is given up, with what its bodies have written."""
        self._written = {}
        self._here = None

    def state(self) -> dict[str, Any]:
        """What is carried at each place; `TensorShard` for tensors. Collective."""
        if not self._group.sum_int(int(self._used), "whether something is carried"):
            return {}
        outlines = {place: elsewhere(held) for place, held in self._places.items()}
        told = self._group.gather_objects(outlines, "what is carried")
        state = {place: held for one in told for place, held in one.items()}
        mine = {place: owned(held) for place, held in self._places.items()}
        return {"places": {str(place): (state | mine)[place] for place in sorted(state)}}

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from `state`, whose tensors are whole; the leader has all places, until the first step."""
        self._written, self._here = {}, None
        self._used, self._of = bool(state), 0
        self._places = {int(place): self._here_on_device(held) for place, held in state.get("places", {}).items()}
        if not self._group.leads:
            self._places = {}

    def _slot(self) -> dict[str, Any]:
        if self._has_server_ranks:
            raise UsageError("run.carry: under this strategy ranks do not all compute micro-batches; use ddp or zero")
        if self._here is None:
            raise UsageError("run.carry outside of the loop's body: there is no micro-batch whose place it could be")
        self._used = True
        return self._here

    def _move(self, of: int) -> None:
        """Places go to the ranks that compute them in a step of so many micro-batches. Collective."""
        on_cpu = pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.detach().cpu(), self._places)
        told = self._group.gather_objects(on_cpu, "what is carried to a step of another size")
        # In a short step some places are not computed: they wait on the rank that had them.
        waiting = {place: held for place, held in self._places.items() if place >= of}
        self._places = waiting | self._mine({place: held for one in told for place, held in one.items()}, of)

    def _mine(self, everything: Mapping[int, dict[str, Any]], of: int) -> dict[int, dict[str, Any]]:
        run = self._runs(self._group.rank, of) if everything else range(0)
        return {place: self._here_on_device(held) for place, held in everything.items() if place in run}

    def _here_on_device(self, held: dict[str, Any]) -> dict[str, Any]:
        moved: dict[str, Any] = pytree.tree_map_only(torch.Tensor, lambda t: t.to(self._group.device), held)
        return moved


def _copied(held: dict[str, Any]) -> dict[str, Any]:
    copy: dict[str, Any] = pytree.tree_map_only(torch.Tensor, torch.clone, held)
    return copy
