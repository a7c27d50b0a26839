"""The buckets of one backward pass under DDP: in which order their sums start, and where the results go."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch._C._distributed_c10d import GradBucket  # what torch.distributed exports, with types

from lockstep.batch import MicroBatchPosition
from lockstep.strategies.gradient_accumulation import TreeGradientAccumulator


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
        self.started.append(StartedBucket(model, bucket.buffer(), bucket.buffer()._version, bucket.parameters()))

    def start_deferred(self) -> None:
        """Start the sums that had to wait for the end of the backward pass, in the order of models and buckets."""
        for _, begin in sorted(self.deferred.items()):
            begin()

    def copy_to_other_gpus(self) -> None:
        """Put the sums of buckets on other GPUs of this rank where their gradients are."""
        while self.elsewhere:
            flat, total = self.elsewhere.pop()
            flat.copy_(total)


def finished(flat: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
    """What DDP's communication hook returns for a bucket with which DDP has nothing more to do."""
    future = torch.futures.Future[torch.Tensor]()
    future.set_result(flat)
    return future
