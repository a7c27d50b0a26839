"""Samplers, batch samplers and functions as the order of an epoch: each place of it once, in its step, on any world."""

import random
from itertools import accumulate

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    Dataset,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from loaders import Numbers, Stream, StridedStream, content, evaluated, loader_of, on_world, steps_of
from lockstep.batch import BatchPlan
from lockstep.errors import DataError, UsageError
from lockstep.seeding import seed_of

N = 12
DATA = {"tensor": torch.arange, "samples": Numbers}


def expected_of(batches, micro_batch):
    """{step: {index: (samples, place)}}, cut by hand."""
    table = {}
    for step, batch in enumerate(batches):
        parts = [batch[i : i + micro_batch] for i in range(0, len(batch), micro_batch)]
        table[step] = {
            index: (tuple(part), (step, index, len(parts), len(part), len(batch))) for index, part in enumerate(parts)
        }
    return table


indices = st.lists(st.integers(0, N - 1), min_size=1, max_size=20)
batches = st.lists(st.lists(st.integers(0, N - 1), min_size=1, max_size=7), min_size=1, max_size=5)


# ---- the law -----------------------------------------------------------------------------------------------------


@settings(max_examples=60)
@given(batches, st.integers(1, 4), st.sampled_from(sorted(DATA)), st.data())
def test_each_batch_of_a_batch_sampler_is_one_step_on_any_world(lists, micro_batch, kind, data):
    sizes = (max(map(len, lists)), micro_batch, True)
    expected = expected_of(lists, micro_batch)
    first_step = data.draw(st.integers(0, len(lists)))
    for world in (1, data.draw(st.integers(2, 4))):
        padding = data.draw(st.sampled_from(["none", "one", "even"]))
        options = {"batch_sampler": lists, "padding": padding}
        got = on_world(DATA[kind](N), sizes, world, first_step=first_step, **options)
        assert steps_of(got) == {step: parts for step, parts in expected.items() if step >= first_step}
        blocks = evaluated(DATA[kind](N), sizes, world, **options)
        flat = [content(b.data) for rank in blocks for b in rank if not b.position.is_padding]
        assert flat == [samples for parts in expected.values() for samples, _ in parts.values()]
        for rank in range(world):
            plan = BatchPlan(*sizes[:2], world, varies=True)
            loader = loader_of(DATA[kind](N), plan, rank, batch_sampler=lists)
            assert loader.micro_batches(0, first_step, padding=padding) == len(got[rank])
            assert loader.micro_batches_of_evaluation(padding=padding) == len(blocks[rank])
            assert len(loader.data_loader) == loader.steps_per_epoch == len(lists)
            steps = loader.steps(0)
            assert [steps.step_samples(s) for s in range(len(steps))] == list(map(len, lists))
            if padding == "one" and first_step < len(lists):
                assert sum(b.position.last for b in got[rank]) == len(lists) - first_step, "a rank missed a step"


@settings(max_examples=60)
@given(indices, st.sampled_from(["sampler", "order"]), st.integers(1, 6), st.booleans(), st.data())
def test_each_place_of_an_order_comes_once_on_any_world(order, way, global_batch, drop_last, data):
    micro_batch = data.draw(st.integers(1, global_batch))
    lists = [order[i : i + global_batch] for i in range(0, len(order), global_batch)]
    if drop_last and len(lists[-1]) < global_batch:
        lists.pop()
    options = {way: order if way == "sampler" else lambda epoch, generator: order, "drop_last": drop_last}
    for world in (1, data.draw(st.integers(2, 4))):
        got = on_world(torch.arange(N), (global_batch, micro_batch), world, **options)
        assert steps_of(got) == expected_of(lists, micro_batch)


class Growing:
    """A curriculum: each epoch one sample more, drawn again."""

    def __call__(self, epoch, generator):
        return torch.randperm(N, generator=generator)[: 4 + epoch]


@pytest.mark.parametrize("epoch", [0, 3])
def test_an_order_may_have_another_length_in_each_epoch(epoch):
    generator = torch.Generator().manual_seed(seed_of(7, "order", epoch))
    order = torch.randperm(N, generator=generator)[: 4 + epoch].tolist()
    expected = expected_of([order[:4], order[4:]] if epoch else [order], 2)
    for world in (1, 2, 3):
        got = on_world(torch.arange(N), (4, 2), world, epoch=epoch, order=Growing())
        assert steps_of(got) == expected
        loader = loader_of(torch.arange(N), BatchPlan(4, 2, world), 0, order=Growing())
        assert loader.micro_batches(epoch, padding="none") == len(got[0])
        assert loader.length == 4


# ---- randomness --------------------------------------------------------------------------------------------------


class OfOwnClass:
    """Draws from generators of its own, of three libraries, and knows the epoch."""

    def __init__(self):
        self.torch, self.python, self.numpy = torch.Generator(), random.Random(1), np.random.default_rng(2)
        self.old, self.epoch = np.random.RandomState(3), None

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return 5

    def __iter__(self):
        yield self.epoch
        yield int(torch.randint(N, (), generator=self.torch))
        yield self.python.randrange(N)
        yield self.numpy.integers(N)
        yield self.old.randint(N)


class Global(Sampler):
    def __iter__(self):
        yield from [random.randrange(N), np.random.randint(N), torch.randint(N, ())]


WEIGHTS = torch.arange(1.0, N + 1)
SAMPLERS = {
    "weighted": lambda: WeightedRandomSampler(WEIGHTS, 9),
    "weighted, its generator": lambda: WeightedRandomSampler(WEIGHTS, 9, generator=torch.Generator()),
    "with replacement": lambda: RandomSampler(range(N), replacement=True, num_samples=9),
    "subset": lambda: SubsetRandomSampler([3, 1, 4], generator=torch.Generator().manual_seed(5)),
    "own": OfOwnClass,
    "global": Global,
}
BATCHED = {name: lambda make=make: BatchSampler(make(), 2, False) for name, make in SAMPLERS.items()}


@pytest.mark.parametrize("way", ["sampler", "batch_sampler"])
@pytest.mark.parametrize("name", SAMPLERS)
def test_a_sampler_is_seeded_by_the_epoch_alone(name, way):
    make = (SAMPLERS if way == "sampler" else BATCHED)[name]

    def order(epoch, world):
        torch.rand(3), random.random(), np.random.rand()
        got = on_world(torch.arange(N), (2, 1, way == "batch_sampler"), world, epoch=epoch, **{way: make()})
        return [samples for parts in steps_of(got).values() for samples, _ in parts.values()]

    first = order(1, 1)
    assert first == order(1, 1) == order(1, 2)
    if name == "own":
        assert first[0] == (1,), "the epoch that it was told"
    # One that has gone through other epochs gives what a new one does.
    loader = loader_of(torch.arange(N), BatchPlan(2, 1, 1, varies=way == "batch_sampler"), **{way: make()})
    for epoch in (0, 3, 1):
        loader.draw(epoch)
        seen = [content(b.data) for b in loader.epoch(epoch, padding="none")]
    assert seen == first
    assert len({tuple(order(epoch, 1)) for epoch in range(4)}) > 1


def test_a_weighted_sampler_draws_what_torch_draws_after_the_same_seed():
    for epoch in (0, 2):
        torch.manual_seed(seed_of(7, "order", epoch))
        by_hand = list(WeightedRandomSampler(WEIGHTS, 9))
        (got,) = on_world(torch.arange(N), (3, 3), 1, epoch=epoch, sampler=SAMPLERS["weighted"]())
        assert [x for b in got for x in content(b.data)] == by_hand


@pytest.mark.parametrize("name", SAMPLERS)
def test_no_global_generator_is_moved_for_an_order(name):
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    loader_of(torch.arange(N), BatchPlan(4, 2, 1), sampler=SAMPLERS[name]()).draw(1)
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1:] == (random.getstate(), np.random.get_state()[1].tolist())


class Augmented(Dataset):
    def __len__(self):
        return N

    def __getitem__(self, index):
        return torch.tensor([index, torch.rand(()).item()], dtype=torch.float64)


def test_a_repeated_sample_is_augmented_differently_and_alike_on_any_world_and_with_loader_processes():
    def rows(world, workers=0):
        got = on_world(Augmented(), (3, 1), world, sampler=[5] * 6, workers=workers)
        return sorted(tuple(row) for rank in got for b in rank for row in b.data.tolist())

    alone = rows(1)
    assert len(set(alone)) == 6
    assert rows(2) == rows(3) == rows(2, workers=1) == alone


# ---- what is refused ---------------------------------------------------------------------------------------------


class GoesOn:
    """An iterator behind an `__iter__`."""

    def __init__(self):
        self.number = 0

    def __iter__(self):
        self.number += 1
        return iter([self.number])


class Failing:
    def __iter__(self):
        raise TypeError("of the user's own code")


class Wraps:
    def __init__(self, sampler):
        self.sampler = sampler

    def __iter__(self):
        return iter(self.sampler)


DIVIDED = DistributedSampler(range(N), num_replicas=2, rank=0)


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"sampler": [1], "shuffle": True}, UsageError, r"sampler=..., shuffle=...\): each determines the order"),
        ({"sampler": [1], "order": Growing()}, UsageError, r"sampler=..., order=...\)"),
        ({"sampler": GoesOn()}, UsageError, "GoesOn gives another order .* order=function"),
        ({"batch_sampler": BatchSampler(GoesOn(), 2, False)}, UsageError, "BatchSampler gives another order"),
        (
            {"order": lambda epoch, generator: [random.SystemRandom().randrange(N) for _ in range(99)]},
            UsageError,
            "anot",
        ),
        ({"sampler": iter([1, 2])}, UsageError, "list_iterator is an iterator"),
        ({"sampler": DIVIDED}, UsageError, "DistributedSampler divides the samples among ranks.*shuffle=True or False"),
        ({"batch_sampler": BatchSampler(DIVIDED, 2, False)}, UsageError, "holds a DistributedSampler, which divides"),
        ({"sampler": Wraps(DIVIDED)}, UsageError, "sampler=Wraps holds a DistributedSampler"),
        ({"order": [1, 2]}, UsageError, "sampler=indices"),
        ({"sampler": []}, DataError, "gives no sample in epoch 0"),
        ({"batch_sampler": []}, DataError, "gives no sample in epoch 0"),
        ({"sampler": [0, N]}, DataError, "from 0 to 12, and the data set has 12"),
        ({"sampler": [-N - 1]}, DataError, "must lie within it"),
        ({"sampler": [0.0]}, DataError, "something else than whole numbers"),
        ({"order": lambda epoch, generator: None}, DataError, "something else than whole numbers"),
        ({"order": lambda epoch, generator: torch.rand(3)}, DataError, "something else than whole numbers"),
        ({"sampler": [[0, 1]]}, DataError, "pass it as batch_sampler="),
        ({"batch_sampler": [0, 1]}, DataError, "pass it as sampler="),
        ({"batch_sampler": [[0], []]}, DataError, "an empty batch at step 1 of epoch 0"),
        ({"sampler": Failing()}, TypeError, "of the user's own code"),
    ],
)
def test_what_is_no_order_is_refused_with_a_way_out(options, error, says):
    with pytest.raises(error, match=says):
        loader_of(torch.arange(N), BatchPlan(4, 2, 1), **options)


@pytest.mark.parametrize("way", ["sampler", "batch_sampler", "order"])
def test_a_stream_has_no_indices_to_choose(way):
    with pytest.raises(DataError, match=f"{way}=..., but Stream is an iterable data set"):
        loader_of(Stream(5), BatchPlan(4, 2, 1), **{way: [1]})


def test_indices_come_as_lists_tensors_arrays_and_from_the_end():
    for order in (
        [0, -1],
        torch.tensor([0, -1], dtype=torch.int32),
        np.array([0, N - 1]),
        (torch.tensor(0), np.int8(-1)),
    ):
        for dataset in (torch.arange(N), Numbers(N)):
            (got,) = on_world(dataset, (2, 2), 1, sampler=order)
            assert [content(b.data) for b in got] == [(0, N - 1)]


# ---- evaluation on more ranks than micro-batches ---------------------------------------------------------------------


@pytest.mark.parametrize("kind", [torch.arange, Numbers, Stream, StridedStream])
@pytest.mark.parametrize("padding", ["none", "even"])
@pytest.mark.parametrize("length", [4, 7, 8])
def test_a_pass_may_have_fewer_micro_batches_than_there_are_ranks(kind, padding, length):
    got = evaluated(
        kind(length), (4, 2), 5, padding=padding, shuffle=False if kind in (torch.arange, Numbers) else None
    )
    real = [b for rank in got for b in rank if not b.position.is_padding]
    assert sorted(x for b in real for x in content(b.data)) == list(range(length))
    if kind in (torch.arange, Numbers):
        assert [x for b in real for x in content(b.data)] == list(range(length))
    if padding == "even":
        assert len(set(map(len, got))) == 1, "ranks must make equally many passes"


@given(batches, st.integers(1, 4))
def test_steps_of_batches_lie_end_to_end(lists, micro_batch):
    steps = BatchPlan(7, micro_batch, 1, varies=True).epoch_of_batches([len(batch) for batch in lists])
    assert list(steps.starts) == list(accumulate(map(len, lists), initial=0))[:-1]
    places = [steps.place(number) for number in range(steps.micro_batches)]
    assert places == [(s, i) for s in range(len(steps)) for i in range(steps.micro_batches_of(s))]
