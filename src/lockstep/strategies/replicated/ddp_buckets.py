"""The buckets of one backward pass under DDP: in which order their sums start, and where the results go."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Final, NamedTuple, cast

import torch
from torch import nn
from torch._C._distributed_c10d import GradBucket  # what torch.distributed exports, with types

from lockstep.batch import MicroBatchPosition
from lockstep.strategies.parts.gradient_accumulation import TreeGradientAccumulator
from lockstep.torch_private import foreach_copy_, version_of

_ALIGNMENT: Final = 64


class StartedBucket(NamedTuple):
    """A bucket whose sum was started."""

    model: int  #: whose, by its number
    flat: torch.Tensor
    version: int  #: how often ``flat`` had been changed
    parameters: list[torch.Tensor]


@dataclass(slots=True, eq=False)
class BucketReduction:
    """The state of one backward pass whose gradients are summed over ranks: that of a rank's last micro-batch."""

    accumulator: TreeGradientAccumulator
    position: MicroBatchPosition
    defers: bool  #: whether sums are started after the backward pass, in an order that does not depend on the loss
    started: list[StartedBucket] = field(default_factory=list)
    deferred: dict[tuple[int, int], Callable[[], None]] = field(default_factory=dict)  #: by model and bucket
    #: buckets on other GPUs of this rank, and their sums on its own one
    elsewhere: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)

    def start(self, model: int, bucket: GradBucket, begin: Callable[[], None]) -> None:
        """Call ``begin``, which starts the sum of ``bucket``: now, or in `start_deferred`."""
        if self.defers:
            self.deferred[model, bucket.index()] = begin
        else:
            begin()
        self.started.append(StartedBucket(model, bucket.buffer(), version_of(bucket.buffer()), bucket.parameters()))

    def start_deferred(self) -> None:
        """Start the sums that had to wait for the end of the backward pass, in the order of models and buckets."""
        for _, begin in sorted(self.deferred.items()):
            begin()

    def copy_to_other_gpus(self) -> None:
        """Put the sums of buckets on other GPUs of this rank where their gradients are."""
        while self.elsewhere:
            flat, total = self.elsewhere.pop()
            flat.copy_(total)


def align_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Each gradient begins at a multiple of `_ALIGNMENT` bytes in its memory, as where no bucket holds it.

    On a GPU a sum or a norm of one tensor is grouped by the address at which that begins, so an optimizer that takes
    norms would have other bits than on one rank. All that stand otherwise are copied by one kernel, most models have
    none: the sizes of their parameters are multiples of 16.
    """
    moved = [p for p in parameters if p.grad is not None and p.grad.storage_offset() * p.grad.itemsize % _ALIGNMENT]
    if moved:
        aligned = [torch.empty_like(cast(torch.Tensor, p.grad)) for p in moved]
        foreach_copy_(aligned, [cast(torch.Tensor, p.grad) for p in moved])
        for parameter, gradient in zip(moved, aligned, strict=True):
            parameter.grad = gradient


def finished(flat: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
    """What DDP's communication hook returns for a bucket with which DDP has nothing more to do."""
    future = torch.futures.Future[torch.Tensor]()
    future.set_result(flat)
    return future
