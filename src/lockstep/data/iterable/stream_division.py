"""The division of a stream's epoch among ranks: one reader after another, each for some of the steps.

WholeStream     one reader: every rank reads the whole stream, or strides through it
DealtStream     one for each deal of shards, and one that reads the rest on every rank
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain, islice
from typing import Final, NamedTuple, Protocol

import torch
from torch.utils.data import IterableDataset
from typing_extensions import override

from lockstep.data.indexed.orders import generator_of
from lockstep.data.indexed.sampling import Sample, UserDataset
from lockstep.data.iterable.iterable_dataset import OnePassReader, Reader, StreamShare, StridedReader
from lockstep.data.iterable.single_process_view import single_process_view
from lockstep.data.iterable.stream_agreement import RanksFound, samples_of_dealt_step, samples_of_stream_step
from lockstep.data.seen_samples import checksum
from lockstep.data.shards.dealt_reader import DealtReader
from lockstep.data.shards.dealt_shards import Deal, Piece, ShardsFound, first_deal, next_deal
from lockstep.data.shards.shard_streams import SeededShards, ShardStream, shard_stream_of
from lockstep.errors import DataError
from lockstep.formatting import plural

_LOOKED_AT: Final = 8  # samples of a shard by which ranks compare what they read


class StreamPart(NamedTuple):
    """The part of an epoch's steps that one reader finds."""

    reader: Reader
    samples_of: Callable[[int, RanksFound], int]  #: of a step, from its number and the findings of each rank
    ends_epoch: bool  #: whether the first step that is not full is the last


class StreamDivision(Protocol):
    """The division of an epoch among readers."""

    note: str | None  #: a line for the user, if several ranks read the same samples
    reader: Reader  #: of the whole epoch, on this rank alone
    needs_found: bool  #: whether finding a step needs the places found in the shards before it

    def part(self, epoch: int, ended: Sequence[int], found: ShardsFound) -> StreamPart:
        """The part that is read after the parts that ``ended`` before these steps."""

    def digest(self, epoch: int) -> str | None:
        """A digest of the order of ``epoch``, for ranks to compare; None if ranks compare samples instead."""


class WholeStream(StreamDivision):
    """The division with a single reader for the whole epoch."""

    needs_found = False

    def __init__(self, share: StreamShare, note: str | None) -> None:
        strided = callable(getattr(share.dataset, "stride", None))
        self.reader: Reader = StridedReader(share) if strided else OnePassReader(share)
        self.note = None if strided or share.plan.world_size == 1 else note
        self._share = share

    @override
    def part(self, epoch: int, ended: Sequence[int], found: ShardsFound) -> StreamPart:
        return StreamPart(self.reader, _judge(self._share, epoch), ends_epoch=True)

    @override
    def digest(self, epoch: int) -> str | None:
        return None


class DealtStream(StreamDivision):
    """The division by shards, which are dealt in another order in each epoch."""

    note = None
    needs_found = True

    def __init__(self, share: StreamShare, stream: ShardStream) -> None:
        self._share = share
        self._shards = SeededShards(stream, share.seed, share.plan.micro_batch)
        self.reader: Reader = OnePassReader(replace(share, dataset=_Pieces(self._shards)))
        self._digest: tuple[tuple[int, int], str] | None = None

    @override
    def part(self, epoch: int, ended: Sequence[int], found: ShardsFound) -> StreamPart:
        plan, deal = self._share.plan, first_deal(self._order(epoch), self._share.plan.micro_batches)
        for end in ended:
            deal = next_deal(deal, end, plan.micro_batch, found)
        if not deal.is_rest:
            reader = DealtReader(self._share, self._shards, deal, found)
            return StreamPart(reader, partial(samples_of_dealt_step, plan), ends_epoch=False)
        return StreamPart(self._rest(deal), _judge(self._share, epoch), ends_epoch=True)

    @override
    def digest(self, epoch: int) -> str | None:
        """A digest of the shards and of the first samples, which differ if a stream shuffles without a seed."""
        of = epoch, self._shards.stream.num_shards
        if self._digest is None or self._digest[0] != of:
            self._digest = of, self._looked_at(epoch)
        return self._digest[1]

    def _order(self, epoch: int) -> list[int]:
        number, generator = self._shards.stream.num_shards, generator_of(self._share.seed, epoch)
        shards: list[int] = torch.randperm(number, generator=generator).tolist()
        return shards

    def _rest(self, deal: Deal) -> Reader:
        (pieces,) = deal.hands
        return OnePassReader(replace(self._share, dataset=_Pieces(self._shards, pieces)), deal.first_step)

    def _looked_at(self, epoch: int) -> str:
        order, few = self._order(epoch), replace(self._shards, at_once=_LOOKED_AT)
        with single_process_view():
            shards = (few.open(epoch, shard, 0) for shard in order)
            mark = checksum(list(islice(chain.from_iterable(shards), _LOOKED_AT)))
        found = repr((len(order), self._share.plan.micro_batches, mark))
        return hashlib.blake2b(found.encode(), digest_size=8).hexdigest()


def division_of(share: StreamShare, *, shuffle: bool | None) -> StreamDivision:
    """The division of the data set of ``share``: by shards if the data set has enough shards, else whole.

    Args:
        share: of this rank.
        shuffle: False for the order of the data set; True for another order of shards in each epoch; None: by the
            shards.

    Raises:
        DataError: if ``shuffle`` is true and the data set has too few shards.
    """
    stream = shard_stream_of(share.dataset)
    places, name = share.plan.micro_batches, type(share.dataset).__name__
    if stream is None:
        return WholeStream(
            share,
            f"each of {share.plan.world_size} ranks reads the whole of {name} and keeps its share, as it has no method "
            "stride(start, step) that gives every step-th sample from start on; a data set with shards is read once, "
            "by several loader processes (docs/shards.md)",
        )
    few = (
        f"it has {plural(stream.num_shards, 'shard')} for the {places} micro-batches of a step; a larger "
        "micro_batch, or more files, would do"
    )
    if shuffle and stream.num_shards < places:
        raise DataError(
            f"shuffle=True, but {name} has too few shards to take them in another order each epoch: {few}; or leave "
            "shuffle out and let it shuffle itself, such as by its own shuffle(..., seed=0)"
        )
    if shuffle is False or stream.num_shards < places:
        why = few if shuffle is None else "shuffle=False takes the samples in its order"
        pieces = _Pieces(SeededShards(stream, share.seed, share.plan.micro_batch))
        whole = replace(share, dataset=pieces if _is_bare(share.dataset) else share.dataset)
        return WholeStream(whole, f"each of {share.plan.world_size} ranks reads the whole of {name}: {why}")
    return DealtStream(share, stream)


class _Pieces(IterableDataset[Sample]):
    """The samples of pieces of shards, one after another; without pieces, of all shards in order."""

    def __init__(self, shards: SeededShards, pieces: Sequence[Piece] | None = None) -> None:
        self._shards = shards
        self._pieces = pieces
        self._epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Read the samples of ``epoch`` from now on."""
        self._epoch = epoch

    def __iter__(self) -> Iterator[Sample]:
        pieces = map(Piece, range(self._shards.stream.num_shards)) if self._pieces is None else self._pieces
        for shard, start in pieces:
            yield from self._shards.open(self._epoch, shard, start)


def _is_bare(dataset: UserDataset) -> bool:
    """Whether ``dataset`` has no ``__iter__``."""
    return not hasattr(dataset, "__iter__")


def _judge(share: StreamShare, epoch: int) -> Callable[[int, RanksFound], int]:
    return partial(samples_of_stream_step, share.plan, type(share.dataset).__name__, epoch)
