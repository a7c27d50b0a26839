"""How an agent shows what the coordinator announces."""

import io
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest

from lockstep.launch.agent import Agent, Stops
from lockstep.launch.diagnosis.error_record import Failure
from lockstep.launch.diagnosis.root_cause import RankExit, diagnose
from lockstep.launch.host.timed_calls import FileThread
from lockstep.launch.rendezvous.lease import Lease
from lockstep.launch.rendezvous.notices import Message
from lockstep.launch.rendezvous.plan import ElasticLimits, Member, NodeReport, Plan, StopMode
from lockstep.launch.rendezvous.takeover import NewCoordinator
from lockstep.launch.terminal.console import Screen
from lockstep.launch_contract import EXIT_STOPPED

RAISED = Failure(1, "n2", "ValueError", "bad label", "train.py", 5, "x", "Traceback...", False, 10.0, 7)
LIVING = SimpleNamespace(running=True, failed=lambda now_s: False)
FAILED = diagnose([RankExit(0, 0, 9.0), RankExit(1, 1, 11.0, failure=RAISED, host="n2")])


@pytest.fixture
def err():
    return io.StringIO()


def agent(err, *, is_coordinator):
    request = SimpleNamespace(grace_s=100.0)
    job = SimpleNamespace(
        generation=0, request=request, log=lambda rank: Path(f"r/{rank}.log"), to_resume="lockstep run --resume"
    )
    store = SimpleNamespace(is_coordinator=is_coordinator, coordinator="c", refused=lambda: ())
    joined = SimpleNamespace(
        job=job,
        store=store,
        limits=ElasticLimits(),
        report=NodeReport("n", "n1", 2),
        place=None,
        probe=None,
        listen=None,
        look_after=None,
        takeover=lambda files: None,
        without_coordinator="",
    )
    screen = Screen(io.StringIO(), err, {})
    workers = SimpleNamespace(output=SimpleNamespace(attached=None))
    return Agent(joined, workers, screen, Stops(), FileThread(screen.say))


@pytest.mark.parametrize(("is_coordinator", "old"), [(True, ["older"]), (False, [])])
def test_each_notice_is_shown_once_and_none_from_before_a_node_joined(err, is_coordinator, old):
    node, notices = agent(err, is_coordinator=is_coordinator), [Message("older")]
    for text in ("", "first", "second"):
        notices += [Message(text)] * bool(text)
        node._show(notices)
        node._show(notices)
    assert err.getvalue().splitlines() == [*old, "first", "second"]


def test_a_failed_generation_is_worded_by_the_agent_with_the_traceback_first(err):
    node = agent(err, is_coordinator=True)
    node._show([FAILED, Message("restarting")])
    lines = err.getvalue().splitlines()
    assert lines[0] == "Traceback..."
    assert lines[1].endswith("run failed: rank 1 of 2 (host n2) raised ValueError")
    assert lines[-2:] == ["  full log: r/1.log; the other ranks beside it", "restarting"]
    assert node.last_failure.startswith("run failed: rank 1 of 2")


def test_a_generation_that_could_not_save_says_how_to_go_on(err):
    notes = Failure(0, "n1", "SystemExit", "74\nno space", "", 0, "", "", False, 10.0, 7)
    node = agent(err, is_coordinator=False)
    node._shown = 0
    node._show([diagnose([RankExit(0, 74, 9.0, failure=notes), RankExit(1, 0, 9.0)])])
    assert node.last_failure.splitlines()[1:3] == ["    no space", "  to go on: lockstep run --resume"]


def test_a_message_that_is_a_failure_is_the_last_failure(err):
    node = agent(err, is_coordinator=True)
    node._show([Message("run failed: lost node n2", failure=True), Message("more")])
    assert node.last_failure == "run failed: lost node n2"


def test_a_coordinator_that_was_replaced_while_it_stood_still_shows_nothing_of_the_new_leader(err):
    """Its leader's log is one file with that of the next leader, and it looks at it as soon as it wakes up."""
    node, did = agent(err, is_coordinator=True), []
    moved = NewCoordinator(Lease(2, "m", "n2", "n2:29400"), None)
    node._takeover = SimpleNamespace(poll=lambda silent_s, running: moved)
    node._store.silent_s = lambda: 0.0
    node._workers = SimpleNamespace(
        current=SimpleNamespace(running=False),
        output=SimpleNamespace(leave_log=lambda: did.append("leave log")),
        stop=lambda mode: did.append("stop"),
        poll=lambda timeout_s: did.append("poll"),
    )
    node._store.beat = node._look_after = node._check_stop_file = node._tell_failure = node._send_report = lambda: None
    assert node._until_over() == EXIT_STOPPED
    assert did == ["leave log", "stop", "poll"]
    assert err.getvalue() == "n2 is the coordinator now (term 2)\n"


def test_who_waits_for_the_first_plan_looks_for_it_more_and_more_seldom(err):
    """Other nodes may come hours later: their launcher spun meanwhile, at a third of a core."""
    node, waited = agent(err, is_coordinator=False), []
    node._workers = SimpleNamespace(current=SimpleNamespace(running=False), poll=waited.append)
    node._look_at_lease = lambda: EXIT_STOPPED if len(waited) == 200 else None
    node._store.beat = node._look_after = node._check_stop_file = node._tell_failure = node._send_report = lambda: None
    node._store.plan, node._follow = Plan, lambda plan: None
    assert node._until_over() == EXIT_STOPPED
    assert waited[0] == 0.0
    assert sum(waited[:20]) < 0.2 < 5 < sum(waited[:110]) < 7
    assert waited[110:] == [waited[110]] * 91


def test_a_node_that_is_told_to_stop_while_the_coordinator_is_away_waits_for_it_to_save(err):
    """Such as while the launchers' store is replaced. Who insists, or has waited for the grace, waits no longer."""
    node, did = agent(err, is_coordinator=False), []
    node._workers = SimpleNamespace(current=LIVING, stop=lambda mode: did.append("killed"))
    node._store.silent_s = lambda: 8.0
    node._stops.ask(signal.SIGTERM)
    assert node._see_connection(Plan()) is None
    assert did == []
    node._stops.ask(signal.SIGTERM)
    assert node._see_connection(Plan()) is None, "a scheduler that asks twice does not insist"
    node._job.request.grace_s = 0.0
    assert node._see_connection(Plan()) == 128 + signal.SIGTERM
    assert did == ["killed"]
    insisting = agent(err, is_coordinator=False)
    insisting._workers, insisting._store.silent_s = node._workers, node._store.silent_s
    insisting._stops.ask(signal.SIGINT)
    insisting._stops.ask(signal.SIGINT)
    assert insisting._see_connection(Plan()) == 128 + signal.SIGINT


def test_ranks_that_lost_the_coordinators_host_leave_what_they_hold_just_before_others_may_go_on(err):
    node, did = agent(err, is_coordinator=False), []
    node._store.coordinator = "c"

    def stop(mode, lost=()):
        did.append((mode, set(lost)))

    node._workers = SimpleNamespace(current=LIVING, stop=stop)
    shared = "172.17.0.1"
    plan = Plan(
        members=(Member("c", "n1", 1, "", ("10.0.0.1", shared)), Member("n", "n2", 1, "", ("10.0.0.2", shared)))
    )
    for silent_s, max_changes in ((4.0, 10), (26.0, 10), (27.5, 0), (27.5, 10)):
        assert did == [], "nor where no node may be lost: the network may still be back in time"
        node._store.silent_s, node._limits = lambda silent_s=silent_s: silent_s, ElasticLimits(max_changes=max_changes)
        assert node._see_connection(plan) is None
    assert did == [(StopMode.PEER_LOST, {"10.0.0.1"})], "just before"
    node._workers.current = SimpleNamespace(
        running=True, failed=lambda now_s: True
    )  # the first of them; others have not written theirs yet
    node._see_connection(plan)
    assert {mode for mode, _ in did} == {StopMode.PEER_LOST}
    node._store.silent_s = lambda: 30.0
    node._see_connection(plan)
    assert did[-1] == (StopMode.KILL, set()), "whatever they do: others may go on now"
