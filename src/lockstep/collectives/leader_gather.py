"""Tensors that ranks hold together, brought to the leader one after the other.

    rank 0   w[0:3] ──► w   ──► taken ──► forgotten     b ──► taken ...
    rank 1   w[3:5] ──┘                       b is here ──┘

So no rank but the leader ever holds a whole tensor, and the leader holds one at a time, if it takes them so.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from lockstep.collectives.group import Group
from lockstep.collectives.tensor_shard import TensorShard


def gather_on_leader(group: Group, state: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Each item of ``state`` with its name: on the leader, whole and on the CPU; on other ranks, nothing.

    Collective: every rank must take all of them, with the same names in the same order.

    Args:
        group: all ranks.
        state: a `TensorShard` for what ranks hold together; anything else is the same on all ranks, and the leader's
            is taken. A tensor on the CPU that the leader holds whole is yielded itself, not a copy.
    """
    what = "the parts of a model"
    boxes = {name: _box(value) for name, value in state.items() if isinstance(value, TensorShard)}
    everywhere = group.gather_objects(boxes, what)
    for name, value in state.items():
        if not isinstance(value, TensorShard):
            if group.leads:
                yield name, value.detach().cpu() if isinstance(value, torch.Tensor) else value
        elif group.leads:
            yield name, _assemble(group, name, value, everywhere)
        elif value.tensor is not None and value.tensor.numel():
            group.send(value.tensor.detach().cpu().contiguous(), 0, f"{name} of {what}")


def _assemble(group: Group, name: str, own: TensorShard, everywhere: list[dict[str, Any]]) -> torch.Tensor:
    if own.tensor is not None and tuple(own.tensor.shape) == tuple(own.shape):
        return own.tensor.detach().cpu()
    whole = torch.empty(own.shape, dtype=own.dtype, device="cpu")
    for rank, boxes in enumerate(everywhere):
        if boxes[name] is None:
            continue
        start, shape = boxes[name]
        place = whole[tuple(slice(first, first + size) for first, size in zip(start, shape, strict=True))]
        if rank == group.rank:
            assert own.tensor is not None
            place.copy_(own.tensor.detach())
        else:
            box = torch.empty(shape, dtype=own.dtype, device="cpu")
            group.receive(box, rank, f"{name} of the parts of a model")
            place.copy_(box)
    return whole


def _box(shard: TensorShard) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Where the elements lie that this rank holds; None without any."""
    if shard.tensor is None or not shard.tensor.numel():
        return None
    return tuple(shard.start), tuple(shard.tensor.shape)
