"""Streams that can be read shard by shard, with shards of unknown length.

    num_shards, read_shard(shard, start)    a class of the user's
    datasets.IterableDataset                its own shards: files, in most cases
    webdataset.WebDataset                   its tar files

A stream of these packages is read by shards only if its samples are then the same: not a stream that takes the first
thousand samples, numbers samples, or is divided among ranks already. Streams are recognised by the names of their
parts, which are not public: a stream with an unknown part, such as a stage of the user's own, is read whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from copy import copy
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final, Protocol

from typing_extensions import override

from lockstep.data.indexed.sampling import Sample, UserDataset
from lockstep.data.iterable.iterable_dataset import tell_epoch
from lockstep.seeding import GeneratorStates, generator_states, seed_generators, seed_of, set_generator_states


class ShardStream(Protocol):
    """A stream of numbered shards, each an iterator."""

    #: Whether skipping samples costs little, and draws no random numbers. If not, all samples before are read again.
    seeks: bool

    @property
    def num_shards(self) -> int:
        """The present number of shards: the script may add some between two epochs."""

    def open(self, epoch: int, shard: int, start: int) -> Iterator[Sample]:
        """The samples of ``shard`` from ``start`` on (0 without `seeks`); equal if generators have equal states."""


@dataclass(frozen=True, slots=True)
class SeededShards:
    """A stream whose shards give the same samples in the same order, for any start of reading and on any rank.

    Args:
        stream: which may draw from the global generators.
        seed: of the run.
        at_once: samples to be read at a time where a shard has random numbers of its own.
    """

    stream: ShardStream
    seed: int
    at_once: int

    def open(self, epoch: int, shard: int, start: int) -> Iterator[Sample]:
        """The samples of ``shard`` from ``start`` on; begins to read at once, and may move the global generators.

        Random numbers for an order are drawn with generators that are seeded for the shard: before its first sample,
        and throughout for a stream that does not seek, as in a shuffle buffer. For later samples of a stream that
        seeks, the caller must seed.
        """
        seed_generators(seed_of(self.seed, "shard", epoch, shard))
        if not self.stream.seeks:
            samples = self._apart(self.stream.open(epoch, shard, 0), generator_states())
            return islice(samples, start, None)
        # A generator function begins when its first sample is read: here the sample before ``start``, which is dropped.
        samples = self.stream.open(epoch, shard, max(0, start - 1))
        if start:
            next(samples, None)
            seed_generators(seed_of(self.seed, "shard", epoch, shard, start))  # not the numbers of the first samples
        return samples

    def _apart(self, samples: Iterator[Sample], states: GeneratorStates) -> Iterator[Sample]:
        """``samples`` with generators that go on from ``states``, whatever other code draws in between."""
        while True:
            set_generator_states(states)
            found = list(islice(samples, self.at_once))
            states = generator_states()
            yield from found
            if len(found) < self.at_once:
                return


class OwnShards(ShardStream):
    """The shards of a data set with ``num_shards`` and ``read_shard``."""

    seeks = True

    def __init__(self, dataset: UserDataset) -> None:
        self._dataset = dataset

    @property
    @override
    def num_shards(self) -> int:
        return int(self._dataset.num_shards)

    def open(self, epoch: int, shard: int, start: int) -> Iterator[Sample]:
        """See `ShardStream.open`; the data set is told the epoch, if it has ``set_epoch``."""
        tell_epoch(self._dataset, epoch)
        return iter(self._dataset.read_shard(shard, start))


class HuggingFaceShards(ShardStream):
    """The shards of an `IterableDataset` of the package `datasets`."""

    def __init__(self, dataset: UserDataset) -> None:
        self._dataset = dataset
        #: Tables are skipped without reading their rows; a function may draw random numbers for each row.
        parts = list(_parts_of(dataset))
        self.seeks = bool(parts[0].iter_arrow) and _FUNCTIONS.isdisjoint(map(_kind_of, parts))

    @property
    @override
    def num_shards(self) -> int:
        return int(self._dataset.num_shards)

    def open(self, epoch: int, shard: int, start: int) -> Iterator[Sample]:
        """See `ShardStream.open`; each shard has its own shuffle buffer, if any."""
        stream = self._dataset.shard(self.num_shards, shard)
        stream.set_epoch(epoch)
        return iter(stream.skip(start) if self.seeks else stream)  # 0 too: a stream that skips shuffles otherwise


class WebDatasetShards(ShardStream):
    """The shards of a pipeline of the package `webdataset` that begins with a list of tar files."""

    seeks = False

    def __init__(self, dataset: UserDataset) -> None:
        self._dataset = dataset

    @property
    @override
    def num_shards(self) -> int:
        return len(self._dataset.pipeline[0].urls)

    def open(self, epoch: int, shard: int, start: int) -> Iterator[Sample]:
        """See `ShardStream.open`; each call has its own pipeline, since some stages count their passes."""
        pipeline = copy(self._dataset)
        urls, *stages = map(copy, self._dataset.pipeline)
        urls.urls = [urls.urls[shard]]
        pipeline.pipeline = [urls, *(stage for stage in stages if _name_of(stage) != "check_empty")]
        tell_epoch(pipeline, epoch)
        return iter(pipeline)


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
#: Attributes that make such a part count samples across shards: ``with_indices``, and a last batch that is left out.
_COUNTING: Final = ("with_indices", "drop_last_batch")
#: Stages of `webdataset` whose samples are those of their shards, by the names of functions and classes.
_STAGES: Final = frozenset(
    (
        *("split_by_node", "split_by_worker", "single_node_only"),
        *("_shuffle", "detshuffle"),
        *("StreamingOpen", "FileCache", "url_opener"),
        *("tar_file_expander", "group_by_keys", "tarfile_samples", "check_empty"),
        *("_decode", "_xdecode", "_map", "_map_dict", "_map_tuple", "_to_tuple", "_select", "_rsample"),
        *("_rename", "_rename_keys", "_extract_keys", "_associate"),
    )
)


def has_shards(dataset: UserDataset) -> bool:
    """Whether ``dataset`` has ``num_shards`` and ``read_shard``: a user's shards, of unknown length."""
    return hasattr(dataset, "num_shards") and callable(getattr(dataset, "read_shard", None))


def shard_stream_of(dataset: UserDataset) -> ShardStream | None:
    """``dataset`` as a stream of shards; None if it has to be read whole, or divides itself by ``stride``."""
    if callable(getattr(dataset, "stride", None)):
        return None
    # The method, not the class: webdataset makes another class for `with_length`, and a user's class may iterate
    # differently.
    iterates = getattr(type(dataset), "__iter__", None)
    if has_shards(dataset):
        return OwnShards(dataset)
    if _is_of("datasets", iterates) and _is_divisible(dataset):
        return HuggingFaceShards(dataset)
    stages = getattr(dataset, "pipeline", None)
    if _is_of("webdataset", iterates) and isinstance(stages, list) and _is_list_of_files(dataset, stages):
        return WebDatasetShards(dataset)
    return None


def _is_divisible(dataset: UserDataset) -> bool:
    parts = list(_parts_of(dataset))
    return (
        bool(parts)
        and all(_kind_of(part) in _DIVISIBLE and not _counts(part) for part in parts)
        and getattr(dataset, "_distributed", None) is None
        and callable(getattr(dataset, "shard", None))
    )


def _parts_of(dataset: UserDataset) -> Iterator[Any]:
    # A private name of the package `datasets`: without this name, each reader reads such a stream from its beginning.
    part = getattr(dataset, "_ex_iterable", None)
    while part is not None:
        yield part
        part = getattr(part, "ex_iterable", None)


def _kind_of(part: object) -> str:
    return type(part).__name__


def _counts(part: Any) -> bool:
    """Whether the result of ``part`` for a sample depends on the number of samples before."""
    # A batched function of the user's may get any number of samples; the package's own `batch` makes one sample of
    # several.
    makes_batches = getattr(part, "batched", False) and _is_of("datasets", part.function)
    return makes_batches or any(getattr(part, name, False) for name in _COUNTING)


def _is_list_of_files(dataset: UserDataset, stages: list[object]) -> bool:
    return (
        bool(stages)
        and _name_of(stages[0]) == "SimpleShardList"
        and getattr(dataset, "repetitions", None) == 1
        and all(_is_of("webdataset", stage) and _name_of(stage) in _STAGES for stage in stages[1:])
    )


def _name_of(stage: object) -> str:
    return getattr(getattr(stage, "f", stage), "__name__", type(stage).__name__)


def _is_of(package: str, part: object) -> bool:
    """Whether a function, or an object, comes from ``package``."""
    module: str | None = getattr(getattr(part, "f", part), "__module__", None)
    return (module or "").partition(".")[0] == package
