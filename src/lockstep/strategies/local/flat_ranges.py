"""Tensors end to end, cut into even ranges: plans made of sizes alone, and the copies that follow them.

tensors, of 4, 3 and 5 elements     0 0 0 0 1 1 1 2 2 2 2 2
cut into three                      0 0 0 0|1 1 1 2|2 2 2 2      [0:4], [0:3] + [0:1], [1:5]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class FlatRange:
    """Elements of one tensor, in the order of its indices."""

    index: int  #: of the tensor in the list
    first: int
    end: int


def cut(sizes: Sequence[int], count: int) -> list[list[FlatRange]]:
    """``count`` runs of the elements of tensors of these sizes, each as the ranges in it.

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
    """Put what `gather` gave, or such, into the tensors."""
    for part, value in zip(ranges, values.split([part.end - part.first for part in ranges]), strict=True):
        tensor = tensors[part.index].detach()
        flat = _flat(tensor)
        with torch.no_grad():
            flat[part.first : part.end].copy_(value)
            if flat.data_ptr() != tensor.data_ptr():  # its elements do not follow each other: `flat` is a copy
                real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
                real.copy_(flat.view_as(real))


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """The elements in the order of their indices; a view where they lie in that order."""
    tensor = tensor.detach()
    return (torch.view_as_real(tensor) if tensor.is_complex() else tensor).reshape(-1)
