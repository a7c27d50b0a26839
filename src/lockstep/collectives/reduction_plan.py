"""Plans of the additions by each rank in a step, which do not depend on the tensors' contents."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Final, TypeVar

from lockstep.collectives.reduction_tree import Node, nodes_of, parent_of

T = TypeVar("T")

Runs = Callable[[int, int], range]
"""``runs(rank, micro_batches)``: the micro-batches of ``rank`` in a step of ``micro_batches``, see `BatchPlan.run`."""

#: Chunks begin on multiples of this many elements, so that no two ranks' chunks share a cache line.
_ALIGN = 16


class ReductionPlan:
    """The plan of a rank: the nodes that each rank brings, and the chunk of the sum that each rank adds up.

    Args:
        rank: the rank of the plan.
        nodes_by_rank: the nodes of each rank, from left to right; all together may be only a part of the tree.
        micro_batches: of the step.
    """

    def __init__(self, rank: int, nodes_by_rank: Sequence[Sequence[Node]], micro_batches: int) -> None:
        self.rank: Final = rank
        self.micro_batches: Final = micro_batches
        self.nodes_by_rank: Final = nodes_by_rank
        #: from left to right
        self.all_nodes: Final[list[Node]] = sorted(node for nodes in nodes_by_rank for node in nodes)
        places = {node: place for place, node in enumerate(self.all_nodes)}
        #: the places of each rank's nodes in `all_nodes`
        self.places: Final = [[places[node] for node in nodes] for nodes in nodes_by_rank]
        #: the place of each of `all_nodes` in the received chunks, rank after rank
        self.received_places: Final = self.from_left_to_right(range(len(self.all_nodes)))
        folded = dict(zip(self.all_nodes, self.received_places, strict=True))
        #: the additions, level after level: the places of all left operands, and of their right operands
        self.additions: Final = _fold_levels(micro_batches, folded)
        #: the places of the remaining sums by node, from left to right: only the root, if the tree is whole
        self.folded: Final = dict(sorted(folded.items()))
        # Two ranks with one node each are the two children of the root: addition commutes, so any all-reduce is exact.
        self.all_reduces: Final = len(nodes_by_rank) == 2 and all(len(nodes) == 1 for nodes in nodes_by_rank)

    def chunk(self, length: int) -> int:
        """The elements of a chunk of a tensor of ``length``; the last chunk also has the remaining elements."""
        return length // (len(self.nodes_by_rank) * _ALIGN) * _ALIGN

    def cuts(self, length: int) -> list[tuple[int, int]]:
        """The beginning and end of each rank's chunk."""
        c, size = self.chunk(length), len(self.nodes_by_rank)
        return [(r * c, (r + 1) * c if r < size - 1 else length) for r in range(size)]

    def from_left_to_right(self, values: Iterable[T]) -> list[T]:
        """The values in the order of `all_nodes`, from ``values`` for each node of each rank, rank after rank."""
        known = dict(zip((place for of_rank in self.places for place in of_rank), values, strict=True))
        return [known[place] for place in range(len(known))]


def turns_of(micro_batches: int, runs: Sequence[range], turns: int) -> list[list[list[Node]]]:
    """The nodes that ranks exchange in each of the ``turns`` in which they compute the micro-batches of a step.

    Ranks that take micro-batches in turn exchange each micro-batch at once: the micro-batches of a turn are neighbours,
    and results of successive turns are added where they are siblings. Ranks with runs of neighbouring micro-batches add
    these first, and exchange their nodes in the last turn.

    Args:
        micro_batches: of the step.
        runs: of the exchanging ranks, each at most ``turns`` long; shorter runs begin later.
        turns: passes that each rank makes, with its padding.

    Returns:
        For each turn and each rank its nodes, from left to right; empty if the rank exchanges none in this turn.
    """
    if all(run.step == 1 for run in runs):
        nothing: list[list[Node]] = [[] for _ in runs]
        return [*([nothing] * (turns - 1)), [nodes_of(micro_batches, run) for run in runs]]
    begin = [turns - len(run) for run in runs]
    return [
        [[(run[turn - b], run[turn - b] + 1)] if turn >= b else [] for run, b in zip(runs, begin, strict=True)]
        for turn in range(turns)
    ]


def _fold_levels(micro_batches: int, places: dict[Node, int]) -> list[tuple[list[int], list[int]]]:
    """The additions of sums at ``places``, level after level, until no two sums are siblings.

    A sum replaces its leftmost part: ``places`` has the remaining sums afterwards.
    """
    levels: list[tuple[list[int], list[int]]] = []
    while True:
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
        if not lefts:
            return levels
        levels.append((lefts, rights))


class ReductionPlans:
    """The plan for each number of micro-batches so far: a full step's, and perhaps a short last step's."""

    def __init__(self, rank: int, size: int, runs: Runs) -> None:
        self._rank, self._size, self._runs = rank, size, runs
        self._known: dict[int, ReductionPlan] = {}

    def __call__(self, micro_batches: int) -> ReductionPlan:
        """The plan of a step of ``micro_batches``."""
        plan = self._known.get(micro_batches)
        if plan is None:
            nodes = [nodes_of(micro_batches, self._runs(rank, micro_batches)) for rank in range(self._size)]
            plan = self._known[micro_batches] = ReductionPlan(self._rank, nodes, micro_batches)
        return plan


class HostDivision:
    """The division of ranks by hosts: ranks of one host add first, then ranks of the same place on each host.

        host 0     host 1
        0  1  2    3  4  5       ranks of a host add first
        |  |  |    |  |  |
        0--+--+----3  |  |       then ranks of the same place, one on each host
           1--+-------4  |
              2----------5

    Args:
        rank: the rank of the division.
        hosts: the host of each rank.
    """

    def __init__(self, rank: int, hosts: Sequence[int]) -> None:
        on_host = {host: [each for each, at in enumerate(hosts) if at == host] for host in hosts}
        #: the ranks on this rank's host
        self.within: Final = on_host[hosts[rank]]
        place = self.within.index(rank)
        #: the ranks of this rank's place, one on each host with as many ranks
        self.across: Final = sorted(each[place] for each in on_host.values() if len(each) == len(self.within))
        #: whether there are several hosts, each with the same number of several ranks
        self.is_possible: Final = len(self.within) > 1 and len(self.across) == len(on_host) > 1
        self._rank: Final = rank
        self._neighbours: Final = [on_host[hosts[each]] for each in self.across]
        self._known: Final[dict[int, tuple[ReductionPlan, ReductionPlan]]] = {}

    def stages(self, whole: ReductionPlan) -> tuple[ReductionPlan, ReductionPlan]:
        """The additions of the plan ``whole`` in two plans: within this host, and then between hosts."""
        stages = self._known.get(whole.micro_batches)
        if stages is None:
            of_hosts = [
                ReductionPlan(
                    self.within.index(self._rank), [whole.nodes_by_rank[rank] for rank in ranks], whole.micro_batches
                )
                for ranks in self._neighbours
            ]
            here = self.across.index(self._rank)
            across = ReductionPlan(here, [list(plan.folded) for plan in of_hosts], whole.micro_batches)
            stages = self._known[whole.micro_batches] = of_hosts[here], across
        return stages
