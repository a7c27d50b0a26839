"""The division of a stream's epoch among ranks: one reader after another, each for some of the steps.

WholeStream     one reader: every rank reads it all, or strides through it
DealtStream     one for each deal of shards, and one that reads the rest on every rank; a shard of a deal is read from
                beginning to end, for one place of a step
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain, count, islice
from typing import Final, NamedTuple, Protocol

import torch
from torch.utils.data import IterableDataset
from typing_extensions import override

from lockstep.data.indexed.orders import generator_of
from lockstep.data.indexed.sampling import Data, Sample, UserDataset
from lockstep.data.iterable.iterable_dataset import (
    OnePassReader,
    Reader,
    StreamShare,
    StreamStep,
    StridedReader,
    single_process_view,
)
from lockstep.data.iterable.stream_agreement import RanksFound, samples_of_dealt_step, samples_of_stream_step
from lockstep.data.seen_samples import checksum
from lockstep.data.shards.dealt_shards import Deal, Piece, ShardsFound, first_deal, next_deal, position_in
from lockstep.data.shards.shard_streams import SeededShards, ShardStream, shard_stream_of
from lockstep.errors import DataError
from lockstep.formatting import plural
from lockstep.seeding import seed_generators, seed_of

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
        shards: list[int] = torch.randperm(number, generator=generator, device="cpu").tolist()
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


class DealtReader(Reader):
    """Reads the hands of this rank's micro-batches, as long as each of them can fill one."""

    def __init__(self, share: StreamShare, shards: SeededShards, deal: Deal, found: ShardsFound) -> None:
        self._share = share
        self._shards = shards
        self._deal = deal
        self._found = found
        self._heads: dict[int, list[Sample]] = {}  # by micro-batch

    @override
    def most_parts(self) -> int:
        return len(self._share.run)

    @override
    def part(self, number: int, parts: int) -> Reader:
        return DealtReader(
            replace(self._share, run=self._share.run[number::parts]), self._shards, self._deal, self._found
        )

    @override
    def nothing(self) -> StreamStep:
        return StreamStep([0] * len(self._share.run), [], [], 0)

    @override
    def steps(self, epoch: int, first_step: int) -> Iterator[StreamStep]:
        """The last one holds only those micro-batches that are full."""
        share, size = self._share, self._share.plan.micro_batch
        with single_process_view():
            hands = [self._begun(epoch, first_step, m) for m in share.run]
        for step in count(first_step):
            with single_process_view():
                groups = [hand.take(step, size) for hand in hands]
                full = [(m, group) for m, group in zip(share.run, groups, strict=True) if len(group) == size]
                batches = [share.collate(group, epoch, step, m) for m, group in full]
            counts = [size if len(group) == size else 0 for group in groups]
            yield StreamStep(counts, batches, [], 0, [length for hand in hands for length in hand.lengths()])
            if len(full) < len(groups):
                return

    @override
    def heads(self, epoch: int, step: int, found: StreamStep, indices: Sequence[int]) -> list[Data]:
        """Padding for a rank without a micro-batch in full steps: a sample that the deal begins with, read once."""
        with single_process_view():
            for m in set(indices) - self._heads.keys():
                self._heads[m] = self._begun(epoch, self._deal.first_step, m).take(self._deal.first_step, 1)
            return [self._share.collate(self._heads[m], epoch, step, m) for m in indices]

    def _begun(self, epoch: int, step: int, index: int) -> _Hand:
        """The hand of micro-batch ``index``, at ``step``."""
        samples = (step - self._deal.first_step) * self._share.plan.micro_batch
        left, read = position_in(self._deal.hands[index], samples, self._found["lengths"])
        hand = _Hand(self._share.seed, self._shards, epoch, index, left)
        if read:
            hand.open(read)
        return hand


class _Hand:
    """The samples of one place, from shard to shard."""

    def __init__(self, seed: int, shards: SeededShards, epoch: int, index: int, pieces: list[Piece]) -> None:
        self._seed = seed
        self._shards = shards
        self._epoch = epoch
        self._index = index
        self._left = pieces
        self._samples: Iterator[Sample] | None = None  # of the first piece
        self._read = 0  # of the first piece, from its start
        self._lengths: list[tuple[int, int]] = []

    def open(self, read: int) -> None:
        """The first piece is read after ``read`` of its samples."""
        shard, start = self._left[0]
        self._samples, self._read = self._shards.open(self._epoch, shard, start + read), read

    def take(self, step: int, most: int) -> list[Sample]:
        """The next ``most`` samples, those of ``step``; fewer at the end."""
        seed_generators(seed_of(self._seed, "samples", self._epoch, step, self._index))
        taken: list[Sample] = []
        while len(taken) < most and self._left:
            if self._samples is None:
                self.open(0)
                assert self._samples is not None
            before = len(taken)
            taken += islice(self._samples, most - before)
            self._read += len(taken) - before
            if len(taken) < most:
                shard, start = self._left.pop(0)
                self._lengths.append((shard, start + self._read))
                self._samples, self._read = None, 0
        return taken

    def lengths(self) -> list[tuple[int, int]]:
        """Of the shards that came to their end since this was asked for last: their numbers and all their samples."""
        found, self._lengths = self._lengths, []
        return found
