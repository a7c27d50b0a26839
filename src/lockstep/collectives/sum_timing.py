"""How long a sum over all ranks takes, by its size: the profile of a link."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Final

import torch

from lockstep.collectives.all_reduce import NativeAllReduce, RankOrderAllReduce
from lockstep.collectives.group import Group

_LEAST, _MOST = 3, 1000  # repetitions of each size
_ROUNDS = 5
_ENOUGH_S = 0.25  # of a size
_SLICE_S = 0.01  # long enough that what a link lets pass at once is a small part of it
_WHAT = "timing of sums"


def time_sums(
    group: Group,
    sizes: Sequence[int],
    *,
    exact: bool,
    budget_s: float,
    clock: Callable[[], float] = time.perf_counter,
) -> list[tuple[int, float]]:
    """The seconds of a sum of each of ``sizes`` bytes over all ranks, of the slowest rank. Collective.

    Sums follow each other without a pause, as in a training; of each size the first one, which may open connections,
    does not count. The sizes take turns. What counts is the median over slices of ten milliseconds of the mean within
    each: a link may let some sums pass at once and hold the next ones back, and other processes disturb some slices.
    With ``exact`` they are summed along the tree, each rank giving one node, else by torch's own all-reduce. Sizes
    that would take the rest of ``budget_s`` seconds are left out, the largest first.
    """
    if group.size == 1 or not sizes:
        return []
    summed = _Sums(group, exact=exact)
    share_s, ends_at = budget_s / len(sizes), clock() + budget_s

    def time(size: int, times: int) -> list[float]:
        tensor = torch.ones(max(1, size // 4), device=group.device)
        group.barrier(_WHAT)
        summed(tensor)
        means = []
        began, count = clock(), 0
        for number in range(times):
            summed(tensor)
            count += 1
            if (took_s := clock() - began) >= _SLICE_S or number == times - 1:
                means.append(took_s / count)
                began, count = clock(), 0
        return means

    repetitions: dict[int, int] = {}
    try:
        for size in sorted(sizes):
            one_s = max(*time(size, 1), 1e-6)
            left_s = ends_at - clock()
            fits, enough = int(min(share_s, left_s) / one_s), int(_ENOUGH_S / one_s)
            times, fits = group.broadcast_object((min(_MOST, enough, fits), fits), _WHAT)
            if fits < _LEAST and repetitions:
                break
            repetitions[size] = max(_LEAST, times)
        took: dict[int, list[float]] = {size: [] for size in repetitions}
        for number in range(_ROUNDS):
            for size, times in repetitions.items():
                now = times * (number + 1) // _ROUNDS - times * number // _ROUNDS
                if now:
                    took[size] += time(size, now)
        return [(size, max(group.gather_objects(statistics.median(each), _WHAT))) for size, each in took.items()]
    finally:
        summed.close()


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
