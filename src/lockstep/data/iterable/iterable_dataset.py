"""Iterable data sets, divided among micro-batches without the data set knowing of ranks.

    stream           0 1 2 3 4 5 6 7 | 8 9 10 11 12 13 14 15 | 16 17 18       global_batch 8 = 4 micro-batches x 2
    micro-batch 0    0       4       | 8          12         | 16
    micro-batch 1      1       5     |   9           13      |    17
    micro-batch 2        2       6   |     10           14   |       18
    micro-batch 3          3       7 |        11           15|                 the last step holds 3 micro-batches

Micro-batch m of step s holds the samples ``s * global_batch + m + M * i``: read by `stride` from its own source, or by
one pass over the whole stream, with the others' samples dropped.

How many samples there are is known at the end only, so the ranks tell each other what they found: see `agreed_steps`.

Streams try to divide themselves: ``datasets`` and ``webdataset`` ask torch which loader process they are in, or
the environment which rank, and give, or shuffle, each its own part. How a stream is divided is decided by its reader,
so while it is read every process appears to it to be the only one (`single_process_view`). Which epoch is read it
learns by its ``set_epoch``, and by the stages of `webdataset` that count.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, count, islice, repeat
from typing import Any, NamedTuple, Protocol

from torch.utils.data import IterableDataset, get_worker_info

from lockstep.batch import BatchPlan
from lockstep.data.dataset_marks import DatasetMarks
from lockstep.data.indexed.sampling import Data, Sample, UserDataset
from lockstep.data.seen_samples import checksum
from lockstep.data.workers import CollateFunction
from lockstep.errors import DataError
from lockstep.seeding import seed_generators, seed_of
from lockstep.torch_private import without_worker_info

_BEGINNING = 4  # samples by which two passes over a stream are compared

Collate = Callable[[list[Sample], int, int, int], Data]
"""A batch of samples that are in an epoch, a step, and a micro-batch of it."""
#: What launchers, and webdataset for its loader processes, tell each process of its place.
_ALONE = {
    "RANK": "0",
    "WORLD_SIZE": "1",
    "LOCAL_RANK": "0",
    "LOCAL_WORLD_SIZE": "1",
    "GROUP_RANK": "0",
    "NODE_RANK": "0",
    "GROUP_WORLD_SIZE": "1",
    "WORKER": "0",
    "NUM_WORKERS": "1",
}


class StreamStep(NamedTuple):
    """The samples that a rank found for its run of a full step's micro-batches."""

    counts: list[int]  #: samples of each micro-batch
    batches: list[Data]  #: the data of micro-batches that hold samples
    heads: list[Data]  #: in a step too short for all ranks, each sample as a micro-batch, if this rank has read them
    mark: int  #: a checksum of the step's first sample, for a stream that all ranks read; else 0
    lengths: Sequence[tuple[int, int]] = ()  #: number and samples of each shard that came to its end

    @classmethod
    def of_parts(cls, parts: Sequence[StreamStep]) -> StreamStep:
        """The whole step, from the parts of n readers, each of which reads every n-th micro-batch of the run."""
        if len(parts) == 1:
            return parts[0]
        places = [(number % len(parts), number // len(parts)) for number in range(sum(len(p.counts) for p in parts))]
        counts = [parts[part].counts[within] for part, within in places]
        batches = [iter(part.batches) for part in parts]  # of micro-batches that hold samples
        found = [next(batches[part]) for (part, _), count in zip(places, counts, strict=True) if count]
        return cls(counts, found, [], 0, [length for part in parts for length in part.lengths])


class Reader(Protocol):
    """A rank's access to its samples of a stream."""

    def most_parts(self) -> int:
        """The number of parts into which the reader can be divided."""

    def part(self, number: int, parts: int) -> Reader:
        """A reader of every ``parts``-th micro-batch of the run, from the ``number``-th on."""

    def nothing(self) -> StreamStep:
        """The step that is found after the end."""

    def steps(self, epoch: int, first_step: int) -> Iterator[StreamStep]:
        """The steps from ``first_step`` on, including the first step that this rank knows not to be full."""

    def heads(self, epoch: int, step: int, found: StreamStep, indices: Sequence[int]) -> list[Data]:
        """Micro-batches ``indices`` of a ``step`` that holds one sample in each micro-batch."""


@dataclass(frozen=True)
class StreamShare:
    """A rank's share of a stream."""

    dataset: UserDataset
    plan: BatchPlan
    rank: int
    run: range  #: its micro-batches of a full step
    seed: int
    collate: Collate

    @classmethod
    def of(cls, dataset: UserDataset, plan: BatchPlan, rank: int, seed: int, collate: CollateFunction) -> StreamShare:
        """The share of ``rank``; ``collate`` runs with generators seeded by seed, epoch, step and micro-batch only.

        A rank collates several micro-batches in turn, which several ranks may collate in another run.
        """
        return cls(dataset, plan, rank, plan.run(rank), seed, partial(_collate, collate, seed))


class StridedReader(Reader):
    """Reads only this rank's samples, by the data set's ``stride(start, step)``. A resume skips without cost."""

    def __init__(self, share: StreamShare) -> None:
        self._share = share

    def most_parts(self) -> int:
        """The number of micro-batches of the run: each has a stride of its own."""
        return len(self._share.run)

    def part(self, number: int, parts: int) -> Reader:
        """A reader with the strides of this part's micro-batches."""
        return StridedReader(replace(self._share, run=self._share.run[number::parts]))

    def nothing(self) -> StreamStep:
        """A step without a sample for any micro-batch."""
        return _nothing(self._share.run)

    def steps(self, epoch: int, first_step: int) -> Iterator[StreamStep]:
        """See `Reader.steps`; keeps one open stride for each micro-batch of the run."""
        with single_process_view():
            tell_epoch(self._share.dataset, epoch)
            streams = [self._open(epoch, first_step, m) for m in self._share.run]
        for step in count(first_step):
            with single_process_view():
                groups = [
                    self._next(stream, epoch, step, m) for m, stream in zip(self._share.run, streams, strict=True)
                ]
                counts = [len(group) for group in groups]
                batches = [
                    self._share.collate(group, epoch, step, m)
                    for m, group in zip(self._share.run, groups, strict=True)
                    if group
                ]
            yield StreamStep(counts, batches, [], 0)
            if any(count < self._share.plan.micro_batch for count in counts):
                return

    def heads(self, epoch: int, step: int, found: StreamStep, indices: Sequence[int]) -> list[Data]:
        """See `Reader.heads`; opens the stride of each micro-batch again, in this process."""
        with single_process_view():
            tell_epoch(self._share.dataset, epoch)
            firsts = [self._next(self._open(epoch, step, m), epoch, step, m)[:1] for m in indices]
            return [self._share.collate(first, epoch, step, m) for m, first in zip(indices, firsts, strict=True)]

    def _open(self, epoch: int, step: int, index: int) -> Iterator[Sample]:
        """The stride of micro-batch ``index``, from ``step`` on.

        A generator function begins when its first sample is read. Its random numbers, such as for an order, must be the
        same for all strides of an epoch, so a sample is read at once: the sample before ``step``, if any, else the
        first.
        """
        plan, before = self._share.plan, min(step, 1)
        start = step * plan.global_batch + index - before * plan.micro_batches
        seed_generators(seed_of(self._share.seed, "stream", epoch))
        stream = iter(self._share.dataset.stride(start, plan.micro_batches))
        read = list(islice(stream, 1))
        return stream if before else chain(read, stream)

    def _next(self, stream: Iterator[Sample], epoch: int, step: int, index: int) -> list[Sample]:
        """The samples of a micro-batch, seeded once, since the rank that reads a micro-batch reads all of it."""
        seed_generators(seed_of(self._share.seed, "samples", epoch, step, index))
        return list(islice(stream, self._share.plan.micro_batch))


class OnePassReader(Reader):
    """Reads the whole stream on every rank and keeps the run's samples. A resume reads all samples that it skips.

    Args:
        share: of this rank.
        first_step: the step of the epoch with which the stream begins.
    """

    def __init__(self, share: StreamShare, first_step: int = 0) -> None:
        self._share = share
        self._first_step = first_step
        self._marks = DatasetMarks(share.dataset)
        self._began = False  # whether a first pass has begun, which shows whether reading changes the data set

    def most_parts(self) -> int:
        """One: every rank reads the whole stream."""
        return 1

    def part(self, number: int, parts: int) -> Reader:
        """The reader itself."""
        return self

    def nothing(self) -> StreamStep:
        """No sample for any of the micro-batches."""
        return _nothing(self._share.run)

    def steps(self, epoch: int, first_step: int) -> Iterator[StreamStep]:
        """See `Reader.steps`; reads in one pass from the beginning of the stream."""
        with single_process_view():
            stream = self._open(epoch, first_step)
        for step in count(first_step):
            with single_process_view():
                found, samples = self._find(stream, epoch, step)
                if not self._began and DatasetMarks(self._share.dataset).differ_from(self._marks):
                    self._require_equal_passes(epoch)
                    stream = self._open(epoch, step + 1)  # since all passes may share one place in the data set
            self._began = True
            yield found
            if samples < self._share.plan.global_batch:
                return

    def _open(self, epoch: int, first_step: int) -> Iterator[Sample]:
        """The stream, from ``first_step`` on."""
        tell_epoch(self._share.dataset, epoch)
        self._marks = DatasetMarks(self._share.dataset)
        # Random numbers that the data set draws at its beginning, or for samples of other ranks, as a shuffle buffer
        # does, must be equal on every rank, too: so each step is seeded, also skipped ones.
        seed_generators(seed_of(self._share.seed, "stream", epoch))
        stream: Iterator[Sample] = iter(self._share.dataset)
        for step in range(self._first_step, first_step):
            for _ in self._next(stream, epoch, step):
                pass
        return stream

    def _require_equal_passes(self, epoch: int) -> None:
        """Check that the data set, which reading has changed, begins with the same samples each time.

        Raises:
            DataError: if not.
        """
        dataset = self._share.dataset
        beginnings = []
        for _ in range(2):
            stream = self._open(epoch, self._first_step)
            beginnings.append([checksum(sample) for sample in islice(stream, _BEGINNING)])
        if beginnings[0] != beginnings[1]:
            kind = type(dataset).__name__
            raise DataError(
                f"{kind} gives other samples each time that it is iterated, as where __iter__ counts its epochs: ranks "
                "iterate it more often than a single process, and a resumed run less often. Let it depend on the epoch "
                f"that it is told: give it `def set_epoch(self, epoch): self.epoch = epoch`, which is called before "
                "each epoch, and take the counting out of __iter__"
            )

    def _next(self, stream: Iterator[Sample], epoch: int, step: int) -> Iterator[Sample]:
        """The samples of a step, seeded once, since every rank reads all samples."""
        seed_generators(seed_of(self._share.seed, "samples", epoch, step))
        return islice(stream, self._share.plan.global_batch)

    def _find(self, stream: Iterator[Sample], epoch: int, step: int) -> tuple[StreamStep, int]:
        """The next step of ``stream``, and how many samples it holds over all ranks."""
        m = self._share.plan.micro_batches
        groups: list[list[Sample]] = [[] for _ in self._share.run]
        first: list[Sample] = []  # one sample of each micro-batch: all samples, in a step too short for the ranks
        samples = 0
        for sample in self._next(stream, epoch, step):
            index = samples % m
            if samples < m:
                first.append(sample)
            if index in self._share.run:
                groups[self._share.run.index(index)].append(sample)
            samples += 1
        mark = checksum(first[:1])  # before the user's function, which may change the samples
        short = first if samples < m or not self._share.run else []
        heads = [self._share.collate([sample], epoch, step, index) for index, sample in enumerate(short)]
        batches = [
            self._share.collate(group, epoch, step, i)
            for i, group in zip(self._share.run, groups, strict=True)
            if group
        ]
        return StreamStep([len(group) for group in groups], batches, heads, mark), samples

    def heads(self, epoch: int, step: int, found: StreamStep, indices: Sequence[int]) -> list[Data]:
        """See `Reader.heads`; every rank has read them."""
        return [found.heads[m] for m in indices]


class Batches(IterableDataset[Any]):
    """Micro-batches of epoch 0, one by one, for a loop of the script's own over a loader of a stream.

    In a pass of `Run.train` or `Run.evaluate`, these are this rank's, read by ``own``; elsewhere all, read by
    ``alone``. The micro-batches of a last step that is too short for all ranks stay on the ranks that found them.
    """

    def __init__(self, dataset: UserDataset, own: Reader, alone: Reader, in_pass: Callable[[], bool]) -> None:
        self.dataset = dataset
        self._own = own
        self._alone = alone
        self._in_pass = in_pass

    def __iter__(self) -> Iterator[Sample]:
        for found in (self._own if self._in_pass() else self._alone).steps(0, 0):
            yield from found.batches


class Steps(IterableDataset[StreamStep]):
    """The steps that this rank finds, for loader processes to read ahead.

    Each of several processes finds its part of every step; after the last step it gives empty steps, so that the
    processes stay in turn.
    """

    def __init__(self, reader: Reader, epoch: int, first_step: int) -> None:
        self.reader = reader
        self.epoch = epoch
        self.first_step = first_step

    def __iter__(self) -> Iterator[StreamStep]:
        worker = get_worker_info()
        number, parts = (0, 1) if worker is None else (worker.id, worker.num_workers)
        reader = self.reader.part(number, parts)
        return chain(reader.steps(self.epoch, self.first_step), repeat(reader.nothing()))


def _nothing(run: range) -> StreamStep:
    return StreamStep([0] * len(run), [], [], 0)


def sizes_of(plan: BatchPlan, samples: int) -> list[int]:
    """The number of samples of each micro-batch, also of empty ones, in a step of ``samples`` of a stream."""
    m = plan.micro_batches
    return [len(range(index, samples, m)) for index in range(m)]


def _collate(collate: CollateFunction, seed: int, samples: list[Sample], epoch: int, step: int, index: int) -> Data:
    seed_generators(seed_of(seed, "collate", epoch, step, index))
    return collate(samples)


def refuse_unequal(plan: BatchPlan) -> None:
    """Check that every micro-batch of a full step has equally many samples, as division by stride needs.

    Raises:
        DataError: if ``micro_batch`` does not divide ``global_batch``.
    """
    if plan.global_batch % plan.micro_batch:
        m = plan.micro_batches
        raise DataError(
            f"micro_batch={plan.micro_batch} does not divide global_batch={plan.global_batch}, which an iterable data "
            f"set needs; use global_batch={m * plan.micro_batch}, or a data set with __getitem__ and __len__"
        )


def tell_epoch(dataset: UserDataset, epoch: int) -> None:
    """``dataset`` is to be read as in ``epoch``, whatever was read of it before in this process."""
    set_epoch = getattr(dataset, "set_epoch", None)
    if callable(set_epoch):
        set_epoch(epoch)
    for stage in _stages_of_webdataset(dataset):
        # It would count the passes begun in this process: in a loader process, or after a resume, they are others.
        if isinstance(getattr(stage, "epoch", None), int):
            stage.epoch = epoch - 1


def _stages_of_webdataset(dataset: UserDataset) -> Iterator[Any]:
    pipeline = getattr(dataset, "pipeline", None)
    for stage in pipeline if isinstance(pipeline, list) else ():
        if type(stage).__module__.startswith("webdataset."):
            yield stage
            yield from _stages_of_webdataset(stage)


@contextmanager
def single_process_view() -> Iterator[None]:
    """Within, this process seems to be the only rank and no loader process; afterwards all is as it was.

    The environment's variables are the process's own: no other thread may read them, or enter here, meanwhile. Those
    that are not set stay so. About 15 us.
    """
    environment = os.environ
    hidden = {name: environment[name] for name in _ALONE if name in environment}
    environment.update({name: _ALONE[name] for name in hidden})
    try:
        with without_worker_info():
            yield
    finally:
        environment.update(hidden)
