"""The loader of a data set with an index, and its two sources: tensors in memory, and samples read singly."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor
from torch.utils.data import Sampler, default_collate
from typing_extensions import override

from lockstep.batch import EpochSteps
from lockstep.data.dataset_marks import DatasetMarks
from lockstep.data.indexed.map_dataset import LoaderPass, MicroBatchSampler, Picks, ScriptSampler, SeededDataset
from lockstep.data.indexed.sampling import NO_CHECKS, CheckedSteps, Data, MicroBatch, Padding, TorchLoader, UserDataset
from lockstep.data.indexed.tensor_dataset import TensorColumns, columns_of
from lockstep.data.micro_batch_loader import MicroBatchLoader
from lockstep.data.seen_samples import SeenSamples, checksum
from lockstep.data.shards.dealt_shards import ShardsFound
from lockstep.data.workers import CollateFunction, WorkerOptions, as_it_is, end_passes, open_loader
from lockstep.errors import DataError


class BatchSource(Protocol):
    """A source of micro-batches."""

    data_loader: TorchLoader

    def read(self, selected: LoaderPass) -> Iterator[MicroBatch]:
        """Each micro-batch of the pass, which begins when the first micro-batch is asked for; one pass at a time."""

    def look(self, indices: list[int]) -> int:
        """A checksum of the samples at ``indices``. Ends an open pass."""

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
            return self._columns.take(self._columns.arranged(torch.tensor(indices)))

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
        return checksum(columns.take(columns.arranged(torch.tensor(indices))))

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
        """The batches of loader processes for the picks of the sampler."""
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
