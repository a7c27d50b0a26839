"""Data sets of numbers, loaders of several ranks in one process, and what they gave."""

import threading

from hypothesis import strategies as st
from torch.utils.data import Dataset, IterableDataset

from lockstep.batch import BatchPlan
from lockstep.data import WorkerOptions, open_micro_batch_loader, open_order


class Numbers(Dataset):
    """A plain data set with an index."""

    def __init__(self, length):
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        if not 0 <= index < self.length:
            raise IndexError(index)
        return index


class Stream(IterableDataset):
    """A stream of ``length`` numbers without indices."""

    def __init__(self, length):
        self.length = length

    def __iter__(self):
        return iter(range(self.length))


class StridedStream(Stream):
    def __iter__(self):
        raise AssertionError("stride serves better")

    def stride(self, start, step):
        return iter(range(start, self.length, step))


class Shards:
    """Numbers in shards of given lengths, or of some that add up to ``length``; counts what is read."""

    def __init__(self, length, shard_lengths=None):
        self.shard_lengths = shard_lengths
        if shard_lengths is None:
            self.shard_lengths = []
            while length:
                self.shard_lengths.append(min(length, len(self.shard_lengths) * 2 % 5))  # 0 2 4 1 3 0 ...
                length -= self.shard_lengths[-1]
        self.opened = 0
        self.read = 0

    def read_shard(self, shard, start):
        self.opened += 1
        before = sum(self.shard_lengths[:shard])
        for number in range(before + start, before + self.shard_lengths[shard]):
            self.read += 1
            yield number


def no_agreement_needed(counts):
    raise AssertionError("only iterables ask the other ranks")


class Meeting:
    """An all-gather among threads, of which only one runs at a time: global generators are the process's own."""

    def __init__(self, size):
        self.size = size
        self.turn = threading.Lock()
        self.barrier = threading.Barrier(size, timeout=20)
        self.table = [None] * size
        self.calls = [0] * size

    def agree_as(self, rank):
        def agree(counts):
            self.calls[rank] += 1
            self.table[rank] = list(counts)
            self.turn.release()
            try:
                self.barrier.wait()
                everyone = list(self.table)
                self.barrier.wait()
            finally:
                self.turn.acquire()
            return everyone

        return agree


def loader_of(
    dataset,
    plan,
    rank=0,
    *,
    agree=no_agreement_needed,
    drop_last=False,
    workers=0,
    collate_fn=None,
    shuffle=None,
    sampler=None,
    batch_sampler=None,
    order=None,
    **options,
):
    order = open_order(
        dataset,
        seed=7,
        shuffle=shuffle,
        collate_fn=collate_fn,
        sampler=sampler,
        batch_sampler=batch_sampler,
        order=order,
    )
    return open_micro_batch_loader(
        dataset,
        plan,
        rank,
        order=order,
        seed=7,
        drop_last=drop_last,
        workers=WorkerOptions(workers),
        agree=agree,
        shuffle=shuffle,
        collate_fn=collate_fn,
        **options,
    )


def on_world(dataset, sizes, world, *, epoch=0, first_step=0, steps=None, padding="none", **options):
    """The micro-batches that each rank gets in ``steps`` steps, one list for each rank."""
    return passes(
        dataset, sizes, world, lambda loader: loader.epoch(epoch, first_step, padding=padding), steps=steps, **options
    )


def evaluated(dataset, sizes, world, *, padding="none", **options):
    """The micro-batches that each rank gets in an evaluation, one list for each rank."""
    return passes(dataset, sizes, world, lambda loader: loader.evaluation(padding=padding), **options)


def passes(dataset, sizes, world, over, *, steps=None, **options):
    """What ``over`` a loader gives each rank, one list for each."""
    meeting = Meeting(world)
    got = [[] for _ in range(world)]
    wrong = []

    def run(rank):
        with meeting.turn:
            try:
                plan = BatchPlan(*sizes[:2], world, *sizes[2:])
                loader = loader_of(dataset, plan, rank, agree=meeting.agree_as(rank), **options)
                for batch in over(loader):
                    got[rank].append(batch)
                    if steps is not None and batch.position.last and sum(b.position.last for b in got[rank]) == steps:
                        break
                loader.close()
            except BaseException as error:  # noqa: BLE001 - raised again, in the test's own thread
                meeting.barrier.abort()
                wrong.append(error)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if wrong:
        raise next((e for e in wrong if not isinstance(e, threading.BrokenBarrierError)), wrong[0])
    return got


def content(data):
    (column,) = data if isinstance(data, list) else [data]
    return tuple(column.tolist())


def samples_of(got):
    return [x for rank in got for batch in rank if not batch.position.is_padding for x in content(batch.data)]


def place_of(batch):
    """What a micro-batch says of where it stands: the same on any rank, and in evaluation as in training."""
    return (
        batch.position.step,
        batch.position.index,
        batch.position.of,
        batch.position.samples,
        batch.position.step_samples,
    )


def steps_of(got):
    """{step: {index of the micro-batch: (its samples, what it says of its place)}}, over all ranks."""
    table = {}
    for rank in got:
        step = None
        for b in rank:
            if not b.position.is_padding:
                assert step in (None, b.position.step), "the last one of a step said that it is not"
                place = table.setdefault(b.position.step, {})
                assert b.position.index not in place
                place[b.position.index] = (content(b.data), place_of(b))
                step = None if b.position.last else b.position.step
    return table


@st.composite
def batch_sizes(draw, streams=False):
    """The length of a data set, global batch and micro-batch, and how many micro-batches a step has.

    For ``streams`` the micro-batch divides the global batch, as they need.
    """
    micro_batch = draw(st.integers(1, 5))
    micro_batches = draw(st.integers(1, 6))
    spare = 0 if streams or micro_batches == 1 else draw(st.integers(0, micro_batch - 1))
    global_batch = micro_batch * micro_batches - spare
    return draw(st.integers(1, 4 * global_batch + 3)), (global_batch, micro_batch), micro_batches
