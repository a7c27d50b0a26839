"""The states of optimizers of ranks that step separately: their mean, and each rank's differences from it.

    exp_avg of parameter 7     rank 0: [...]    rank 1: [...]    rank 2: none, it has had no gradient yet
    mean                       over ranks 0 and 1
    rows, shape (3, ...)       rank 0's, rank 1's, zeros; and "rank 2 has none"

Tensors of floating-point numbers are averaged. Of counts of steps, and of all other values, the greatest is taken.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from lockstep.collectives import Group, TensorShard
from lockstep.strategies.local.averaging import RankAverager
from lockstep.strategies.strategy import StateDict

Key = tuple[int | str, str]
"""One entry of an optimizer's state: the number of its parameter, and its name."""


class AveragedOptimizer:
    """The compared states of the ranks' optimizers. The constructor is collective."""

    def __init__(self, optimizer: torch.optim.Optimizer, group: Group) -> None:
        self._state: StateDict = optimizer.state_dict()
        self._group = group
        flat = {(n, name): v for n, about in self._state["state"].items() for name, v in about.items()}
        self._moments: dict[Key, torch.Tensor] = {key: v for key, v in flat.items() if _is_moment(key, v)}
        shapes = {key: (tuple(v.shape), v.dtype) for key, v in self._moments.items()}
        rest = {
            key: v.cpu() if isinstance(v, torch.Tensor) else v for key, v in flat.items() if key not in self._moments
        }
        gathered = group.gather_objects((shapes, rest), "what the optimizers remember")
        self._shapes = {key: shape for shapes, _ in gathered for key, shape in shapes.items()}
        self._lacking = [[key for key in self._shapes if key not in shapes] for shapes, _ in gathered]
        self._rest: list[dict[Key, Any]] = [rest for _, rest in gathered]
        keys = dict.fromkeys(key for rest in self._rest for key in rest if key not in self._shapes)
        self._common = {key: elementwise_max([rest[key] for rest in self._rest if key in rest]) for key in keys}

    def mean(self, averager: RankAverager) -> StateDict:
        """The optimizer's ``state_dict()`` with the mean over the ranks. Collective."""
        sums = dict(zip(self._shapes, averager.sums(list(self._local_position().values())), strict=True))
        for key, total in sums.items():
            total.div_(self._group.size - sum(key in lacking for lacking in self._lacking))
        return self._state | {"state": _by_number({**sums, **self._common})}

    def own_state(self) -> StateDict:
        """The values of each rank's optimizer in addition to the mean: plain, and `TensorShard` with a row per rank."""
        missing = [
            [*lacking, *(key for key in self._common if key not in rest)]
            for lacking, rest in zip(self._lacking, self._rest, strict=True)
        ]
        other = [{k: v for k, v in rest.items() if not _same(v, self._common.get(k))} for rest in self._rest]
        return {
            "moments": [[*key, row_of(value, self._group)] for key, value in self._local_position().items()],
            "lacking": [[list(key) for key in keys] for keys in missing],
            "rest": [[[*key, value] for key, value in rest.items()] for rest in other],
        }

    def _local_position(self) -> dict[Key, torch.Tensor]:
        """This rank's moments, and zeros for moments of other ranks only; in equal order on all ranks."""
        return {
            key: self._moments[key]
            if key in self._moments
            else torch.zeros(shape, dtype=dtype, device=self._group.device)
            for key, (shape, dtype) in self._shapes.items()
        }


def load_own_state(optimizer: torch.optim.Optimizer, own: StateDict, rank: int) -> None:
    """Load the values of ``rank`` from `AveragedOptimizer.own_state` into ``optimizer``, which holds the mean."""
    state = optimizer.state_dict()
    flat: dict[Key, Any] = {(n, name): v for n, about in state["state"].items() for name, v in about.items()}
    flat |= {(number, name): rows[rank] for number, name, rows in own["moments"]}
    flat |= {(number, name): value for number, name, value in own["rest"][rank]}
    for number, name in own["lacking"][rank]:
        flat.pop((number, name), None)
    optimizer.load_state_dict(state | {"state": _by_number(flat)})


def row_of(tensor: torch.Tensor, group: Group) -> TensorShard:
    """``tensor`` as this rank's row of a tensor with one row per rank."""
    start = (group.rank,) + (0,) * tensor.dim()
    return TensorShard(tensor.detach()[None], start, (group.size, *tensor.shape), tensor.dtype)


def elementwise_max(values: Sequence[Any]) -> Any:
    """The greatest of numbers, and of tensors element by element; of anything else the first."""
    if all(isinstance(v, torch.Tensor) for v in values):
        return torch.stack(list(values)).amax(0)
    return max(values) if all(isinstance(v, int | float) for v in values) else values[0]


def _is_moment(key: Key, value: object) -> bool:
    return isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex()) and key[1] != "step"


def _same(value: object, other: object) -> bool:
    if isinstance(value, torch.Tensor) and isinstance(other, torch.Tensor):
        return value.dtype == other.dtype and torch.equal(value, other)
    return type(value) is type(other) and value == other


def _by_number(flat: Mapping[Key, object]) -> dict[int | str, dict[str, object]]:
    found: dict[int | str, dict[str, Any]] = {}
    for (number, name), value in flat.items():
        found.setdefault(number, {})[name] = value
    return found
