"""Every exchange gives the tree's sum, bit for bit, on any world."""

import os

import pytest
import torch

from lockstep.batch import BatchPlan
from lockstep.collectives import TreeAccumulator, all_reduce, fold, open_all_reduce, open_group, shared_memory
from lockstep.collectives.all_reduce import GlooAllReduce
from lockstep.collectives.reduction_plan import HostDivision, ReductionPlans
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


def wrong_sums(kind, hosts=None):
    """Which sums differ from the tree's, of many begun at once."""
    world = World.from_env(os.environ)
    group = open_group(world, torch.device("cpu"), 60)
    if hosts is not None:
        group.nodes = hosts
        all_reduce._LITTLE = 300  # bytes: some are summed in one stage, and some of the chunks are little, too
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


@pytest.mark.parametrize("hosts", [(0, 0, 1, 1), (0, 1, 0, 1), (0, 0, 1, 1, 2, 2), (0, 0, 0, 1, 1, 1), (0, 0, 1)])
def test_sums_within_hosts_and_then_between_them_are_the_trees(hosts):
    told = run_ranks(wrong_sums, len(hosts), "gloo", hosts)
    assert told == [("GlooAllReduce", [])] * len(hosts)


def sent_to_others(plan, ranks, hosts, length):
    """Elements of ``length`` that a rank sends to other hosts in a stage among ``ranks``, which gather by a ring."""
    cuts, here, after = plan.cuts(length), plan.rank, (plan.rank + 1) % len(ranks)
    is_other = [hosts[rank] != hosts[ranks[here]] for rank in ranks]
    scattered = sum(end - first for (first, end), other in zip(cuts, is_other, strict=True) if other)
    first, end = cuts[after]
    return len(plan.nodes_by_rank[here]) * scattered + is_other[after] * (length - (end - first))


@pytest.mark.parametrize(
    ("hosts", "each", "of_a_ring", "at_once"),
    [
        (1, 8, None, None),
        (2, 8, 1.0, 4.94),
        (4, 4, 1.0, 2.62),
        (16, 8, 1.0, 4.52),
        (3, 5, 1.67, 3.2),  # the tree's halves do not end where hosts do: each has two or three sums of its own
        (3, 4, 1.67, 2.69),
    ],
)
def test_between_hosts_ranks_send_what_a_ring_over_hosts_sends(hosts, each, of_a_ring, at_once):
    """Where the number of hosts is a power of two, or the micro-batches of a host are a subtree."""
    length, size = 1 << 24, hosts * each
    host_of = [rank // each for rank in range(size)]
    runs = BatchPlan(size, 1, size).run
    staged = in_one = 0
    for rank in range(size):
        division, whole = HostDivision(rank, host_of), ReductionPlans(rank, size, runs)(size)
        in_one += sent_to_others(whole, range(size), host_of, length)
        assert division.is_possible == (hosts > 1)
        if hosts > 1:
            within, across = division.stages(whole)
            assert sent_to_others(within, division.within, host_of, length) == 0
            first, end = within.cuts(length)[within.rank]
            staged += sent_to_others(across, division.across, host_of, end - first)
            assert len(across.folded) == 1
    ring = hosts * 2 * length * (hosts - 1) / hosts
    if hosts > 1:
        assert staged / ring == pytest.approx(of_a_ring, abs=0.01)
        assert in_one / ring == pytest.approx(at_once, abs=0.01)


def test_the_tree_shows_in_the_bits():
    """Else the tests above would pass for any order of the sum."""
    values = [leaf(m, 4099, torch.float32) for m in range(8)]
    assert not torch.equal(sum(values[1:], values[0]), expected(8, 4099, torch.float32))
