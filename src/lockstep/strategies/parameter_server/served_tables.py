"""Which embeddings of a model servers are to hold, and which they cannot."""

from __future__ import annotations

from collections.abc import Collection

from torch import nn

from lockstep.collectives import Group
from lockstep.errors import UsageError
from lockstep.strategies.parameter_server.embedding_tables import EmbeddingTable
from lockstep.strategies.parameter_server.table_construction import TablePart, whole_table
from lockstep.strategies.sparse_gradients import sparse_parameters


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
            weight.values(name)
            module.weight = nn.Parameter(whole_table(weight, group).to(group.device), weight.requires_grad)


def _check(model: nn.Module, name: str, table: EmbeddingTable) -> None:
    if table.max_norm is not None:
        raise UsageError(
            f"{name} has max_norm={table.max_norm}, so look-ups change it, and workers would do so at the same "
            "time; leave max_norm out, or name the embeddings to serve: --strategy hybrid:served=..."
        )
    sharing = [n for n, p in model.named_parameters(remove_duplicate=False) if p is table.weight]
    if len(sharing) > 1:
        raise UsageError(
            f"{' and '.join(sharing)} are one tensor, of which only look-ups can be served; name the embeddings to "
            "serve, without this one: --strategy hybrid:served=..."
        )
