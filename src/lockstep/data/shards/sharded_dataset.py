"""Data sets in shards: files, or other parts, each of which can be read from any sample on."""

from __future__ import annotations

import hashlib
import os
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate, islice
from typing import Protocol, TypeGuard

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset
from typing_extensions import override

from lockstep.batch import BatchPlan, EpochSteps, MicroBatchPosition
from lockstep.data.indexed.orders import Indices, Order, generator_of
from lockstep.data.indexed.sampling import Sample, UserDataset
from lockstep.data.iterable.iterable_dataset import single_process_view
from lockstep.errors import DataError


class ShardedDataset(Protocol):
    """A user's data set in shards of known length."""

    shard_lengths: Sequence[int]  #: samples of each shard

    def read_shard(self, shard: int, start: int) -> Iterator[Sample]:
        """The samples of ``shard`` from ``start`` on, in the same order each time.

        If the format allows, samples before ``start`` are not read. No random number is drawn before the first sample.
        """


def is_sharded(dataset: UserDataset) -> TypeGuard[ShardedDataset]:
    """Whether ``dataset`` lies in shards."""
    return hasattr(dataset, "shard_lengths") and callable(getattr(dataset, "read_shard", None))


class ShardedSamples(Dataset[Sample]):
    """A sharded data set, read by index. Shards stay open, so that reading on after earlier samples costs no more.

    Args:
        dataset: the user's.
        most_open: number of open reads; a further read closes the least recently used one.

    Raises:
        DataError: when a shard holds another number of samples than ``shard_lengths`` says.
    """

    def __init__(self, dataset: ShardedDataset, most_open: int) -> None:
        self.dataset = dataset
        self._begins = [0, *accumulate(dataset.shard_lengths)]
        self._most_open = most_open
        self._open: dict[tuple[int, int], Iterator[Sample]] = {}  # by shard and next sample of it
        self._process = os.getpid()

    def __len__(self) -> int:
        return self._begins[-1]

    @override
    def __getitem__(self, index: int) -> Sample:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Sample]:
        if self._process != os.getpid():  # in a loader process, which must not read from the rank's open files
            self._process, self._open = os.getpid(), {}
        samples: list[Sample] = []
        with single_process_view():
            while len(samples) < len(indices):
                first = indices[len(samples)]
                shard = bisect_right(self._begins, first) - 1
                within = self._begins[shard + 1] - first
                following = enumerate(indices[len(samples) : len(samples) + within], first)
                count = sum(1 for place, index in following if place == index)
                samples += self._read(shard, first - self._begins[shard], count)
        return samples

    def __getstate__(self) -> dict[str, object]:
        return self.__dict__ | {"_open": {}}

    def _read(self, shard: int, start: int, count: int) -> list[Sample]:
        stream = self._open.pop((shard, start), None)
        if stream is None:
            stream = iter(self.dataset.read_shard(shard, start))
        samples = list(islice(stream, count))
        length, end = self._begins[shard + 1] - self._begins[shard], start + count
        if len(samples) < count or (end == length and next(iter(stream), self) is not self):
            held = f"only {start + len(samples)}" if len(samples) < count else f"more than {length}"
            raise DataError(
                f"shard {shard} of {type(self.dataset).__name__} holds {held} samples, and shard_lengths says "
                f"{length}: count them again; read_shard(shard, start) gives all from start on"
            )
        if end < length:
            self._open[shard, end] = stream
            while len(self._open) > self._most_open:
                self._open.pop(next(iter(self._open)))
        return samples


class ShardSequence(Indices):
    """The indices of the samples of all shards, laid end to end in the order ``shards``."""

    def __init__(self, lengths: Sequence[int], shards: Sequence[int]) -> None:
        of_shard, order = np.asarray(lengths, np.int64), np.asarray(shards, np.int64)
        self._ends = of_shard[order].cumsum()
        #: For each shard, the difference between a sample's place in the data set and in the sequence.
        self._shifts = (of_shard.cumsum() - of_shard)[order] - (self._ends - of_shard[order])

    @override
    def __len__(self) -> int:
        return int(self._ends[-1])

    @override
    def __getitem__(self, places: slice, /) -> Tensor:
        wanted = np.arange(*places.indices(len(self)))
        return torch.from_numpy(wanted + self._shifts[self._ends.searchsorted(wanted, side="right")])


class ShardOrder(Order):
    """The order of a sharded data set: shards in another order each epoch, or all samples in their own order.

        shards, in the epoch's order   | 2         | 0     | 3           | 1       |
        of a full step: micro-batch      0 0 0 0 0 1 1 1 1 1 2 2 2 2 2 3 3 3 3 3 | *     * the rest: the short last step
                              step       0 1 2 3 4 0 1 2 3 4 0 1 2 3 4 0 1 2 3 4 | 5

    So the rank that computes a micro-batch continues reading where the step before ended, and opens no other shards.
    The order follows from the lengths of the shards alone, so no rank has to ask another, and a resume can begin at any
    step.

    Args:
        lengths: samples of each shard.
        seed: of the order.
        shuffle: whether the shards are shuffled. If not, micro-batches hold neighbouring samples of the data set, as
            for a data set with an index.

    Raises:
        DataError: if ``lengths`` is empty, has a negative length, or only zeros.
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
        """A digest of the lengths, which must be equal on all ranks, and before and after a resume."""
        return hashlib.blake2b(repr((self._lengths, self._shuffle)).encode(), digest_size=8).hexdigest()

    @override
    def indices(self, epoch: int) -> Indices | range:
        if not self._shuffle:
            return range(self._samples)
        shards = torch.randperm(len(self._lengths), generator=generator_of(self._seed, epoch), device="cpu")
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
    """The places of the sequence that a micro-batch holds, where each place of a full step has its own part.

    The samples that fill no step come last, and form the micro-batches of the last step one after another.
    """
    plan = steps.plan
    full, before = steps.samples // plan.global_batch, position.index * plan.micro_batch
    if position.step < full:
        start = full * before + position.step * position.samples
    else:
        start = full * plan.global_batch + before
    return slice(start, start + position.samples)
