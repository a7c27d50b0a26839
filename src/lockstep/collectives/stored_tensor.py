"""A tensor in a file, whose users decide which parts are read, and when.

state["weight"]                      a StoredTensor of shape (5, 3): nothing is in memory
state["weight"].rows(3, 5)           its last two rows, on the rank that holds them
parameter.copy_(state["weight"])     read as a whole, copied, and forgotten again
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Self

import torch

from lockstep.torch_private import no_torch_function, pytree, wrapper_tensor

ReadBox = Callable[[tuple[int, ...], tuple[int, ...]], torch.Tensor]
"""Reads the box at a first element, of a shape: contiguous on the CPU, with memory of its own."""


class StoredTensor(torch.Tensor):
    """A tensor on the CPU whose values are in a file; each operation reads the whole tensor, and gives plain ones.

    So ``load_state_dict`` of modules and optimizers accepts it, and holds one tensor more at a time. Errors of `read`
    are raised by the operation.
    """

    _read: ReadBox

    @staticmethod
    def __new__(cls: type[Self], shape: Sequence[int], dtype: torch.dtype, read: ReadBox) -> Self:
        """A tensor of ``shape`` and ``dtype``, of which ``read`` gives boxes."""
        made: Self = wrapper_tensor(cls, shape, dtype=dtype, device=torch.device("cpu"))
        made._read = read
        return made

    def box(self, start: Sequence[int], shape: Sequence[int]) -> torch.Tensor:
        """Read only the box of ``shape`` at ``start``, into memory of its own."""
        return self._read(tuple(start), tuple(shape))

    def rows(self, first: int, end: int) -> torch.Tensor:
        """Read only the rows from ``first`` to before ``end``, into memory of their own."""
        rest = tuple(self.shape[1:])
        return self.box((first, *(0 for _ in rest)), (end - first, *rest))

    def whole(self) -> torch.Tensor:
        """Read the whole tensor, into memory of its own."""
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
    # Ten times as slow, which is noticeable where a run goes on after a rank's death.
    return pytree.tree_map_only(StoredTensor, StoredTensor.whole, value) if isinstance(value, dict | tuple) else value
