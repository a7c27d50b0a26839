"""What sums through shared memory take."""

import os

import pytest
import torch

from lockstep.batch import BatchPlan
from lockstep.collectives import open_all_reduce, open_group
from lockstep.collectives.shared_memory import SharedMemoryArena
from lockstep.errors import PeerLost
from lockstep.testing import run_ranks
from lockstep.world import World


def shared_bytes():
    """Memory shared after one sum of all elements, and after as many cut in ten, with a small sum in between."""
    world = World.from_env(os.environ)
    group = open_group(world, torch.device("cpu"), 60)
    exchange = open_all_reduce(group, BatchPlan(world.size, 1, world.size).run)
    taken = []
    for cuts in ([100_000], [10_000] * 10, [100], [10_000] * 10):
        sums = [torch.ones(length) for length in cuts]
        for out in sums:
            exchange.begin(out, [out], world.size)
        exchange.finish()
        assert all(torch.equal(out, torch.full_like(out, world.size)) for out in sums)
        taken.append(_shared())
    group.barrier("all are through")
    exchange.close()
    group.close()
    return taken


def _shared():
    with open("/proc/self/maps") as maps:
        spans = [line.split()[0].split("-") for line in maps if "lockstep-sums" in line]
    return sum(int(end, 16) - int(first, 16) for first, end in spans)


def test_sums_that_are_cut_again_take_the_memory_that_is_there():
    for taken in run_ranks(shared_bytes, 3):
        assert 3 * 400_000 <= taken[0] < 3 * 400_000 + 8192
        assert taken == taken[:1] * 4


def after_another_has_left():
    """Rank 1 ends once both have the sum, before rank 0 says that it is done with the memory."""
    world = World.from_env(os.environ)
    group = open_group(world, torch.device("cpu"), 60)
    arena = SharedMemoryArena(group, "the reduction")
    arena.arrive()
    arena.wait()
    if world.rank == 1:
        arena.arrive()
        arena.close()
    group.barrier("rank 1 has left")
    if world.rank == 0:
        arena.arrive()
        arena.wait()  # rank 1 had arrived here
        arena.arrive()
        with pytest.raises(PeerLost, match="rank 1 left during the reduction"):
            arena.wait()
        arena.close()
    group.close()


def test_a_rank_that_leaves_after_its_sum_costs_the_others_nothing_of_theirs():
    run_ranks(after_another_has_left, 2)
