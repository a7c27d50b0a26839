"""Sums and gatherings of activations, and of their gradients, between the ranks of a tensor group.

                     forward pass                        backward pass
to_each_rank         nothing                             the sum of the ranks' gradients
sum_of_ranks         the sum of the ranks' values        nothing
gathered             the ranks' last dimensions joined   this rank's part
own_part             this rank's part                    the ranks' parts joined

Sums follow the tree over the ranks of the group: their bits depend on the values, and on the group's number of ranks.

The backward pass of each operation is another of these operations, so gradients can be differentiated again, as for a
gradient penalty.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch

from lockstep.collectives import RankOrderAllReduce, ShardGroups, translating_peer_errors

_Map = Callable[[torch.Tensor], torch.Tensor]


class TensorGroup:
    """The ranks that compute each layer of a model together; each method is collective for these ranks.

    Args:
        shard_groups: of which a tensor group is a copy.
    """

    def __init__(self, shard_groups: ShardGroups) -> None:
        self.rank: Final = shard_groups.within.rank
        self.size: Final = shard_groups.within.size
        self._shard_groups: Final = shard_groups
        self._all_reduce: Final = RankOrderAllReduce(shard_groups.within)

    def to_each_rank(self, value: torch.Tensor) -> torch.Tensor:
        """``value``, equal on all ranks, for each rank's separate computation."""
        return _paired(value, lambda same: same.view_as(same), self.sum_of_ranks)

    def sum_of_ranks(self, value: torch.Tensor) -> torch.Tensor:
        """The sum of each rank's ``value``, for an equal computation on all ranks."""
        return _paired(value, self.sum, self.to_each_rank)

    def gathered(self, value: torch.Tensor) -> torch.Tensor:
        """Each rank's ``value``, joined in the last dimension, for an equal computation on all ranks."""
        return _paired(value, self.gather, self.own_part)

    def own_part(self, value: torch.Tensor) -> torch.Tensor:
        """This rank's part, in the last dimension, of ``value``, which is equal on all ranks."""
        return _paired(value, self.part, self.gathered)

    def sum(self, value: torch.Tensor) -> torch.Tensor:
        """The sum of each rank's ``value``, without a gradient."""
        total = value.detach().clone(memory_format=torch.contiguous_format)
        if total.numel():
            with translating_peer_errors("a sum within a tensor group"):
                self._all_reduce.begin(total.view(-1))
                self._all_reduce.finish()
        return total

    def gather(self, value: torch.Tensor) -> torch.Tensor:
        """Each rank's ``value``, joined in the last dimension, without a gradient."""
        if not value.numel():
            return value.new_empty((*value.shape[:-1], self.size * value.shape[-1]))
        sent = value.detach().contiguous().view(-1).view(torch.uint8)  # as bytes: transports do not support every type
        parts = self._shard_groups.gather(sent).view(value.dtype).view(self.size, *value.shape)
        return torch.cat(parts.unbind(), dim=-1)

    def part(self, value: torch.Tensor) -> torch.Tensor:
        """This rank's part of ``value`` in the last dimension, without a gradient."""
        length = value.shape[-1] // self.size
        return value.detach().narrow(-1, self.rank * length, length).contiguous()

    def close(self) -> None:
        """End the threads and connections."""
        self._all_reduce.close()


class _Paired(torch.autograd.Function):
    """A map of values whose backward pass is another map, which can be differentiated, too."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, of_value: _Map, of_gradient: _Map) -> torch.Tensor:
        ctx.of_gradient = of_gradient
        return of_value(value)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return ctx.of_gradient(gradient), None, None


def _paired(value: torch.Tensor, of_value: _Map, of_gradient: _Map) -> torch.Tensor:
    return _Paired.apply(value, of_value, of_gradient)  # type: ignore[no-any-return, no-untyped-call]
