"""Who keeps what of a mirrored state: a pure function of which rank is on which node, and of what it holds.

    one node            part 0  everything that rank 0 holds     part 1  what only rank 1 holds     ...

    several nodes,      node 0                          node 1
    fsdp on 4 ranks     part 0, 1   of ranks 0, 1       part 2, 3   of ranks 2, 3
                        part 4      what all hold       part 4      what all hold
                        copies of 2, 3                  copies of 0, 1

With several nodes each part is on two of them, so that one may be lost with all its memory: what only one rank holds is
sent to a rank of the next node, and what ranks of several nodes hold is kept on each of these.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Self


@dataclass(frozen=True, slots=True)
class MirrorPlan:
    """What one rank keeps in its host's memory, and whose copies."""

    parts: int  #: that make the state whole; the one with this rank's number has what it measured, and more
    own: frozenset[str] | None  #: the names of the state in the part with this rank's number; None: all
    rest: int | None  #: the number of the part that this rank writes with all other names; None: it writes none
    to: int | None = None  #: the rank on another node that keeps a copy of the part with this rank's number
    sources: tuple[int, ...] = ()  #: the ranks on other nodes of whose parts this one keeps copies

    @classmethod
    def on_its_node(cls, nodes: Sequence[int], divided: Collection[str], rank: int) -> Self:
        """Each part is on the node of its rank alone, which is enough as long as no node is lost.

        Args:
            nodes: on which node each rank is.
            divided: the names of the state of which each rank holds a part.
            rank: whose plan this is.
        """
        is_first = nodes.index(nodes[rank]) == rank
        return cls(len(nodes), None if is_first else frozenset(divided), None)

    @classmethod
    def on_two_nodes(
        cls, nodes: Sequence[int], numbers: Sequence[int], divided: Collection[str], own: Collection[str], rank: int
    ) -> Self:
        """Each part is on two nodes at least. There must be two.

        Args:
            nodes: on which node each rank is.
            numbers: ranks with the same number hold the same of what is ``divided``.
            divided: the names of the state of which each rank holds a part.
            own: those of them that lie on one rank alone, whatever its number.
            rank: whose plan this is.
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
    """The rank on another node that keeps copies of what ``rank`` has, and those of which ``rank`` keeps copies.

    ``nodes`` says on which node each rank is; there must be two.
    """
    targets = [_neighbour_of(nodes, r) for r in range(len(nodes))]
    return targets[rank], tuple(r for r, target in enumerate(targets) if target == rank)


def _neighbour_of(nodes: Sequence[int], rank: int) -> int:
    """A rank of the next node; those of one node are spread over all of the next one."""
    every = sorted(set(nodes))
    following = every[(every.index(nodes[rank]) + 1) % len(every)]
    here, there = ([r for r, node in enumerate(nodes) if node == one] for one in (nodes[rank], following))
    return there[here.index(rank) % len(there)]
