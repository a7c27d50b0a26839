"""Embeddings that no rank holds whole while they are made, with the values that one rank would have drawn.

    self.words = nn.Embedding(10**9, 64)      every rank    draws all rows, a block at a time, as one rank would
                                              a server      keeps those that are its own
    nn.init.normal_(self.words.weight, ...)   likewise
    self.words.weight.mul_(0.1)               a server      changes its own rows

So what is drawn afterwards is the same, too. It takes the time of drawing everything, and the memory of own rows and of
one block.

`divided_construction` is another mechanism for another promise. It lets a constructor do whatever it likes, on whole
tensors, and frees them between two operations: the largest tensor must fit on each rank, and every rank is to have
rows. A table is larger than that, and workers have no rows. It is never whole, not even while one operation runs, so
only operations are allowed that can be made part by part; that is why it is a class of tensor, which refuses the others
by their name, and not a mode around the constructor. In the other mechanism this would be a second kind of storage with
a branch in each of its methods: all that both share is how ranks are compared beforehand, and which operations look at
no value.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Any, Final, Self

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.overrides import TorchFunctionMode

from lockstep.collectives import Group
from lockstep.errors import UsageError
from lockstep.strategies.not_whole.divided_construction import SHARE_MEMORY
from lockstep.strategies.parameter_server.embedding_tables import EmbeddingTable, ServedTable
from lockstep.strategies.parameter_server.row_division import RowDivision
from lockstep.strategies.parts.module_states import verify_random_state
from lockstep.strategies.parts.row_shard import rows_of
from lockstep.strategies.parts.sparse_gradients import sparse_parameters
from lockstep.torch_private import no_torch_function, own_buffers, pytree, storage_key, wrapper_tensor

_ATEN = torch.ops.aten
_CPU: Final = torch.device("cpu")
_BLOCK_BYTES: Final = 1 << 24
#: Torch draws normal numbers for 16 elements at once: a block that begins elsewhere would have others.
_DRAWN_AT_ONCE: Final = 16
#: They give every element a value that does not depend on the one before, drawn in the order of the elements.
_DRAWS: Final = {_ATEN.normal_.default, _ATEN.uniform_.default}
#: They treat each element by itself, as all do that torch has tagged so.
_ELEMENT_BY_ELEMENT: Final = {_ATEN.zero_.default, _ATEN.copy_.default, _ATEN.clone.default, _ATEN.empty_like.default}


@dataclass(slots=True)
class _Rows:
    """The rows of a table that are on this rank."""

    part: torch.Tensor
    here: range  #: their numbers
    of: dict[int, range]  #: of each server
    group: Group
    has_values: bool = False


class TablePart(torch.Tensor):
    """A table of which this rank holds some rows: it can be given values, and nothing else, until it is served."""

    held: _Rows

    @staticmethod
    def __new__(cls: type[Self], shape: tuple[int, ...], held: _Rows) -> Self:
        """A table of ``shape``, of which ``held`` is here."""
        made: Self = wrapper_tensor(cls, shape, dtype=held.part.dtype, device=_CPU)
        made.held = held
        return made

    __torch_function__ = no_torch_function  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: object, args: Any = (), kwargs: Any = None) -> object:  # type: ignore[override]
        kwargs = kwargs or {}
        tables = [value for value in pytree.tree_leaves((args, kwargs)) if isinstance(value, TablePart)]
        table, first = tables[0], args[0] if args else None
        if func in SHARE_MEMORY:
            return TablePart(tuple(table.shape), table.held)
        if func in _DRAWS and first is table:
            table._draw(lambda block: func(block, *args[1:], **kwargs))
            return table
        if func is _ATEN.select.int and args[1] == 0:
            row, here = range(table.shape[0])[args[2]], table.held.here
            # What is done to a row that lies elsewhere is done there.
            return table.held.part[row - here.start] if row in here else table.held.part.new_empty(table.shape[1])
        if func is _ATEN.any.default:
            return table.held.group.sum_tensor(table.held.part.any().float(), "the initial values of a table") != 0
        if func is _ATEN.copy_.default and not isinstance(args[1], TablePart) and args[1].shape == table.shape:
            rows = rows_of(args[1], table.held.here)
            args = (first, TablePart(tuple(table.shape), replace(table.held, part=rows)))
        plain = [v for v in pytree.tree_leaves((args, kwargs)) if isinstance(v, torch.Tensor) and v.dim()]
        alike = all(isinstance(v, TablePart) and v.shape == table.shape for v in plain)
        if alike and (func in _ELEMENT_BY_ELEMENT or torch.Tag.pointwise in func.tags):
            own = pytree.tree_map_only(TablePart, lambda one: one.held.part, (args, kwargs))
            result = func(*own[0], **own[1])
            if isinstance(first, TablePart) and result is first.held.part:
                first.held.has_values = True
                return first
            return TablePart(tuple(table.shape), replace(table.held, part=result))
        raise UsageError(
            f"{func} of an embedding's weight while strategy hybrid makes the model: its rows lie on several ranks, "
            "and may be initialised by normal_, uniform_ and what treats each element by itself; or give "
            "run.model(...) the model, which each rank then makes whole"
        )

    def initialised(self, name: str) -> torch.Tensor:
        """The rows that are here, of the embedding ``name``.

        Raises:
            UsageError: if nobody has given them values.
        """
        if not self.held.has_values and self.numel():
            raise UsageError(
                f"{name}.weight was allocated and never initialised; nn.Embedding does that by itself, in "
                "reset_parameters()"
            )
        return self.held.part

    def _draw(self, draw: Callable[[torch.Tensor], object]) -> None:
        """Let ``draw`` fill all rows, block by block, and keep those of this rank."""
        count, width, held = self.shape[0], max(1, self.shape[1]), self.held
        rows = max(1, _BLOCK_BYTES // (width * self.element_size() * _DRAWN_AT_ONCE)) * _DRAWN_AT_ONCE
        starts = list(range(0, count, rows))
        if len(starts) > 1 and (count - starts[-1]) * width < _DRAWN_AT_ONCE:
            starts.pop()  # torch draws for so few elements in another way
        memory = held.part.new_empty(min(count, rows + _DRAWN_AT_ONCE), self.shape[1])
        for first, end in itertools.pairwise([*starts, count]):
            block = memory[: end - first]
            draw(block)
            low, high = max(first, held.here.start), min(end, held.here.stop)
            if low < high:
                held.part[low - held.here.start : high - held.here.start] = block[low - first : high - first]
        held.has_values = True


def construct(make: Callable[[], nn.Module], division: RowDivision, group: Group) -> nn.Module:
    """What ``make`` gives, with a `TablePart` as the weight of each embedding that it initialises. Collective.

    Raises:
        MismatchError: if ranks would draw different random numbers.
    """
    verify_random_state(group)
    with _Allocations() as allocations:

        def divide(module: nn.Module, name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
            # One that is made of given values, as by from_pretrained, is not what was just allocated.
            is_table = isinstance(module, nn.Embedding | nn.EmbeddingBag) and name == "weight"
            if not is_table or parameter is None or parameter.is_meta or not allocations.last_is(parameter):
                return None
            rows_of = division.place(parameter.shape[0], parameter.shape[1] * parameter.element_size())
            here = rows_of.get(group.rank, range(0))
            part = torch.empty(len(here), parameter.shape[1], dtype=parameter.dtype, device=parameter.device)
            table = TablePart(tuple(parameter.shape), _Rows(part, here, rows_of, group))
            return nn.Parameter(table, parameter.requires_grad)

        with register_module_parameter_registration_hook(divide):  # type: ignore[arg-type]
            return make()


def whole_table(table: TablePart, group: Group) -> torch.Tensor:
    """All rows of ``table``, on every rank. Collective."""
    held = table.held
    parts = group.gather_objects((held.here.start, held.part), "the rows of an embedding that is not served")
    return torch.cat([part for _, part in sorted(parts, key=lambda one: one[0]) if len(part)] or [held.part])


class _Allocations(TorchFunctionMode):
    """Knows what `torch.empty`, or its like, has given last: what a module allocates before it initialises it."""

    def __init__(self) -> None:
        super().__init__()
        self._last: StorageWeakRef | None = None  # while it is there, no other storage is in its place

    def last_is(self, tensor: torch.Tensor) -> bool:
        """Whether ``tensor`` has that memory."""
        return self._last is not None and storage_key(tensor) == self._last.cdata

    def __torch_function__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> object:
        result = func(*args, **(kwargs or {}))
        if func in (torch.empty, torch.empty_like):
            self._last = None if result.is_meta else StorageWeakRef(result.untyped_storage())
        return result


def find_tables(model: nn.Module, names: Collection[str]) -> dict[str, EmbeddingTable]:
    """The embeddings of ``model`` to serve, by name: those of ``names``, or all of them if there are none.

    Raises:
        UsageError: if one of them cannot lie on servers, or has a sparse gradient and is to lie elsewhere.
    """
    tables: dict[str, EmbeddingTable] = {}
    for name, module in model.named_modules():
        if names and name not in names:
            continue
        if isinstance(module, EmbeddingTable):
            _check(model, name, module)
            tables[name] = module
        elif names:
            raise UsageError(f"strategy hybrid: served={name} is a {type(module).__name__}; give an embedding")
    for parameter, name in sparse_parameters(model).items():
        if not any(parameter is table.weight for table in tables.values()):
            raise UsageError(
                f"{name} has sparse=True and is not served, and workers sum dense gradients among themselves; "
                "leave sparse=True out, or let served=... name it, too"
            )
    return tables


def restore_unserved(model: nn.Module, served: dict[str, EmbeddingTable], group: Group) -> None:
    """Make each embedding whole on every rank that was divided while it was made and is not ``served``. Collective."""
    for name, module in model.named_modules():
        weight = getattr(module, "weight", None)
        if name not in served and isinstance(module, EmbeddingTable) and isinstance(weight, TablePart):
            weight.initialised(name)
            module.weight = nn.Parameter(whole_table(weight, group).to(group.device), weight.requires_grad)


def place_rest(model: nn.Module, device: torch.device) -> None:
    """Move all of ``model`` to ``device`` but for tables that were divided while it was made."""
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            if not isinstance(parameter, TablePart):
                parameter.data = parameter.data.to(device)
        for name, buffer in module.named_buffers(recurse=False):
            own_buffers(module)[name] = buffer.to(device)


def own_rows(name: str, table: ServedTable, group: Group) -> torch.Tensor | None:
    """What this rank is to hold of ``table``, on the device; None: nothing. Collective.

    Rank 0, a worker, sends each server its rows, and a server lets go of its own table before; not so where each rank
    has made its own rows alone.

    Raises:
        UsageError: if nobody has given them values.
    """
    weight = table.module.weight
    if isinstance(weight, TablePart):
        part = weight.initialised(name)
        return part.to(group.device) if table.is_here else None
    table.keep(None)
    what = "the first values of a model"
    if group.leads:
        for server, rows in table.rows_of.items():
            group.send(weight.detach()[rows.start : rows.stop].cpu().contiguous(), server, what)
    if not table.is_here:
        return None
    del weight
    own = torch.empty(len(table.rows), table.shape[1], dtype=table.dtype, device="cpu")
    group.receive(own, 0, what)
    return own.to(group.device)


def _check(model: nn.Module, name: str, table: EmbeddingTable) -> None:
    sharing = [n for n, p in model.named_parameters(remove_duplicate=False) if p is table.weight]
    if len(sharing) > 1:
        raise UsageError(
            f"{' and '.join(sharing)} are one tensor, of which only look-ups can be served; name the embeddings to "
            "serve, without this one: --strategy hybrid:served=..."
        )
