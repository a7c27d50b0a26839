"""Gradients are folded along the tree, whoever adds which."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

from lockstep.batch import MicroBatchPosition
from lockstep.collectives import TreeAccumulator
from lockstep.errors import UsageError
from lockstep.strategies import ParameterSet
from lockstep.strategies.gradient_accumulation import TreeGradientAccumulator, add_into_left


class Joined(nn.Module):
    """The gradients of its parts are views of one tensor, in its layout or another one."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.parts = nn.ParameterList([nn.Parameter(torch.randn(rows, 3)) for rows in (1, 2, 3)])
        self.same = nn.ParameterList([nn.Parameter(torch.randn(3)) for _ in range(2)])
        self.flat = nn.Parameter(torch.randn(18))

    def forward(self, x, used):
        weight = torch.cat([*self.parts]) + self.flat.view(6, 3)
        return ((x @ weight.t()).square().sum() + (x @ torch.stack([*self.same]).t()).sin().sum()) * used[0]


class Branches(nn.Module):
    """Each micro-batch may use other layers, and one of them twice."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(3))

    def forward(self, x, used):
        for layer in used:
            x = (
                checkpoint(self.layers[layer], x, use_reentrant=True)
                if used.count(layer) > 1
                else self.layers[layer](x)
            )
        return x.square().sum()


def losses(model, used, m):
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(m)).requires_grad_()
    return model(x * 10.0 ** (m - 3), used)


def leaves(model, steps):
    """The gradients of each micro-batch by itself."""
    found = []
    for m, used in steps.items():
        losses(model, used, m).backward()
        found.append([torch.full_like(p, -0.0) if p.grad is None else p.grad for p in model.parameters()])
        model.zero_grad()
    return found


def folded(model, steps, micro_batches):
    """What a rank holds, and of which nodes, that computes these micro-batches."""
    target = ParameterSet(tuple(model.parameters()), everything=True)
    accumulator = TreeGradientAccumulator(target, micro_batches)
    for m, used in steps.items():
        position = MicroBatchPosition(m, micro_batches, last=m == max(steps))
        accumulator.prepare(position)
        losses(model, used, m).backward()
        accumulator.accumulate(position)
        assert all(p.grad is None for p in model.parameters())
    return accumulator._tree.nodes, accumulator._tree.sums


def expected(steps, gradients, micro_batches):
    tree = TreeAccumulator(micro_batches, add_into_left)
    for m, leaf in zip(steps, gradients, strict=True):
        tree.push((m, m + 1), leaf)
    return tree.nodes, tree.sums


def same(one, other):
    nodes, sums = one
    assert nodes == other[0]
    for mine, theirs in zip(sums, other[1], strict=True):
        for a, b in zip(mine, theirs, strict=True):
            assert a.view(torch.int32).equal(b.view(torch.int32))  # also the sign of a zero


@given(
    st.integers(1, 9).flatmap(
        lambda of: st.tuples(
            st.just(of),
            st.integers(0, of - 1),
            st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=3, unique=True), min_size=of, max_size=of),
        )
    )
)
@settings(max_examples=40)
def test_a_rank_holds_the_sums_of_its_nodes(case):
    of, first, used = case
    steps = {m: used[m] for m in range(first, of)}
    model = Branches()
    same(folded(model, steps, of), expected(steps, leaves(model, steps), of))


def test_gradients_that_are_parts_of_one_tensor_are_added_once_each():
    steps = {m: [m + 1] for m in range(5)}
    model = Joined()
    same(folded(model, steps, 5), expected(steps, leaves(model, steps), 5))


def test_what_is_used_twice_is_added_before_it_is_folded():
    steps = {m: [0, 1, 0] for m in range(8)}
    model = Branches()
    same(folded(model, steps, 8), expected(steps, leaves(model, steps), 8))


def test_what_is_used_twice_in_some_micro_batches_only_is_refused():
    with pytest.raises(UsageError, match="use_reentrant=False"):
        folded(Branches(), {0: [0, 1], 1: [0, 1, 0]}, 2)


def clamp(parameter):
    parameter.grad = parameter.grad.clamp(-1e-6, 1e-6)


def test_hooks_see_the_gradient_of_one_micro_batch():
    steps = {m: [0, 1] for m in range(4)}
    model = Branches()
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(clamp)
    same(folded(model, steps, 4), expected(steps, leaves(model, steps), 4))
