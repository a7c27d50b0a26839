"""The layout of models and optimizers of which each rank holds rows of every tensor, as in `fully_shard`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate

from lockstep.collectives import Group, ShardGroups, StoredTensor, TensorShard, local_part
from lockstep.strategies.parts.grad_norm import norm_of_rows, squared_norms
from lockstep.strategies.parts.state_layout import load_states
from lockstep.strategies.strategy import StateDict, StateLayout

_WHOLE: Final = (Replicate(),)


class DTensorLayout(StateLayout):
    """The layout of tensors that are divided by rows.

    For example, of shape (5, 3) on three ranks: rows 0 and 1, rows 2 and 3, row 4. If ranks hold several copies, a
    checkpoint gets the first copy.

    Args:
        group: all ranks.
        shard_groups: of the ranks that hold one copy.
        every_copy: whether ranks of all copies give their rows, not only those of the first copy.
    """

    def __init__(self, group: Group, shard_groups: ShardGroups, *, every_copy: bool = False) -> None:
        self._group: Final = group
        self._every_copy: Final = every_copy
        self._shard_groups: Final = shard_groups

    def norm(self, parameters: Sequence[nn.Parameter]) -> torch.Tensor:
        """The 2-norm of all gradients, from the squares of every rank's rows. Collective."""
        gradients = [p.grad for p in parameters if p.grad is not None]
        divided = iter(self._row_squares_of([g for g in gradients if isinstance(g, DTensor)]))
        whole = iter(squared_norms([g for g in gradients if not isinstance(g, DTensor)]))
        squares = [next(divided if isinstance(g, DTensor) else whole) for g in gradients]
        return norm_of_rows(squares, parameters[0].device if not gradients else local_part(gradients[0]).device)

    def _row_squares_of(self, gradients: Sequence[DTensor]) -> list[torch.Tensor]:
        """The `squared_row_norms` of gradients that are divided. Collective."""
        if not gradients:
            return []
        ranks = self._shard_groups.within.size
        rows = [len(g) for g in gradients]
        most = [-(-r // ranks) for r in rows]  # rows of a tensor on one rank
        own = squared_norms([local_part(g) for g in gradients])
        widest_type = max((m.dtype for m in own), key=lambda dtype: dtype.itemsize)
        padded = [nn.functional.pad(m.to(widest_type), (0, high - len(m))) for m, high in zip(own, most, strict=True)]
        table = self._shard_groups.gather(torch.cat(padded)).view(ranks, -1)
        return [part.reshape(-1)[:r] for part, r in zip(table.split(most, dim=1), rows, strict=True)]

    def any(self, found: torch.Tensor) -> torch.Tensor:
        """1.0 if ``found`` is not zero on some rank, else 0.0. Collective."""
        return (self._group.sum_tensor(local_part(found), "whether gradients are finite") != 0).to(found.dtype)

    def model_state(self, model: nn.Module) -> StateDict:
        """This rank's rows of each tensor, as `TensorShard`."""
        return {name: self._to_shard(value) for name, value in model.state_dict().items()}

    def load_model(self, model: nn.Module, state: StateDict) -> None:
        """Load this rank's rows of each tensor, one tensor after the other."""
        own = model.state_dict()
        # Divided tensors are loaded before `load_state_dict`, which copies them into themselves, and checks names and
        # shapes.
        model.load_state_dict({name: self._copied(value, own.get(name)) for name, value in state.items()})

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> StateDict:
        """This rank's rows of each state, as `TensorShard`."""
        whole = optimizer.state_dict()
        whole["state"] = {
            number: {name: self._to_shard(value) for name, value in of_one.items()}
            for number, of_one in whole["state"].items()
        }
        return whole

    def load_optimizer(self, optimizer: torch.optim.Optimizer, state: StateDict) -> None:
        """Load this rank's rows: a state of its parameter's shape is divided like the parameter."""
        load_states(optimizer, state, self._to_dtensor)

    def _to_shard(self, value: object) -> object:
        if not isinstance(value, DTensor):
            return value
        if value.placements == _WHOLE:  # such as an optimizer's state of means of rows
            return value.to_local().detach()
        local, shape = value.to_local().detach(), tuple(value.shape)
        if (self._shard_groups.copy and not self._every_copy) or not local.numel():
            return TensorShard.absent(shape, value.dtype)
        first = self._shard_groups.within.rank * -(-shape[0] // self._shard_groups.within.size)
        return TensorShard(local, (first, *(0 for _ in shape[1:])), shape, value.dtype)

    def _copied(self, value: Any, like: Any) -> object:
        """``like`` with this rank's rows of ``value``, if that lies divided as ``like`` does; else ``value``."""
        if not _is_divided_as(like, value):
            return value
        with torch.no_grad():
            like.to_local().copy_(self._rows_of(value))
        return like

    def _to_dtensor(self, value: Any, like: Any) -> object:
        """This rank's rows of ``value`` if it is a whole tensor to be divided as ``like``; else ``value`` itself."""
        if not _is_divided_as(like, value):
            return _beside(value, like)
        # New memory, also on the CPU: the optimizer uses it, and the whole tensor must be freed.
        own = self._rows_of(value).to(like.to_local().device, copy=not isinstance(value, StoredTensor))
        return DTensor.from_local(
            own, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
        )

    def _rows_of(self, value: torch.Tensor) -> torch.Tensor:
        """This rank's rows of a whole tensor; of a tensor in a file, only these rows are read."""
        high = -(-len(value) // self._shard_groups.within.size)
        first = min(self._shard_groups.within.rank * high, len(value))
        end = min(first + high, len(value))
        return value.rows(first, end) if isinstance(value, StoredTensor) else value[first:end]


def _is_divided_as(like: object, value: object) -> bool:
    return isinstance(like, DTensor) and isinstance(value, torch.Tensor) and value.shape == like.shape


def _beside(value: object, like: object) -> object:
    """``value``, whole on every rank, as a `DTensor` for computations with ``like``, if ``like`` is divided.

    For numbers torch needs no conversion.
    """
    if not (isinstance(like, DTensor) and isinstance(value, torch.Tensor) and value.dim()):
        return value
    return DTensor.from_local(value.to(like.device), like.device_mesh, _WHOLE, run_check=False)
