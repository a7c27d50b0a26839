"""Every exchange gives the tree's sum, bit for bit, on any world."""

import os

import pytest
import torch

from lockstep.batch import BatchPlan
from lockstep.collectives import TreeAccumulator, fold, open_all_reduce, open_group, shared_memory
from lockstep.collectives.all_reduce import GlooAllReduce
from lockstep.testing import run_ranks
from lockstep.world import World

LENGTHS = (1, 2, 15, 16, 17, 100, 4099)
MICRO_BATCHES = (1, 2, 3, 7, 8)  # also fewer than ranks, as at the end of an epoch
DTYPES = (torch.float32, torch.bfloat16, torch.float64)


def leaf(m, length, dtype):
    return (
        torch.randn(length, generator=torch.Generator().manual_seed(1000 * m + length)).mul_(10.0 ** (m - 4)).to(dtype)
    )


def expected(micro_batches, length, dtype):
    leaves = [leaf(m, length, dtype) for m in range(micro_batches)]
    return fold(micro_batches, [(m, m + 1) for m in range(micro_batches)], leaves, torch.add)


def wrong_sums(kind):
    """Which sums differ from the tree's, of many begun at once."""
    world = World.from_env(os.environ)
    group = open_group(world, torch.device("cpu"), 60)
    plan = BatchPlan(100, 1, world.size)
    if kind == "in chunks":
        shared_memory._FOLDED_BY_ALL = 200  # bytes: of the small ones the whole, of the others a chunk each
    exchange = (GlooAllReduce if kind == "gloo" else open_all_reduce)(group, plan.run)
    wrong = []
    try:
        for dtype in DTYPES:
            begun = []
            for length in LENGTHS:
                for micro_batches in MICRO_BATCHES:
                    held = TreeAccumulator(micro_batches, torch.add)
                    for m in plan.run(world.rank, micro_batches):
                        held.push((m, m + 1), leaf(m, length, dtype))
                    partials = [sums.clone() for sums in held.sums]
                    out = partials[-1] if partials else torch.full((length,), 7.0, dtype=dtype)
                    exchange.begin(out, partials, micro_batches)
                    begun.append((length, micro_batches, out))
                if length == 16:
                    exchange.finish()  # in the midst, and again at the end
            exchange.finish()
            wrong += [
                (str(dtype), length, micro_batches)
                for length, micro_batches, out in begun
                if not torch.equal(out, expected(micro_batches, length, dtype))
            ]
        group.barrier("all are through")
    finally:
        exchange.close()
        group.close()
    return type(exchange).__name__, wrong


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 5])
def test_sums_are_the_trees(world_size):
    told = run_ranks(wrong_sums, world_size, "best")
    assert {name for name, _ in told} == {"_NoAllReduce" if world_size == 1 else "SharedMemoryAllReduce"}
    assert [wrong for _, wrong in told] == [[]] * world_size


def test_large_sums_are_the_trees():
    told = run_ranks(wrong_sums, 3, "in chunks")
    assert told == [("SharedMemoryAllReduce", [])] * 3


@pytest.mark.parametrize("world_size", [2, 3, 5])
def test_sums_over_gloo_are_the_trees(world_size):
    told = run_ranks(wrong_sums, world_size, "gloo")
    assert told == [("GlooAllReduce", [])] * world_size


def test_the_tree_shows_in_the_bits():
    """Else the tests above would pass for any order of the sum."""
    values = [leaf(m, 4099, torch.float32) for m in range(8)]
    assert not torch.equal(sum(values[1:], values[0]), expected(8, 4099, torch.float32))
