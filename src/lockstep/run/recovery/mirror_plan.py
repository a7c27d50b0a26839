"""The plan of a mirrored state: which rank keeps which parts, by each rank's node and part of the state.

    one node            part 0  everything that rank 0 holds     part 1  what only rank 1 holds     ...

    several nodes,      node 0                          node 1
    fsdp on 4 ranks     part 0, 1   of ranks 0, 1       part 2, 3   of ranks 2, 3
                        part 4      what all hold       part 4      what all hold
                        copies of 2, 3                  copies of 0, 1

With several nodes each part is on two nodes, so that one node may be lost with all its memory: a part that only one
rank holds is sent to a rank of the next node, and a part that ranks of several nodes hold is kept on each of these
nodes.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Self


@dataclass(frozen=True, slots=True)
class MirrorPlan:
    """The parts and copies that a rank keeps in its host's memory."""

    parts: int  #: number of parts of a whole state; the part with this rank's number also has its measured values
    own: frozenset[str] | None  #: the names of the state in the part with this rank's number; None: all
    rest: int | None  #: the number of the part that this rank writes with all other names; None: no such part
    to: int | None = None  #: the rank on another node that keeps a copy of the part with this rank's number
    sources: tuple[int, ...] = ()  #: the ranks on other nodes of whose parts this rank keeps copies

    @classmethod
    def on_its_node(cls, nodes: Sequence[int], divided: Collection[str], rank: int) -> Self:
        """The plan with each part only on the node of its rank, which suffices as long as no node is lost.

        Args:
            nodes: the node of each rank.
            divided: the names of the state of which each rank holds a part.
            rank: the rank of the plan.
        """
        is_first = nodes.index(nodes[rank]) == rank
        return cls(len(nodes), None if is_first else frozenset(divided), None)

    @classmethod
    def on_two_nodes(
        cls, nodes: Sequence[int], numbers: Sequence[int], divided: Collection[str], own: Collection[str], rank: int
    ) -> Self:
        """The plan with each part on at least two nodes. There must be two nodes.

        Args:
            nodes: the node of each rank.
            numbers: part numbers; ranks with equal numbers hold equal parts of ``divided`` state.
            divided: the names of the state of which each rank holds a part.
            own: names in ``divided`` of state that lies on one rank alone, whatever its number.
            rank: the rank of the plan.
        """
        holders = {number: {nodes[r] for r, one in enumerate(numbers) if one == number} for number in numbers}
        is_elsewhere = all(len(held) > 1 for held in holders.values())
        kinds = sorted(holders) if is_elsewhere else [0]
        kind = numbers[rank] if is_elsewhere else 0
        alike = [r for r, node in enumerate(nodes) if node == nodes[rank] and (not is_elsewhere or numbers[r] == kind)]
        to, sources = neighbours_of(nodes, rank)
        return cls(
            parts=len(nodes) + len(kinds),
            own=frozenset(own if is_elsewhere else divided),
            rest=len(nodes) + kinds.index(kind) if alike[0] == rank else None,
            to=to,
            sources=sources,
        )


def neighbours_of(nodes: Sequence[int], rank: int) -> tuple[int, tuple[int, ...]]:
    """The rank on another node that keeps copies for ``rank``, and the ranks for which ``rank`` keeps copies.

    ``nodes`` gives the node of each rank; there must be two nodes.
    """
    targets = [_neighbour_of(nodes, r) for r in range(len(nodes))]
    return targets[rank], tuple(r for r, target in enumerate(targets) if target == rank)


def _neighbour_of(nodes: Sequence[int], rank: int) -> int:
    """A rank of the next node; the ranks of a node are spread over all ranks of the next node."""
    every = sorted(set(nodes))
    following = every[(every.index(nodes[rank]) + 1) % len(every)]
    here, there = ([r for r, node in enumerate(nodes) if node == one] for one in (nodes[rank], following))
    return there[here.index(rank) % len(there)]
