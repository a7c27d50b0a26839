"""The loader of an iterable data set, read in this process, or ahead of time in loader processes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sized
from copy import deepcopy
from dataclasses import replace
from functools import partial
from itertools import islice

from torch.utils.data import IterableDataset
from typing_extensions import override

from lockstep.batch import EpochSteps, MicroBatchPosition
from lockstep.data.indexed.sampling import (
    NO_CHECKS,
    CheckedSteps,
    MicroBatch,
    Padding,
    TorchLoader,
    UserDataset,
    audited_alone,
    checked,
    count_of_steps,
    padding_of,
)
from lockstep.data.iterable.iterable_dataset import Batches, Reader, Steps, StreamShare, StreamStep, sizes_of
from lockstep.data.iterable.stream_agreement import Agree, agreed_steps
from lockstep.data.iterable.stream_division import division_of
from lockstep.data.micro_batch_loader import MicroBatchLoader
from lockstep.data.shards.dealt_shards import ShardsFound, begin_pass, note_length
from lockstep.data.workers import WorkerOptions, as_it_is, end_passes, open_loader
from lockstep.errors import DataError


class IterableLoader(MicroBatchLoader):
    """The loader of an iterable data set. Its loader processes live for one part of a pass."""

    def __init__(
        self,
        share: StreamShare,
        *,
        shuffle: bool | None,
        drop_last: bool,
        workers: WorkerOptions,
        agree: Agree,
        in_pass: Callable[[], bool],
        pin_memory: bool,
    ) -> None:
        self._dataset = share.dataset
        self._division = division_of(share, shuffle=shuffle)
        self._rank = share.rank
        self._seed = share.seed
        self._drop_last = drop_last
        self._workers = workers
        self._agree = agree
        self._pin = pin_memory
        self._pass: TorchLoader | None = None
        self.plan = share.plan
        self.length: int | None = None
        self.steps_per_epoch: int | None = None
        self.notes: tuple[str, ...] = (self._division.note,) if self._division.note else ()
        alone = replace(share.plan, world_size=1, in_turn=1)
        whole = division_of(replace(share, plan=alone, rank=0, run=alone.run(0)), shuffle=shuffle).reader
        self.data_loader = self._open(Batches(share.dataset, self._division.reader, whole, in_pass), WorkerOptions(0))

    @override
    def draw(self, epoch: int) -> str | None:
        return self._division.digest(epoch)

    @override
    def look(self, epoch: int) -> None:
        return None

    @override
    def steps(self, epoch: int) -> EpochSteps:
        raise DataError(
            f"{type(self._dataset).__name__} is an iterable data set: its steps are known only when they are read"
        )

    @override
    def epoch(
        self,
        epoch: int,
        first_step: int = 0,
        *,
        padding: Padding,
        found: ShardsFound | None = None,
        checks: CheckedSteps = NO_CHECKS,
    ) -> Iterator[MicroBatch]:
        self._close_pass()
        found = {} if found is None else found
        # If the places found in the shards are not known, all samples before the step are read again.
        step = first_step if begin_pass(found) or not self._division.needs_found else 0
        ended = [end for end in found["ends"] if end <= step]
        while True:
            part = self._division.part(epoch, ended, found)
            steps = agreed_steps(
                self._begin(part.reader, epoch, step),
                self._agree,
                step,
                self.plan.global_batch,
                part.samples_of,
                partial(note_length, found, name=type(self._dataset).__name__),
            )
            for own, samples in steps:
                is_full = samples == self.plan.global_batch
                if step >= first_step and (is_full or (part.ends_epoch and not self._drop_last)):
                    batches = self._step(part.reader, own, epoch, step, samples, padding)
                    yield from _checked(batches, checks, step - first_step, alone=self.plan.world_size == 1)
                step += is_full
            self._close_pass()
            if part.ends_epoch:
                return
            ended.append(step)
            found["ends"][len(ended) - 1 :] = [step]

    @override
    def evaluation(self, *, padding: Padding) -> Iterator[MicroBatch]:
        return self.epoch(0, padding=padding)

    @override
    def micro_batches(self, epoch: int = 0, first_step: int = 0, *, padding: Padding) -> int | None:
        samples = _length_if_known(self._dataset)
        if samples is None:
            return None
        full, rest = divmod(samples, self.plan.global_batch)
        tail = 0 if self._drop_last else min(rest, self.plan.micro_batches)
        steps = [self.plan.micro_batches] * full + [tail] * (tail > 0)
        return count_of_steps(self.plan, self._rank, steps[first_step:], padding)

    @override
    def micro_batches_of_evaluation(self, *, padding: Padding) -> int | None:
        return self.micro_batches(padding=padding)

    @override
    def close(self) -> None:
        self._close_pass()
        end_passes(self.data_loader)

    def _begin(self, reader: Reader, epoch: int, step: int) -> Iterator[StreamStep]:
        """The endless steps of ``reader`` from ``step`` on, read ahead from now on."""
        workers = replace(self._workers, count=min(self._workers.count, reader.most_parts()))
        self._pass = self._open(Steps(reader, epoch, step), workers)
        return self._whole_steps(iter(self._pass), max(1, workers.count))

    def _whole_steps(self, batches: Iterator[StreamStep], parts: int) -> Iterator[StreamStep]:
        while True:
            yield StreamStep.of_parts(list(islice(batches, parts)))

    def _step(
        self, reader: Reader, found: StreamStep, epoch: int, step: int, samples: int, padding: Padding
    ) -> Iterator[MicroBatch]:
        sizes = [size for size in sizes_of(self.plan, samples) if size]
        run = self.plan.run(self._rank, len(sizes))
        before = padding_of(self.plan, len(run), len(sizes), padding)
        # In a step with fewer micro-batches, the runs of ranks move, and other ranks may have found this rank's
        # samples. So it is for the padding of a rank without a micro-batch of a full step, in an evaluation.
        if len(sizes) < self.plan.micro_batches or not found.batches:
            indices = [len(sizes) - 1] * before + [*run]
            data = reader.heads(epoch, step, found, indices)
        else:
            indices = [run.start] * before + [*run]
            data = [*found.batches[:1] * before, *found.batches]
        for number, (index, batch) in enumerate(zip(indices, data, strict=True)):
            last, is_padding = number == len(indices) - 1, number < before
            position = MicroBatchPosition(index, len(sizes), last, is_padding, sizes[index], samples, step)
            yield MicroBatch(position, batch)

    def _open(self, dataset: IterableDataset[object], workers: WorkerOptions) -> TorchLoader:
        return open_loader(
            dataset,
            self._steps,
            workers,
            1,
            self._seed,
            batch_size=None,
            collate_fn=as_it_is,
            pin_memory=self._pin,
        )

    def _steps(self) -> int:
        samples = _length_if_known(self._dataset)
        if samples is None:
            raise TypeError(
                f"len(loader): how many steps an epoch has is known at its end only, as {type(self._dataset).__name__} "
                "is an iterable data set without a length; give it a method __len__, or write the number of "
                "steps yourself"
            )
        return self.plan.steps(samples, drop_last=self._drop_last)

    def _close_pass(self) -> None:
        if self._pass is not None:
            end_passes(self._pass)
        self._pass = None


def _checked(batches: Iterable[MicroBatch], checks: CheckedSteps, step: int, *, alone: bool) -> Iterator[MicroBatch]:
    """The micro-batches of a step, perhaps a checked one; for a replay, data is copied before the script gets it."""
    drawn = None if checks.audits is None else checks.audits.draw(step)
    if drawn is None and step not in checks:
        yield from batches
        return
    batches = list(batches)
    data = {batch.position.index: batch.data for batch in batches}
    positions = [batch.position for batch in batches]
    if drawn is None:
        comes_next = alone and checks.is_second(step)
        positions = checked(positions, replays=checks.replays, comes_next=comes_next)
    elif positions:
        positions = audited_alone(positions, drawn)
    try:
        copies = [deepcopy(data[position.index]) for position in positions if position.is_replay]
    except (TypeError, ValueError, RuntimeError):  # data cannot be copied
        positions = [position for position in positions if not position.is_replay]
    for position in positions:
        yield MicroBatch(position, copies.pop() if position.is_replay else data[position.index])


def _length_if_known(dataset: UserDataset) -> int | None:
    """The length of a stream by ``len``; None if the stream has none."""
    try:
        return len(dataset) if isinstance(dataset, Sized) else None
    except (TypeError, NotImplementedError):  # such as a chain of streams of which one has no length
        return None
