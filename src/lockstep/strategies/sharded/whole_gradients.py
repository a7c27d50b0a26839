"""Gradients of parameters of ignored modules, which every rank holds whole, beside divided blocks.

each micro-batch     .grad of all of them, flat     exchanged with those of the other ranks, as a block's is
the last one         each rank's part of the sum    gathered: .grad is the same sum on every rank
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from torch import nn

from lockstep.batch import MicroBatchPosition
from lockstep.collectives import ReduceScatter, ScatteredSum, ShardGroups
from lockstep.strategies.parts.gradient_accumulation import align_gradients, gradient_like


class WholeGradients:
    """Sums the gradients of parameters of one type.

    Args:
        parameters: dense, and whole on every rank.
        shard_groups: the ranks of each copy.
        reduce_scatter: sums over ranks.
    """

    def __init__(
        self, parameters: Sequence[nn.Parameter], shard_groups: ShardGroups, reduce_scatter: ReduceScatter
    ) -> None:
        self._parameters: Final = parameters
        self._sizes: Final = [p.numel() for p in parameters]
        self._shard_groups: Final = shard_groups
        self._reduce_scatter: Final = reduce_scatter
        self._sum: ScatteredSum | None = None  # of this step

    def add(self, position: MicroBatchPosition) -> None:
        """Take the gradients of a micro-batch out of ``.grad``; after the last, ``.grad`` holds the sum. Collective.

        All parameters must have a gradient.
        """
        if self._sum is None:
            self._sum = self._reduce_scatter.begin(position.of)
        ranks, length = self._shard_groups.within.size, sum(self._sizes)
        flat = self._sum.allocate(-(-length // ranks) * ranks, self._parameters[0].dtype)
        flat[length:] = 0
        pieces = flat[:length].split(self._sizes)
        for parameter, piece in zip(self._parameters, pieces, strict=True):
            assert parameter.grad is not None
            piece.view(parameter.shape).copy_(parameter.grad)
            parameter.grad = None
        self._sum.add(flat, None if position.is_padding else position.index)
        if position.last:
            part = flat.new_empty(len(flat) // ranks)
            self._sum.finish(part)
            self._sum = None
            total = self._shard_groups.gather(part)[:length].split(self._sizes)
            for parameter, piece in zip(self._parameters, total, strict=True):
                parameter.grad = gradient_like(parameter, piece)
            align_gradients(parameter for parameter in self._parameters if parameter.is_cuda)

    def forget(self) -> None:
        """Drop the sum of this step."""
        self._sum = None


def by_type(
    parameters: Sequence[nn.Parameter], shard_groups: ShardGroups, reduce_scatter: ReduceScatter
) -> list[WholeGradients]:
    """A `WholeGradients` for the ``parameters`` of each type."""
    types = dict.fromkeys(p.dtype for p in parameters)
    return [
        WholeGradients([p for p in parameters if p.dtype == dtype], shard_groups, reduce_scatter) for dtype in types
    ]
