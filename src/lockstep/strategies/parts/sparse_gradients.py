"""Sparse gradients, as of ``nn.Embedding(sparse=True)``: summed as dense tables, and then sparse again.

    sparse                      dense, with a column that tells which rows are there
    row 1: a b                  0 0 0
    row 4: c d                  a b 1
                                0 0 0
                                0 0 0
                                c d 1

So sparse gradients are summed like any other gradient, along the same tree, and an optimizer such as SparseAdam steps
only the rows that had a part in some micro-batch of the step. Messages are as large as the table.
"""

from __future__ import annotations

import torch
from torch import nn

from lockstep.errors import UsageError


def sparse_parameters(model: nn.Module) -> dict[nn.Parameter, str]:
    """The parameters of ``model`` whose gradients are sparse, with their names.

    Raises:
        UsageError: if such a parameter is also used where its gradient is dense.
    """
    found: dict[nn.Parameter, str] = {}
    elsewhere: dict[nn.Parameter, str] = {}
    for path, module in model.named_modules():
        is_sparse = isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse
        for name, parameter in module.named_parameters(path, recurse=False):
            (found if is_sparse else elsewhere).setdefault(parameter, name)
    for parameter, name in found.items():
        if parameter in elsewhere:
            raise UsageError(
                f"{name} has sparse=True and is {elsewhere[parameter]}, too, where its gradient is dense; "
                "leave sparse=True out"
            )
    return found


def refuse_sparse(model: nn.Module, strategy: str) -> None:
    """Check that ``model`` has no sparse gradients, for a ``strategy`` that sums only dense ones.

    Raises:
        UsageError: if ``model`` has a parameter with sparse gradients.
    """
    for name in sparse_parameters(model).values():
        raise UsageError(
            f"{name} has sparse=True, and strategy {strategy} moves dense gradients; leave sparse=True out, or use ddp"
        )


def dense_rows(gradient: torch.Tensor) -> torch.Tensor:
    """The sparse ``gradient`` of a table (rows, ...) as a dense tensor of shape (rows, elements of a row + 1)."""
    gradient = gradient.coalesce()
    values = gradient.values().reshape(gradient.indices().shape[1], -1)
    table = values.new_zeros(gradient.shape[0], values.shape[1] + 1)
    table[gradient.indices()[0]] = torch.cat([values, values.new_ones(len(values), 1)], 1)
    return table


def no_rows(parameter: torch.Tensor) -> torch.Tensor:
    """The result of `dense_rows` for a gradient without a row."""
    return parameter.new_zeros(len(parameter), parameter[:1].numel() + 1, requires_grad=False)


def sparse_again(table: torch.Tensor, like: torch.Tensor) -> torch.Tensor | None:
    """The sparse gradient of shape ``like.shape`` from ``table``, a sum of `dense_rows`; None if it has no row."""
    rows = table[:, -1].nonzero().view(1, -1)
    if not rows.numel():
        return None
    values = table[rows[0], :-1].view(-1, *like.shape[1:])
    return torch.sparse_coo_tensor(
        rows, values, like.shape, device=values.device, is_coalesced=True, check_invariants=False
    )
