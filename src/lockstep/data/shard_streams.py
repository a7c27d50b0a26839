"""Streams that can be read shard by shard, of which nobody knows how many samples they hold.

    num_shards, read_shard(shard, start)    a class of the user's
    datasets.IterableDataset                its own shards: files, in most cases
    webdataset.WebDataset                   its tar files

Of the packages' streams only those are taken apart whose samples are then the same: not one that takes the first
thousand samples, or is divided among ranks already. They are told by the names of their parts, which are not public:
what is not known is read whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from copy import copy
from itertools import islice
from typing import Any, Final, Protocol

from lockstep.data.sampling import Sample, UserDataset
from lockstep.data.stream_epoch import tell_epoch


class ShardStream(Protocol):
    """Shards by number, each an iterator."""

    num_shards: int
    #: Whether what is skipped costs little, and draws nothing at random. If not, all before it is read once more, under
    #: the seeds of before.
    seeks: bool

    def open(self, epoch: int, shard: int, start: int) -> Iterator[Sample]:
        """The samples of ``shard`` from ``start`` on; the same in each process, where it is seeded alike."""


class OwnShards(ShardStream):
    """Of a data set with ``num_shards`` and ``read_shard``."""

    seeks = True

    def __init__(self, dataset: UserDataset) -> None:
        self._dataset = dataset
        self.num_shards = int(dataset.num_shards)

    def open(self, epoch: int, shard: int, start: int) -> Iterator[Sample]:
        """Told the epoch, if it has ``set_epoch``."""
        tell_epoch(self._dataset, epoch)
        return iter(self._dataset.read_shard(shard, start))


class HuggingFaceShards(ShardStream):
    """Of an `IterableDataset` of the package `datasets`."""

    def __init__(self, dataset: UserDataset) -> None:
        self._dataset = dataset
        self.num_shards = int(dataset.num_shards)
        #: Tables are skipped without a look at their rows; what a function computes, it may draw.
        self.seeks = bool(dataset._ex_iterable.iter_arrow) and _FUNCTIONS.isdisjoint(_kinds_of(dataset))

    def open(self, epoch: int, shard: int, start: int) -> Iterator[Sample]:
        """With a shuffling buffer of its own, if there is one."""
        stream = self._dataset.shard(self.num_shards, shard)
        stream.set_epoch(epoch)
        return iter(stream.skip(start)) if self.seeks else _without_first(iter(stream), start)


class WebDatasetShards(ShardStream):
    """Of a pipeline of the package `webdataset` that begins with a list of tar files."""

    seeks = False

    def __init__(self, dataset: UserDataset) -> None:
        self._dataset = dataset
        self._urls: list[str] = list(dataset.pipeline[0].urls)
        self.num_shards = len(self._urls)

    def open(self, epoch: int, shard: int, start: int) -> Iterator[Sample]:
        """By a pipeline of its own, as some of its stages count their passes."""
        pipeline = copy(self._dataset)
        urls, *stages = map(copy, self._dataset.pipeline)
        urls.urls = [self._urls[shard]]
        pipeline.pipeline = [urls, *(stage for stage in stages if _name_of(stage) != "check_empty")]
        tell_epoch(pipeline, epoch)
        return _without_first(iter(pipeline), start)


#: Parts of streams of `datasets` whose samples are those of their shards.
_DIVISIBLE: Final = frozenset(
    (
        "ExamplesIterable",
        "ArrowExamplesIterable",
        "RebatchedArrowExamplesIterable",
        "SelectColumnsIterable",
        "MappedExamplesIterable",
        "FilteredExamplesIterable",
        "BufferShuffledExamplesIterable",
        "InterleavedShardsExamplesIterable",
        "FormattedExamplesIterable",
    )
)
_FUNCTIONS: Final = frozenset(("MappedExamplesIterable", "FilteredExamplesIterable"))
#: Stages of `webdataset` that count samples across shards.
_COUNTING: Final = frozenset(("islice", "_batched"))


def has_shards(dataset: UserDataset) -> bool:
    """Whether ``dataset`` is a class of the user's with shards of which it does not say the lengths."""
    return hasattr(dataset, "num_shards") and callable(getattr(dataset, "read_shard", None))


def shard_stream_of(dataset: UserDataset) -> ShardStream | None:
    """``dataset`` as shards; None if it has to be read whole."""
    package = type(dataset).__module__.partition(".")[0]
    if has_shards(dataset):
        return OwnShards(dataset)
    if package == "datasets" and _is_divisible(dataset):
        return HuggingFaceShards(dataset)
    stages = getattr(dataset, "pipeline", None)
    if package == "webdataset" and isinstance(stages, list) and _is_list_of_files(dataset, stages):
        return WebDatasetShards(dataset)
    return None


def _is_divisible(dataset: UserDataset) -> bool:
    kinds = _kinds_of(dataset)
    return (
        bool(kinds)
        and kinds <= _DIVISIBLE
        and getattr(dataset, "_distributed", None) is None
        and callable(getattr(dataset, "shard", None))
    )


def _kinds_of(dataset: UserDataset) -> set[str]:
    kinds, part = set(), getattr(dataset, "_ex_iterable", None)
    while part is not None:
        kinds.add(type(part).__name__)
        part = getattr(part, "ex_iterable", None)
    return kinds


def _is_list_of_files(dataset: UserDataset, stages: list[Any]) -> bool:
    return (
        bool(stages)
        and type(stages[0]).__name__ == "SimpleShardList"
        and getattr(dataset, "repetitions", None) == 1
        and _COUNTING.isdisjoint(map(_name_of, stages))
    )


def _name_of(stage: Any) -> str:
    return getattr(getattr(stage, "f", stage), "__name__", "")


def _without_first(samples: Iterator[Sample], count: int) -> Iterator[Sample]:
    """``samples`` after so many, which are read now."""
    for _ in islice(samples, count):
        pass
    return samples
