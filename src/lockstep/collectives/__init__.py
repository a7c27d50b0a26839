"""The only room that speaks torch.distributed: ranks meet, agree, and add up along one fixed tree."""

from lockstep.collectives.all_reduce import AllReduce, NativeAllReduce, RankOrderAllReduce, open_all_reduce
from lockstep.collectives.group import Group, KeyValueStore, alone, open_group, translating_peer_errors
from lockstep.collectives.object_channel import ObjectChannel
from lockstep.collectives.owner_broadcast import OwnerBroadcast, open_owner_broadcast
from lockstep.collectives.reduce_scatter import (
    NativeReduceScatter,
    ReduceScatter,
    ShardGroups,
    TreeReduceScatter,
    broadcast_from_rank0,
)
from lockstep.collectives.reduction_plan import Runs
from lockstep.collectives.reduction_tree import Node, TreeAccumulator, fold, nodes_of
from lockstep.collectives.tensor_shard import TensorShard, elsewhere, owned

__all__ = [
    "AllReduce",
    "Group",
    "KeyValueStore",
    "NativeAllReduce",
    "NativeReduceScatter",
    "Node",
    "ObjectChannel",
    "OwnerBroadcast",
    "RankOrderAllReduce",
    "ReduceScatter",
    "Runs",
    "ShardGroups",
    "TensorShard",
    "TreeAccumulator",
    "TreeReduceScatter",
    "alone",
    "broadcast_from_rank0",
    "elsewhere",
    "fold",
    "nodes_of",
    "open_all_reduce",
    "open_group",
    "open_owner_broadcast",
    "owned",
    "translating_peer_errors",
]
