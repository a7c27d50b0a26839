"""Who owns each of some things that are not divided: a plan, which all ranks make alike without talking."""

from __future__ import annotations

import heapq
from collections.abc import Sequence


def owners_of(sizes: Sequence[int], loads: Sequence[int]) -> tuple[list[int], list[int]]:
    """Who owns each of some things; a pure function of its arguments.

    The largest goes first, each to the owner that has least so far, of several the first::

        sizes 40 30 20 6 6, two owners      owner 0: 40, 6, 6      owner 1: 30, 20

    No owner has more than an equal share plus the largest thing.

    Args:
        sizes: of the things, in any unit.
        loads: what each owner has before.

    Returns:
        The owner of each thing, and what each owner has then.
    """
    least = [(load, owner) for owner, load in enumerate(loads)]
    heapq.heapify(least)
    owners = [0] * len(sizes)
    for place in sorted(range(len(sizes)), key=lambda p: (-sizes[p], p)):
        load, owners[place] = heapq.heappop(least)
        heapq.heappush(least, (load + sizes[place], owners[place]))
    return owners, [load for load, _ in sorted(least, key=lambda one: one[1])]
