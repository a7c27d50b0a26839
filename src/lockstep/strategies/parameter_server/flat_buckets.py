"""Tensors that are sent as one, and gradients that are summed so.

parameters      a 2x2     b 3       c 2
owners          rank 2    rank 3    rank 2
buckets         a a a a c c    to and from rank 2
                b b b          to and from rank 3
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import torch

from lockstep.batch import MicroBatchPosition
from lockstep.collectives import Node, TreeAccumulator
from lockstep.strategies.parts.gradient_accumulation import add_into_left, pop_gradients

Tensors = Sequence[torch.Tensor]


@dataclass(frozen=True, slots=True, eq=False)
class FlatBucket:
    """Tensors of one owner and one type, which are sent as one."""

    owner: int
    tensors: tuple[torch.Tensor, ...]

    def pack(self, values: Tensors) -> torch.Tensor:
        """Concatenate ``values``, one for each tensor, into a new one-dimensional tensor."""
        return torch.cat([value.detach().reshape(-1) for value in values])

    def unpack(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Views of what `pack` gave, each shaped like its tensor."""
        pieces = flat.split([tensor.numel() for tensor in self.tensors])
        return [piece.view(tensor.shape) for piece, tensor in zip(pieces, self.tensors, strict=True)]

    def values(self) -> torch.Tensor:
        """What the tensors hold, packed, on the CPU."""
        return self.pack(self.tensors).cpu()

    @torch.no_grad()
    def fill(self, flat: torch.Tensor) -> None:
        """Copy packed values into the tensors."""
        for tensor, value in zip(self.tensors, self.unpack(flat), strict=True):
            tensor.copy_(value)


def flat_buckets_of(tensors: Iterable[torch.Tensor], owners: Iterable[int]) -> list[FlatBucket]:
    """The buckets of ``tensors``, in the order in which owners and types first occur."""
    found: dict[tuple[int, torch.dtype], list[torch.Tensor]] = {}
    for tensor, owner in zip(tensors, owners, strict=True):
        found.setdefault((owner, tensor.dtype), []).append(tensor)
    return [FlatBucket(owner, tuple(held)) for (owner, _), held in found.items()]


class BucketGradients:
    """A worker's gradients of one step, packed as they are sent, folded along the tree or just added up."""

    def __init__(self, buckets: Sequence[FlatBucket], micro_batches: int, *, exact: bool) -> None:
        self._buckets: Final = buckets
        self._exact: Final = exact
        self._fold: Final = TreeAccumulator[list[torch.Tensor]](micro_batches, add_into_left)
        #: for each bucket, the indices of its parameters that had a part in some loss
        self.used: Final[list[set[int]]] = [set() for _ in buckets]

    def accumulate(self, position: MicroBatchPosition) -> None:
        """Add the gradients of ``position``, and leave ``.grad`` empty."""
        if not position.is_padding:
            pairs = zip(self._buckets, self.used, strict=True)
            flats = [bucket.pack(pop_gradients(bucket.tensors, used)) for bucket, used in pairs]
            if self._exact or not self._fold.sums:
                self._fold.push((position.index, position.index + 1), flats)
            else:
                add_into_left(self._fold.sums[0], flats)
        for bucket in self._buckets:
            for parameter in bucket.tensors:
                parameter.grad = None

    def rows(self, number: int) -> list[torch.Tensor]:
        """The sums of the bucket of this number: one-dimensional, one for each of `nodes`."""
        return [sums[number] for sums in self._fold.sums]

    @property
    def sums(self) -> list[list[torch.Tensor]]:
        """For each of `nodes`, the sum of each bucket, one-dimensional."""
        return self._fold.sums

    @property
    def nodes(self) -> list[Node]:
        """The nodes of the tree of which there are sums; where gradients are just added up, a single one."""
        return list(self._fold.nodes)


def set_gradients(bucket: FlatBucket, flat: torch.Tensor, used: Collection[int]) -> None:
    """Set ``.grad`` of the bucket's parameters to the values in ``flat``; None where the index is not in ``used``."""
    for place, (parameter, gradient) in enumerate(zip(bucket.tensors, bucket.unpack(flat), strict=True)):
        parameter.grad = gradient.to(parameter.device) if place in used else None
