"""Sums of which each rank keeps a part: the tree's, no matter which ranks share a copy."""

import os

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lockstep.batch import BatchPlan
from lockstep.collectives import (
    NativeReduceScatter,
    ShardGroups,
    TreeAccumulator,
    TreeReduceScatter,
    broadcast_from_rank0,
    fold,
    nodes_of,
    open_group,
)
from lockstep.world import World
from worlds import on_world


@given(st.integers(1, 40), st.integers(1, 5), st.integers(1, 4))
def test_what_the_ranks_of_a_copy_bring_folds_into_the_nodes_of_their_common_run(micro_batches, ranks, copies):
    plan = BatchPlan(micro_batches, 1, min(ranks * copies, micro_batches))
    for first in range(0, ranks * copies, ranks):
        runs = [plan.run(rank, micro_batches) for rank in range(first, first + ranks) if rank < plan.world_size]
        sums = TreeAccumulator(micro_batches, lambda left, right: left + right)
        for run in runs:
            for node in nodes_of(micro_batches, run):
                sums.push(node, node[1] - node[0])
        together = range(runs[0].start, runs[-1].stop) if runs else range(0)
        assert sums.nodes == nodes_of(micro_batches, together)


def gradient(micro_batch, length):
    """Of sizes that no two orders of adding up agree on."""
    return torch.randn(length, generator=torch.Generator().manual_seed(micro_batch)) * 10.0**micro_batch


def scattered(ranks, micro_batches, part):
    """This rank's part of the sums, the tree's and the fast one; and where it begins."""
    group = open_group(World.from_env(os.environ), torch.device("cpu"), 30)
    shard_groups = ShardGroups(group, ranks)
    runs = BatchPlan(micro_batches[0], 1, group.size).run
    tree, quick = TreeReduceScatter(shard_groups, runs), NativeReduceScatter(shard_groups)
    found = []
    for of in micro_batches:
        sums = TreeAccumulator(of, lambda left, right: left + right)
        for micro_batch in runs(group.rank, of):
            sums.push((micro_batch, micro_batch + 1), gradient(micro_batch, part * ranks))
        out, fast = torch.empty(part), torch.empty(part)
        total = [torch.stack(sums.sums).sum(0)] if sums.sums else []
        tree(out, [s.clone() for s in sums.sums], of)
        quick(fast, total, of)
        found.append((out, fast, shard_groups.gather(out)))
    tree.close()
    group.close()
    return found


@pytest.mark.parametrize("world_size", [2, 4])
def test_every_rank_gets_its_part_of_the_tree_of_sums(world_size):
    steps, part = (7, 2, 1), 5
    cases = [(ranks, steps, part) for ranks in (1, 2, world_size)]
    for (ranks, _, _), by_rank in zip(cases, on_world(world_size, [(scattered, *case) for case in cases]), strict=True):
        for step, of in enumerate(steps):
            leaves = [gradient(m, part * ranks) for m in range(of)]
            total = fold(of, [(m, m + 1) for m in range(of)], leaves, lambda left, right: left + right)
            for rank, found in enumerate(by_rank):
                out, fast, whole = found[step]
                expected = total[rank % ranks * part :][:part]
                assert torch.equal(out, expected), (ranks, of, rank)
                assert torch.equal(whole, total)
                torch.testing.assert_close(fast, expected, rtol=1e-4, atol=1e-3)


def alike():
    group = open_group(World.from_env(os.environ), torch.device("cpu"), 30)
    mine = [
        torch.full((2, 3), float(group.rank)).t(),
        torch.tensor(group.rank > 0),
        torch.empty(0),
        torch.tensor([group.rank], dtype=torch.bfloat16),
    ]
    broadcast_from_rank0(group, mine)
    group.close()
    return [t.tolist() for t in mine]


def test_all_begin_with_what_rank_0_has():
    assert on_world(3, [(alike,)]) == [[[[[0.0, 0.0]] * 3, False, [], [0.0]]] * 3]
