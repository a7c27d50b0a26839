"""An evaluation is the epoch in its own order, one block for each rank, and passes know their length."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from loaders import Numbers, Shards, Stream, batch_sizes, content, evaluated, loader_of, on_world, place_of
from lockstep.batch import BatchPlan


class Sized(Stream):
    def __len__(self):
        return self.length


class StridedSized(Sized):
    def stride(self, start, step):
        return iter(range(start, self.length, step))


@st.composite
def cases(draw, streams=False):
    length, sizes, micro_batches = draw(batch_sizes(streams))
    return length, sizes, draw(st.integers(1, micro_batches)), draw(st.booleans())


@given(
    cases(), st.sampled_from([torch.arange, Numbers, Shards]), st.booleans(), st.sampled_from(["none", "one", "even"])
)
def test_the_ranks_blocks_are_the_order_of_the_epoch(case, kind, shuffle, padding):
    length, sizes, world, drop_last = case
    options = {"shuffle": shuffle, "drop_last": drop_last}
    (alone,) = on_world(kind(length), sizes, 1, **options)
    got = evaluated(kind(length), sizes, world, padding=padding, **options)
    mine = [[b for b in rank if not b.position.is_padding] for rank in got]
    described = [(content(b.data), place_of(b)) for rank in mine for b in rank]
    assert described == [(content(b.data), place_of(b)) for b in alone]
    if not shuffle:
        kept = BatchPlan(*sizes, 1).steps(length, drop_last=drop_last) * sizes[0] if drop_last else length
        assert [x for rank in mine for b in rank for x in content(b.data)] == list(range(kept))
    assert max(map(len, mine)) - min(map(len, mine)) <= 1
    for rank, own in zip(got, mine, strict=True):
        steps = [b.position.step for b in own]
        assert [b.position.last for b in own] == [step not in steps[place + 1 :] for place, step in enumerate(steps)]
        if alone:
            assert len(rank) == {"none": len(own), "one": max(1, len(own)), "even": max(map(len, mine))}[padding]
        assert [b.position.is_padding for b in rank] == sorted((b.position.is_padding for b in rank), reverse=True), (
            "padding come first"
        )


def test_ranks_that_find_no_micro_batch_meet_the_others_by_padding():
    got = evaluated(torch.arange(3), (8, 2), 4, padding="even", shuffle=False)
    assert [[(content(b.data), b.position.is_padding) for b in rank] for rank in got] == [
        [((2,), True)],
        [((0, 1), False)],
        [((2,), True)],
        [((2,), False)],
    ]


def test_loader_processes_read_a_block_as_this_process_does_between_epochs():
    plan = BatchPlan(8, 2, 3)
    for rank in range(3):
        here, there = loader_of(Numbers(21), plan, rank), loader_of(Numbers(21), plan, rank, workers=2)
        passes = [("evaluation", {}), ("epoch", {"epoch": 3}), ("evaluation", {})]
        for name, where in passes:
            a, b = ([content(m.data) for m in getattr(f, name)(**where, padding="none")] for f in (here, there))
            assert a == b
        there.close()


def test_a_stream_is_evaluated_as_it_is_trained_on():
    trained, got = (way(Stream(13), (4, 1), 2) for way in (on_world, evaluated))
    assert [[content(b.data) for b in rank] for rank in got] == [[content(b.data) for b in rank] for rank in trained]


# ---- lengths -------------------------------------------------------------------------------------------------------


@given(
    cases(streams=True),
    st.sampled_from([torch.arange, Numbers, Shards, Sized, StridedSized]),
    st.sampled_from(["none", "one", "even"]),
    st.data(),
)
def test_a_feed_tells_how_many_micro_batches_it_is_about_to_give(case, kind, padding, data):
    length, sizes, world, drop_last = case
    dataset = kind(length)
    steps = BatchPlan(*sizes, 1).steps(length, drop_last=drop_last)
    first_step = data.draw(st.integers(0, steps))
    got = on_world(dataset, sizes, world, first_step=first_step, padding=padding, drop_last=drop_last)
    in_evaluation = evaluated(dataset, sizes, world, padding=padding, drop_last=drop_last)
    for rank in range(world):
        loader = loader_of(dataset, BatchPlan(*sizes, world), rank, drop_last=drop_last)
        assert loader.micro_batches(0, first_step, padding=padding) == len(got[rank])
        assert loader.micro_batches_of_evaluation(padding=padding) == len(in_evaluation[rank])
        assert len(loader.data_loader) == steps, "the same on every world"


@pytest.mark.parametrize("kind", [torch.arange, Numbers, Shards, Sized, StridedSized])
def test_a_loader_can_be_iterated_whatever_its_length_says(kind):
    loader = loader_of(kind(20), BatchPlan(4, 1, 2))
    assert len(loader.data_loader) == 5
    assert len(list(loader.data_loader)) == 10


def test_a_stream_without_a_length_says_so():
    loader = loader_of(Stream(5), BatchPlan(4, 1, 1))
    assert loader.micro_batches(padding="none") is None
    assert loader.micro_batches_of_evaluation(padding="none") is None
    with pytest.raises(TypeError, match=r"len\(loader\).*Stream is an iterable data set.*__len__"):
        len(loader.data_loader)
    assert list(loader.data_loader) == [torch.tensor([n]) for n in range(5)]
