"""The Pareto front of vectors of losses."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def pareto_front(losses: Sequence[tuple[float, ...]]) -> list[int]:
    """The indices of the vectors that no other one dominates, in ascending order; equal vectors are all included.

    One vector dominates another if it is nowhere higher and somewhere lower. O(n log n) for one or two losses,
    O(n times the front) for more.
    """
    if not losses:
        return []
    values = np.asarray(losses, dtype=np.float64).reshape(len(losses), -1)
    values = np.where(np.isnan(values), np.inf, values)
    order = np.lexsort(values.T[::-1])  # by the first loss, then by the second...: a vector comes after its dominators
    front: list[int] = []
    if values.shape[1] <= 2:
        lowest = np.inf
        latest: np.ndarray | None = None
        for index in order:
            last = values[index, -1]
            if not front or last < lowest or (latest is not None and np.array_equal(values[index], latest)):
                front.append(int(index))
                lowest, latest = last, values[index]
        if values.shape[1] == 1:
            front = [index for index in front if values[index, 0] == values[order[0], 0]]
        return sorted(front)
    members = np.empty_like(values)
    for index in order:
        known = members[: len(front)]
        dominated = (known <= values[index]).all(axis=1) & (known < values[index]).any(axis=1)
        if not dominated.any():
            members[len(front)] = values[index]
            front.append(int(index))
    return sorted(front)
