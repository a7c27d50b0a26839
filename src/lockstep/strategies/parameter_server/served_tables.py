"""Which embeddings of a model servers are to hold, which they cannot, and where their first values come from."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import nn

from lockstep.collectives import Group
from lockstep.errors import UsageError
from lockstep.strategies.parameter_server.embedding_tables import EmbeddingTable, ServedTable
from lockstep.strategies.parameter_server.table_construction import TablePart, whole_table
from lockstep.strategies.parts.sparse_gradients import sparse_parameters
from lockstep.torch_private import own_buffers


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
