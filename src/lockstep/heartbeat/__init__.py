"""In a rank: what it is doing, and how the launcher gets to know it.

    in a rank                                       in the launcher (launch/diagnosis)

    ProgressMarker ◄── Run: phase and step
      │
    HeartbeatSender ═══ heartbeats, on a CPU channel ═══► HeartbeatTracker ─► overdue_ranks ─► explain ─► report
    stack dump      ◄══ STACKS_SIGNAL, a file ══════════► read_stacks ────────────────────────────┘

It works for every script, also for one that does not use `Run`.
"""

from lockstep.heartbeat.frames import NOWHERE, is_users, look
from lockstep.heartbeat.sender import HeartbeatSender, ProgressMarker, open_channel, progress_marker
from lockstep.heartbeat.stack_dump import NOTHING, Stack, Stacks, is_registered, read_stacks, register_stacks

__all__ = [
    "NOTHING",
    "NOWHERE",
    "HeartbeatSender",
    "ProgressMarker",
    "Stack",
    "Stacks",
    "is_registered",
    "is_users",
    "look",
    "open_channel",
    "progress_marker",
    "read_stacks",
    "register_stacks",
]
