"""A tensor divided by rows, seen from one rank: the rank's rows, and the optimizer state of these rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from lockstep.collectives import StoredTensor, TensorShard
from lockstep.errors import UsageError
from lockstep.torch_private import pytree


@dataclass(frozen=True, slots=True)
class RowShard:
    """This rank's rows of a tensor; the ranks together hold each row once."""

    rows: range  #: may be empty
    shape: tuple[int, ...]  #: of the whole tensor
    leads: bool  #: whether this rank writes undivided values of the tensor, such as a count of steps

    def shards(self, values: object) -> Any:
        """The nested ``values`` of this rank's rows, with each tensor of the rows' shape as a shard of a whole tensor.

        Any other tensor is whole on the rank that `leads`, and absent elsewhere.

        Raises:
            UsageError: for a tensor of another shape with several elements: such an optimizer does not treat each row
                by itself.
        """
        return pytree.tree_map_only(torch.Tensor, self._shard, values)

    def own(self, values: object) -> Any:
        """This rank's part of nested ``values`` of whole tensors, in memory or a file; rows are copies."""
        return pytree.tree_map_only(torch.Tensor, self._own, values)

    def _own(self, tensor: torch.Tensor) -> torch.Tensor:
        if tuple(tensor.shape) != self.shape:
            return tensor
        return rows_of(tensor, self.rows)

    def _shard(self, tensor: torch.Tensor) -> TensorShard:
        tensor = tensor.detach()
        if tuple(tensor.shape) == (len(self.rows), *self.shape[1:]):
            if not tensor.numel():
                return TensorShard.absent(self.shape, tensor.dtype)
            start = (self.rows.start, *(0 for _ in self.shape[1:]))
            return TensorShard(tensor, start, self.shape, tensor.dtype)
        if tensor.numel() > 1:
            raise UsageError(
                f"the optimizer remembers a tensor of shape {tuple(tensor.shape)} of an embedding of shape "
                f"{self.shape} that servers divide by rows: it does not treat each element alike; use another "
                "optimizer, one server, or ddp"
            )
        return TensorShard.whole(tensor) if self.leads else TensorShard.absent(tuple(tensor.shape), tensor.dtype)


def rows_of(tensor: torch.Tensor, rows: range) -> torch.Tensor:
    """The ``rows`` of ``tensor``, in memory of their own; of a tensor in a file only these rows are read."""
    if isinstance(tensor, StoredTensor):
        return tensor.rows(rows.start, rows.stop)
    return tensor[rows.start : rows.stop].clone()
