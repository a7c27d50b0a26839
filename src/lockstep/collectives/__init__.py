"""The only room that speaks torch.distributed: ranks meet, agree, and add up along one fixed tree."""

from lockstep.collectives.exchange import Exchange, FastExchange, open_exchange
from lockstep.collectives.group import Board, Group, alone, naming_lost_peers, open_group, tells_of_lost_peer
from lockstep.collectives.route import Runs
from lockstep.collectives.tree import Fold, Node, fold, nodes_of

__all__ = [
    "Board",
    "Exchange",
    "FastExchange",
    "Fold",
    "Group",
    "Node",
    "Runs",
    "alone",
    "fold",
    "naming_lost_peers",
    "nodes_of",
    "open_exchange",
    "open_group",
    "tells_of_lost_peer",
]
