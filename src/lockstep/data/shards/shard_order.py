"""The order of a data set in shards: each place of a step reads its own part of the epoch from beginning to end.

    shards, in the epoch's order   | 2         | 0     | 3           | 1       |
    of a full step: micro-batch      0 0 0 0 0 1 1 1 1 1 2 2 2 2 2 3 3 3 3 3 | *     * the rest: the short last step
                          step       0 1 2 3 4 0 1 2 3 4 0 1 2 3 4 0 1 2 3 4 | 5

So the rank that computes a micro-batch continues reading where the step before ended, and opens none of the other
shards. The order follows from the lengths of the shards alone, so no rank has to ask another, and any step can be the
first.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from lockstep.batch import BatchPlan, EpochSteps, MicroBatchPosition
from lockstep.data.indexed.orders import Indices, Order, generator_of
from lockstep.errors import DataError


class ShardSequence(Indices):
    """The samples of shards that are laid end to end in the order ``shards``; by their place in the data set."""

    def __init__(self, lengths: Sequence[int], shards: Sequence[int]) -> None:
        of_shard, order = np.asarray(lengths, np.int64), np.asarray(shards, np.int64)
        self._ends = of_shard[order].cumsum()
        #: What is to be added to a place in the sequence for the place in the data set, of each shard.
        self._shifts = (of_shard.cumsum() - of_shard)[order] - (self._ends - of_shard[order])

    @override
    def __len__(self) -> int:
        return int(self._ends[-1])

    @override
    def __getitem__(self, places: slice, /) -> Tensor:
        wanted = np.arange(*places.indices(len(self)))
        return torch.from_numpy(wanted + self._shifts[self._ends.searchsorted(wanted, side="right")])


class ShardOrder(Order):
    """Shards in another order each epoch, divided among the micro-batches of a step; or all samples as they lie.

    Args:
        lengths: samples of each shard.
        seed: of the order.
        shuffle: whether the shards are shuffled. If not, micro-batches hold neighbouring samples of the data set, as
            those of a data set with an index do.

    Raises:
        DataError: if there are no lengths, one is negative, or all are 0.
    """

    largest_batch: int | None = None
    may_repeat = False

    def __init__(self, lengths: Sequence[int], seed: int, *, shuffle: bool) -> None:
        if not len(lengths) or min(lengths) < 0 or not sum(lengths):
            raise DataError(
                f"shard_lengths={list(lengths)[:5]}: give the number of samples of each shard, in a list; at least one "
                "must hold a sample"
            )
        self._lengths = [int(length) for length in lengths]
        self._samples = sum(self._lengths)
        self._seed = seed
        self._shuffle = shuffle

    @override
    def draw(self, epoch: int) -> str | None:
        """Of the lengths: ranks, and the runs before and after a resume, are to see the same shards."""
        return hashlib.blake2b(repr((self._lengths, self._shuffle)).encode(), digest_size=8).hexdigest()

    @override
    def indices(self, epoch: int) -> Indices | range:
        if not self._shuffle:
            return range(self._samples)
        shards = torch.randperm(len(self._lengths), generator=generator_of(self._seed, epoch))
        return ShardSequence(self._lengths, shards.tolist())

    @override
    def few(self, epoch: int) -> list[int]:
        return []

    @override
    def steps(self, epoch: int, plan: BatchPlan, *, drop_last: bool) -> EpochSteps:
        return plan.epoch(self._samples, drop_last=drop_last)

    @override
    def rows(self, steps: EpochSteps, position: MicroBatchPosition) -> slice:
        return rows_of_own_part(steps, position) if self._shuffle else steps.rows(position)


def rows_of_own_part(steps: EpochSteps, position: MicroBatchPosition) -> slice:
    """Which places of the sequence the micro-batch holds, where each place of a full step has a part of its own.

    The samples that fill no step come last, and are its micro-batches one after another.
    """
    plan = steps.plan
    full, before = steps.samples // plan.global_batch, position.index * plan.micro_batch
    if position.step < full:
        start = full * before + position.step * position.samples
    else:
        start = full * plan.global_batch + before
    return slice(start, start + position.samples)
