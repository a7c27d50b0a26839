"""The options of ``lockstep run`` that say where the launchers of several machines meet, and how they stay together."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lockstep.launch import NodeOptions, Nodes


def add_rendezvous_options(parser: argparse.ArgumentParser) -> None:
    """Add them to ``parser``, as a group of their own."""
    meet = parser.add_argument_group("several machines: the same on each")
    meet.add_argument("--rdzv-endpoint", metavar="HOST[:PORT]", help="where they meet, on one of them (port: 29400)")
    meet.add_argument("--rdzv-id", metavar="ID", help="a word that must be the same on all of them")
    meet.add_argument(
        "--rdzv-conf",
        metavar="NAME=SECONDS",
        help="join_timeout=600,last_call_timeout=3,suspect_after=5,lost_after=30 unless given",
    )
    meet.add_argument(
        "--max-changes", type=int, metavar="N", help="starts after machines were lost, came or left (default: 10)"
    )
    meet.add_argument(
        "--spares", type=int, default=0, metavar="N", help="of MAX machines, those that wait to replace another one"
    )
    meet.add_argument(
        "--rdzv-takeover", action="store_true", help="if the endpoint's host is lost, another one takes its place"
    )
    # Torchrun's other words for it.
    meet.add_argument("--rdzv-backend", choices=("c10d", "static"), help=argparse.SUPPRESS)  # there is one way only
    meet.add_argument("--master-addr", metavar="HOST", help=argparse.SUPPRESS)
    meet.add_argument("--master-port", type=int, metavar="PORT", help=argparse.SUPPRESS)
    meet.add_argument("--node-rank", type=int, metavar="N", help=argparse.SUPPRESS)


def nodes_of(parsed: argparse.Namespace) -> Nodes | None:
    """The machines of which these options and ``--nnodes`` speak.

    Raises:
        SettingError: as `Nodes.of`.
    """
    # Late, for help and usage errors do without it.
    from lockstep.launch import Nodes

    return Nodes.of(
        parsed.nnodes,
        parsed.rdzv_endpoint,
        parsed.rdzv_id,
        node_options(parsed),
        node_rank=parsed.node_rank,
        master_addr=parsed.master_addr,
        master_port=parsed.master_port,
    )


def node_options(parsed: argparse.Namespace) -> NodeOptions:
    """What of it holds whichever the machines are."""
    from lockstep.launch import NodeOptions

    return NodeOptions(parsed.rdzv_conf, parsed.max_changes, parsed.spares, parsed.rdzv_takeover)
