"""How long a sum over all ranks takes, by its size: the profile of a link."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Final

import torch

from lockstep.collectives.all_reduce import NativeAllReduce, RankOrderAllReduce
from lockstep.collectives.group import Group

_LEAST, _MOST = 3, 25  # repetitions of each size
_WHAT = "timing of sums"


def time_sums(
    group: Group,
    sizes: Sequence[int],
    *,
    exact: bool,
    budget_s: float,
    clock: Callable[[], float] = time.perf_counter,
) -> list[tuple[int, float]]:
    """The median seconds of a sum of each of ``sizes`` bytes over all ranks, of the slowest rank. Collective.

    Sums follow each other without a pause, as in a training; of each size the first one, which may open connections,
    does not count. With ``exact`` they are summed along the tree, each rank giving one node, else by torch's own
    all-reduce. Sizes that would take the rest of ``budget_s`` seconds are left out, the largest first.
    """
    if group.size == 1:
        return []
    summed = _Sums(group, exact=exact)
    ends_at = clock() + budget_s
    timed: list[tuple[int, float]] = []
    try:
        for size in sorted(sizes):
            tensor = torch.ones(max(1, size // 4), device=group.device)
            group.barrier(_WHAT)
            summed(tensor)
            began = clock()
            summed(tensor)
            one_s = clock() - began
            share_s = min(budget_s / len(sizes), ends_at - clock())
            times = group.broadcast_object(min(_MOST, int(share_s / max(one_s, 1e-6))), _WHAT)
            if times < _LEAST and timed:
                break
            took = []
            for _ in range(max(_LEAST, times)):
                began = clock()
                summed(tensor)
                took.append(clock() - began)
            timed.append((size, max(group.gather_objects(statistics.median(took), _WHAT))))
    finally:
        summed.close()
    return timed


class _Sums:
    """One sum after another."""

    def __init__(self, group: Group, *, exact: bool) -> None:
        self._device: Final = group.device
        self._tree: Final = RankOrderAllReduce(group) if exact else None
        self._native: Final = NativeAllReduce(group)

    def __call__(self, tensor: torch.Tensor) -> None:
        summed = self._tree or self._native
        summed.begin(tensor)
        summed.finish()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def close(self) -> None:
        if self._tree is not None:
            self._tree.close()
