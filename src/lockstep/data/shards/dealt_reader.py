"""The reader of dealt shards, each of which is read from beginning to end, for one place of a step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import count, islice

from typing_extensions import override

from lockstep.data.indexed.sampling import Data, Sample
from lockstep.data.iterable.iterable_dataset import Reader, StreamShare, StreamStep
from lockstep.data.iterable.single_process_view import single_process_view
from lockstep.data.shards.dealt_shards import Deal, Piece, ShardsFound, position_in
from lockstep.data.shards.shard_streams import SeededShards
from lockstep.seeding import seed_generators, seed_of


class DealtReader(Reader):
    """Reads the hands of this rank's micro-batches, as long as each hand can fill a micro-batch."""

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
        """See `Reader.steps`; the last step holds only the full micro-batches."""
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
        """See `Reader.heads`; for padding of a rank without a micro-batch in full steps: the deal's first sample."""
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
    """The samples of a place in the steps, from shard to shard."""

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
        """Open the first piece after ``read`` of its samples."""
        shard, start = self._left[0]
        self._samples, self._read = self._shards.open(self._epoch, shard, start + read), read

    def take(self, step: int, most: int) -> list[Sample]:
        """The next ``most`` samples, for ``step``; fewer at the end."""
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
        """The number and the samples of each shard that came to its end since the last call."""
        found, self._lengths = self._lengths, []
        return found
