"""Each sample once, the same micro-batches on any world (P3 and the data's part of P1), and what is refused."""

import dataclasses
import itertools
import random
from collections import Counter
from itertools import islice, pairwise
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset

from loaders import (
    Meeting,
    Numbers,
    Shards,
    Stream,
    StridedStream,
    batch_sizes,
    content,
    loader_of,
    on_world,
    samples_of,
    steps_of,
)
from lockstep.batch import BatchPlan
from lockstep.data import choose_workers, is_in_memory
from lockstep.data.indexed.orders import ShuffledOrder
from lockstep.data.indexed.sampling import epoch_positions
from lockstep.data.iterable.stream_agreement import bytes_of
from lockstep.errors import DataError

KINDS = {
    "tensor": torch.arange,
    "subset": lambda n: Subset(TensorDataset(torch.arange(n + 3)), range(3, n + 3)),
    "samples": Numbers,
    "stream": Stream,
    "strided": StridedStream,
    "shards": Shards,
}


@st.composite
def cases(draw, streams=False):
    length, sizes, micro_batches = draw(batch_sizes(streams))
    worlds = draw(st.lists(st.integers(1, micro_batches), min_size=1, max_size=3))
    return length, sizes, worlds, draw(st.booleans())


# ---- the law -----------------------------------------------------------------------------------------------------


@given(cases(), st.booleans(), st.integers(0, 3))
def test_order_holds_each_sample_once_through_changing_worlds(case, shuffle, epoch):
    length, sizes, worlds, drop_last = case
    steps = BatchPlan(*sizes, 1).steps(length, drop_last=drop_last)
    order = ShuffledOrder(lambda: length, 7, shuffle=shuffle).indices(epoch)
    seen = Counter()
    for step in range(steps):
        plan = BatchPlan(*sizes, worlds[step % len(worlds)])  # a resize before every step
        divided, indices = plan.epoch(length, drop_last=drop_last), []
        for rank in range(plan.world_size):
            positions = list(epoch_positions(divided, rank, first_step=step, padding="none"))
            mine = [p for p in positions if p.step == step]
            seen.update(int(i) for p in mine for i in order[divided.rows(p)])
            indices += [p.index for p in mine]
            assert [p.last for p in mine] == [False] * (len(mine) - 1) + [True] * bool(mine)
            assert {p.step for p in positions} <= set(range(step, steps))
            assert all(step * plan.global_batch <= divided.rows(p).start < (step + 1) * plan.global_batch for p in mine)
        assert indices == list(range(len(indices)))
    left_out = length % sizes[0] if drop_last else 0
    assert sum(seen.values()) == len(seen) == length - left_out
    assert set(seen) <= set(range(length))


@given(cases(streams=True), st.sampled_from(sorted(KINDS)), st.integers(0, 2))
def test_each_sample_once_and_the_same_micro_batches_on_any_world(case, kind, epoch):
    length, sizes, worlds, drop_last = case
    dataset = KINDS[kind](length)
    alone = on_world(dataset, sizes, 1, epoch=epoch, drop_last=drop_last)
    expected = length - (length % sizes[0] if drop_last else 0)
    first = 3 if kind == "subset" else 0
    seen = sorted(samples_of(alone))
    assert len(seen) == expected
    assert len(set(seen)) == expected
    assert set(seen) <= set(range(first, first + length))
    for world in worlds:
        many = on_world(dataset, sizes, world, epoch=epoch, drop_last=drop_last)
        if expected:
            assert steps_of(many) == steps_of(alone)
        else:
            assert not any(many)


@given(cases(streams=True), st.sampled_from(sorted(KINDS)), st.data())
def test_an_epoch_resumes_at_any_step_on_another_world(case, kind, data):
    length, sizes, worlds, drop_last = case
    dataset = KINDS[kind](length)
    steps = BatchPlan(*sizes, 1).steps(length, drop_last=drop_last)
    first_step = data.draw(st.integers(0, steps))
    whole = samples_of(on_world(dataset, sizes, 1, drop_last=drop_last))
    before = []
    if first_step:
        before = samples_of(on_world(dataset, sizes, worlds[0], steps=first_step, drop_last=drop_last, padding="one"))
    after = samples_of(on_world(dataset, sizes, worlds[-1], first_step=first_step, drop_last=drop_last))
    assert sorted(before + after) == sorted(whole)


@given(cases(streams=True), st.sampled_from(sorted(KINDS)))
def test_every_rank_computes_in_every_step_if_padding_stands_in(case, kind):
    length, sizes, worlds, _ = case
    dataset = KINDS[kind](length)
    steps = BatchPlan(*sizes, 1).steps(length)
    for world in worlds:
        bare, shaded = (on_world(dataset, sizes, world, padding=padding) for padding in ("none", "one"))
        assert not any(b.position.is_padding for rank in bare for b in rank)
        assert [sum(b.position.last for b in rank) for rank in shaded] == [steps] * world
        for rank_bare, rank_shaded in zip(bare, shaded, strict=True):
            assert [content(b.data) for b in rank_shaded if not b.position.is_padding] == [
                content(b.data) for b in rank_bare
            ]
            padding = [b for b in rank_shaded if b.position.is_padding]
            assert all(
                b.position.index == b.position.of - 1 and b.position.last and len(content(b.data)) == b.position.samples
                for b in padding
            )
            assert all(content(b.data) == steps_of(bare)[b.position.step][b.position.index][0] for b in padding)


@given(cases(streams=True), st.sampled_from(sorted(KINDS)))
def test_with_even_padding_all_ranks_compute_equally_many_in_every_step(case, kind):
    length, sizes, worlds, _ = case
    dataset = KINDS[kind](length)
    for world in worlds:
        bare, even = (on_world(dataset, sizes, world, padding=padding) for padding in ("none", "even"))
        turns = []
        for rank_bare, rank_even in zip(bare, even, strict=True):
            assert [content(b.data) for b in rank_even if not b.position.is_padding] == [
                content(b.data) for b in rank_bare
            ]
            steps, here = [], []
            for batch in rank_even:
                here.append(batch)
                if batch.position.last:
                    assert sorted(here, key=lambda b: not b.position.is_padding) == here  # padding come first
                    steps.append(len(here))
                    here = []
            assert not here
            turns.append(steps)
        assert all(steps == turns[0] for steps in turns)


def test_a_padding_micro_batch_stands_in_where_the_last_step_is_shorter_than_the_world():
    got = on_world(torch.arange(9), (8, 2), 4, padding="one", shuffle=False)
    assert [
        [(content(b.data), b.position.is_padding, b.position.index, b.position.of) for b in rank[1:]] for rank in got
    ] == [
        [((8,), True, 0, 1)],
        [((8,), True, 0, 1)],
        [((8,), True, 0, 1)],
        [((8,), False, 0, 1)],
    ]


# ---- order -------------------------------------------------------------------------------------------------------


def test_order_changes_with_epoch_and_seed_and_leaves_global_generators_alone():
    state = torch.get_rng_state()
    orders = [
        ShuffledOrder(lambda: 100, seed, shuffle=True).indices(epoch).tolist() for seed in (0, 1) for epoch in (0, 1)
    ]
    assert len({tuple(o) for o in orders}) == 4
    assert orders[0] == ShuffledOrder(lambda: 100, 0, shuffle=True).indices(0).tolist()
    assert torch.equal(torch.get_rng_state(), state)


def test_order_is_stable_between_versions():
    # Written down once: a checkpoint of today must find the same samples tomorrow.
    assert ShuffledOrder(lambda: 8, 0, shuffle=True).indices(0).tolist() == [5, 0, 1, 6, 3, 7, 4, 2]


# ---- randomness --------------------------------------------------------------------------------------------------


class Augmented(Dataset):
    """Draws from every global generator, as augmentations do."""

    def __len__(self):
        return 21

    def __getitem__(self, index):
        return torch.tensor([index, float(torch.rand(())), random.random(), np.random.rand()], dtype=torch.float64)


class AugmentedAtOnce(Augmented):
    def __getitems__(self, indices):
        return [torch.cat([torch.tensor([i]), torch.rand(3)]) for i in indices]


class AugmentedStream(IterableDataset):
    """Draws in a generator, also for samples that another rank keeps: a shuffle buffer."""

    def __init__(self):
        self.epochs = []

    def set_epoch(self, epoch):
        self.epochs.append(epoch)

    def __iter__(self):
        start = random.randrange(1000)
        held = list(range(start, start + 4))
        for number in range(start + 4, start + 25):
            place = random.randrange(len(held))
            yield torch.tensor([held[place], torch.rand(()).item()], dtype=torch.float64)
            held[place] = number


def table_of(got):
    return sorted(row for rank in got for b in rank if not b.position.is_padding for row in map(tuple, b.data.tolist()))


@pytest.mark.parametrize("dataset", [Augmented(), Subset(Augmented(), range(0, 21, 2)), AugmentedAtOnce()])
def test_augmentation_depends_on_neither_world_nor_workers(dataset):
    alone = table_of(on_world(dataset, (8, 2), 1, epoch=1))
    assert len(alone) == len(dataset)
    assert len({row[1] for row in alone}) == len(dataset)
    for world in (2, 3, 4):
        torch.rand(5)
        assert table_of(on_world(dataset, (8, 2), world, epoch=1)) == alone
    assert table_of(on_world(dataset, (8, 2), 2, epoch=1, workers=1)) == alone
    assert table_of(on_world(dataset, (8, 2), 1, epoch=2)) != alone


class AugmentedByStride(IterableDataset):
    def __iter__(self):
        return self.stride(0, 1)

    def stride(self, start, step):
        return (torch.tensor([number, torch.rand(()).item()]) for number in range(start, 24, step))


class AugmentedWhole(IterableDataset):
    def __iter__(self):
        return (torch.tensor([number, torch.rand(()).item()]) for number in range(24))


@pytest.mark.parametrize("stream", [AugmentedByStride(), AugmentedWhole()])
def test_a_stream_draws_other_numbers_in_each_micro_batch_and_in_each_epoch(stream):
    first, second = (
        {row[1] for row in table_of(on_world(stream, (6, 2), 1, epoch=epoch, shuffle=False))} for epoch in (0, 1)
    )
    assert first.isdisjoint(second)
    # The first sample of each stride is read before its micro-batch is known.
    assert min(len(first), len(second)) >= 24 - 2


def test_persistent_workers_read_each_epoch_from_its_step_also_after_a_break():
    plan = BatchPlan(8, 2, 1)
    here, there = loader_of(Augmented(), plan), loader_of(Augmented(), plan, workers=2)

    def some(loader, epoch, first_step, batches):
        return [b.data.tolist() for b in islice(loader.epoch(epoch, first_step, padding="one"), batches)]

    for epoch, first_step, batches in [(0, 0, 99), (1, 0, 3), (1, 1, 99), (4, 2, 99), (0, 0, 1), (2, 0, 99)]:
        assert some(there, epoch, first_step, batches) == some(here, epoch, first_step, batches)
    there.close()


def test_workers_read_a_stream_as_this_process_does():
    plan = BatchPlan(6, 2, 1)
    for epoch, first_step in [(0, 0), (1, 2)]:
        tables = []
        for workers in (0, 2):
            loader = loader_of(AugmentedStream(), plan, agree=lambda counts: [counts], workers=workers)
            tables.append([b.data.tolist() for b in loader.epoch(epoch, first_step, padding="none")])
            loader.close()
        assert tables[0] == tables[1]


def test_a_stream_that_shuffles_itself_is_shuffled_alike_on_every_rank():
    alone = table_of(on_world(AugmentedStream(), (6, 2), 1, epoch=3))
    assert len(alone) == 21
    for world in (2, 3):
        assert table_of(on_world(AugmentedStream(), (6, 2), world, epoch=3)) == alone
    begun = table_of(on_world(AugmentedStream(), (6, 2), 2, epoch=3, steps=2))
    assert sorted(begun + table_of(on_world(AugmentedStream(), (6, 2), 3, epoch=3, first_step=2))) == alone


def test_a_stream_that_shuffles_as_it_begins_is_seeded_before_that():
    class Eager:
        def __iter__(self):
            return iter(random.sample(range(21), 21))

    def order(world):
        return steps_of(on_world(Eager(), (6, 2), world, epoch=3))

    alone = order(1)
    random.random()
    assert order(1) == order(2) == order(3) == alone


def test_a_stream_is_told_its_epoch():
    dataset = AugmentedStream()
    on_world(dataset, (6, 2), 1, epoch=3)
    assert dataset.epochs == [3]


# ---- what the user gets back ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("kind", [Numbers, Stream])
def test_a_loop_of_the_scripts_own_reads_all_outside_of_a_pass_and_this_ranks_part_within(kind, workers):
    plan, inside = BatchPlan(4, 1, 2), False
    loaders = [loader_of(kind(8), plan, rank, workers=workers, in_pass=lambda: inside) for rank in range(2)]
    try:
        alone = [content(batch) for batch in loader_of(kind(8), BatchPlan(4, 1, 1)).data_loader]
        outside = [[content(batch) for batch in loader.data_loader] for loader in loaders]
        begun = [iter(loader.data_loader) for loader in loaders]  # as `zip` does before the pass has begun
        inside = True
        within = [[content(batch) for batch in batches] for batches in begun]
    finally:
        for loader in loaders:
            loader.close()
    assert outside == [alone] * 2
    assert within == [alone[0:2] + alone[4:6], alone[2:4] + alone[6:8]]


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_the_loader_is_a_data_loader_and_gives_the_first_epoch_of_this_rank(kind):
    meeting = on_world(KINDS[kind](10), (4, 1), 2)
    for rank in range(2):
        loader = loader_of(KINDS[kind](10), BatchPlan(4, 1, 2), rank)
        assert isinstance(loader.data_loader, DataLoader)
        batches = [content(b) for b in loader.data_loader]
        if kind in ("stream", "strided"):
            assert loader.length is None
            assert loader.steps_per_epoch is None
            batches, expected = batches[:4], [content(b.data) for b in meeting[rank]][:4]
        else:
            assert len(loader.data_loader.dataset) == loader.length == 10
            assert loader.steps_per_epoch == 3
            expected = [content(b.data) for b in meeting[rank]]
        assert batches == expected


def test_the_data_set_behind_the_loader_is_as_the_user_gave_it():
    loader = loader_of(Numbers(5), BatchPlan(2, 1, 1))
    assert [loader.data_loader.dataset[i] for i in range(len(loader.data_loader.dataset))] == list(range(5))


class Pair(NamedTuple):
    x: torch.Tensor
    y: torch.Tensor


X, Y = torch.arange(12.0).reshape(6, 2), torch.arange(6)


@pytest.mark.parametrize(
    ("dataset", "kind"),
    [
        (TensorDataset(X, Y), list),
        ((X, Y), tuple),
        ([X, Y], list),
        (Pair(X, Y), Pair),
        (Subset(Subset(TensorDataset(X, Y), [-2, -1, 3, 1, 2, 0]), [-1, -2, 3, 0, 2, 1]), list),
    ],
)
@pytest.mark.parametrize("shuffle", [True, False])
def test_tensors_come_in_the_shape_they_were_given(dataset, kind, shuffle):
    assert is_in_memory(dataset)
    loader = loader_of(dataset, BatchPlan(4, 2, 1), shuffle=shuffle)
    seen = []
    for batch, again in zip(loader.epoch(0, padding="none"), loader.data_loader, strict=True):
        assert type(batch.data) is type(again) is kind
        x, y = batch.data
        assert torch.equal(x, X[y])
        assert torch.equal(x, again[0])
        assert torch.equal(y, again[1])
        seen += y.tolist()
    assert sorted(seen) == list(range(6))
    if not shuffle:
        assert seen == ([0, 2, 1, 4, 3, 5] if isinstance(dataset, Subset) else list(range(6)))


def test_a_dict_of_tensors_comes_as_a_dict():
    (first, *_) = loader_of({"x": X, "y": Y}, BatchPlan(4, 2, 1), shuffle=False).epoch(0, padding="none")
    assert first.data.keys() == {"x", "y"}
    assert first.data["y"].tolist() == [0, 1]


@pytest.mark.parametrize("shuffle", [True, False])
def test_a_batch_changed_in_place_leaves_the_data_set_as_it_was(shuffle):
    x = torch.ones(6)
    for batch in loader_of(x, BatchPlan(4, 2, 1), shuffle=shuffle).epoch(0, padding="none"):
        batch.data.zero_()
    assert x.sum() == 6


def test_a_collate_function_gets_lists_of_samples():
    loader = loader_of(
        TensorDataset(Y), BatchPlan(4, 2, 1), shuffle=False, collate_fn=lambda samples: ("mine", samples)
    )
    first = next(iter(loader.epoch(0, padding="none")))
    assert first.data == ("mine", [(torch.tensor(0),), (torch.tensor(1),)])


def test_a_list_of_samples_needs_a_collate_function():
    ragged, equal = [torch.zeros(3), torch.zeros(4)], [torch.zeros(3)] * 4
    for samples in (ragged, equal):
        (first, *_) = loader_of(samples, BatchPlan(2, 2, 1), shuffle=False, collate_fn=list).epoch(0, padding="none")
        assert [len(sample) for sample in first.data] == [len(sample) for sample in samples[:2]]
    assert [is_in_memory(samples) for samples in (ragged, equal)] == [False, True]


def test_data_in_memory_needs_no_seeding_and_moves_no_generator():
    state = torch.get_rng_state()
    list(loader_of((X, Y), BatchPlan(4, 2, 1)).epoch(0, padding="none"))
    assert torch.equal(torch.get_rng_state(), state)


# ---- agreement -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [Stream, StridedStream])
@pytest.mark.parametrize(
    ("length", "calls"), [(7, 1), (8, 2), (23, 2), (24, 3), (8 * 31, 6), (8 * 63 - 1, 6), (8 * 63, 7)]
)
def test_ranks_agree_on_twice_as_many_steps_each_time_and_end_together(kind, length, calls):
    meeting = Meeting(1)
    loader = loader_of(kind(length), BatchPlan(8, 2, 1), agree=meeting.agree_as(0))
    with meeting.turn:
        assert len(samples_of([list(loader.epoch(0, padding="one"))])) == length
    assert meeting.calls == [calls]


def test_ranks_agree_on_no_more_steps_than_fit_into_memory_and_read_those_one_by_one():
    read = []
    note = (
        read.append
    )  # not the list itself: a data set that counts is read once more, to see whether it gives the same

    class Large(Stream):
        def __iter__(self):
            for number in range(self.length):
                note(number)
                yield torch.zeros(2**20)  # 4 MiB

    meeting, ahead = Meeting(1), []
    loader = loader_of(Large(40), BatchPlan(1, 1, 1), agree=meeting.agree_as(0))
    with meeting.turn:
        for step, _ in enumerate(loader.epoch(0, padding="one")):
            ahead.append(len(read) - step)
    assert meeting.calls == [2 + 40 // 4]  # blocks of 1, 2, 4, 4, ...
    assert max(ahead) <= 2 * 4
    assert all(later <= before + 1 for before, later in pairwise(ahead[3:]))


def test_streams_divided_by_the_data_set_itself_are_found():
    class DividedByRank:
        def __init__(self):
            self.rank = iter(range(2))

        def __iter__(self):
            return iter(range(next(self.rank), 100, 2))

    with pytest.raises(DataError, match="different streams"):
        on_world(DividedByRank(), (8, 2), 2)


def test_a_stride_that_gives_too_much_is_found():
    class Wrong(Stream):
        def stride(self, start, step):
            return iter(range(start, self.length))

    with pytest.raises(DataError, match=r"different streams.*\[2, 2, 1, 0\]"):
        on_world(Wrong(3), (8, 2), 2)


def test_a_stride_that_draws_its_order_from_global_generators_is_the_same_for_all_micro_batches():
    class Shuffled(Stream):
        def stride(self, start, step):
            yield from torch.randperm(self.length).tolist()[start::step]

    def found(world, first_step=0):
        batches = itertools.chain(*on_world(Shuffled(21), (8, 2), world, epoch=3, first_step=first_step))
        return {(b.position.step, b.position.index): b.data.tolist() for b in batches}

    whole = found(1)
    assert sorted(itertools.chain(*whole.values())) == list(range(21))
    for world in (1, 2, 3):
        for first_step in range(3):
            assert found(world, first_step) == {at: data for at, data in whole.items() if at[0] >= first_step}


def test_what_a_batch_takes_counts_all_its_tensors():
    @dataclasses.dataclass
    class Both:
        x: torch.Tensor
        y: list

    assert bytes_of(Both(torch.zeros(1000), [np.zeros(500), {"text": "abc"}])) == 4000 + 4000 + 3


def test_a_wasteful_stream_is_named_once():
    assert "stride(start, step)" in loader_of(Stream(5), BatchPlan(4, 1, 2)).notes[0]
    assert loader_of(Stream(5), BatchPlan(4, 1, 1)).notes == ()
    assert loader_of(StridedStream(5), BatchPlan(4, 1, 2)).notes == ()
    assert loader_of(Numbers(5), BatchPlan(4, 1, 2)).notes == ()


# ---- refusals ------------------------------------------------------------------------------------------------------


class NoLength:
    def __getitem__(self, index):
        return index


@pytest.mark.parametrize(
    ("dataset", "says"),
    [
        (torch.zeros(0), r"empty \(length 0\)"),
        (Numbers(0), r"empty \(length 0\)"),
        (DataLoader(Numbers(4)), "pass its data set"),
        ((torch.zeros(3), torch.zeros(4)), r"differ in length \(3, 4\)"),
        ((torch.zeros(3), "abc"), "also holds a str"),
        (torch.tensor(3.0).expand(()), "without dimensions"),
        ([torch.zeros(3), torch.zeros(3)], "may be columns or samples"),
        (NoLength(), "NoLength has no length"),
        (iter([1, 2]), "can be read only once"),
        ((x for x in range(3)), "can be read only once"),
        (5, "int is no data set"),
        (Subset(TensorDataset(Y), [0, 6]), "0 to 6 of a data set of 6"),
    ],
)
def test_what_is_no_data_set_is_refused_with_a_way_out(dataset, says):
    with pytest.raises(DataError, match=says):
        loader_of(dataset, BatchPlan(4, 2, 1))


def test_a_stream_cannot_be_shuffled():
    with pytest.raises(DataError, match="has its own order; give shuffle=False"):
        loader_of(Stream(5), BatchPlan(4, 2, 1), shuffle=True)


def test_a_stream_needs_equal_micro_batches():
    with pytest.raises(DataError, match="use global_batch=6, or"):
        loader_of(Stream(5), BatchPlan(5, 2, 1))


def test_an_empty_stream_is_refused_when_it_is_read():
    with pytest.raises(DataError, match="gave no sample in epoch 2"):
        on_world(Stream(0), (4, 2), 2, epoch=2)


@pytest.mark.parametrize("dataset", [torch.arange(9), Numbers(9)])
def test_an_epoch_cannot_begin_after_its_end(dataset):
    loader = loader_of(dataset, BatchPlan(4, 2, 1))
    assert list(loader.epoch(0, 3, padding="one")) == []
    with pytest.raises(DataError, match="has 3 steps of 4"):
        list(loader.epoch(0, 4, padding="one"))


@pytest.mark.parametrize(
    ("cpus", "in_memory", "workers"), [(8, True, 0), (8, False, 7), (32, False, 8), (1, False, 0), (4, False, 3)]
)
def test_workers_are_chosen_from_the_cpus_of_a_rank(cpus, in_memory, workers):
    assert choose_workers(cpus, in_memory=in_memory) == workers
