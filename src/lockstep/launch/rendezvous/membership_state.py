"""What the coordinator of a job remembers, and how it changes: each function gives a new value.

start (in `membership`)              stop_ranks
gather  ──────────────────────────►  generation ─────────► generation, whose ranks are to end
▲                                     │
└────────── next_generation ──────────┤
└── end_job ──►  over
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from lockstep.launch.diagnosis.root_cause import Diagnosis
from lockstep.launch.rendezvous.notices import Message, Notice
from lockstep.launch.rendezvous.plan import Plan, StopMode
from lockstep.launch_contract import EXIT_FAILED


@dataclass(frozen=True, slots=True)
class MembershipState:
    """What the coordinator remembers: the plan, and what led to it."""

    plan: Plan = field(default_factory=Plan)
    notices: tuple[Notice, ...] = ()  #: all that were announced so far
    since_s: float = 0.0  #: when this phase began
    enough_since_s: float | None = None  #: since when ``min_nodes`` are there
    not_before_s: float = 0.0  #: the next generation does not start earlier: back-off
    wait_notices: int = 0  #: how often missing nodes were announced
    failed_since_s: float | None = None  #: when the first rank of the generation was seen to have failed
    stopped_by: int | None = None  #: the signal that stops the whole job
    resizing: bool = False  #: the generation is stopped for nodes that come or leave
    suspects: tuple[str, ...] = ()  #: ids of members that are silent, and not lost yet
    lost: tuple[str, ...] = ()  #: ids of members that were lost
    failures: int = 0  #: restarts that failures have cost
    changes: int = 0  #: restarts that changes of nodes have cost
    furthest: int = -1  #: the newest step that was done before the last restart
    failed_starts: int = 0  #: in a row, for a reason that may pass
    starts_fail_since_s: float | None = None  #: since when
    beyond_since_s: float | None = None  #: since when there are newer ones
    held_back: Diagnosis | None = None  #: why the job ends, once what survivors have left is saved
    gave_up: bool = False  #: the job is over because too few nodes joined


def initial_state(generation: int, now_s: float) -> MembershipState:
    """The state before anything was decided; ``generation`` will be the first."""
    return MembershipState(Plan(generation=generation), since_s=now_s)


def announce(state: MembershipState, *notices: Notice) -> MembershipState:
    """The state with further notices, which every agent shows once."""
    plan, announced = state.plan, (*state.notices, *notices)
    return replace(state, notices=announced, plan=replace(plan, number=plan.number + 1, notices=len(announced)))


def abandon(state: MembershipState, why: str) -> MembershipState:
    """The state of a job that is over for a reason that no node has reported."""
    return end_job(announce(state, Message(f"run failed: {why}", failure=True)), EXIT_FAILED)


def next_generation(
    state: MembershipState, now_s: float, pause_s: float, text: str = "", *, failures: int = 0, changes: int = 0
) -> MembershipState:
    """Gather nodes for the next generation; ``failures`` and ``changes`` are what it costs of the limits.

    ``pause_s`` serves against a node that comes and goes, and gives one that was cut off time to end its ranks.
    """
    state = announce(state, Message(text)) if text else state
    plan = replace(
        state.plan,
        number=state.plan.number + 1,
        phase="gather",
        generation=state.plan.generation + 1,
        restart=state.plan.restart + 1,
        members=(),
        lost=(),
        stop_mode=StopMode.NONE,
    )
    return replace(
        state,
        plan=plan,
        since_s=now_s,
        enough_since_s=None,
        not_before_s=now_s + pause_s,
        wait_notices=0,
        failures=state.failures + failures,
        changes=state.changes + changes,
    )


def end_job(state: MembershipState, code: int, text: str = "") -> MembershipState:
    """The job is over, with this exit code on every node."""
    state = announce(state, Message(text)) if text else state
    return replace(state, plan=replace(state.plan, number=state.plan.number + 1, phase="over", code=code))


def stop_ranks(state: MembershipState, mode: StopMode, text: str = "", reason: str = "") -> MembershipState:
    """End the ranks of this generation; nothing changes if they are asked already."""
    if mode <= state.plan.stop_mode:
        return state
    state = announce(state, Message(text)) if text else state
    plan = replace(state.plan, number=state.plan.number + 1, stop_mode=mode, stop_reason=reason)
    return replace(state, plan=plan)
