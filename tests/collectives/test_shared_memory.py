"""What sums through shared memory take."""

import os

import torch

from lockstep.batch import BatchPlan
from lockstep.collectives import open_all_reduce, open_group
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
