"""The loader of a data set with an index: its sampler, and its sources.

orders              which samples an epoch has, in which order
MicroBatchSampler   this rank's micro-batches of a pass: for each the samples, and a seed
SeededDataset       reads them with generators seeded so, in any process
SampleSource        ... one by one, here or in loader processes; TensorSource: at once, from tensors in memory
IndexedLoader       hands them on with their positions
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import copy
from dataclasses import replace
from functools import partial
from typing import Any, Final, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.utils.data import Dataset, Sampler, Subset, default_collate
from typing_extensions import override

from lockstep.batch import BatchPlan, EpochSteps, MicroBatchPosition
from lockstep.data.dataset_marks import DatasetMarks
from lockstep.data.indexed.orders import Order
from lockstep.data.indexed.sampling import (
    NO_CHECKS,
    CheckedSteps,
    Data,
    MicroBatch,
    Padding,
    Sample,
    TorchLoader,
    UserDataset,
    count_of_evaluation,
    count_of_steps,
    epoch_positions,
    evaluation_positions,
)
from lockstep.data.indexed.tensor_dataset import TensorColumns, columns_of
from lockstep.data.micro_batch_loader import MicroBatchLoader
from lockstep.data.seen_samples import SeenBatch, SeenSamples, checksum
from lockstep.data.shards.dealt_shards import ShardsFound
from lockstep.data.workers import CollateFunction, WorkerOptions, as_it_is, end_passes, open_loader
from lockstep.errors import DataError
from lockstep.seeding import drawn_states, seed_generators, seed_of, seeded_generators

#: The message to a loader process for each micro-batch: the seed of its random numbers, and its samples. A process that
#: lives longer than an epoch and reads ahead needs to know nothing else. Without a seed, checksums of the samples are
#: returned, to be compared.
Picks = tuple[int | None, list[int]]

_LOOK_SEED: Final = seed_of("look")  # of random numbers for a sample that is read for its checksum


class LoaderPass(NamedTuple):
    """This rank's micro-batches of a pass: the epoch, its steps and the positions."""

    epoch: int
    steps: EpochSteps
    positions: Callable[[], Iterator[MicroBatchPosition]]  #: starts over each time


class MicroBatchSampler(Sampler[Picks]):
    """The batch sampler of a rank: its micro-batches of the selected pass, at first epoch 0."""

    def __init__(self, plan: BatchPlan, rank: int, order: Order, seed: int, *, drop_last: bool) -> None:
        self.plan = plan
        self.rank = rank
        self.order = order
        self.seed = seed
        self.drop_last = drop_last
        first = self.steps(0)
        self.length = first.samples  #: of epoch 0
        self.steps_per_epoch = len(first)  #: of epoch 0
        self.selected = self.of_epoch(0, 0, padding="none")
        self.few: list[int] = []  #: samples whose checksums are wanted, in the place of the selected pass

    def steps(self, epoch: int) -> EpochSteps:
        """The steps of ``epoch``."""
        return self.order.steps(epoch, self.plan, drop_last=self.drop_last)

    def of_epoch(
        self, epoch: int, first_step: int, *, padding: Padding, checks: CheckedSteps = NO_CHECKS
    ) -> LoaderPass:
        """This rank's micro-batches of ``epoch``, from ``first_step`` on, and the replays that ``checks`` asks for."""
        steps = self.steps(epoch)
        return LoaderPass(
            epoch,
            steps,
            partial(epoch_positions, steps, self.rank, first_step=first_step, padding=padding, checks=checks),
        )

    def of_evaluation(self, *, padding: Padding) -> LoaderPass:
        """This rank's micro-batches of an evaluation."""
        steps = self.steps(0)
        return LoaderPass(0, steps, partial(evaluation_positions, steps, self.rank, padding=padding))

    def micro_batches(self, epoch: int, first_step: int, *, padding: Padding) -> int:
        """The number of micro-batches that `of_epoch` selects."""
        steps = self.steps(epoch)
        rest = (steps.micro_batches_of(step) for step in range(first_step, len(steps)))
        return count_of_steps(self.plan, self.rank, rest, padding)

    def micro_batches_of_evaluation(self, *, padding: Padding) -> int:
        """The number of micro-batches that `of_evaluation` selects."""
        return count_of_evaluation(self.plan, self.rank, self.steps(0).micro_batches, padding)

    def __iter__(self) -> Iterator[Picks]:
        # A generator begun here, not a generator function: the selection is read now, not with the first item.
        if self.few:
            return iter([(None, self.few)])
        return (picks for _, picks in self.picks_of(self.selected))

    def picks_of(self, selected: LoaderPass) -> Iterator[tuple[MicroBatchPosition, Picks]]:
        """The micro-batches of a pass, each with its position and the samples to be read."""
        order, epoch = self.order, selected.epoch
        found = order.indices(epoch)
        # A part of an array takes a fifth of the time of a part of a tensor.
        indices = found.numpy() if isinstance(found, Tensor) else found
        for position in selected.positions():
            rows = order.rows(selected.steps, position)
            part = indices[rows]
            picked: list[int] = list(part) if isinstance(part, range) else part.tolist()
            # Seeded by the first sample, so random numbers of a micro-batch do not depend on its place in the order. A
            # micro-batch that may come again in the same epoch must draw other numbers then.
            mark = ("at", rows.start) if order.may_repeat else (picked[0],)
            yield position, (seed_of(self.seed, "samples", epoch, *mark), picked)


class ScriptSampler(Sampler[Picks]):
    """The sampler of a loop of the script's own over a loader, which reads epoch 0.

    In a pass of `Run.train` or `Run.evaluate`, such a loop reads this rank's micro-batches; elsewhere all
    micro-batches, equally on all ranks, as for the statistics of a data set.
    """

    def __init__(self, own: MicroBatchSampler, *, drop_last: bool, in_pass: Callable[[], bool]) -> None:
        alone = replace(own.plan, world_size=1, in_turn=1)
        self._own = copy(own)  # the copy stays at epoch 0
        self._all = MicroBatchSampler(alone, 0, own.order, own.seed, drop_last=drop_last)
        self._in_pass = in_pass

    def __iter__(self) -> Iterator[Picks]:
        return iter(self._own if self._in_pass() else self._all)


class SeededDataset(Dataset[Any]):
    """The user's data set, read with generators whose seeds depend only on (seed, epoch, micro-batch).

    Length and single samples are those of the user's data set. Only micro-batches are seeded, each once, since seeding
    for each sample cost more than reading it from memory. So random numbers for a sample do not depend on ranks or on
    loader processes, but do depend on ``micro_batch``, as BatchNorm and dropout do.
    """

    def __init__(self, dataset: UserDataset, take: Callable[[list[int]], Data] | None = None) -> None:
        self.dataset = dataset
        self.take = take  #: for data in memory: reads the whole micro-batch at once, without random numbers
        self.at_once = _fetches_at_once(dataset)

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Sample:
        return self.dataset[index]

    def __getitems__(self, picks: Picks) -> Data:
        seed, indices = picks
        if self.take is not None:
            return self.take(indices)
        if seed is None:
            with seeded_generators(_LOOK_SEED):
                return SeenBatch(map(checksum, self._samples(indices) if self.at_once else self._looked_at(indices)))
        seed_generators(seed)
        return self._samples(indices)

    def _looked_at(self, indices: list[int]) -> list[Sample]:
        """The samples at ``indices``; checks that reading a sample again draws random numbers again.

        Raises:
            DataError: if the data set caches random results.
        """
        samples, drawn = [], [drawn_states()]
        for index in indices:
            samples.append(self.dataset[index])
            drawn.append(drawn_states())
        drew = [index for index, before, after in zip(indices, drawn, drawn[1:], strict=False) if before != after]
        if len(drew) > 1:  # a single sample may have drawn numbers that the data set needs once, for all samples
            for index in indices:
                self.dataset[index]
            if drawn_states() == drawn[-1]:
                raise DataError(
                    f"the data set keeps what it has drawn: sample {drew[-1]} drew random numbers when it was read "
                    "first, and none when it was read again, as from a cache of augmented samples. Each rank and each "
                    "loader process would keep draws of its own, and no checkpoint has them: put into the cache what "
                    "is loaded, and draw after it was taken from there"
                )
        return samples

    def _samples(self, indices: list[int]) -> Data:
        if self.at_once:
            return self.dataset.__getitems__(indices)
        return [self.dataset[index] for index in indices]


def _fetches_at_once(dataset: UserDataset) -> bool:
    while type(dataset) is Subset:  # a Subset has __getitems__, but may only call the inner data set's
        dataset = dataset.dataset
    return callable(getattr(dataset, "__getitems__", None))


class BatchSource(Protocol):
    """A source of micro-batches."""

    data_loader: TorchLoader

    def read(self, selected: LoaderPass) -> Iterator[MicroBatch]:
        """Each micro-batch of the pass, which begins when the first micro-batch is asked for; one pass at a time."""

    def look(self, indices: list[int]) -> int:
        """A checksum of the samples at ``indices``. Ends an open pass."""

    def rows_in_memory(self) -> list[Tensor]:
        """See `MicroBatchLoader.rows_in_memory`."""
        return []

    def is_outdated(self, *, ahead: bool) -> bool:
        """See `MicroBatchLoader.is_outdated`, for the pass that `read` has begun."""

    def close(self) -> None:
        """End all loader processes. May be called twice."""


class IndexedLoader(MicroBatchLoader):
    """The loader of the micro-batches that a sampler selects, with the data of a source."""

    def __init__(self, sampler: MicroBatchSampler, source: BatchSource) -> None:
        self._sampler = sampler
        self._source = source
        self.data_loader = source.data_loader
        self.plan = sampler.plan
        self.length: int | None = sampler.length
        self.steps_per_epoch: int | None = sampler.steps_per_epoch
        self.notes: tuple[str, ...] = ()

    @override
    def draw(self, epoch: int) -> str | None:
        digest = self._sampler.order.draw(epoch)
        if len(self._sampler.steps(epoch)) != self._sampler.steps_per_epoch:
            self.steps_per_epoch = None  # epochs have different numbers of steps
        return digest

    @override
    def look(self, epoch: int) -> SeenSamples | None:
        indices = self._sampler.order.few(epoch)
        return SeenSamples(indices, self._source.look(indices)) if indices else None

    @override
    def rows_in_memory(self) -> list[Tensor]:
        return self._source.rows_in_memory()

    @override
    def steps(self, epoch: int) -> EpochSteps:
        return self._sampler.steps(epoch)

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
        return self._source.read(self._sampler.of_epoch(epoch, first_step, padding=padding, checks=checks))

    @override
    def again(self, epoch: int, step: int, index: int) -> MicroBatch:
        steps = self.steps(epoch)
        position = self.plan.position(step, steps.step_samples(step), index, last=False)
        return next(self._source.read(LoaderPass(epoch, steps, lambda: iter((position,)))))

    @override
    def is_outdated(self, *, ahead: bool) -> bool:
        return self._source.is_outdated(ahead=ahead)

    @override
    def evaluation(self, *, padding: Padding) -> Iterator[MicroBatch]:
        return self._source.read(self._sampler.of_evaluation(padding=padding))

    @override
    def micro_batches(self, epoch: int = 0, first_step: int = 0, *, padding: Padding) -> int | None:
        return self._sampler.micro_batches(epoch, first_step, padding=padding)

    @override
    def micro_batches_of_evaluation(self, *, padding: Padding) -> int | None:
        return self._sampler.micro_batches_of_evaluation(padding=padding)

    @override
    def close(self) -> None:
        self._source.close()


class TensorSource(BatchSource):
    """A source of tensors in memory: one gather for each micro-batch and tensor, which takes a few microseconds."""

    def __init__(
        self,
        dataset: UserDataset,
        columns: TensorColumns,
        sampler: MicroBatchSampler,
        *,
        for_script: ScriptSampler,
        pin_memory: bool,
    ) -> None:
        self._dataset = dataset
        self._marks = DatasetMarks(dataset)
        self._columns = columns
        self._sampler = sampler

        def take(indices: list[int]) -> Data:
            return self._columns.take(self._columns.arranged(torch.tensor(indices, device="cpu")))

        self.data_loader = open_loader(
            SeededDataset(dataset, take),
            lambda: sampler.steps_per_epoch,
            WorkerOptions(0),
            1,
            sampler.seed,
            begins_late=True,
            batch_sampler=for_script,
            collate_fn=as_it_is,
            pin_memory=pin_memory,
        )

    @override
    def read(self, selected: LoaderPass) -> Iterator[MicroBatch]:
        self._columns = columns = self._columns_now()
        order = self._sampler.order
        indices = order.indices(selected.epoch)
        # A stored order is arranged at once; a computed order part by part.
        rows = columns.arranged(indices) if isinstance(indices, Tensor | range) else None
        for position in selected.positions():
            part = order.rows(selected.steps, position)
            yield MicroBatch(position, columns.take(columns.arranged(indices[part]) if rows is None else rows[part]))

    @override
    def look(self, indices: list[int]) -> int:
        self._columns = columns = self._columns_now()
        return checksum(columns.take(columns.arranged(torch.tensor(indices, device="cpu"))))

    @override
    def rows_in_memory(self) -> list[Tensor]:
        return self._columns_now().spread()

    @override
    def is_outdated(self, *, ahead: bool) -> bool:
        return DatasetMarks(self._dataset).differ_from(self._marks)

    def _columns_now(self) -> TensorColumns:
        """The columns of the data set, which the script may have replaced since the last pass."""
        before, self._marks = self._marks, DatasetMarks(self._dataset)
        if not self._marks.differ_from(before):
            return self._columns
        columns = columns_of(self._dataset)
        if columns is None:
            raise DataError(
                "the data set held tensors when run.loader was called, and something else now: call run.loader again"
            )
        return columns

    @override
    def close(self) -> None:
        end_passes(self.data_loader)


class SampleSource(BatchSource):
    """A data set that is read sample by sample, in this process or in loader processes that live on."""

    def __init__(
        self,
        dataset: UserDataset,
        sampler: MicroBatchSampler,
        *,
        for_script: ScriptSampler,
        workers: WorkerOptions,
        collate_fn: CollateFunction | None,
        pin_memory: bool,
    ) -> None:
        self._sampler = sampler
        self._samples = samples = SeededDataset(dataset)
        self._collate = collate_fn or default_collate
        self._reads_here = not workers.count

        def loader(selected: Sampler[Picks], *, persistent: bool, begins_late: bool) -> TorchLoader:
            return open_loader(
                samples,
                lambda: sampler.steps_per_epoch,
                workers,
                len(sampler.plan.run(sampler.rank)),
                sampler.seed,
                begins_late=begins_late,
                batch_sampler=selected,
                collate_fn=collate_fn,
                pin_memory=pin_memory,
                persistent_workers=persistent,
            )

        # Two loaders, since the iterator of a loader with persistent workers starts over if the script iterates that
        # loader.
        self.data_loader = loader(for_script, persistent=False, begins_late=True)
        self._own_loader = loader(sampler, persistent=workers.count > 0, begins_late=False)
        self._dataset = dataset
        self._marks: DatasetMarks | None = None  # of the data set when the loader processes copied it

    @override
    def read(self, selected: LoaderPass) -> Iterator[MicroBatch]:
        if self._reads_here:
            # The work of `DataLoader` around each micro-batch costs more than reading it.
            samples, collate = self._samples, self._collate
            for position, picks in self._sampler.picks_of(selected):
                yield MicroBatch(position, collate(samples.__getitems__(picks)))
            return
        self._sampler.selected = selected
        for position, data in zip(selected.positions(), self._from_processes(), strict=True):
            yield MicroBatch(position, data)

    @override
    def look(self, indices: list[int]) -> int:
        if self._reads_here:
            return checksum(self._samples.__getitems__((None, indices)))
        self._sampler.few = indices
        try:
            return checksum(next(self._from_processes()))
        finally:
            self._sampler.few = []

    @override
    def is_outdated(self, *, ahead: bool) -> bool:
        if self._reads_here or self._marks is None:
            return ahead
        return DatasetMarks(self._dataset).differ_from(self._marks)

    def _from_processes(self) -> Iterator[Data]:
        """The batches of loader processes for the picks of the sampler: the same bytes as those that are read here.

        `workers` and `shared_slots` only carry them.
        """
        marks = DatasetMarks(self._dataset)
        if self._marks is not None and marks.differ_from(self._marks):
            end_passes(self._own_loader)
        self._marks = marks
        batches: Iterator[Data] = iter(self._own_loader)
        return batches

    @override
    def close(self) -> None:
        end_passes(self._own_loader)
        end_passes(self.data_loader)
