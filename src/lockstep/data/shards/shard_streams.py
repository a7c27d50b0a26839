"""Streams that can be read shard by shard, of which nobody knows how many samples they hold.

    num_shards, read_shard(shard, start)    a class of the user's
    datasets.IterableDataset                its own shards: files, in most cases
    webdataset.WebDataset                   its tar files

Of the packages' streams only those are taken apart whose samples are then the same: not one that takes the first
thousand samples, numbers them, or is divided among ranks already. They are told by the names of their parts, which are
not public: what is not known, such as a stage of the user's own, is read whole.
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
    """Shards by number, each an iterator."""

    #: Whether what is skipped costs little, and draws nothing at random. If not, all before it is read once more.
    seeks: bool

    @property
    def num_shards(self) -> int:
        """How many there are now: the script may add some between two epochs."""

    def open(self, epoch: int, shard: int, start: int) -> Iterator[Sample]:
        """The samples of ``shard`` from ``start`` on; 0 if it does not seek. The same where generators are alike."""


@dataclass(frozen=True, slots=True)
class SeededShards:
    """A stream whose shards give the same samples, in the same order, wherever reading begins and whoever reads.

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

        What an order depends on is drawn under generators that are seeded for the shard: before its first sample, and
        all along if it does not seek, as in a buffer that shuffles. What a stream that seeks draws for later samples
        is the caller's to seed.
        """
        seed_generators(seed_of(self.seed, "shard", epoch, shard))
        if not self.stream.seeks:
            samples = self._apart(self.stream.open(epoch, shard, 0), generator_states())
            return islice(samples, start, None)
        # A generator function begins when its first sample is read: the one before, which is left out.
        samples = self.stream.open(epoch, shard, max(0, start - 1))
        if start:
            next(samples, None)
            seed_generators(seed_of(self.seed, "shard", epoch, shard, start))  # not what was drawn for the first ones
        return samples

    def _apart(self, samples: Iterator[Sample], states: GeneratorStates) -> Iterator[Sample]:
        """``samples`` under generators that go on from ``states``, whatever else is drawn in between."""
        while True:
            set_generator_states(states)
            found = list(islice(samples, self.at_once))
            states = generator_states()
            yield from found
            if len(found) < self.at_once:
                return


class OwnShards(ShardStream):
    """Of a data set with ``num_shards`` and ``read_shard``."""

    seeks = True

    def __init__(self, dataset: UserDataset) -> None:
        self._dataset = dataset

    @property
    @override
    def num_shards(self) -> int:
        return int(self._dataset.num_shards)

    def open(self, epoch: int, shard: int, start: int) -> Iterator[Sample]:
        """Told the epoch, if it has ``set_epoch``."""
        tell_epoch(self._dataset, epoch)
        return iter(self._dataset.read_shard(shard, start))


class HuggingFaceShards(ShardStream):
    """Of an `IterableDataset` of the package `datasets`."""

    def __init__(self, dataset: UserDataset) -> None:
        self._dataset = dataset
        #: Tables are skipped without a look at their rows; what a function computes, it may draw.
        parts = list(_parts_of(dataset))
        self.seeks = bool(parts[0].iter_arrow) and _FUNCTIONS.isdisjoint(map(_kind_of, parts))

    @property
    @override
    def num_shards(self) -> int:
        return int(self._dataset.num_shards)

    def open(self, epoch: int, shard: int, start: int) -> Iterator[Sample]:
        """With a shuffling buffer of its own, if there is one."""
        stream = self._dataset.shard(self.num_shards, shard)
        stream.set_epoch(epoch)
        return iter(stream.skip(start) if self.seeks else stream)  # 0 too: a stream that skips shuffles otherwise


class WebDatasetShards(ShardStream):
    """Of a pipeline of the package `webdataset` that begins with a list of tar files."""

    seeks = False

    def __init__(self, dataset: UserDataset) -> None:
        self._dataset = dataset

    @property
    @override
    def num_shards(self) -> int:
        return len(self._dataset.pipeline[0].urls)

    def open(self, epoch: int, shard: int, start: int) -> Iterator[Sample]:
        """By a pipeline of its own, as some of its stages count their passes."""
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
#: What makes such a part count samples across shards: ``with_indices``, and a last batch that is left out.
_COUNTING: Final = ("with_indices", "drop_last_batch")
#: Stages of `webdataset` whose samples are those of their shards, by the names of its functions and classes.
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
    """Whether ``dataset`` is a class of the user's with shards of which it does not say the lengths."""
    return hasattr(dataset, "num_shards") and callable(getattr(dataset, "read_shard", None))


def shard_stream_of(dataset: UserDataset) -> ShardStream | None:
    """``dataset`` as shards; None if it has to be read whole, or divides itself by ``stride``."""
    if callable(getattr(dataset, "stride", None)):
        return None
    # Not the class, of which webdataset makes another one for `with_length`; one of the user's may iterate otherwise.
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
    # A private name of the package `datasets`: without it, such a stream is read from its beginning by each reader.
    part = getattr(dataset, "_ex_iterable", None)
    while part is not None:
        yield part
        part = getattr(part, "ex_iterable", None)


def _kind_of(part: object) -> str:
    return type(part).__name__


def _counts(part: Any) -> bool:
    """Whether what it does with a sample depends on how many came before."""
    # A batched function of the user's gets what there is; those of the package's own `batch` make samples of it.
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
