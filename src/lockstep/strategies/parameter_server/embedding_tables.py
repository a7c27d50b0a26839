"""Embeddings on servers: their look-ups, and the gradients of a step.

    worker    ids 7 2 7  ──►  distinct: 2 7  ──►  the servers of 2 and 7  ──►  a table of two rows, looked up as 1 0 1
              its gradient: (rows 2 7, values), added row by row along the tree
    server    rows 2 ...  ◄──  at the end of the step: (rows 2 ..., values) of each worker, and the rest of the tree

So a server never has a gradient of all its rows but once in a step, and a worker never a row that it has not asked for.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from lockstep.errors import UsageError
from lockstep.strategies.parts.row_shard import RowShard
from lockstep.torch_private import pytree

EmbeddingTable = nn.Embedding | nn.EmbeddingBag
Fetch = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True, eq=False)
class RowGradient:
    """The gradient of some rows of a table; that of all others is zero."""

    rows: torch.Tensor  #: their numbers, each once and in order, of shape (rows,)
    values: torch.Tensor  #: of shape (rows, elements of a row)

    def plus(self, other: RowGradient) -> RowGradient:
        """The sum, with the bits that two gradients of the whole table would have."""
        rows, places = torch.unique(torch.cat([self.rows, other.rows]), return_inverse=True)
        mine, theirs = places.split([len(self.rows), len(other.rows)])
        values = self.values.new_zeros(len(rows), self.values.shape[1])
        values[mine] = self.values
        values[theirs] += other.values
        return RowGradient(rows, values)

    def within(self, rows: range) -> RowGradient:
        """The part of it that belongs to these ``rows`` of the table."""
        first, end = torch.searchsorted(self.rows, self.rows.new_tensor([rows.start, rows.stop])).tolist()
        return RowGradient(self.rows[first:end], self.values[first:end])

    def of_table(self, rows: range, dtype: torch.dtype, device: torch.device, *, sparse: bool) -> torch.Tensor:
        """As the gradient of the ``rows`` of a table, dense or sparse."""
        places, values = (self.rows - rows.start).to(device), self.values.to(device, dtype)
        shape = (len(rows), values.shape[1])
        if sparse:
            return torch.sparse_coo_tensor(
                places[None], values, shape, device=device, is_coalesced=True, check_invariants=False
            )
        return torch.zeros(shape, dtype=dtype, device=device).index_copy_(0, places, values)


Gradients = dict[int, RowGradient]
"""Of tables, by their numbers; none for one that had no part in the loss."""


class ServedTable:
    """A table whose rows are divided between servers.

    Args:
        module: the model's; its parameter becomes what of it lies on this rank.
        rows: of each server that holds some, by its rank, in order.
        rank: this rank.
    """

    def __init__(self, module: EmbeddingTable, rows: Mapping[int, range], rank: int) -> None:
        self.module: Final = module
        self.shape: Final = (module.num_embeddings, module.embedding_dim)
        self.dtype: Final = module.weight.dtype
        self.trained: Final = module.weight.requires_grad
        self.rows_of: Final = rows
        self.is_here: Final = rank in rows  #: whether this rank holds some of them
        self.rows: Final = rows.get(rank, range(0))  #: on this rank

    @property
    def whole_here(self) -> bool:
        """Whether all rows lie on this rank."""
        return self.is_here and not self.is_divided

    @property
    def is_divided(self) -> bool:
        """Whether several servers hold rows."""
        return len(self.rows_of) > 1

    def shard(self) -> RowShard:
        """What of it is on this rank."""
        return RowShard(self.rows, self.shape, leads=self.rows == next(iter(self.rows_of.values())))

    def keep(self, values: torch.Tensor | None) -> None:
        """Let ``values`` be the rows on this rank, and the module's parameter; None: nothing of the table lies here."""
        if values is None:
            # Its shape is kept, for optimizers; reading it without a look-up is an error.
            values = torch.empty(self.shape, dtype=self.dtype, device="meta")
        self.module.weight = nn.Parameter(values, requires_grad=self.trained)

    def parts(self, rows: torch.Tensor) -> list[tuple[int, torch.Tensor]]:
        """The servers of ``rows``, numbers in order, each with those that it holds."""
        ends = torch.searchsorted(rows, torch.tensor([part.stop for part in self.rows_of.values()], device="cpu"))
        pieces = rows.tensor_split(ends.tolist()[:-1])
        return [(server, piece) for server, piece in zip(self.rows_of, pieces, strict=True) if len(piece)]

    def read(self, rows: torch.Tensor) -> torch.Tensor:
        """The values of these ``rows``, all of which lie on this rank, in the memory of the CPU."""
        weight = self.module.weight.detach()
        return weight[(rows - self.rows.start).to(weight.device)].cpu()

    def look_up(self, fetch: Fetch, inputs: Sequence[object], named: Mapping[str, object]) -> torch.Tensor:
        """What the module's forward pass returns, also that of a class of the user's.

        Args:
            fetch: gives the rows of these numbers, each of which it is asked for once, in order.
            inputs: of the forward pass.
            named: likewise.

        Raises:
            IndexError: for a number that is no row of the table, as torch does.
            UsageError: if the forward pass reads the table otherwise than by look-ups.
        """
        forward: Callable[..., torch.Tensor] = type(self.module).forward
        with _LookUps(self.module, fetch):
            return forward(self.module, *inputs, **named)


class _LookUps(TorchFunctionMode):
    """Within, look-ups in a module's weight get the rows that they need, and whatever else reads it is refused."""

    def __init__(self, module: EmbeddingTable, fetch: Fetch) -> None:
        super().__init__()
        self._module: Final = module
        self._fetch: Final = fetch

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> object:
        named, weight = kwargs or {}, self._module.weight
        if not any(leaf is weight for leaf in pytree.tree_leaves((args, named))):
            return func(*args, **named)
        if func in (F.embedding, F.embedding_bag):
            asked = inspect.signature(func).bind(*args, **named)
            asked.apply_defaults()
            if asked.arguments["input"] is not weight and asked.arguments["max_norm"] is None:
                return func(**self._with_rows(asked.arguments))
        elif not isinstance(result := func(*args, **named), torch.Tensor):
            return result  # such as its shape
        raise UsageError(
            f"the forward pass of {type(self._module).__name__} reads its weight by {func.__name__}, and servers "
            "answer look-ups only; name the embeddings to serve, without this one: --strategy hybrid:served=..."
        )

    def _with_rows(self, arguments: dict[str, Any]) -> dict[str, object]:
        """The ``arguments`` of a look-up, in a table of the rows that it needs instead of the whole one."""
        numbers, padding, count = arguments["input"], arguments["padding_idx"], self._module.num_embeddings
        # The padding's row always comes along, so that the same kernels compute what they would with the whole table.
        asked = numbers.detach().reshape(-1).to("cpu", torch.int64)
        if padding is not None:
            asked = torch.cat([asked, torch.tensor([padding % count], device="cpu")])
        rows, places = torch.unique(asked, return_inverse=True)
        if len(rows) and not 0 <= int(rows[0]) <= int(rows[-1]) < count:
            raise IndexError(f"index out of range: row {int(rows[-1] if rows[0] >= 0 else rows[0])} of {count}")
        return arguments | {
            "input": places[: numbers.numel()].to(numbers.device, numbers.dtype).view(numbers.shape),
            "weight": self._fetch(rows),
            "padding_idx": None if padding is None else int(places[-1]),
            "sparse": False,
        }


@dataclass(frozen=True, slots=True, eq=False)
class Lookup:
    """What a worker has been sent of a table."""

    table: int  #: its number
    rows: torch.Tensor  #: their numbers in the table, each once and in order, int64, of shape (rows,)
    values: torch.Tensor  #: a leaf of autograd, of shape (rows, elements of a row)

    def gradient(self, padding: int | None) -> RowGradient | None:
        """What the backward pass has left, without the row of the ``padding``; None, if it had no part in the loss."""
        if self.values.grad is None:
            return None
        kept = slice(None) if padding is None else self.rows != padding
        return RowGradient(self.rows[kept], self.values.grad[kept])


def sum_of_look_ups(look_ups: Sequence[Lookup], tables: Sequence[ServedTable]) -> Gradients:
    """The gradients of one micro-batch, whose backward pass is done."""
    sums: Gradients = {}
    # From the last look-up of the forward pass to the first, as autograd adds them on one rank.
    for one in reversed(look_ups):
        if (own := one.gradient(tables[one.table].module.padding_idx)) is not None:
            sums[one.table] = own.plus(sums[one.table]) if one.table in sums else own
    return sums


def merge_gradients(left: Gradients, right: Gradients) -> Gradients:
    """Add gradients; where one is missing, the other one is the sum."""
    both = {number: left[number].plus(right[number]) for number in left.keys() & right.keys()}
    return {**left, **right, **both}


def set_table_gradients(tables: Sequence[ServedTable], total: Gradients) -> None:
    """Set ``.grad`` of the rows on this server; None for tables that had no part in a loss."""
    for number, table in enumerate(tables):
        if table.is_here:
            weight, gradient = table.module.weight, total.get(number)
            weight.grad = (
                None
                if gradient is None
                else gradient.of_table(table.rows, weight.dtype, weight.device, sparse=table.module.sparse)
            )
