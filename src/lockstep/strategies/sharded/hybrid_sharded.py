"""Copies of a model, each divided among a few ranks: within a node, where links are fast.

    node 0     rank 0 [rows 0..1]  rank 1 [rows 2..3]      gathered and scattered within the node,
    node 1     rank 2 [rows 0..1]  rank 3 [rows 2..3]      summed between 0 and 2, and between 1 and 3

Bytes between nodes: 2 (C - 1) / C times a rank's rows for C copies, where ``fsdp`` sends whole models. Memory: as
``fsdp`` on the ranks of one copy.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from lockstep.collectives import Group
from lockstep.errors import SettingError
from lockstep.strategies.sharded import fully_sharded
from lockstep.strategies.sharded.fully_sharded import FullySharded
from lockstep.strategies.strategy import Strategy, StrategyContext
from lockstep.strategies.tensor_parallel.tensor_parallel import TensorParallel
from lockstep.strategy_kinds import HsdpOptions


def open_strategy(context: StrategyContext, options: HsdpOptions) -> Strategy:
    """The strategy ``hsdp``; a single rank divides nothing. Collective.

    Raises:
        SettingError: if the ranks cannot be divided into copies.
    """
    if options.tensor > 1:
        data_parallel = replace(options, tensor=1)
        return TensorParallel(context, options.tensor, "hsdp", lambda inner: open_strategy(inner, data_parallel))
    if context.group.size == 1:
        return fully_sharded.open_strategy(context, options)
    return FullySharded(context, options, ranks_of_a_copy(context.group, options.shard), "hsdp")


def ranks_of_a_copy(group: Group, shard: int) -> int:
    """The number of ranks that hold a copy of the model: ``shard``, or the ranks of each node.

    Raises:
        SettingError: if this number does not divide the ranks, or nodes have different numbers of ranks.
    """
    ranks = shard
    if not shard:
        sizes = Counter(group.nodes)
        neighbours = list(group.nodes) == sorted(group.nodes)
        if len(set(sizes.values())) > 1 or not neighbours:
            raise SettingError(
                f"strategy='hsdp': nodes have {', '.join(map(str, sizes.values()))} ranks; start equally many on each, "
                "in a row, or say hsdp:shard=N"
            )
        ranks = next(iter(sizes.values()))
    if ranks < 2 or group.size % ranks:
        raise SettingError(
            f"strategy='hsdp' with {ranks} of {group.size} ranks to a copy; shard=N takes a divisor of the number of "
            "ranks, from 2 on (with 1 it would be ddp)"
        )
    return ranks
