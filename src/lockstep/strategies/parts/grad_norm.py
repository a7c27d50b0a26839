"""The norm of a gradient, with the same bits for every division of its rows between ranks.

The squares of a row are summed by halves, and then the sums of the rows of all parameters in the same way::

    a b c d e        (5)
    a+d b+e c        (3)      the second half is added to the first one, element by element
    a+d+c b+e        (2)
    ...

Only element-wise additions are made. Their bits depend neither on the number of rows on a rank, nor on how a kernel
would divide a sum among threads.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

import torch

_AT_ONCE: Final = 1 << 25  #: elements of gradients that are copied into one table: 128 MiB in fp32
_BY_ONE_THREAD: Final = 1 << 15  #: elements up to which torch adds with one thread


def squared_row_norms(gradient: torch.Tensor) -> torch.Tensor:
    """The sum of squares of each row along the first dimension; float32, or float64 for a gradient of that type.

    A gradient of no dimension has one row. The square of a complex number is the sum of the squares of its two parts.
    """
    gradient = gradient.detach()
    if gradient.is_sparse:
        gradient = gradient.to_dense()
    shape = gradient.shape
    if gradient.is_complex():
        gradient = torch.view_as_real(gradient.resolve_conj())
    rows = gradient.reshape(*shape[:1] or (1,), math.prod(gradient.shape[1 if shape else 0 :]))
    squares = rows.to(torch.promote_types(rows.dtype, torch.float32), copy=True)
    return _halved(squares.square_())


def squared_norms(gradients: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The `squared_row_norms` of each gradient; on a GPU, all of one row width at once, since launches cost time."""
    found: list[torch.Tensor] = [torch.empty(0, device="cpu")] * len(gradients)
    together: dict[tuple[torch.device, torch.dtype, int], list[int]] = {}
    for place, gradient in enumerate(gradients):
        if gradient.is_cpu or gradient.is_sparse or gradient.is_complex() or not gradient.numel():
            found[place] = squared_row_norms(gradient)
        else:
            width = math.prod(gradient.shape[1:])
            together.setdefault((gradient.device, gradient.dtype, width), []).append(place)
    for (*_, width), places in together.items():
        tables = [gradients[place].detach().reshape(-1, width) for place in places]
        for some in _batches(range(len(places)), [table.numel() for table in tables]):
            squares = squared_row_norms(torch.cat([tables[i] for i in some]))
            for i, rows in zip(some, squares.split([len(tables[i]) for i in some]), strict=True):
                found[places[i]] = rows
    return found


def _batches(items: Sequence[int], sizes: Sequence[int]) -> list[list[int]]:
    """``items`` in order, in lists of at most `_AT_ONCE` elements, or of one item."""
    batches: list[list[int]] = []
    room = 0
    for item, size in zip(items, sizes, strict=True):
        if not batches or size > room:
            batches.append([])
            room = _AT_ONCE
        batches[-1].append(item)
        room -= size
    return batches


def norm_of_rows(rows: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """The 2-norm, of no dimension, from the `squared_row_norms` of all parameters, in the model's order."""
    if not rows:
        return torch.zeros((), device=device)
    kind = torch.float64 if any(r.dtype == torch.float64 for r in rows) else torch.float32
    return _halved(torch.cat([r.to(device, kind) for r in rows]).view(1, -1)).sqrt_()[0]


def _halved(table: torch.Tensor) -> torch.Tensor:
    """The sum of each row of ``table``, of shape (rows, any), which is overwritten."""
    width = table.shape[1]
    if not width:
        return table.new_zeros(len(table))
    # NumPy's additions are the same, and take a third of the time to begin.
    sums: Any = table.numpy() if table.is_cpu and table.numel() <= _BY_ONE_THREAD else table
    while width > 1:
        kept = (width + 1) // 2
        left = sums[:, : width - kept]
        left += sums[:, kept:width]  # not as one statement, which would copy the sums onto themselves as well
        width = kept
    return table[:, 0]
