"""How fast each pair of ranks is: a small message there and back, and a large one."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from lockstep.collectives.group import Group, translating_peer_errors

_WHAT = "timing of pairs"
_SMALL, _LARGE = 20, 3  # repetitions of a small message and of a large one


class PairTime(NamedTuple):
    """What two ranks have measured between them."""

    first: int
    second: int
    latency_s: float  #: of a small message, one way
    bytes_per_s: float  #: of a large one, one way


def pair_rounds(nodes: Sequence[int]) -> list[list[tuple[int, int]]]:
    """Rounds of pairs of ranks, where ``nodes`` has the node of each: those of one round do not disturb each other.

    Each two ranks of a node are a pair, and the first ranks of each two nodes. In a round each node has one pair of its
    own, or is part of one.
    """
    ranks = [[rank for rank, node in enumerate(nodes) if node == number] for number in dict.fromkeys(nodes)]
    within = itertools.zip_longest(*(itertools.combinations(each, 2) for each in ranks))
    rounds = [[pair for pair in one if pair is not None] for one in within]
    # A tournament: the first stays, the others go around it. Who meets nobody has a free round.
    table: list[int | None] = [each[0] for each in ranks]
    table += [None] * (len(table) % 2)
    for _ in range(len(table) - 1):
        opposite = zip(table[: len(table) // 2], reversed(table), strict=False)
        rounds.append([(min(a, b), max(a, b)) for a, b in opposite if a is not None and b is not None])
        table.insert(1, table.pop())
    return [one for one in rounds if one]


def time_pairs(group: Group, large_bytes: int) -> list[PairTime]:
    """What each pair of `pair_rounds` has measured, on the ranks' own devices. Collective.

    Takes some ten milliseconds a round, or as long as nine times ``large_bytes`` need.
    """
    found: list[PairTime] = []
    for one in pair_rounds(group.nodes):
        group.barrier(_WHAT)
        mine = next((pair for pair in one if group.rank in pair), None)
        own = None if mine is None else _time_pair(group, *mine, large_bytes)
        found += [pair for pair in group.gather_objects(own, _WHAT) if pair is not None]
    return found


def _time_pair(group: Group, first: int, second: int, large_bytes: int) -> PairTime | None:
    """Of this rank and the other one of the pair; None on the second, which has measured the same."""
    latency_s = statistics.median(_there_and_back(group, first, second, 4, _SMALL)) / 2
    large_s = min(_there_and_back(group, first, second, large_bytes, _LARGE)) / 2
    return PairTime(first, second, latency_s, large_bytes / large_s) if group.rank == first else None


def _there_and_back(group: Group, first: int, second: int, size: int, times: int) -> list[float]:
    """The seconds of each of ``times`` rounds of ``size`` bytes, after one that does not count."""
    tensor = torch.zeros(size, dtype=torch.uint8, device=group.device)
    durations = []
    for _ in range(times + 1):
        began = time.perf_counter()
        with translating_peer_errors(_WHAT):
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
