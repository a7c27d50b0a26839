"""Data sets that lie in shards: files, or other parts, each of which is read from somewhere on."""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate, islice
from typing import Protocol, TypeGuard

from torch.utils.data import Dataset
from typing_extensions import override

from lockstep.data.indexed.sampling import Sample, UserDataset
from lockstep.data.iterable.single_process_view import single_process_view
from lockstep.errors import DataError


class ShardedDataset(Protocol):
    """What the user gives."""

    shard_lengths: Sequence[int]  #: samples of each shard

    def read_shard(self, shard: int, start: int) -> Iterator[Sample]:
        """The samples of ``shard`` from ``start`` on, in the same order each time.

        Without reading those before it, where the format allows that, and drawing nothing at random before the first.
        """


def is_sharded(dataset: UserDataset) -> TypeGuard[ShardedDataset]:
    """Whether ``dataset`` lies in shards."""
    return hasattr(dataset, "shard_lengths") and callable(getattr(dataset, "read_shard", None))


class ShardedSamples(Dataset[Sample]):
    """A sharded data set by index. Shards stay open, so that samples which follow those read before cost no more.

    Args:
        dataset: the user's.
        most_open: how many reads may be under way; the one that was used longest ago is given up.

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
        if self._process != os.getpid():  # a loader process: what the rank has open, both would read from
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
