"""What a node makes of the silence of the coordinator: one state, and the rule by which the state changes.

                suspect_after_s          leave_after_s           lost_after_s
    CONNECTED ------------------> WAITING -------------> LEAVING -------------> CUT_OFF
        ^                            |                      |                      |
        '------ heard again ---------'----------------------'----------------------'

A node whose ranks hold no state has nothing to wait for, and is cut off as soon as the coordinator is suspected.
"""

from __future__ import annotations

from enum import Enum, auto

from lockstep.launch.rendezvous.plan import ElasticLimits
from lockstep.launch.timeouts import NodeTimeouts


class Connection(Enum):
    """How far the coordinator is lost to a node."""

    CONNECTED = auto()  #: the coordinator is heard
    WAITING = auto()  #: the coordinator is silent; the ranks go on, and hold their connections
    LEAVING = auto()  #: the ranks leave the state that they hold, just before others may go on without them
    CUT_OFF = auto()  #: others may go on without this node, whose ranks end


def next_connection(now: Connection, silent_s: float, limits: ElasticLimits, *, holds_state: bool) -> Connection:
    """The state after the coordinator was silent for ``silent_s``.

    The coordinator counts on this rule: see `membership.lost_members`.

    Args:
        now: the state so far.
        silent_s: seconds since the coordinator was heard.
        limits: of the job.
        holds_state: whether ranks of this node run whose state may still be of use to a next generation.
    """
    if silent_s < limits.suspect_after_s:
        return Connection.CONNECTED
    if now is Connection.CUT_OFF or not holds_state or silent_s >= limits.lost_after_s:
        return Connection.CUT_OFF
    # Where no node may be lost there is no next generation, and a network may be back in the last moment.
    leaves = limits.max_changes > 0 and silent_s >= NodeTimeouts(limits.lost_after_s).leave_after_s
    return Connection.LEAVING if leaves else Connection.WAITING
