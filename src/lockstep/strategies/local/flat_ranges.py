"""Even ranges of tensors laid end to end: plans made from sizes alone, and copies by these plans.

tensors, of 4, 3 and 5 elements     0 0 0 0 1 1 1 2 2 2 2 2
cut into three                      0 0 0 0|1 1 1 2|2 2 2 2      [0:4], [0:3] + [0:1], [1:5]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class FlatRange:
    """A range of elements of a tensor, in the order of its indices."""

    index: int  #: of the tensor in the list
    first: int
    end: int


def cut(sizes: Sequence[int], count: int) -> list[list[FlatRange]]:
    """``count`` runs of the elements of tensors of these sizes, each as a list of ranges.

    Each element is in one range, the ranges follow the order of the elements, and the runs differ in length by at most
    one element.
    """
    total, cuts = sum(sizes), []
    for number in range(count):
        first, end = total * number // count, total * (number + 1) // count
        ranges, before = [], 0
        for index, size in enumerate(sizes):
            a, b = max(first - before, 0), min(end - before, size)
            if a < b:
                ranges.append(FlatRange(index, a, b))
            before += size
        cuts.append(ranges)
    return cuts


def by_dtype(tensors: Sequence[torch.Tensor]) -> list[list[int]]:
    """The indices of the tensors of each type; types in the order in which they first occur."""
    found: dict[torch.dtype, list[int]] = {}
    for index, tensor in enumerate(tensors):
        found.setdefault(tensor.dtype, []).append(index)
    return list(found.values())


def sizes_of(tensors: Sequence[torch.Tensor]) -> list[int]:
    """The number of elements of each tensor for `gather`: a complex number counts as two."""
    return [t.numel() * (2 if t.is_complex() else 1) for t in tensors]


def gather(tensors: Sequence[torch.Tensor], ranges: Sequence[FlatRange], device: torch.device) -> torch.Tensor:
    """The ranges of tensors of one type, end to end in new memory of ``device``."""
    found = [_flat(tensors[part.index])[part.first : part.end].to(device) for part in ranges]
    return torch.cat(found) if found else torch.empty(0, device=device)


def scatter(tensors: Sequence[torch.Tensor], ranges: Sequence[FlatRange], values: torch.Tensor) -> None:
    """Copy ``values``, in the layout of `gather`, into the tensors."""
    for part, value in zip(ranges, values.split([part.end - part.first for part in ranges]), strict=True):
        tensor = tensors[part.index].detach()
        flat = _flat(tensor)
        with torch.no_grad():
            flat[part.first : part.end].copy_(value)
            if flat.data_ptr() != tensor.data_ptr():  # not contiguous: `flat` is a copy
                real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
                real.copy_(flat.view_as(real))


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """The elements in the order of their indices; a view if the memory has this order."""
    tensor = tensor.detach()
    return (torch.view_as_real(tensor) if tensor.is_complex() else tensor).reshape(-1)
