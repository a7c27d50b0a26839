"""Where each rank is, told while it runs; which rank is late, and who keeps the others waiting.

    in a rank                                       in the launcher

    pulse ◄── Run: phase and step
      │
    Heart ═══════ heartbeats, on a CPU channel ═══► Watch ─► late ─► explain ─► report
    stacks ◄═════ STACKS_SIGNAL, a file ══════════► read_stacks ─────────────────┘

A rank's part works for every script, also one that does not use `Run`.
"""

from lockstep.watch.faults import Fault, FaultPlan, PlannedFault
from lockstep.watch.hang import (
    Patience,
    Recovered,
    Sight,
    Stall,
    Watch,
    Worker,
    explain,
    headline,
    informed,
    late,
    named,
    report,
    sentence,
    why,
)
from lockstep.watch.places import NOWHERE, is_users, look
from lockstep.watch.pulse import Heart, Pulse, open_channel, pulse
from lockstep.watch.stacks import NOTHING, Stack, Stacks, is_registered, read_stacks, register_stacks
from lockstep.watch.waits import Waiting, Waits

__all__ = [
    "NOTHING",
    "NOWHERE",
    "Fault",
    "FaultPlan",
    "Heart",
    "Patience",
    "PlannedFault",
    "Pulse",
    "Recovered",
    "Sight",
    "Stack",
    "Stacks",
    "Stall",
    "Waiting",
    "Waits",
    "Watch",
    "Worker",
    "explain",
    "headline",
    "informed",
    "is_registered",
    "is_users",
    "late",
    "look",
    "named",
    "open_channel",
    "pulse",
    "read_stacks",
    "register_stacks",
    "report",
    "sentence",
    "why",
]
