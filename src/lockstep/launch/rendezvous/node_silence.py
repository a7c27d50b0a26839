"""Which members of a generation are lost: those whose ranks cannot live any more when the next generation begins.

    a member is silent for        the coordinator                          the member itself, which hears nothing either
    `suspect_after_s` (5)         lost if its ranks must be dead:          ends its ranks if one of them has failed
                                  one failed, or its connections broke
    `lost_after_s` (30)           lost                                     ends its ranks

In between, ranks wait for each other as long as TCP keeps their connections, and a network that comes back has cost
nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet

from lockstep.launch.rendezvous.plan import ElasticLimits, NodeView, Plan, StopMode


def lost_members(
    plan: Plan,
    members: Sequence[NodeView],
    done: AbstractSet[str],
    lost_before: AbstractSet[str],
    limits: ElasticLimits,
    *,
    failed_for_s: float,
    patience_s: float,
) -> set[str]:
    """Ids of the members that are lost now.

    Args:
        plan: of the generation.
        members: as the coordinator sees them; one that it does not know is lost.
        done: ids of those that have reported how their ranks ended, and are not needed any more.
        lost_before: ids of those that were found to be lost already.
        limits: how long a silent member is waited for.
        failed_for_s: since the first failure of a rank of this generation was seen; 0: there was none.
        patience_s: how long a silent member is waited for whose ranks may live.
    """
    lost = {member.node_id for member in plan.members} - {node.report.node_id for node in members}
    if plan.stop_mode is StopMode.NONE:
        # A node that ended its ranks unasked was cut off, for a moment that was just too short to be seen here.
        # Not so one that ended ranks because they hung.
        stopped_itself = [n for n in members if any(e.ended_by_us and not e.hung for e in n.endings)]
        lost |= {node.report.node_id for node in stopped_itself} & done
    awaited = [node for node in members if node.report.node_id not in done]
    lost |= {node.report.node_id for node in awaited if node.report.leaving or node.silent_s >= patience_s}
    silent = [node for node in awaited if node.silent_s >= limits.suspect_after_s]
    current = [node for node in members if node.report.generation == plan.generation]
    lost |= {node.report.node_id for node in silent if node in current and node.report.failed}
    heard = [node for node in current if node not in silent]
    broken = any(node.report.lost_peer for node in heard) and not any(node.report.own_cause for node in heard)
    # A cause that another member had would have come meanwhile.
    told = all(node.report.node_id in done or node.silent_s + limits.listen_s < failed_for_s for node in heard)
    if broken and told and len(silent) == 1 and lost_before <= {silent[0].report.node_id}:
        # Only its connections can have broken: a rank of it is gone, and if its launcher lives, it knows that.
        lost.add(silent[0].report.node_id)
    return lost
