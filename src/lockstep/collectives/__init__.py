"""The only package that uses torch.distributed: groups of ranks, their agreement, and sums along a fixed tree."""

from lockstep.collectives.all_reduce import AllReduce, NativeAllReduce, RankOrderAllReduce, open_all_reduce
from lockstep.collectives.group import (
    Connections,
    Group,
    KeyValueStore,
    keeping_connections,
    open_group,
    open_store,
    single_rank_group,
    translating_peer_errors,
)
from lockstep.collectives.link_timing import PairTime, pair_rounds, time_pairs, time_sums
from lockstep.collectives.mailbox import Mailbox
from lockstep.collectives.neighbour_link import NeighbourLink, Neighbours, meet_neighbours
from lockstep.collectives.object_channel import ObjectChannel
from lockstep.collectives.owner_broadcast import OwnerBroadcast, open_owner_broadcast
from lockstep.collectives.reduce_scatter import (
    NativeReduceScatter,
    ReduceScatter,
    ScatteredSum,
    ShardGroups,
    TreeReduceScatter,
    broadcast_from_rank0,
    open_gather,
    open_reduce_scatter,
)
from lockstep.collectives.reduction_plan import Runs
from lockstep.collectives.reduction_tree import Node, TreeAccumulator, fold, nodes_of
from lockstep.collectives.tensor_shard import (
    ReadBox,
    StoredTensor,
    TensorShard,
    as_absent_shards,
    as_owned_shards,
    gather_on_leader,
    in_memory,
    local_part,
)
from lockstep.collectives.wait_clock import WaitClock, wait_clock
from lockstep.collectives.write_channel import Write, WriteChannel

__all__ = [
    "AllReduce",
    "Connections",
    "Group",
    "KeyValueStore",
    "Mailbox",
    "NativeAllReduce",
    "NativeReduceScatter",
    "NeighbourLink",
    "Neighbours",
    "Node",
    "ObjectChannel",
    "OwnerBroadcast",
    "PairTime",
    "RankOrderAllReduce",
    "ReadBox",
    "ReduceScatter",
    "Runs",
    "ScatteredSum",
    "ShardGroups",
    "StoredTensor",
    "TensorShard",
    "TreeAccumulator",
    "TreeReduceScatter",
    "WaitClock",
    "Write",
    "WriteChannel",
    "as_absent_shards",
    "as_owned_shards",
    "broadcast_from_rank0",
    "fold",
    "gather_on_leader",
    "in_memory",
    "keeping_connections",
    "local_part",
    "meet_neighbours",
    "nodes_of",
    "open_all_reduce",
    "open_gather",
    "open_group",
    "open_owner_broadcast",
    "open_reduce_scatter",
    "open_store",
    "pair_rounds",
    "single_rank_group",
    "time_pairs",
    "time_sums",
    "translating_peer_errors",
    "wait_clock",
]
