"""A computed permutation holds each place once, is drawn evenly, and stands in where a stored one would be too long."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from loaders import Numbers, loader_of, on_world, samples_of, steps_of
from lockstep.batch import BatchPlan
from lockstep.data.indexed import orders
from lockstep.data.indexed.orders import ComputedPermutation


@given(st.integers(1, 5000), st.integers(0, 2**63 - 1), st.data())
def test_each_place_comes_once_and_parts_are_those_of_the_whole(length, seed, data):
    permutation = ComputedPermutation(length, seed)
    whole = permutation[:]
    assert len(permutation) == length
    assert whole.dtype == torch.int64
    assert sorted(whole.tolist()) == list(range(length))
    start = data.draw(st.integers(0, length))
    assert permutation[start : start + 40].tolist() == whole[start : start + 40].tolist()


def test_a_length_that_is_none_is_refused():
    with pytest.raises(ValueError, match="a permutation of 0"):
        ComputedPermutation(0, 1)


def test_it_is_stable_between_versions():
    assert ComputedPermutation(10**9, 7)[123_456_789:123_456_793].tolist() == FROZEN


FROZEN = [674934815, 555668589, 347785493, 356633353]


@pytest.mark.parametrize("length", [2**16, 3**10 + 1])
def test_it_is_drawn_evenly(length):
    """The chi-square of what an ideal permutation would give, of 24 x 24 boxes: place, and what stands there.

    Also of neighbours, of which nothing of the one is to follow from the other.
    """
    boxes = 24
    for seed in range(3):
        values = ComputedPermutation(length, seed)[:].numpy()
        places = np.arange(length)
        for first, second in ((places, values), (values[:-1], values[1:]), (values[:-256], values[256:])):
            counts, _, _ = np.histogram2d(first, second, boxes)
            expected = len(first) / boxes**2
            chi_square = ((counts - expected) ** 2 / expected).sum()
            free = (boxes - 1) ** 2
            assert abs(chi_square - free) < 5 * np.sqrt(2 * free)


def test_seeds_give_unrelated_permutations():
    first, second = (ComputedPermutation(10**6, seed)[:1000] for seed in (1, 2))
    assert (first == second).sum() < 3


@pytest.mark.parametrize("kind", [torch.arange, Numbers])
@given(data=st.data())
def test_a_long_epoch_holds_each_sample_once_on_any_world_from_any_step(kind, data):
    length, sizes = data.draw(st.integers(11, 60)), (8, 2)
    first_step, world = data.draw(st.integers(0, length // 8)), data.draw(st.integers(1, 4))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(orders, "LONGEST_STORED", 10)
        alone = on_world(kind(length), sizes, 1, epoch=1)
        rest = on_world(kind(length), sizes, world, epoch=1, first_step=first_step)
    assert sorted(samples_of(alone)) == list(range(length))
    assert steps_of(rest) == {step: found for step, found in steps_of(alone).items() if step >= first_step}


def test_an_epoch_of_a_hundred_million_samples_takes_no_memory():
    length = 10**8 + 5
    loader = loader_of(Numbers(length), BatchPlan(256, 32, 1))
    last = [batch.data.tolist() for batch in loader.epoch(4, length // 256 - 1, padding="none")]
    assert len({number for data in last for number in data}) == 256 + 5
    assert isinstance(loader._sampler.order.indices(4), ComputedPermutation)
    assert loader.draw(4) is not None, "a checkpoint knows by which version it was computed"
    assert loader_of(Numbers(orders.LONGEST_STORED), BatchPlan(256, 32, 1)).draw(4) is None
