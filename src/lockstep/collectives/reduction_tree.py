r"""The reduction tree, the shape of every sum: a binary tree over the micro-batches of a step.

    micro-batch     0   1   2   3   4   5   6   7          M = 8
                     \ /     \ /     \ /     \ /
                     0:2     2:4     4:6     6:8           splits at midpoints
                        \   /           \   /
                         0:4             4:8
                             \         /
                                 0:8

Floating-point addition commutes but does not associate: with the shape fixed, it does not matter which rank adds, when,
or on which side an operand stands. A rank holds a run of neighbouring micro-batches; the largest subtrees within the
run are its *nodes*, at most about 2 log2(M) of them. If ranks take micro-batches in turn, each micro-batch is a node.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, Generic, TypeVar

T = TypeVar("T")

#: A subtree, by the micro-batches [first, end) below it.
Node = tuple[int, int]


def nodes_of(micro_batches: int, run: range) -> list[Node]:
    """The largest subtrees that together hold exactly the micro-batches of ``run``, from left to right."""

    def within(first: int, end: int) -> list[Node]:
        if run.start >= end or run.stop <= first:
            return []
        if end - first == 1:
            return [(first, end)] if first in run else []
        if run.step == 1 and run.start <= first and end <= run.stop:
            return [(first, end)]
        middle = (first + end) // 2
        return within(first, middle) + within(middle, end)

    return within(0, micro_batches)


def parent_of(micro_batches: int, node: Node) -> Node | None:
    """The subtree one level above ``node``; None above the root."""
    above: Node | None = None
    first, end = 0, micro_batches
    while (first, end) != node:
        above = (first, end)
        middle = (first + end) // 2
        first, end = (first, middle) if node[1] <= middle else (middle, end)
    return above


class TreeAccumulator(Generic[T]):
    """Sums pushed from left to right, where siblings are added at once: holds at most about log2(M) + 1 sums."""

    def __init__(self, micro_batches: int, add: Callable[[T, T], T]) -> None:
        self._micro_batches: Final = micro_batches
        self._add: Final = add
        self.nodes: list[Node] = []  #: of the held sums, from left to right
        self.sums: list[T] = []  #: one for each node

    def push(self, node: Node, value: T) -> None:
        """Hold ``value`` as the sum of ``node``; ``add(left, right)`` may reuse the memory of its operands."""
        while self.nodes:
            left, above = self.nodes[-1], parent_of(self._micro_batches, node)
            if above is None or parent_of(self._micro_batches, left) != above:
                break
            value = self._add(self.sums.pop(), value)
            self.nodes.pop()
            node = above
        self.nodes.append(node)
        self.sums.append(value)


def fold(micro_batches: int, nodes: Sequence[Node], values: Sequence[T], add: Callable[[T, T], T]) -> T:
    """The sum at the root, from values for ``nodes`` that together cover the tree from left to right."""
    sums = TreeAccumulator(micro_batches, add)
    for node, value in zip(nodes, values, strict=True):
        sums.push(node, value)
    (total,) = sums.sums
    return total
