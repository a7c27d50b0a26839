"""The part of a tensor that one rank holds, of a tensor that several ranks hold together.

Such as one of shape (5, 3)::

    rank 0: rows 0..2       TensorShard(tensor of (3, 3), start (0, 0), shape (5, 3))
    rank 1: rows 3..4       TensorShard(tensor of (2, 3), start (3, 0), shape (5, 3))
    rank 2: nothing         TensorShard(None, (), shape (5, 3))
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from lockstep.torch_private import pytree


@dataclass(frozen=True, slots=True, eq=False)
class TensorShard:
    """This rank's box of a tensor; the boxes of all ranks cover each element once."""

    tensor: torch.Tensor | None  #: dense and on any device; None: this rank holds nothing of it
    start: tuple[int, ...]  #: the box's first element in the whole
    shape: tuple[int, ...]  #: of the whole
    dtype: torch.dtype  #: of the whole

    @classmethod
    def absent(cls, shape: tuple[int, ...], dtype: torch.dtype) -> TensorShard:
        """The shard of a tensor of which this rank holds nothing."""
        return cls(None, (), shape, dtype)

    @classmethod
    def whole(cls, tensor: torch.Tensor) -> TensorShard:
        """The shard of a tensor that this rank alone holds."""
        return cls(tensor, (0,) * tensor.dim(), tuple(tensor.shape), tensor.dtype)


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds of ``tensor``, in the same memory: its part of a `DTensor`, and the whole of any other."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def as_owned_shards(value: Any) -> Any:
    """``value``, nested dicts, lists and tuples, with each tensor as a `TensorShard` that this rank alone holds."""
    return pytree.tree_map_only(torch.Tensor, lambda tensor: TensorShard.whole(tensor.detach()), value)


def as_absent_shards(value: Any) -> Any:
    """``value``, nested likewise, with each tensor or `TensorShard` as one of which this rank holds nothing."""
    held = (torch.Tensor, TensorShard)
    return pytree.tree_map_only(held, lambda one: TensorShard.absent(tuple(one.shape), one.dtype), value)
