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
    open_gather,
    open_group,
)
from lockstep.collectives.reduce_scatter import _TreeSum
from lockstep.collectives.reduction_plan import turns_of
from lockstep.collectives.shared_memory import SharedMemoryExchange
from lockstep.errors import MismatchError
from lockstep.world import World
from worlds import on_world


@given(st.integers(1, 40), st.integers(1, 5), st.integers(1, 4), st.booleans())
def test_what_the_ranks_of_a_copy_exchange_folds_into_the_nodes_of_their_common_run(micro, ranks, copies, in_turn):
    plan = BatchPlan(micro, 1, ranks * copies, in_turn=ranks if in_turn else 1)
    passes = -(-micro // plan.world_size)
    for first in range(0, plan.world_size, ranks):
        runs = [plan.run(rank, micro) for rank in range(first, first + ranks)]
        sums = TreeAccumulator(micro, lambda left, right: left + right)
        turns = turns_of(micro, runs, passes)
        assert len(turns) == passes
        for turn in turns:
            for node in (node for nodes in turn for node in nodes):
                sums.push(node, node[1] - node[0])
            assert len(sums.nodes) <= 2 * micro.bit_length()
        indices = sorted(index for run in runs for index in run)
        assert sums.nodes == nodes_of(micro, range(indices[0], indices[-1] + 1) if indices else range(0))


def gradient(micro_batch, length):
    """Of sizes that no two orders of adding up agree on."""
    return torch.randn(length, generator=torch.Generator().manual_seed(micro_batch)) * 10.0**micro_batch


def scattered(ranks, micro_batches, part, in_turn, shares_memory):
    """This rank's part of the sums, the tree's and the fast one; and where it begins."""
    group = open_group(World.from_env(os.environ), torch.device("cpu"), 30)
    shard_groups = ShardGroups(group, ranks)
    shard_groups.shares_memory &= shares_memory
    runs = BatchPlan(micro_batches[0], 1, group.size, in_turn=ranks if in_turn else 1).run
    ways = TreeReduceScatter(shard_groups, runs), NativeReduceScatter(shard_groups)
    found = []
    for of in micro_batches:
        run = runs(group.rank, of)
        passes = -(-of // group.size)
        sums = [way.begin(of) for way in ways]
        for turn, index in enumerate([None] * (passes - len(run)) + [*run]):
            for one in sums:
                value = one.allocate(part * ranks, torch.float32)
                value.copy_(torch.full_like(value, torch.nan) if index is None else gradient(index, part * ranks))
                one.add(value, index)
                if in_turn:  # nothing whole is kept between turns, and of parts few, each in memory of its own
                    held = one._parts.sums if isinstance(one, _TreeSum) else [one._part]
                    assert len(held) <= of.bit_length()
                    assert one is sums[1] or not one._whole.sums
                    assert turn == passes - 1 or all(h.untyped_storage().nbytes() == 4 * part for h in held)
        out, fast = torch.empty(part), torch.empty(part)
        for one, into in zip(sums, (out, fast), strict=True):
            one.finish(into)
        found.append((out, fast, shard_groups.gather(out)))
    for way in ways:
        way.close()
    group.close()
    return found


@pytest.mark.parametrize("world_size", [2, 4])
def test_every_rank_gets_its_part_of_the_tree_of_sums(world_size):
    steps, part = (11, 7, 2, 1), 5
    cases = [
        (ranks, steps, part, in_turn, shares_memory)
        for ranks in (1, 2, world_size)
        for in_turn in (False, True)
        for shares_memory in (False, True)
        if ranks > 1 or not (in_turn or shares_memory)
    ]
    for (ranks, *_), by_rank in zip(cases, on_world(world_size, [(scattered, *case) for case in cases]), strict=True):
        for step, of in enumerate(steps):
            leaves = [gradient(m, part * ranks) for m in range(of)]
            total = fold(of, [(m, m + 1) for m in range(of)], leaves, lambda left, right: left + right)
            for rank, found in enumerate(by_rank):
                out, fast, whole = found[step]
                expected = total[rank % ranks * part :][:part]
                assert torch.equal(out, expected), (ranks, of, rank)
                assert torch.equal(whole, total)
                torch.testing.assert_close(fast, expected, rtol=1e-4, atol=1e-3)


def waits_for_a_slow_reader(gather, group):
    """Whether the leader still reads what was gathered when another rank has let go of it and writes what is next."""
    last = torch.zeros(1, dtype=torch.uint8)
    before = gather.allocate((8,), dtype=torch.float32, device=group.device)
    before.fill_(1)
    gather(before, before, None)
    now = gather.allocate((8,), dtype=torch.float32, device=group.device)
    gather(now, now, None)
    if not group.leads:
        del before
    after = gather.allocate((8,), dtype=torch.float32, device=group.device) if not group.leads else None
    if after is not None:
        after.fill_(2)
    if group.rank == 1:
        group.send(last, 0, "that all is written")
    if group.leads:
        group.receive(last, 1, "that all is written")
        return bool((before == 1).all())
    return True


def exchanges():
    """What the leader reads late of an exchange, when another rank has begun the next one."""
    group = open_group(World.from_env(os.environ), torch.device("cpu"), 30)
    exchange, last = SharedMemoryExchange(group), torch.zeros(1, dtype=torch.uint8)
    for number in range(3):
        value = exchange.allocate(8, torch.float32, group.device).fill_(number)
        pieces = exchange([value], [1, 1], value)
    if group.leads:
        group.receive(last, 1, "that all is written")
    else:
        exchange.allocate(8, torch.float32, group.device).fill_(9)
        group.send(last, 0, "that all is written")
    read = torch.stack(list(pieces)).unique().tolist()
    exchange.close()
    group.close()
    return read


def test_what_is_read_late_is_not_written_again():
    assert on_world(2, [(exchanges,)]) == [[[2.0]] * 2]


def gathers(ranks):
    """What each gather gives, over lengths that differ, while results are held in several ways; then other lengths."""
    group = open_group(World.from_env(os.environ), torch.device("cpu"), 30)
    gather = open_gather(ShardGroups(group, ranks))
    rank, found, held = group.rank % ranks, [], []
    for number in range(12):
        part = 3 + 5 * (number % 4)
        whole = gather.allocate((part * ranks,), dtype=torch.float32, device=group.device)
        whole[rank * part : (rank + 1) * part] = 100 * number + torch.arange(part) + part * rank
        gather(whole, whole[rank * part :][:part], None)
        held = [*held[-(number % 3) :], (number, whole)] if number % 3 else [(number, whole)]
        found += [torch.equal(w, 100 * n + torch.arange(len(w)).float()) for n, w in held]
    areas = len(gather._areas)
    del whole, held
    found.append(waits_for_a_slow_reader(gather, group))
    wrong = gather.allocate(((1 + group.rank) * ranks,), dtype=torch.float32, device=group.device)
    with pytest.raises(MismatchError, match=r"forward\(\) must call the same blocks in the same order"):
        gather(wrong, wrong, None)
    gather.close()
    group.close()
    return all(found), areas


def test_gathers_share_memory_that_nobody_reads_any_more():
    for by_rank in on_world(4, [(gathers, 2), (gathers, 4)]):
        assert by_rank == [(True, by_rank[0][1])] * 4
        assert by_rank[0][1] <= 5


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
