"""Tensors that are not whole in this rank's memory.

One of shape (5, 3) that several ranks hold together::

    rank 0: rows 0..2       TensorShard(tensor of (3, 3), start (0, 0), shape (5, 3))
    rank 1: rows 3..4       TensorShard(tensor of (2, 3), start (3, 0), shape (5, 3))
    rank 2: nothing         TensorShard(None, (), shape (5, 3))

One that lies in a file, whose users decide what is read of it, and when::

    state["weight"]                      a StoredTensor of shape (5, 3): nothing is in memory
    state["weight"].rows(3, 5)           its last two rows, on the rank that holds these
    parameter.copy_(state["weight"])     read as a whole, copied, and forgotten again
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch.distributed.tensor import DTensor

from lockstep.collectives.group import Group
from lockstep.torch_private import no_torch_function, pytree, wrapper_tensor

ReadBox = Callable[[tuple[int, ...], tuple[int, ...]], torch.Tensor]
"""The box at a first element, of a shape: contiguous on the CPU, with memory of its own."""


@dataclass(frozen=True, slots=True, eq=False)
class TensorShard:
    """A rank's box of a tensor; the boxes of all ranks cover each element once."""

    tensor: torch.Tensor | None  #: dense and on any device; None: this rank holds no element
    start: tuple[int, ...]  #: the box's first element in the whole tensor
    shape: tuple[int, ...]  #: of the whole
    dtype: torch.dtype  #: of the whole

    @classmethod
    def absent(cls, shape: tuple[int, ...], dtype: torch.dtype) -> TensorShard:
        """The shard of a tensor of which this rank holds no element."""
        return cls(None, (), shape, dtype)

    @classmethod
    def whole(cls, tensor: torch.Tensor) -> TensorShard:
        """The shard of a tensor that this rank alone holds."""
        return cls(tensor, (0,) * tensor.dim(), tuple(tensor.shape), tensor.dtype)


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of ``tensor``, in the same memory: the part of a `DTensor`, and the whole of any other."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def as_owned_shards(value: object) -> Any:
    """``value``, nested dicts, lists and tuples, with each tensor as a `TensorShard` that this rank alone holds."""
    return pytree.tree_map_only(torch.Tensor, lambda tensor: TensorShard.whole(tensor.detach()), value)


def as_absent_shards(value: object) -> Any:
    """``value``, nested as well, with each tensor or `TensorShard` as a shard of which this rank holds no element."""
    held = (torch.Tensor, TensorShard)
    return pytree.tree_map_only(held, lambda one: TensorShard.absent(tuple(one.shape), one.dtype), value)


def gather_on_leader(group: Group, state: Mapping[str, object]) -> Iterator[tuple[str, Any]]:
    """Each item of ``state`` with its name: on the leader, whole and on the CPU; on other ranks, no items.

        rank 0   w[0:3] ──► w   ──► taken ──► forgotten     b ──► taken ...
        rank 1   w[3:5] ──┘                       b is here ──┘

    So no rank but the leader ever holds a whole tensor, and the leader holds one at a time, if it drops each before the
    next.

    Collective: every rank must take all items, with the same names in the same order.

    Args:
        group: all ranks.
        state: a `TensorShard` for each divided tensor; any other value is equal on all ranks, and the leader's is used.
            A tensor on the CPU that the leader holds whole is yielded itself, not as a copy.
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
    """The start and shape of this rank's box; None if it holds no element."""
    if shard.tensor is None or not shard.tensor.numel():
        return None
    return tuple(shard.start), tuple(shard.tensor.shape)


class StoredTensor(torch.Tensor):
    """A tensor on the CPU whose values are in a file; each operation reads it whole, and gives plain tensors.

    So ``load_state_dict`` of modules and optimizers takes it, and holds one tensor more at a time. What `read` raises
    comes out of the operation.
    """

    _read: ReadBox

    @staticmethod
    def __new__(cls: type[Self], shape: Sequence[int], dtype: torch.dtype, read: ReadBox) -> Self:
        """A tensor of ``shape`` and ``dtype``, of which ``read`` gives boxes."""
        made: Self = wrapper_tensor(cls, shape, dtype=dtype, device=torch.device("cpu"))
        made._read = read
        return made

    def box(self, start: Sequence[int], shape: Sequence[int]) -> torch.Tensor:
        """Read only the elements from ``start`` on, ``shape`` of them; with memory of its own."""
        return self._read(tuple(start), tuple(shape))

    def rows(self, first: int, end: int) -> torch.Tensor:
        """Read only the rows from ``first`` to before ``end``; with memory of its own."""
        rest = tuple(self.shape[1:])
        return self.box((first, *(0 for _ in rest)), (end - first, *rest))

    def whole(self) -> torch.Tensor:
        """Read all of it; with memory of its own."""
        return self._read((0,) * self.dim(), tuple(self.shape))

    __torch_function__ = no_torch_function  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: object, args: Any = (), kwargs: Any = None
    ) -> object:
        args, kwargs = in_memory((args, kwargs or {}))
        return func(*args, **kwargs)

    def __deepcopy__(self, _memo: object) -> torch.Tensor:
        return self.whole()

    def __reduce_ex__(self, protocol: object) -> Any:
        return self.whole().__reduce_ex__(protocol)


def in_memory(value: Any) -> Any:
    """``value``, nested dicts, lists and tuples, with each `StoredTensor` read whole."""
    if isinstance(value, StoredTensor):
        return value.whole()
    if type(value) is dict:
        return {key: in_memory(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(in_memory, value))
    # Ten times as slow, which shows where a run goes on after a death.
    return pytree.tree_map_only(StoredTensor, StoredTensor.whole, value) if isinstance(value, dict | tuple) else value
