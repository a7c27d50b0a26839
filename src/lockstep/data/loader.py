"""`MicroBatchLoader` gives one rank its micro-batches of an epoch, from any step on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sized
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, default_collate

from lockstep.batch import BatchPlan, MicroBatchPosition
from lockstep.data.iterable_dataset import (
    Batches,
    OnePassReader,
    Reader,
    Steps,
    StreamStep,
    StridedReader,
    refuse_unequal,
    seeded,
    sizes_of,
)
from lockstep.data.map_dataset import MicroBatchSampler, Picks, Positions, SeededDataset
from lockstep.data.sampling import MicroBatch, Padding, count_from_step, order_of, padding_of
from lockstep.data.tensor_dataset import TensorColumns, columns_of
from lockstep.data.workers import begin_pass, choose_workers, end_passes, open_loader
from lockstep.errors import DataError

__all__ = ["MicroBatchLoader", "choose_workers", "is_in_memory", "open_micro_batch_loader"]

#: All ranks call it once a step, each with its numbers, and get those of every rank, in the order of ranks.
Agree = Callable[[list[int]], list[list[int]]]


class MicroBatchLoader(Protocol):
    """One rank's way to its micro-batches."""

    #: Gives this rank's micro-batches of an epoch (the first one's order) when used by itself. Its length is the
    #: number of optimizer steps of an epoch, on any world; TypeError for a stream that does not know its own.
    data_loader: DataLoader[Any]
    plan: BatchPlan
    length: int | None  #: samples of an epoch, over all ranks; None: known at its end
    steps_per_epoch: int | None
    notes: tuple[str, ...]  #: lines to print once for the user

    def epoch(self, epoch: int, first_step: int = 0, *, padding: Padding) -> Iterator[MicroBatch]:
        """This rank's micro-batches of ``epoch`` from step ``first_step`` on, in the order it computes them.

        All ranks go through it alike, on any number of them: a micro-batch holds the same samples, with the same
        random augmentation, whoever computes it. Every sample of the epoch comes exactly once, over all ranks.

        With ``padding``, it first gets those that it is to compute in a step. One pass at a time: a new one ends those
        before it.

        The global generators of this process may be moved in any way; whoever draws from them seeds them first.

        Raises:
            DataError: if the epoch has fewer than ``first_step`` steps; for a stream also if it gave nothing, or not
                the same to every rank.
        """

    def evaluation(self, *, padding: Padding) -> Iterator[MicroBatch]:
        """This rank's block of the micro-batches of ``epoch(0)``, for a pass in which no step is finished together.

        The blocks of the ranks, one after another, are the order of the epoch (without shuffling, the data set's), on
        any number of ranks; some may be empty. What a micro-batch says of itself is what it says in ``epoch(0)``, but
        for ``last`` and ``padding``. With padding "even" all ranks compute equally many; padding come first.

        A stream, of which nobody knows the length, is divided as in ``epoch(0)``: the blocks are not its order.
        """

    def micro_batches(self, first_step: int = 0, *, padding: Padding) -> int | None:
        """How many `epoch` hands out from ``first_step`` on; None for a stream that does not know its length."""

    def micro_batches_of_evaluation(self, *, padding: Padding) -> int | None:
        """How many `evaluation` hands out; None for a stream that does not know its length."""

    def close(self) -> None:
        """No loader process runs afterwards. May be called twice."""


def open_micro_batch_loader(
    dataset: Any,
    plan: BatchPlan,
    rank: int,
    *,
    seed: int,
    shuffle: bool | None,
    drop_last: bool,
    workers: int,
    agree: Agree,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    pin_memory: bool = False,
) -> MicroBatchLoader:
    """The loader of ``rank`` for ``dataset``: tensors in memory, a data set with an index, or anything iterable.

    Args:
        dataset: samples by index (``__getitem__`` and ``__len__``), an iterable of samples, or tensors with one row
            per sample: a `TensorDataset` or `Subset` of one, a tensor, a tuple or dict of tensors.
        plan: how a step is divided.
        rank: whose micro-batches it gives.
        seed: of the order and of each sample's random augmentation.
        shuffle: a new order each epoch. None: yes, except for iterables, which come as they are.
        drop_last: leave out the short step at the end of an epoch.
        workers: loader processes. Data in memory takes none, an iterable at most one, as it is read in order.
        agree: gathers the counts of all ranks; collective, and used only for iterables, once a step.
        collate_fn: makes a batch of a list of samples, as for `torch.utils.data.DataLoader`.
        pin_memory: hand out tensors in page-locked memory, for asynchronous copies to a GPU.

    Raises:
        DataError: for what cannot be divided into samples, or is empty, or a `DataLoader`; for an iterable also if
            ``shuffle`` is asked for or ``micro_batch`` does not divide ``global_batch``.
    """
    _refuse_what_is_no_data_set(dataset)
    if _is_stream(dataset):
        if shuffle:
            raise DataError(
                f"shuffle=True, but {type(dataset).__name__} can only be iterated: its order is its own; "
                "shuffle=False takes it as it comes (it may shuffle itself: it is seeded alike on every rank)"
            )
        refuse_unequal(plan)
        reader = _reader_of(dataset, plan, rank, seed, collate_fn or default_collate)
        return IterableLoader(dataset, reader, plan, rank, seed, drop_last, min(workers, 1), agree, pin_memory)
    columns = columns_of(dataset) if collate_fn is None else None
    length = _length_of(dataset if columns is None else columns)
    sampler = MicroBatchSampler(plan, rank, length, seed, shuffle=shuffle is not False, drop_last=drop_last)
    if columns is not None:
        return TensorLoader(dataset, columns, sampler, pin_memory)
    return MapLoader(dataset, sampler, workers, collate_fn, pin_memory)


def is_in_memory(dataset: Any) -> bool:
    """Whether ``dataset`` lies in memory as tensors, so that loader processes would help nothing."""
    try:
        return columns_of(dataset) is not None
    except (
        DataError
    ):  # tensors all the same; `open_micro_batch_loader` knows whether they can be used, and says why not
        return True


class TensorLoader(MicroBatchLoader):
    """Loader of tensors in memory: one gather for each micro-batch and tensor, and a few microseconds."""

    def __init__(self, dataset: Any, columns: TensorColumns, sampler: MicroBatchSampler, pin_memory: bool) -> None:
        self._columns = columns
        self._sampler = sampler
        self._pin = pin_memory
        self.plan = sampler.plan
        self.length: int | None = sampler.length
        self.steps_per_epoch: int | None = sampler.steps
        self.notes: tuple[str, ...] = ()

        def take(indices: list[int]) -> Any:
            rows = columns.arranged(torch.tensor(indices))
            return columns.take(rows)

        self.data_loader = open_loader(
            SeededDataset(dataset, sampler.seed, take),
            lambda: sampler.steps,
            0,
            1,
            sampler.seed,
            batch_sampler=sampler,
            collate_fn=_as_it_is,
            pin_memory=pin_memory,
        )

    def epoch(self, epoch: int, first_step: int = 0, *, padding: Padding) -> Iterator[MicroBatch]:
        return self._read(epoch, self._sampler.positions(first_step, padding=padding))

    def evaluation(self, *, padding: Padding) -> Iterator[MicroBatch]:
        return self._read(0, self._sampler.evaluation_positions(padding=padding))

    def micro_batches(self, first_step: int = 0, *, padding: Padding) -> int | None:
        return self._sampler.micro_batches(first_step, padding=padding)

    def micro_batches_of_evaluation(self, *, padding: Padding) -> int | None:
        return self._sampler.micro_batches_of_evaluation(padding=padding)

    def _read(self, epoch: int, positions: Positions) -> Iterator[MicroBatch]:
        sampler, take, pin = self._sampler, self._columns.take, self._pin
        rows = self._columns.arranged(order_of(sampler.length, sampler.seed, epoch, shuffle=sampler.shuffle))
        for position in positions():
            data = take(rows[self.plan.rows(position)])
            yield MicroBatch(position, _pinned(data) if pin else data)

    def close(self) -> None:
        end_passes(self.data_loader)


class MapLoader(MicroBatchLoader):
    """Loader of a data set with an index, read sample by sample here or in loader processes that live on."""

    def __init__(
        self,
        dataset: Any,
        sampler: MicroBatchSampler,
        workers: int,
        collate_fn: Callable[[list[Any]], Any] | None,
        pin_memory: bool,
    ) -> None:
        self._sampler = sampler
        self._pass: Any = None
        self.plan = sampler.plan
        self.length: int | None = sampler.length
        self.steps_per_epoch: int | None = sampler.steps
        self.notes: tuple[str, ...] = ()
        samples, collate = SeededDataset(dataset, sampler.seed), collate_fn or default_collate

        def read(picks: Picks) -> Any:
            data = collate(samples.__getitems__(picks))
            return _pinned(data) if pin_memory else data

        # Without loader processes, what `DataLoader` does around each micro-batch costs more than reading it.
        self._read_here: Callable[[Picks], Any] | None = None if workers else read
        self.data_loader = open_loader(
            samples,
            lambda: sampler.steps,
            workers,
            len(sampler.plan.run(sampler.rank)),
            sampler.seed,
            batch_sampler=sampler,
            collate_fn=collate_fn,
            pin_memory=pin_memory,
            persistent_workers=workers > 0,
        )

    def epoch(self, epoch: int, first_step: int = 0, *, padding: Padding) -> Iterator[MicroBatch]:
        return self._read(epoch, self._sampler.positions(first_step, padding=padding))

    def evaluation(self, *, padding: Padding) -> Iterator[MicroBatch]:
        return self._read(0, self._sampler.evaluation_positions(padding=padding))

    def micro_batches(self, first_step: int = 0, *, padding: Padding) -> int | None:
        return self._sampler.micro_batches(first_step, padding=padding)

    def micro_batches_of_evaluation(self, *, padding: Padding) -> int | None:
        return self._sampler.micro_batches_of_evaluation(padding=padding)

    def _read(self, epoch: int, positions: Positions) -> Iterator[MicroBatch]:
        self._sampler.select(epoch, positions)
        if self._read_here is not None:
            batches = map(self._read_here, self._sampler)
        else:
            batches = self._pass = begin_pass(self.data_loader)
        for position, data in zip(positions(), batches, strict=True):
            yield MicroBatch(position, data)

    def close(self) -> None:
        end_passes(self.data_loader, self._pass)
        self._pass = None


class IterableLoader(MicroBatchLoader):
    """Loader of an iterable, read here or ahead of time in one loader process an epoch."""

    def __init__(
        self,
        dataset: Any,
        reader: Reader,
        plan: BatchPlan,
        rank: int,
        seed: int,
        drop_last: bool,
        workers: int,
        agree: Agree,
        pin_memory: bool,
    ) -> None:
        self._dataset = dataset
        self._reader = reader
        self._rank = rank
        self._seed = seed
        self._drop_last = drop_last
        self._workers = workers
        self._agree = agree
        self._pin = pin_memory
        self._pass: Any = None
        self.plan = plan
        self.length: int | None = None
        self.steps_per_epoch: int | None = None
        wasteful = isinstance(reader, OnePassReader) and plan.world_size > 1
        self.notes: tuple[str, ...] = (_note(dataset, plan.world_size),) if wasteful else ()
        self.data_loader = self._open(Batches(dataset, reader), 0)

    def epoch(self, epoch: int, first_step: int = 0, *, padding: Padding) -> Iterator[MicroBatch]:
        loader = self._open(Steps(self._reader, epoch, first_step), self._workers)
        self._close_pass()
        self._pass = (loader, begin_pass(loader))
        nothing = StreamStep([0] * len(self.plan.run(self._rank)), [], [], 0)
        step = first_step
        samples = self.plan.global_batch
        while samples == self.plan.global_batch:
            found: StreamStep = next(self._pass[1], nothing)
            samples = self._agreed(found, epoch, step)
            if samples < self.plan.global_batch and self._drop_last:
                break
            yield from self._step(found, epoch, step, samples, padding)
            step += 1
        self._close_pass()

    def evaluation(self, *, padding: Padding) -> Iterator[MicroBatch]:
        return self.epoch(0, padding=padding)

    def micro_batches(self, first_step: int = 0, *, padding: Padding) -> int | None:
        samples = _length_if_known(self._dataset)
        if samples is None:
            return None
        full, rest = divmod(samples, self.plan.global_batch)
        tail = 0 if self._drop_last else min(rest, self.plan.micro_batches)
        return count_from_step(self.plan, self._rank, full, tail, first_step=first_step, padding=padding)

    def micro_batches_of_evaluation(self, *, padding: Padding) -> int | None:
        return self.micro_batches(padding=padding)

    def close(self) -> None:
        self._close_pass()
        end_passes(self.data_loader)

    def _step(self, found: StreamStep, epoch: int, step: int, samples: int, padding: Padding) -> Iterator[MicroBatch]:
        sizes = [size for size in sizes_of(self.plan, samples) if size]
        run = self.plan.run(self._rank, len(sizes))
        before = padding_of(self.plan, self._rank, len(sizes), padding)
        # With micro-batches missing the runs move, and the few samples there are may have been found on other ranks.
        if len(sizes) < self.plan.micro_batches:
            indices = [len(sizes) - 1] * before + [*run]
            data = self._reader.heads(epoch, step, found, indices)
        else:
            indices = [run.start] * before + [*run]
            data = [*found.batches[:1] * before, *found.batches]
        for number, (index, batch) in enumerate(zip(indices, data, strict=True)):
            last, is_padding = number == len(indices) - 1, number < before
            position = MicroBatchPosition(index, len(sizes), last, is_padding, sizes[index], samples, step)
            yield MicroBatch(position, batch)

    def _agreed(self, found: StreamStep, epoch: int, step: int) -> int:
        """Samples of the step over all ranks, if all found what belongs to them. All ranks call it."""
        everyone = self._agree([found.mark, *found.counts])
        counts = [number for numbers in everyone for number in numbers[1:]]
        samples = sum(counts)
        where, kind = f"in step {step} of epoch {epoch}", type(self._dataset).__name__
        if counts != sizes_of(self.plan, samples):
            raise DataError(
                f"the ranks read different streams: {where} their micro-batches hold {counts} samples; {kind} must "
                "give every rank the whole stream in the same order (no division by rank in the data set), or have a "
                "method stride(start, step)"
            )
        if len({numbers[0] for numbers in everyone}) > 1:
            raise DataError(
                f"the ranks read different streams: {where} {kind} gives them different samples; if it shuffles by "
                "itself, give it a seed, such as shuffle(..., seed=0); if it is divided by rank, leave that out: every "
                "rank is to be given the whole stream in the same order"
            )
        if samples == 0 and step == 0:
            raise DataError(
                f"the data set gave no sample in epoch {epoch}; it needs at least one, and __iter__ must begin anew "
                "each time it is called"
            )
        return samples

    def _open(self, dataset: Any, workers: int) -> DataLoader[Any]:
        return open_loader(
            dataset,
            self._steps,
            workers,
            1,
            self._seed,
            batch_size=None,
            collate_fn=_as_it_is,
            pin_memory=self._pin,
        )

    def _steps(self) -> int:
        samples = _length_if_known(self._dataset)
        if samples is None:
            raise TypeError(
                f"len(loader): how many steps an epoch has is known at its end only, as {type(self._dataset).__name__} "
                "can only be iterated and does not know its length; give it a method __len__, or write the number of "
                "steps yourself"
            )
        return self.plan.steps(samples, drop_last=self._drop_last)

    def _close_pass(self) -> None:
        if self._pass is not None:
            end_passes(*self._pass)
        self._pass = None


def _as_it_is(data: Any) -> Any:
    return data


def _pinned(data: Any) -> Any:
    """``data`` with its tensors in page-locked memory; what is neither a tensor nor holds any stays as it is."""
    if isinstance(data, Tensor):
        return data if data.is_cuda else data.pin_memory()
    if isinstance(data, dict):
        return {name: _pinned(part) for name, part in data.items()}
    if isinstance(data, list | tuple):
        return getattr(type(data), "_make", type(data))([_pinned(part) for part in data])
    return data.pin_memory() if callable(getattr(data, "pin_memory", None)) else data


def _is_stream(dataset: Any) -> bool:
    # torch's IterableDataset has a __getitem__ too, which only raises.
    return isinstance(dataset, IterableDataset) or (
        not hasattr(dataset, "__getitem__") and (hasattr(dataset, "__iter__") or hasattr(dataset, "stride"))
    )


def _reader_of(dataset: Any, plan: BatchPlan, rank: int, seed: int, collate: Callable[[list[Any]], Any]) -> Reader:
    kind = StridedReader if callable(getattr(dataset, "stride", None)) else OnePassReader
    return kind(dataset, plan, rank, seed, seeded(collate, seed))


def _length_if_known(dataset: Any) -> int | None:
    """The length that a stream says it has, if it says one."""
    try:
        return len(dataset) if isinstance(dataset, Sized) else None
    except (TypeError, NotImplementedError):  # such as a chain of streams of which one does not know
        return None


def _length_of(dataset: Any) -> int:
    try:
        length = len(dataset)
    except TypeError:
        raise DataError(
            f"{type(dataset).__name__} has no length; a data set with __getitem__ needs __len__, "
            "one that can only be iterated has __iter__ and no __getitem__"
        ) from None
    if length < 1:
        raise DataError(f"the data set is empty (length {length}); it needs at least one sample")
    return length


def _refuse_what_is_no_data_set(dataset: Any) -> None:
    if isinstance(dataset, DataLoader):
        raise DataError(
            "a DataLoader was passed, which has already divided its data into batches; pass its data set instead "
            "(loader.dataset) and collate_fn and workers as arguments. In place of a sampler: shuffle, or a Subset "
            "whose indices name the samples, repeated ones too"
        )
    if isinstance(dataset, Iterator) and not isinstance(dataset, IterableDataset):
        raise DataError(
            f"an iterator ({type(dataset).__name__}) can be read only once; pass an object whose __iter__ begins anew"
        )
    if not any(hasattr(dataset, name) for name in ("__getitem__", "__iter__", "stride")):
        raise DataError(
            f"{type(dataset).__name__} is no data set; it needs __getitem__ and __len__, or __iter__, "
            "or pass tensors with one row per sample"
        )


def _note(dataset: Any, ranks: int) -> str:
    return (
        f"each of {ranks} ranks reads the whole of {type(dataset).__name__} and keeps its share, as it has no method "
        "stride(start, step) that gives every step-th sample from start on"
    )
