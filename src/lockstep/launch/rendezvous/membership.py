"""Decides what the nodes of a job do next, on one node, from the last report of each.

    each node:   its report  ──►  store  ──►  node views                       the coordinator, one of the nodes:
                 the plan    ◄──  store  ◄──  decide(state, nodes, now)  ──►  state, whose plan all nodes follow

                  enough joined                all ranks have ended
        gather  ──────────────►  generation  ──────────────────►  over: the same exit code on every node
           ▲                      │  stop mode: how its ranks are to end
           └──────────────────────┘  restarts or changes are left

There is no clock, socket or process in here: all of it is a function of values. One machine is a job of one node.
"""

from __future__ import annotations

import signal
from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace

from lockstep.errors import RendezvousError, UnreadableCheckpoint
from lockstep.formatting import format_ranks, plural
from lockstep.launch.diagnosis.root_cause import Diagnosis, RankExit, diagnose, has_failed, in_one_line, signal_name
from lockstep.launch.rendezvous.membership_state import (
    MembershipState,
    abandon,
    announce,
    end_job,
    next_generation,
    stop_ranks,
)
from lockstep.launch.rendezvous.notices import Message
from lockstep.launch.rendezvous.plan import ElasticLimits, Member, NodeReport, NodeView, Plan, StopMode
from lockstep.launch.timeouts import STARTED_AGAIN_S
from lockstep.launch_contract import (
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_NOT_SAVED,
    EXIT_OK,
    EXIT_STOPPED,
    EXIT_TIMEOUT,
    EXIT_USAGE,
)

_FIRST_WAIT_NOTICE_S = 3.0  #: of waiting, until missing nodes are announced; then again after twice the time, and so on
#: Pause after the first change of nodes, or start that failed, doubled with each one up to the second value.
_BACK_OFF_S = (1.0, 60.0)
_SETTLED_S = 10.0  #: how long a generation runs undisturbed before it is stopped for new nodes

#: Nothing is started after these, whatever restarts are left. A usage error would be the same the next time.
_FINAL = frozenset({EXIT_OK, EXIT_USAGE, EXIT_NOT_SAVED, EXIT_STOPPED, EXIT_INTERRUPTED})
#: What ranks raise at their start where the network or the file system may work again a little later.
_MAY_PASS = frozenset(f"{kind.__module__}.{kind.__qualname__}" for kind in (RendezvousError, UnreadableCheckpoint))


def decide(state: MembershipState, nodes: Sequence[NodeView], limits: ElasticLimits, now_s: float) -> MembershipState:
    """What is to be done now.

    Args:
        state: what this function returned last; `initial_state` at the beginning.
        nodes: all nodes that ever joined, in the order of their joining; the coordinator is the first.
        limits: what the user allows.
        now_s: on the coordinator's clock.
    """
    match state.plan.phase:
        case "gather":
            return _gather(state, nodes, limits, now_s)
        case "generation":
            return _supervise(state, nodes, limits, now_s)
        case "over":
            return state


def missing_hosts(nodes: Iterable[NodeView], limits: ElasticLimits) -> tuple[str, ...]:
    """Hosts that are expected and not there."""
    present = {_short(node.report.host) for node in nodes if node.present(limits)}
    return tuple(host for host in limits.expected if _short(host) not in present)


def _gather(state: MembershipState, nodes: Sequence[NodeView], limits: ElasticLimits, now_s: float) -> MembershipState:
    state = _release(state, nodes, limits)
    if (stoppers := _stoppers(state, nodes, limits)) and not _saves_first(state, stoppers, limits, now_s):
        stopped_by = stoppers[0].stopped_by
        return end_job(state, 128 + stopped_by, f"stopped by {signal_name(stopped_by)} while waiting for nodes")
    if state.held_back is not None and now_s >= state.since_s + limits.lost_after_s:
        return _end_with(state, state.held_back, "nodes are missing")
    if any(node.report.node_id in state.plan.released for node in nodes[:1]):
        return state  # another node takes over
    ready = _ready(state, nodes, limits)
    if twice := _given_twice(ready):
        hosts = ", ".join(node.report.host for node in twice)
        return abandon(state, f"{hosts} all have --node-rank {twice[0].report.node_rank}; give each its own")
    if len(ready) >= limits.min_nodes:
        enough_s = now_s if state.enough_since_s is None else state.enough_since_s
        start_s = enough_s if len(ready) >= limits.max_nodes else enough_s + limits.last_call_s
        if now_s >= max(start_s, state.not_before_s):
            return _start_generation(state, ready, limits, now_s)
        return replace(state, enough_since_s=enough_s)
    state = replace(state, enough_since_s=None)
    waited_s = now_s - state.since_s
    if waited_s >= limits.join_timeout_s:
        return replace(end_job(state, EXIT_TIMEOUT, _waiting(ready, limits, waited_s, "gave up waiting")), gave_up=True)
    if waited_s >= _FIRST_WAIT_NOTICE_S * 2**state.wait_notices:
        state = replace(state, wait_notices=state.wait_notices + 1)
        return announce(state, Message(_waiting(ready, limits, waited_s, "waiting")))
    return state


def _ready(state: MembershipState, nodes: Sequence[NodeView], limits: ElasticLimits) -> list[NodeView]:
    """Nodes with which a generation may begin, in the order of their joining."""
    free = [node for node in nodes if node.present(limits) and not node.report.running]
    return [node for node in free if node.report.node_id not in state.plan.released]


def _given_twice(ready: Sequence[NodeView]) -> list[NodeView]:
    """Nodes to which the user has given the same number. One that was silent just now may have been started again."""
    for node in ready:
        number = node.report.node_rank
        same = [n for n in ready if n.report.node_rank == number and n.silent_s < STARTED_AGAIN_S]
        if number is not None and len(same) > 1:
            return same
    return []


def _in_order(ready: Sequence[NodeView]) -> list[NodeView]:
    """The coordinator, those with a number in its order, and then the others as they came."""
    coordinator, *others = ready
    last = len(ready)
    return [coordinator, *sorted(others, key=lambda n: last if n.report.node_rank is None else n.report.node_rank)]


def _waiting(ready: Sequence[NodeView], limits: ElasticLimits, waited_s: float, verb: str) -> str:
    wanted = limits.min_nodes - len(ready)
    hosts = ", ".join(node.report.host for node in ready)
    absent = missing_hosts(ready, limits)
    absentees = f"; still missing: {', '.join(absent)}" if absent else ""
    total = plural(limits.min_nodes, "node")
    return f"{verb} for {wanted} of {total}: here {hosts}{absentees} ({waited_s:.0f} s)"


def _start_generation(
    state: MembershipState, ready: Sequence[NodeView], limits: ElasticLimits, now_s: float
) -> MembershipState:
    reports = [node.report for node in _in_order(ready[: limits.max_nodes])]
    members = tuple(map(Member.of, reports))
    number = state.plan.number + 1
    plan = replace(state.plan, number=number, phase="generation", members=members, stop_mode=StopMode.NONE, port=0)
    state = replace(state, plan=plan, since_s=now_s, failed_since_s=None, resizing=False, lost=(), suspects=())
    waiting = ready[limits.max_nodes :]
    if limits.max_nodes == 1 and not waiting:
        return state
    most = plural(limits.max_nodes, "node")
    on = most if len(members) == limits.max_nodes else f"{len(members)} of at most {most}"
    hosts = ", ".join(f"{member.host} ({member.ranks})" for member in members)
    spares = ", ".join(node.report.host for node in waiting)
    text = f"generation {plan.generation}: {plural(plan.ranks, 'rank')} on {on}: {hosts}"
    return announce(state, Message(f"{text}; spare: {spares}" if spares else text))


def _supervise(
    state: MembershipState, nodes: Sequence[NodeView], limits: ElasticLimits, now_s: float
) -> MembershipState:
    state = _release(state, nodes, limits)
    plan = state.plan
    ids = {member.node_id for member in plan.members}
    members = [node for node in nodes if node.report.node_id in ids]
    current = [node.report for node in members if node.report.generation == plan.generation]
    done = {n.report.node_id for n in members if n.report.generation == plan.generation and n.endings}
    state = _note_progress(state, current, limits, now_s)
    stoppers = _stoppers(state, nodes, limits)
    stops = max((report.stops for report in stoppers), default=0)
    if stops and state.stopped_by is None:
        state = replace(state, stopped_by=stoppers[0].stopped_by)
    failed_for_s = 0.0 if state.failed_since_s is None else now_s - state.failed_since_s
    # A user who insists does not wait: there is no other generation then.
    patience_s = limits.suspect_after_s if stops > 1 else limits.lost_after_s
    lost = lost_members(plan, members, done, set(state.lost), limits, failed_for_s=failed_for_s, patience_s=patience_s)
    state = replace(state, lost=(*state.lost, *sorted(lost - set(state.lost))))
    if ids <= done | set(state.lost):
        endings = [ending for node in members if node.report.node_id in done for ending in node.endings]
        return _finish_generation(state, endings, nodes, limits, now_s)
    state = _suspect(state, [node for node in members if node.report.node_id not in done], limits)
    if state.failed_since_s is None and any(report.failed for report in current):
        state = replace(state, failed_since_s=now_s)
    return _stop_if_needed(state, nodes, members, current, limits, now_s)


def _stop_if_needed(
    state: MembershipState,
    nodes: Sequence[NodeView],
    members: Sequence[NodeView],
    current: Sequence[NodeReport],
    limits: ElasticLimits,
    now_s: float,
) -> MembershipState:
    """Stop the ranks of the generation for the first reason that there is; the more urgent ones come first.

    ``members`` are its nodes that are here, ``current`` the reports of those that run it.
    """
    plan = state.plan
    stoppers = _stoppers(state, nodes, limits)
    stops = max((report.stops for report in stoppers), default=0)
    if stops > 2:
        return stop_ranks(state, StopMode.KILL, "killing all ranks")
    if any(report.hangs for report in current):
        # No rank would react to a request: they wait for each other.
        return stop_ranks(state, StopMode.KILL)
    if severed := tuple(report.node_id for report in current if report.severed):
        # The network closes no connection: those to its ranks are ended here, so that the others leave what they hold.
        return stop_ranks(replace(state, plan=plan.with_lost(severed)), StopMode.PEER_LOST)
    if state.lost:
        text = f"{_lost_nodes(state)}: nothing heard for {_silence_s(state, members, limits):g} s; ending all ranks"
        return stop_ranks(replace(state, plan=plan.with_lost(state.lost)), StopMode.PEER_LOST, text)
    if state.failed_since_s is not None and now_s >= state.failed_since_s + limits.listen_s:
        return stop_ranks(state, StopMode.TERMINATE)
    if stops > 1:
        text = "stopping now, without another checkpoint; Ctrl-C once more kills all ranks"
        return stop_ranks(state, StopMode.INTERRUPT, text)
    if plan.save_only:
        return state  # it ends by itself, as soon as it can
    if stops:
        text = "stopping: waiting for the ranks to save and leave; Ctrl-C now: without saving"
        return stop_ranks(state, StopMode.GRACEFUL, text, _why_stopped(stoppers[0], limits))
    if leavers := [member.host for member in plan.members if member.node_id in plan.released]:
        why = f"{', '.join(leavers)}, which leaves the job,"
        return stop_ranks(replace(state, resizing=True), StopMode.GRACEFUL, reason=why)
    if newcomers := _newcomers(state, nodes, limits, now_s):
        hosts = ", ".join(node.report.host for node in newcomers)
        text = f"{hosts} came: stopping at a checkpoint, to go on with more nodes"
        return stop_ranks(replace(state, resizing=True), StopMode.GRACEFUL, text, f"{hosts}, which came to take part,")
    return state


def _release(state: MembershipState, nodes: Sequence[NodeView], limits: ElasticLimits) -> MembershipState:
    """Let nodes go that were asked to stop by themselves, if enough others stay: a scheduler wants them back."""
    plan = state.plan
    # Where nobody takes over from the first one, its host is where all meet.
    tied = [] if limits.hands_over else nodes[:1]
    if any(node in tied or node.report.stops_job for node in nodes if node.report.stops and not node.gone(limits)):
        return state
    asked = [node.report for node in nodes if node.report.stops and not node.gone(limits)]
    leavers = [report for report in asked if report.node_id not in plan.released]
    stay = [node for node in nodes if node.present(limits) and not node.report.stops]
    costs = plan.phase == "generation" and any(plan.node_rank(report.node_id) is not None for report in leavers)
    if not leavers or len(stay) < limits.min_nodes or (costs and state.changes >= limits.max_changes):
        return state
    signals = " and ".join(sorted({signal_name(report.stopped_by) for report in leavers}))
    hosts = ", ".join(report.host for report in leavers)
    how = "stopping at a checkpoint, to go on with the other nodes" if costs else "the other nodes go on"
    state = announce(state, Message(f"{hosts} was told to stop ({signals}) and leaves: {how}"))
    released = (*plan.released, *(report.node_id for report in leavers))
    return replace(state, plan=replace(state.plan, number=state.plan.number + 1, released=released))


def _stoppers(state: MembershipState, nodes: Iterable[NodeView], limits: ElasticLimits) -> list[NodeReport]:
    """Reports of nodes that want the whole job to stop."""
    asked = [node.report for node in nodes if node.report.stops and not node.gone(limits)]
    return [report for report in asked if report.stops_job or report.node_id not in state.plan.released]


def _note_progress(
    state: MembershipState, current: Sequence[NodeReport], limits: ElasticLimits, now_s: float
) -> MembershipState:
    """Restarts and changes count from 0 again after training at steps that no generation before has reached."""
    if not (state.failures or state.changes) or max((r.step for r in current), default=-1) <= state.furthest:
        return state
    since_s = now_s if state.beyond_since_s is None else state.beyond_since_s
    if now_s < since_s + limits.refill_after_s:
        return replace(state, beyond_since_s=since_s)
    text = f"{limits.refill_after_s:g} s of training at new steps: restarts and changes of nodes count from 0 again"
    return announce(replace(state, failures=0, changes=0, beyond_since_s=None), Message(text))


def _suspect(state: MembershipState, awaited: Sequence[NodeView], limits: ElasticLimits) -> MembershipState:
    """Say which members have fallen silent and are waited for, and which are heard again."""
    silent = [node.report for node in awaited if node.silent_s >= limits.suspect_after_s and not node.report.leaving]
    ids = tuple(report.node_id for report in silent)
    new = [report.host for report in silent if report.node_id not in {*state.suspects, *state.lost}]
    back = [n.report.host for n in awaited if n.report.node_id in state.suspects and n.report.node_id not in ids]
    state = replace(state, suspects=ids)
    if back:
        state = announce(state, Message(f"{', '.join(back)} is heard again"))
    if new and state.plan.stop_mode is StopMode.NONE:
        text = (
            f"nothing heard of {', '.join(new)} for {limits.suspect_after_s:g} s; waiting up to "
            f"{limits.lost_after_s:g} s, while the ranks hold their connections"
        )
        state = announce(state, Message(text))
    return state


def _newcomers(
    state: MembershipState, nodes: Sequence[NodeView], limits: ElasticLimits, now_s: float
) -> list[NodeView]:
    """Nodes for which the generation should be stopped now."""
    room = limits.max_nodes - len(state.plan.members)
    if not room or state.changes >= limits.max_changes or state.plan.stop_mode is not StopMode.NONE:
        return []
    if now_s < state.since_s + max(_SETTLED_S, _back_off_s(state.changes)):
        return []
    ids = {member.node_id for member in state.plan.members}
    return [node for node in _ready(state, nodes, limits) if node.report.node_id not in ids][:room]


def _finish_generation(
    state: MembershipState, endings: Sequence[RankExit], nodes: Sequence[NodeView], limits: ElasticLimits, now_s: float
) -> MembershipState:
    plan, stopped_by = state.plan, state.stopped_by
    reached = max([state.furthest, *(node.report.step for node in nodes if node.report.generation == plan.generation)])
    state = replace(state, furthest=reached, beyond_since_s=None)
    failed = [ending for ending in endings if has_failed(ending)]
    diagnosis = diagnose(endings, ranks=plan.ranks, stopped_by=stopped_by) if endings else None
    left = any(node.report.left for node in nodes if node.report.generation == plan.generation)
    insists = any(report.stops > 1 for report in _stoppers(state, nodes, limits))
    final = any(node.report.final for node in nodes)
    can_save = left and not (insists or final) and len(_ready(state, nodes, limits)) >= limits.min_nodes
    if state.held_back is None and state.lost and all(ending.collateral for ending in failed):
        return _after_node_loss(state, nodes, limits, now_s, diagnosis if can_save else None)
    assert diagnosis is not None, "no rank of the generation has ended"
    at_its_end = {ending.status for ending in endings} <= {EXIT_OK, EXIT_NOT_SAVED}
    if state.resizing and stopped_by is None and not failed and not at_its_end:
        leaves = any(member.node_id in plan.released for member in plan.members)
        return next_generation(state, now_s, 0.0 if leaves else _back_off_s(state.changes), changes=1)
    code = diagnosis.code
    if state.held_back is not None:
        why = "" if code in (EXIT_OK, EXIT_STOPPED) or diagnosis.cause is None else in_one_line(diagnosis).text
        return _end_with(state, state.held_back, why)
    state = _note_start(state, failed, now_s)
    since_s = state.starts_fail_since_s
    # What has trained before can train; else a name or an address may be wrong for ever.
    waits = since_s is not None and reached >= 0 and now_s - since_s < limits.join_timeout_s
    spent = state.failures >= limits.max_restarts and not waits
    if can_save and (stopped_by is not None or spent) and code not in _FINAL:
        return _save_what_is_left(state, diagnosis, in_one_line(diagnosis).text, now_s)
    if diagnosis.cause is not None and (stopped_by is None or code != 128 + stopped_by):
        state = announce(state, diagnosis)
    if code in _FINAL or stopped_by is not None or spent or final:
        return end_job(state, code)
    # Not as many as before, where a device is left out.
    here = sum(node.report.ranks for node in nodes)
    ranks = f"all {plural(here, 'rank')}" if limits.max_nodes == 1 else "all ranks"
    start_pause_s = 0.0 if since_s is None else _back_off_s(state.failed_starts - 1)
    if waits:
        text = (
            f"starting {ranks} again in {start_pause_s:g} s, as generation {plan.generation + 1}: what failed may work "
            f"again, so this costs no restart for {limits.join_timeout_s:g} s"
        )
        return next_generation(state, now_s, start_pause_s, text)
    text = (
        f"restarting {ranks} as generation {plan.generation + 1} (restart {state.failures + 1} of "
        f"{limits.max_restarts}), from the last finished step or the newest checkpoint"
    )
    pause_s = _back_off_s(state.changes) if state.lost else start_pause_s
    return next_generation(state, now_s, pause_s, text, failures=1)


def _note_start(state: MembershipState, failed: Sequence[RankExit], now_s: float) -> MembershipState:
    """A generation has failed: count it if its ranks could not start for a reason that may pass."""
    kinds = [(ending.failure.kind if ending.failure else "", ending.collateral) for ending in failed]
    passing = [kind in _MAY_PASS for kind, _ in kinds]
    if not any(passing) or not all(may or collateral for may, (_, collateral) in zip(passing, kinds, strict=True)):
        return replace(state, failed_starts=0, starts_fail_since_s=None)
    since_s = now_s if state.starts_fail_since_s is None else state.starts_fail_since_s
    return replace(state, failed_starts=state.failed_starts + 1, starts_fail_since_s=since_s)


def _save_what_is_left(state: MembershipState, diagnosis: Diagnosis, why: str, now_s: float) -> MembershipState:
    """Before the job ends, what survivors hold becomes a checkpoint: a generation is started that does no more."""
    reason = "the end of the job" if state.stopped_by is None else signal_name(state.stopped_by)
    state = next_generation(state, now_s, 0.0, f"{why}; saving the last finished step before the job ends")
    return replace(state, plan=replace(state.plan, save_only=reason), held_back=diagnosis)


def _end_with(state: MembershipState, diagnosis: Diagnosis, why_not: str) -> MembershipState:
    """The job is over, after an attempt to save what survivors left; ``why_not``: it did not succeed."""
    if not why_not and state.stopped_by is not None:
        return end_job(state, EXIT_STOPPED)
    if why_not:
        state = announce(state, Message(f"the last finished step is not saved: {why_not}"))
    if state.stopped_by is None or diagnosis.code != 128 + state.stopped_by:
        state = announce(state, diagnosis)
    return end_job(state, diagnosis.code)


def _saves_first(state: MembershipState, stoppers: Sequence[NodeReport], limits: ElasticLimits, now_s: float) -> bool:
    """Whether the job, which is to stop, first starts a generation that saves what survivors have left."""
    waits = now_s < state.since_s + limits.lost_after_s
    return bool(state.plan.save_only) and waits and max(report.stops for report in stoppers) == 1


def _after_node_loss(
    state: MembershipState,
    nodes: Sequence[NodeView],
    limits: ElasticLimits,
    now_s: float,
    can_save: Diagnosis | None,
) -> MembershipState:
    """What follows the loss of nodes; ``can_save`` if what survivors left can be saved before the job ends."""
    lost = f"{_lost_nodes(state)}: {_why_lost(state, nodes)}"
    if state.stopped_by is not None:
        if can_save is not None:
            return _save_what_is_left(state, can_save, lost, now_s)
        return end_job(state, 128 + state.stopped_by, lost)
    if state.changes < limits.max_changes:
        text = (
            f"{_lost_nodes(state)}; going on as generation {state.plan.generation + 1} with {_node_range(limits)} "
            f"(change {state.changes + 1} of at most {limits.max_changes})"
        )
        # Spares take the place of the lost ones at once; a moment is left to a node that was cut off, to end its ranks.
        complete = len(_ready(state, nodes, limits)) >= limits.max_nodes
        pause_s = _BACK_OFF_S[0] if complete else _back_off_s(state.changes)
        return next_generation(state, now_s, pause_s, text, changes=1)
    spent = f"{plural(limits.max_changes, 'change')} of nodes spent; --max-changes allows more"
    if not limits.max_changes:
        spent = "no change of nodes is allowed here; --max-changes N allows the job to go on after one"
    return end_job(announce(state, Message(f"run failed: {lost}\n    {spent}", failure=True)), EXIT_FAILED)


def _why_lost(state: MembershipState, nodes: Sequence[NodeView]) -> str:
    # Who decides this has neither died nor lost the network to itself.
    if nodes[0].report.node_id in state.lost:
        host = nodes[0].report.host
        return f"the store where the launchers meet, on {host}, did not answer for too long, or its launcher stood"
    return "it died, or the network does not reach it any more"


def _silence_s(state: MembershipState, members: Sequence[NodeView], limits: ElasticLimits) -> float:
    """For how long nothing was heard, at least, of each node that is lost."""
    lost = [node for node in members if node.report.node_id in state.lost]
    waited = lost and all(node.silent_s >= limits.lost_after_s for node in lost)
    return limits.lost_after_s if waited else limits.suspect_after_s


def _lost_nodes(state: MembershipState) -> str:
    plan = state.plan
    nodes = []
    for node_rank, member in enumerate(plan.members):
        if member.node_id in state.lost:
            first = plan.first_rank(node_rank)
            nodes.append(f"{member.host} ({format_ranks(range(first, first + member.ranks))} of {plan.ranks})")
    return f"lost node{'s' * (len(nodes) > 1)} {', '.join(nodes)}"


def _node_range(limits: ElasticLimits) -> str:
    if limits.min_nodes == limits.max_nodes:
        return plural(limits.min_nodes, "node")
    return f"{limits.min_nodes} to {limits.max_nodes} nodes"


def _why_stopped(report: NodeReport, limits: ElasticLimits) -> str:
    name = "Ctrl-C" if report.stopped_by == signal.SIGINT else signal_name(report.stopped_by)
    return name if limits.max_nodes == 1 else f"{name} on {report.host}"


def _back_off_s(changes: int) -> float:
    first_s, longest_s = _BACK_OFF_S
    return min(longest_s, first_s * 2.0**changes)


def _short(host: str) -> str:
    return host.partition(".")[0]


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

        a member is silent for     the coordinator                         the member itself, which hears nothing either
        `suspect_after_s` (5)      lost if its ranks must be dead:         ends its ranks if one of them has failed
                                   one failed, or its connections broke
        `lost_after_s` (30)        lost                                    ends its ranks

    In between, ranks wait for each other as long as TCP keeps their connections, and a network that comes back has cost
    nothing.

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
