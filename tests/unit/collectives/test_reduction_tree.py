"""The shape of sums does not depend on who adds."""

from functools import reduce

from hypothesis import given
from hypothesis import strategies as st

from lockstep.batch import BatchPlan
from lockstep.collectives import TreeAccumulator, fold, nodes_of
from lockstep.collectives.reduction_tree import parent_of

sizes = st.integers(1, 65)


def add(left, right):
    return f"({left}+{right})"


def whole(micro_batches):
    """The sum of all leaves in the tree's shape, spelt out."""
    return fold(micro_batches, [(m, m + 1) for m in range(micro_batches)], [str(m) for m in range(micro_batches)], add)


def sums_of(micro_batches, run):
    """What a rank holds after it has pushed its leaves one by one."""
    held = TreeAccumulator(micro_batches, add)
    alive = 0
    for m in run:
        held.push((m, m + 1), str(m))
        alive = max(alive, len(held.sums))
    return held, alive


@given(sizes, st.data())
def test_nodes_cover_the_run_exactly_with_the_largest_subtrees(micro_batches, data):
    first = data.draw(st.integers(0, micro_batches))
    run = range(first, data.draw(st.integers(first, micro_batches)))
    nodes = nodes_of(micro_batches, run)
    assert [m for first, end in nodes for m in range(first, end)] == list(run)
    parents = [parent_of(micro_batches, node) for node in nodes]
    for parent in parents:
        assert parent is None or not (run.start <= parent[0] and parent[1] <= run.stop), "two nodes are one"
    assert len(nodes) <= 2 * max(1, micro_batches.bit_length())


@given(sizes, st.data())
def test_any_partition_gives_the_same_sum(micro_batches, data):
    cuts = sorted(data.draw(st.lists(st.integers(0, micro_batches), max_size=6)))
    runs = [range(a, b) for a, b in zip([0, *cuts], [*cuts, micro_batches], strict=True)]
    nodes, sums = [], []
    for run in runs:
        held, alive = sums_of(micro_batches, run)
        assert held.nodes == nodes_of(micro_batches, run)
        assert alive <= 2 * max(1, micro_batches.bit_length())
        nodes += held.nodes
        sums += held.sums
    assert fold(micro_batches, nodes, sums, add) == whole(micro_batches)


@given(sizes, st.integers(1, 65))
def test_the_runs_of_a_plan_give_the_same_sum_on_any_world(micro_batches, world_size):
    plan = BatchPlan(65, 1, world_size)
    parts = [sums_of(micro_batches, plan.run(rank, micro_batches))[0] for rank in range(world_size)]
    nodes = reduce(list.__add__, [part.nodes for part in parts])
    sums = reduce(list.__add__, [part.sums for part in parts])
    assert fold(micro_batches, nodes, sums, add) == whole(micro_batches)


def test_the_tree_is_the_one_that_is_drawn():
    assert whole(8) == "(((0+1)+(2+3))+((4+5)+(6+7)))"
    assert whole(3) == "(0+(1+2))"
    assert whole(1) == "0"
