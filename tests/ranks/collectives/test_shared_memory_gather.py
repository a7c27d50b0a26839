"""Gathering through shared memory, where ranks let go of what they gathered at different times."""

import os

import torch

from lockstep.collectives import open_group
from lockstep.collectives.shared_memory import SharedMemoryGather
from lockstep.testing import run_ranks
from lockstep.world import World


def gathers():
    """Eight gathers of two numbers a rank; rank 0 keeps what it has gathered for two gathers more than the others."""
    world = World.from_env(os.environ)
    group = open_group(world, torch.device("cpu"), 60)
    gather, kept, right = SharedMemoryGather(group), [], True
    for number in range(8):
        whole = gather.allocate((2 * world.size,), dtype=torch.float32, device=torch.device("cpu"))
        whole[2 * world.rank :][:2] = 10 * number + world.rank
        gather(whole, whole, None)
        expected = [10.0 * number + rank for rank in range(world.size) for _ in range(2)]
        right &= whole.tolist() == expected
        kept.append((whole, expected))
        del whole
        kept = kept[-3 if world.rank == 0 else len(kept) :]
        right &= all(before.tolist() == then for before, then in kept)
    group.barrier("all are through")
    gather.close()
    group.close()
    return right


def test_a_rank_may_keep_what_it_gathered_for_longer_than_others_do():
    assert run_ranks(gathers, 2) == [True, True]
