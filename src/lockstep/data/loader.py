"""The choice of the way to read a data set; objects that are no data set are refused."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial

from torch.utils.data import DataLoader, IterableDataset, Subset, default_collate

from lockstep.batch import BatchPlan
from lockstep.data.indexed.indexed_loader import (
    IndexedLoader,
    MicroBatchSampler,
    SampleSource,
    ScriptSampler,
    TensorSource,
)
from lockstep.data.indexed.orders import (
    Order,
    OrderFunction,
    ShuffledOrder,
    order_of_batch_sampler,
    order_of_function,
    order_of_sampler,
)
from lockstep.data.indexed.sampling import UserDataset
from lockstep.data.indexed.tensor_dataset import columns_of
from lockstep.data.iterable.iterable_dataset import StreamShare, refuse_unequal
from lockstep.data.iterable.iterable_loader import IterableLoader
from lockstep.data.iterable.stream_agreement import Agree
from lockstep.data.micro_batch_loader import MicroBatchLoader
from lockstep.data.shards.shard_streams import shard_stream_of
from lockstep.data.shards.sharded_dataset import ShardedSamples, ShardOrder, is_sharded
from lockstep.data.workers import CollateFunction, WorkerOptions
from lockstep.errors import DataError, UsageError


def open_order(
    dataset: UserDataset,
    *,
    seed: int,
    shuffle: bool | None,
    collate_fn: CollateFunction | None = None,
    sampler: Iterable[object] | None = None,
    batch_sampler: Iterable[object] | None = None,
    order: OrderFunction | None = None,
) -> Order | None:
    """The order in which samples of ``dataset`` are visited; None for an iterable data set, which has its own order.

    Args:
        dataset: see `open_micro_batch_loader`.
        seed: of the order.
        shuffle: a new order each epoch. None: yes, except for iterables, which come as they are.
        collate_fn: see `open_micro_batch_loader`; only whether one is given matters.
        sampler: gives the indices of an epoch.
        batch_sampler: gives batches of indices, each of which is one step.
        order: gives the indices from the epoch and a generator.

    Raises:
        UsageError: for more than one of ``sampler``, ``batch_sampler``, ``order`` and ``shuffle``; for a sampler that
            divides samples among ranks, or gives another order when it is asked again.
        DataError: for an object that is no data set, or an empty one; for indices outside of it; for a sampler, batch
            sampler or order with an iterable data set.
    """
    _refuse_what_is_no_data_set(dataset)
    given = {"sampler": sampler, "batch_sampler": batch_sampler, "order": order, "shuffle": shuffle or None}
    names = [name for name, value in given.items() if value is not None]
    if len(names) > 1:
        raise UsageError(
            f"run.loader({', '.join(f'{name}=...' for name in names)}): each determines the order; give only one"
        )
    if is_sharded(dataset):
        if names not in ([], ["shuffle"]):
            raise DataError(
                f"{names[0]}=..., but {type(dataset).__name__} lies in shards, which are read from beginning to end; "
                f"leave {names[0]} out, or give a data set with __getitem__ and __len__"
            )
        return ShardOrder(dataset.shard_lengths, seed, shuffle=shuffle is not False)
    if _is_stream(dataset):
        if names == ["shuffle"] and shard_stream_of(dataset) is not None:
            return None
        if names == ["shuffle"]:
            raise DataError(
                f"shuffle=True, but {type(dataset).__name__} is an iterable data set, which has its own order; "
                "give shuffle=False (it may shuffle itself: its generators are seeded alike on every rank)"
            )
        if names:
            raise DataError(
                f"{names[0]}=..., but {type(dataset).__name__} is an iterable data set, which has no indices; "
                f"leave {names[0]} out, or give a data set with __getitem__ and __len__"
            )
        return None
    length = partial(_length_of, dataset, may_be_columns=collate_fn is None)
    if sampler is not None:
        return order_of_sampler(sampler, length, seed)
    if batch_sampler is not None:
        return order_of_batch_sampler(batch_sampler, length, seed)
    if order is not None:
        return order_of_function(order, length, seed)
    return ShuffledOrder(length, seed, shuffle=shuffle is not False)


def open_micro_batch_loader(
    dataset: UserDataset,
    plan: BatchPlan,
    rank: int,
    *,
    order: Order | None,
    seed: int,
    drop_last: bool,
    workers: WorkerOptions,
    agree: Agree,
    in_pass: Callable[[], bool] = lambda: True,
    shuffle: bool | None = None,
    collate_fn: CollateFunction | None = None,
    pin_memory: bool = False,
) -> MicroBatchLoader:
    """The loader of ``rank`` for ``dataset``: tensors in memory, a data set with an index, or any iterable.

    Args:
        dataset: samples by index (``__getitem__`` and ``__len__``), shards of samples (`ShardedDataset`), an iterable
            of samples, or tensors with one row per sample: a `TensorDataset` or a `Subset` of a `TensorDataset`, a
            tensor, a tuple or dict of tensors.
        plan: how a step is divided.
        rank: whose micro-batches the loader gives.
        order: result of `open_order` for ``dataset``.
        seed: of each sample's random augmentation.
        drop_last: leave out the short step at the end of an epoch.
        workers: loader processes. Data in memory takes none; shards, and an iterable with ``stride`` or with shards,
            at most one for each of the rank's micro-batches of a step; any other iterable at most one, as it is read
            in order.
        in_pass: whether the script is in a loop over `Run.train` or `Run.evaluate` now, see `ScriptSampler`.
        agree: gathers the numbers of all ranks; collective, and used only for iterables, once for many steps.
        shuffle: of an iterable. False: its samples come in its own order, also where it has shards that ranks could
            divide; True: its shards come in another order each epoch, as they do with None where shards are enough.
        collate_fn: makes a batch of a list of samples, as for `torch.utils.data.DataLoader`.
        pin_memory: hand out tensors in page-locked memory, for asynchronous copies to a GPU.

    Raises:
        DataError: for tensors that cannot be divided into samples; for an iterable if ``micro_batch`` does not divide
            ``global_batch``, or if ``shuffle`` is true and shards are too few.
    """
    if order is None:
        refuse_unequal(plan)
        share = StreamShare.of(dataset, plan, rank, seed, collate_fn or default_collate)
        return IterableLoader(
            share,
            shuffle=shuffle,
            drop_last=drop_last,
            workers=workers,
            agree=agree,
            in_pass=in_pass,
            pin_memory=pin_memory,
        )
    sampler = MicroBatchSampler(plan, rank, order, seed, drop_last=drop_last)
    for_script = ScriptSampler(sampler, drop_last=drop_last, in_pass=in_pass)
    columns = columns_of(dataset) if collate_fn is None and not is_sharded(dataset) else None
    if columns is not None:
        return IndexedLoader(
            sampler, TensorSource(dataset, columns, sampler, for_script=for_script, pin_memory=pin_memory)
        )
    if is_sharded(dataset):
        dataset = ShardedSamples(dataset, most_open=plan.micro_batches + 1)
        workers = replace(workers, count=_even_part(len(plan.run(rank)), workers.count))
    source = SampleSource(
        dataset, sampler, for_script=for_script, workers=workers, collate_fn=collate_fn, pin_memory=pin_memory
    )
    return IndexedLoader(sampler, source)


def is_in_memory(dataset: UserDataset) -> bool:
    """Whether ``dataset`` lies in memory as tensors, so that loader processes would help nothing."""
    try:
        return columns_of(dataset) is not None
    except DataError:  # unusable tensors, which `open_micro_batch_loader` refuses with the reason
        return True


def _even_part(micro_batches: int, workers: int) -> int:
    """The largest number of loader processes, up to ``workers``, that divides the ``micro_batches`` of a step.

    So each micro-batch of a step is always read by the same process.
    """
    return max((count for count in range(1, workers + 1) if micro_batches % count == 0), default=0)


def _is_stream(dataset: UserDataset) -> bool:
    # torch's IterableDataset has a __getitem__ too, which only raises.
    return isinstance(dataset, IterableDataset) or (
        not hasattr(dataset, "__getitem__")
        and any(hasattr(dataset, name) for name in ("__iter__", "stride", "read_shard"))
    )


def _length_of(dataset: UserDataset, *, may_be_columns: bool) -> int:
    """The number of samples of ``dataset``; of columns, such as a dict of tensors, the length of each column."""
    # A Subset knows its length, and finding its columns would take time.
    columns = columns_of(dataset) if may_be_columns and not isinstance(dataset, Subset) else None
    try:
        length = len(dataset if columns is None else columns)
    except TypeError:
        raise DataError(
            f"{type(dataset).__name__} has no length; a data set with __getitem__ needs __len__, "
            "an iterable one has __iter__ and no __getitem__"
        ) from None
    if length < 1:
        raise DataError(f"the data set is empty (length {length}); it needs at least one sample")
    return length


def _refuse_what_is_no_data_set(dataset: UserDataset) -> None:
    if isinstance(dataset, DataLoader):
        raise DataError(
            "a DataLoader was passed, which has already divided its data into batches; pass its data set instead "
            "(loader.dataset), and collate_fn, workers and sampler or batch_sampler as arguments"
        )
    if isinstance(dataset, Iterator) and not isinstance(dataset, IterableDataset):
        raise DataError(
            f"an iterator ({type(dataset).__name__}) can be read only once; pass an object whose __iter__ starts over"
        )
    if not any(hasattr(dataset, name) for name in ("__getitem__", "__iter__", "stride", "read_shard")):
        raise DataError(
            f"{type(dataset).__name__} is no data set; it needs __getitem__ and __len__, or __iter__, "
            "or pass tensors with one row per sample"
        )
