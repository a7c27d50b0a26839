"""Heartbeats of a rank, which tell the launcher what the rank is doing.

    in a rank                                       in the launcher (launch/diagnosis)

    ProgressMarker ◄── Run: phase and step
      │
    HeartbeatSender ═══ heartbeats, on a CPU channel ═══► HeartbeatTracker ─► overdue_ranks ─► diagnose_hang ─► report
    LostPeers       ◄══ addresses of lost hosts, a file ═══ the plan of all nodes
    stack dump      ◄══ STACKS_SIGNAL, a file ══════════► read_stacks ────────────────────────────┘

Heartbeats work for every script, also without `Run`.
"""

from lockstep.heartbeat.frames import (
    NOTHING,
    NOWHERE,
    Stack,
    Stacks,
    collectives_begun,
    find_user_frame,
    is_registered,
    is_users,
    own_lines,
    read_stacks,
    register_stacks,
    user_frame,
)
from lockstep.heartbeat.lost_peers import LostPeers
from lockstep.heartbeat.sender import BEAT_EVERY_S, HeartbeatSender, ProgressMarker, open_channel, progress_marker

__all__ = [
    "BEAT_EVERY_S",
    "NOTHING",
    "NOWHERE",
    "HeartbeatSender",
    "LostPeers",
    "ProgressMarker",
    "Stack",
    "Stacks",
    "collectives_begun",
    "find_user_frame",
    "is_registered",
    "is_users",
    "open_channel",
    "own_lines",
    "progress_marker",
    "read_stacks",
    "register_stacks",
    "user_frame",
]
