"""Tensors that are sent as one.

parameters      a 2x2     b 3       c 2
owners          rank 2    rank 3    rank 2
buckets         a a a a c c    to and from rank 2
                b b b          to and from rank 3
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import torch

from lockstep.strategies.parts.gradient_accumulation import align_gradients, gradient_like

Tensors = Sequence[torch.Tensor]


@dataclass(frozen=True, slots=True, eq=False)
class FlatBucket:
    """Tensors of one owner and one type, which are sent as one."""

    owner: int
    tensors: tuple[torch.Tensor, ...]
    places: tuple[int, ...]  #: of the tensors among all those that were divided into buckets

    def pack(self, values: Tensors) -> torch.Tensor:
        """Concatenate those of ``values``, one for each tensor of all buckets, that are here, in one dimension."""
        return torch.cat([values[place].detach().reshape(-1) for place in self.places])

    def unpack(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Views of what `pack` gave, each shaped like its tensor."""
        pieces = flat.split([tensor.numel() for tensor in self.tensors])
        return [piece.view(tensor.shape) for piece, tensor in zip(pieces, self.tensors, strict=True)]

    def values(self) -> torch.Tensor:
        """What the tensors hold, packed, on the CPU."""
        return torch.cat([tensor.detach().reshape(-1) for tensor in self.tensors]).cpu()

    @torch.no_grad()
    def fill(self, flat: torch.Tensor) -> None:
        """Copy packed values into the tensors."""
        for tensor, value in zip(self.tensors, self.unpack(flat), strict=True):
            tensor.copy_(value)


def flat_buckets_of(tensors: Iterable[torch.Tensor], owners: Iterable[int]) -> list[FlatBucket]:
    """The buckets of ``tensors``, in the order in which owners and types first occur."""
    found: dict[tuple[int, torch.dtype], list[tuple[torch.Tensor, int]]] = {}
    for place, (tensor, owner) in enumerate(zip(tensors, owners, strict=True)):
        found.setdefault((owner, tensor.dtype), []).append((tensor, place))
    return [FlatBucket(owner, *zip(*held, strict=True)) for (owner, _), held in found.items()]


def set_gradients(bucket: FlatBucket, flat: torch.Tensor, used: Collection[int]) -> None:
    """Set ``.grad`` of the bucket's parameters to the values in ``flat``; None where the place is not in ``used``.

    Each in the memory format and, on a GPU, at a place in memory as on one rank.
    """
    for place, parameter, gradient in zip(bucket.places, bucket.tensors, bucket.unpack(flat), strict=True):
        parameter.grad = gradient_like(parameter, gradient) if place in used else None
    align_gradients(tensor for tensor in bucket.tensors if tensor.is_cuda)
