"""Embeddings that no rank holds whole while they are made, with the values that one rank would have drawn.

    self.words = nn.Embedding(10**9, 64)      every rank    draws all rows, a block at a time, as one rank would
                                              a server      keeps those that are its own
    nn.init.normal_(self.words.weight, ...)   likewise
    self.words.weight.mul_(0.1)               a server      changes its own rows

So what is drawn afterwards is the same, too. It takes the time of drawing everything, and the memory of own rows and of
one block.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any, Final, Self

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.overrides import TorchFunctionMode

from lockstep.collectives import Group
from lockstep.errors import UsageError
from lockstep.strategies.parameter_server.row_division import RowDivision

_ATEN = torch.ops.aten
_BLOCK_BYTES: Final = 1 << 24
#: Torch draws normal numbers for 16 elements at once: a block that begins elsewhere would have others.
_DRAWN_AT_ONCE: Final = 16
#: They give every element a value that does not depend on the one before, drawn in the order of the elements.
_DRAWS: Final = {_ATEN.normal_.default, _ATEN.uniform_.default}
#: They change each element by itself, without random numbers.
_CHANGES: Final = {
    *(_ATEN.zero_.default, _ATEN.fill_.Scalar, _ATEN.fill_.Tensor, _ATEN.mul_.Scalar, _ATEN.add_.Scalar),
    *(_ATEN.sub_.Scalar, _ATEN.div_.Scalar, _ATEN.clamp_.default, _ATEN.erfinv_.default, _ATEN.mul_.Tensor),
    *(_ATEN.add_.Tensor, _ATEN.sub_.Tensor, _ATEN.div_.Tensor, _ATEN.neg_.default, _ATEN.abs_.default),
}


class TablePart(torch.Tensor):
    """A table of which this rank holds some rows: it can be given values, and nothing else, until it is served."""

    part: torch.Tensor  #: the rows that are here
    rows: range  #: their numbers
    rows_of: dict[int, range]  #: of each server
    has_values: bool

    @staticmethod
    def __new__(cls: type[Self], like: torch.Tensor, rows_of: dict[int, range], rank: int) -> Self:
        """A table like ``like``, without values, of which each server holds ``rows_of``."""
        shape = tuple(like.shape)
        made: Self = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=like.dtype, device="cpu")  # type: ignore[attr-defined]
        made.rows = rows_of.get(rank, range(0))
        made.rows_of = rows_of
        made.part = torch.empty(len(made.rows), *shape[1:], dtype=like.dtype)
        made.has_values = False
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
        table: TablePart = args[0]
        kwargs = kwargs or {}
        if func in (_ATEN.detach.default, _ATEN.alias.default):
            return table._alias()
        others = [value for value in (*args[1:], *kwargs.values()) if isinstance(value, torch.Tensor)]
        if isinstance(table, TablePart) and all(value.dim() == 0 for value in others):
            if func in _DRAWS:
                table._draw(lambda block: func(block, *args[1:], **kwargs))
                return table
            if func in _CHANGES:
                func(table.part, *args[1:], **kwargs)
                table._hold.has_values = True
                return table
            if func is _ATEN.select.int and args[1] == 0:
                row = range(table.shape[0])[args[2]]
                # What is done to a row that lies elsewhere is done there.
                return table.part[row - table.rows.start] if row in table.rows else table.part.new_empty(table.shape[1])
        raise UsageError(
            f"{func} of an embedding's weight while strategy hybrid makes the model: its rows lie on several ranks, "
            "and may be initialised by normal_, uniform_ and what changes each element by itself; do it after "
            "run.model(...) with weights=, or give run.model(...) the model itself, which each rank then makes whole"
        )

    def values(self, name: str) -> torch.Tensor:
        """The rows that are here, of the embedding ``name``.

        Raises:
            UsageError: if nobody has given them values.
        """
        if not self._hold.has_values and self.numel():
            raise UsageError(
                f"{name}.weight was allocated and never initialised; nn.Embedding does that by itself, in "
                "reset_parameters()"
            )
        return self.part

    @property
    def _hold(self) -> TablePart:
        """The first of all that share this memory."""
        return vars(self).get("first", self)

    def _alias(self) -> TablePart:
        alias: TablePart = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            TablePart, tuple(self.shape), dtype=self.dtype, device="cpu"
        )
        alias.rows, alias.rows_of, alias.part = self.rows, self.rows_of, self.part
        vars(alias)["first"] = self._hold
        return alias

    def _draw(self, draw: Callable[[torch.Tensor], object]) -> None:
        """Let ``draw`` fill all rows, block by block, and keep those of this rank."""
        count, width = self.shape[0], max(1, self.shape[1])
        rows = max(1, _BLOCK_BYTES // (width * self.element_size() * _DRAWN_AT_ONCE)) * _DRAWN_AT_ONCE
        starts = list(range(0, count, rows))
        if len(starts) > 1 and (count - starts[-1]) * width < _DRAWN_AT_ONCE:
            starts.pop()  # torch draws for so few elements in another way
        for first, end in zip(starts, [*starts[1:], count], strict=True):
            block = self.part.new_empty(end - first, self.shape[1])
            draw(block)
            low, high = max(first, self.rows.start), min(end, self.rows.stop)
            if low < high:
                self.part[low - self.rows.start : high - self.rows.start] = block[low - first : high - first]
        self._hold.has_values = True


def construct(make: Callable[[], nn.Module], division: RowDivision, group: Group) -> nn.Module:
    """What ``make`` gives, with a `TablePart` as the weight of each embedding that it initialises. Collective.

    Raises:
        MismatchError: if ranks would draw different random numbers.
    """
    group.check_equal(
        "the state of torch's random numbers before run.model(...), which must draw the same on all ranks",
        zlib.crc32(torch.get_rng_state().numpy().data),
    )
    with _Allocations() as allocations:

        def divide(module: nn.Module, name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
            # One that is made of given values, as by from_pretrained, is not what was just allocated.
            is_table = isinstance(module, nn.Embedding | nn.EmbeddingBag) and name == "weight"
            if not is_table or parameter is None or parameter.is_meta or not allocations.last_is(parameter):
                return None
            rows_of = division.place(parameter.shape[0], parameter.shape[1] * parameter.element_size())
            return nn.Parameter(TablePart(parameter, rows_of, group.rank), parameter.requires_grad)

        hook = register_module_parameter_registration_hook(divide)
        try:
            return make()
        finally:
            hook.remove()


def whole_table(table: TablePart, group: Group) -> torch.Tensor:
    """All rows of ``table``, on every rank. Collective."""
    parts = group.gather_objects((table.rows.start, table.part), "the rows of an embedding that is not served")
    return torch.cat([part for _, part in sorted(parts, key=lambda one: one[0]) if len(part)] or [table.part])


class _Allocations(TorchFunctionMode):
    """Knows what `torch.empty` has given last: the memory that a module allocates before it initialises it."""

    def __init__(self) -> None:
        super().__init__()
        self._last = 0

    def last_is(self, tensor: torch.Tensor) -> bool:
        """Whether ``tensor`` has that memory."""
        return tensor.data_ptr() == self._last != 0

    def __torch_function__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.empty:
            self._last = 0 if result.is_meta else result.data_ptr()
        return result
