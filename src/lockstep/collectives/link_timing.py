"""Measurement of links between ranks: of pairs, by a small and a large message, and of sums over all ranks, by size."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Sequence
from typing import Final, NamedTuple

import torch
import torch.distributed as dist

from lockstep.collectives.all_reduce import NativeAllReduce, RankOrderAllReduce
from lockstep.collectives.group import Group, translating_peer_errors

_PAIRS = "timing of pairs"
_SMALL, _LARGE = 20, 3  # repetitions of a small message and of a large one
_LEAST, _MOST = 3, 1000  # repetitions of each size
_ROUNDS = 5
_ENOUGH_S = 0.25  # time for a size
_SLICE_S = 0.01  # long enough that a burst on the link is a small part of the slice
_SUMS = "timing of sums"


class PairTime(NamedTuple):
    """The measured latency and rate between two ranks."""

    first: int
    second: int
    latency_s: float  #: of a small message, one way
    bytes_per_s: float  #: of a large message, one way


def pair_rounds(nodes: Sequence[int]) -> list[list[tuple[int, int]]]:
    """Rounds of pairs of ranks, on the ``nodes`` of ranks: the pairs of a round do not disturb each other.

    Each two ranks of a node are a pair, and the first ranks of each two nodes. In a round each node has one pair of its
    own ranks, or one rank in a pair.
    """
    ranks = [[rank for rank, node in enumerate(nodes) if node == number] for number in dict.fromkeys(nodes)]
    within = itertools.zip_longest(*(itertools.combinations(each, 2) for each in ranks))
    rounds = [[pair for pair in one if pair is not None] for one in within]
    # A round-robin tournament: the first stays, the others rotate. With an odd number, one has a free round.
    table: list[int | None] = [each[0] for each in ranks]
    table += [None] * (len(table) % 2)
    for _ in range(len(table) - 1):
        opposite = zip(table[: len(table) // 2], reversed(table), strict=False)
        rounds.append([(min(a, b), max(a, b)) for a, b in opposite if a is not None and b is not None])
        table.insert(1, table.pop())
    return [one for one in rounds if one]


def time_pairs(group: Group, large_bytes: int) -> list[PairTime]:
    """Measure each pair of `pair_rounds`, between the ranks' own devices. Collective.

    Takes some ten milliseconds a round, or as long as nine times ``large_bytes`` need.
    """
    found: list[PairTime] = []
    for one in pair_rounds(group.nodes):
        group.barrier(_PAIRS)
        mine = next((pair for pair in one if group.rank in pair), None)
        own = None if mine is None else _time_pair(group, *mine, large_bytes)
        found += [pair for pair in group.gather_objects(own, _PAIRS) if pair is not None]
    return found


def _time_pair(group: Group, first: int, second: int, large_bytes: int) -> PairTime | None:
    """The time of this rank's pair; None on the pair's second rank, which has measured the same."""
    latency_s = statistics.median(_there_and_back(group, first, second, 4, _SMALL)) / 2
    large_s = min(_there_and_back(group, first, second, large_bytes, _LARGE)) / 2
    return PairTime(first, second, latency_s, large_bytes / large_s) if group.rank == first else None


def _there_and_back(group: Group, first: int, second: int, size: int, times: int) -> list[float]:
    """The seconds of each of ``times`` round trips of ``size`` bytes, after a first one that does not count."""
    tensor = torch.zeros(size, dtype=torch.uint8, device=group.device)
    durations = []
    for _ in range(times + 1):
        began = time.perf_counter()
        with translating_peer_errors(_PAIRS):
            if group.rank == first:
                dist.send(tensor, second, group=group.process_group)
                dist.recv(tensor, second, group=group.process_group)
            else:
                dist.recv(tensor, first, group=group.process_group)
                dist.send(tensor, first, group=group.process_group)
        if group.device.type == "cuda":
            torch.cuda.synchronize(group.device)
        durations.append(time.perf_counter() - began)
    return durations[1:]


def time_sums(
    group: Group,
    sizes: Sequence[int],
    *,
    exact: bool,
    budget_s: float,
) -> list[tuple[int, float]]:
    """The seconds of a sum of each of ``sizes`` bytes over all ranks, of the slowest rank. Collective.

    Sums follow each other without a pause, as in a training; the first sum of each size, which may open connections,
    does not count. The sizes take turns. The result is the median over slices of ten milliseconds of the mean within
    each slice: a link may let some sums pass at once and hold the next ones back, and other processes disturb some
    slices. With ``exact``, tensors are summed along the tree, with one node per rank, else by torch's own all-reduce.
    Sizes that would take the rest of ``budget_s`` seconds are left out, the largest first.
    """
    if group.size == 1 or not sizes:
        return []
    summed = _Sums(group, exact=exact)
    share_s, ends_at = budget_s / len(sizes), time.perf_counter() + budget_s

    def timed(size: int, times: int) -> list[float]:
        tensor = torch.ones(max(1, size // 4), device=group.device)
        group.barrier(_SUMS)
        summed(tensor)
        means = []
        began, count = time.perf_counter(), 0
        for number in range(times):
            summed(tensor)
            count += 1
            if (took_s := time.perf_counter() - began) >= _SLICE_S or number == times - 1:
                means.append(took_s / count)
                began, count = time.perf_counter(), 0
        return means

    repetitions: dict[int, int] = {}
    try:
        for size in sorted(sizes):
            one_s = max(*timed(size, 1), 1e-6)
            left_s = ends_at - time.perf_counter()
            fits, enough = int(min(share_s, left_s) / one_s), int(_ENOUGH_S / one_s)
            times, fits = group.broadcast_object((min(_MOST, enough, fits), fits), _SUMS)
            if fits < _LEAST and repetitions:
                break
            repetitions[size] = max(_LEAST, times)
        took: dict[int, list[float]] = {size: [] for size in repetitions}
        for number in range(_ROUNDS):
            for size, times in repetitions.items():
                now = times * (number + 1) // _ROUNDS - times * number // _ROUNDS
                if now:
                    took[size] += timed(size, now)
        return [(size, max(group.gather_objects(statistics.median(each), _SUMS))) for size, each in took.items()]
    finally:
        summed.close()


class _Sums:
    """Sums of tensors, each waited for before the next."""

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
