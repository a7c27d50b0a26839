"""The only room that speaks torch.distributed: ranks meet, agree, and add up along one fixed tree."""

from lockstep.collectives.exchange import Exchange, FastExchange, RankSums, open_exchange
from lockstep.collectives.group import Board, Group, alone, naming_lost_peers, open_group, tells_of_lost_peer
from lockstep.collectives.part import Part, elsewhere, owned
from lockstep.collectives.relay import Relay
from lockstep.collectives.route import Runs
from lockstep.collectives.scatter import Division, FastScatter, Scatter, TreeScatter, begin_alike
from lockstep.collectives.spread import Spread, open_spread
from lockstep.collectives.tree import Fold, Node, fold, nodes_of

__all__ = [
    "Board",
    "Division",
    "Exchange",
    "FastExchange",
    "FastScatter",
    "Fold",
    "Group",
    "Node",
    "Part",
    "RankSums",
    "Relay",
    "Runs",
    "Scatter",
    "Spread",
    "TreeScatter",
    "alone",
    "begin_alike",
    "elsewhere",
    "fold",
    "naming_lost_peers",
    "nodes_of",
    "open_exchange",
    "open_group",
    "open_spread",
    "owned",
    "tells_of_lost_peer",
]
