"""Who adds what in a step of so many micro-batches; nothing of it depends on the tensors' contents."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Final, TypeVar

from lockstep.collectives.reduction_tree import Node, nodes_of, parent_of

T = TypeVar("T")

Runs = Callable[[int, int], range]
"""``runs(rank, micro_batches)``: the micro-batches that a rank computes in a step of so many, see `BatchPlan.run`."""

#: Chunks begin on multiples of this many elements, so that no two ranks' chunks share a cache line.
_ALIGN = 16


class ReductionPlan:
    """A plan of one rank: the nodes that each rank brings, and the chunk of the sum that each rank adds up.

    Args:
        rank: whose plan it is.
        size: how many ranks there are.
        runs: what each of them computes.
        micro_batches: of the step.
    """

    def __init__(self, rank: int, size: int, runs: Runs, micro_batches: int) -> None:
        self.rank: Final = rank
        self.micro_batches: Final = micro_batches
        self.nodes_by_rank: Final = [nodes_of(micro_batches, runs(r, micro_batches)) for r in range(size)]
        #: from left to right
        self.all_nodes: Final[list[Node]] = sorted(node for nodes in self.nodes_by_rank for node in nodes)
        places = {node: place for place, node in enumerate(self.all_nodes)}
        #: where each rank's nodes stand among all
        self.places: Final = [[places[node] for node in nodes] for nodes in self.nodes_by_rank]
        #: where each of `all_nodes` stands in what is received, rank after rank
        self.received_places: Final = self.from_left_to_right(range(len(self.all_nodes)))
        #: level after level, what is added to what of it: the places of all left ones, and those of their right ones
        self.additions: Final = _levels(micro_batches, dict(zip(self.all_nodes, self.received_places, strict=True)))
        # Two ranks with one node each are the two children of the root: addition commutes, so any all-reduce is exact.
        self.all_reduces: Final = size == 2 and all(len(nodes) == 1 for nodes in self.nodes_by_rank)

    def chunk(self, length: int) -> int:
        """Elements of a chunk of a tensor of ``length``; the last chunks are shorter or empty."""
        return -(-length // (len(self.nodes_by_rank) * _ALIGN)) * _ALIGN

    def cuts(self, length: int) -> list[tuple[int, int]]:
        """Where each rank's chunk begins and ends."""
        c = self.chunk(length)
        return [(min(r * c, length), min((r + 1) * c, length)) for r in range(len(self.nodes_by_rank))]

    def from_left_to_right(self, values: Iterable[T]) -> list[T]:
        """The values of `all_nodes`, from one for each node of each rank, rank after rank."""
        known = dict(zip((place for of_rank in self.places for place in of_rank), values, strict=True))
        return [known[place] for place in range(len(known))]


def turns_of(micro_batches: int, runs: Sequence[range], turns: int) -> list[list[list[Node]]]:
    """Which nodes ranks exchange in each of the ``turns`` in which they compute the micro-batches of a step.

    Ranks that take micro-batches in turn exchange each at once: those of a turn are neighbours, and what turn after
    turn gives is folded as far as it goes. Ranks with runs of neighbours fold these first, and exchange their nodes in
    the last turn.

    Args:
        micro_batches: of the step.
        runs: of the ranks that exchange, of which none is longer than ``turns``; shorter ones begin later.
        turns: passes that each rank makes, with its padding.

    Returns:
        For each turn and each rank its nodes, from left to right; empty where it has none to give then.
    """
    if all(run.step == 1 for run in runs):
        nothing: list[list[Node]] = [[] for _ in runs]
        return [*([nothing] * (turns - 1)), [nodes_of(micro_batches, run) for run in runs]]
    begin = [turns - len(run) for run in runs]
    return [
        [[(run[turn - b], run[turn - b] + 1)] if turn >= b else [] for run, b in zip(runs, begin, strict=True)]
        for turn in range(turns)
    ]


def _levels(micro_batches: int, places: dict[Node, int]) -> list[tuple[list[int], list[int]]]:
    """Which of the sums at ``places`` are added at once, until the leftmost one holds the sum at the root."""
    levels: list[tuple[list[int], list[int]]] = []
    while len(places) > 1:
        pairs: dict[Node, list[Node]] = {}
        for node in sorted(places):
            if (above := parent_of(micro_batches, node)) is not None:
                pairs.setdefault(above, []).append(node)
        lefts: list[int] = []
        rights: list[int] = []
        for above, children in pairs.items():
            if len(children) == 2:
                left, right = (places.pop(child) for child in children)
                lefts.append(left)
                rights.append(right)
                places[above] = left
        levels.append((lefts, rights))
    return levels


class ReductionPlans:
    """The plan for each number of micro-batches so far: a full step's, and perhaps a short last step's."""

    def __init__(self, rank: int, size: int, runs: Runs) -> None:
        self._rank, self._size, self._runs = rank, size, runs
        self._known: dict[int, ReductionPlan] = {}

    def __call__(self, micro_batches: int) -> ReductionPlan:
        """The plan of a step of ``micro_batches``."""
        plan = self._known.get(micro_batches)
        if plan is None:
            plan = self._known[micro_batches] = ReductionPlan(self._rank, self._size, self._runs, micro_batches)
        return plan
