"""The table of a job on a real store, and what happens when that falls silent."""

import contextlib
import os
import signal
import socket
import threading
import time

import pytest

from lockstep.errors import LaunchError, SettingError
from lockstep.launch.diagnosis.error_record import Failure
from lockstep.launch.diagnosis.root_cause import RankExit
from lockstep.launch.host import interface_of
from lockstep.launch.rendezvous.join import inquire
from lockstep.launch.rendezvous.membership import How, Line, Member, Plan
from lockstep.launch.rendezvous.store import Alone, Creed, Endpoint, Keeper, Shared, differences, found, read_creed
from lockstep.launch.workers.fork_server import own_python

DEADLINE_S = 60
RAISED = Failure(3, "n2", "ValueError", "bad label", "train.py", 5, "x", "Traceback...", False, 10.0, 7)


def soon(what):
    end_s = time.monotonic() + DEADLINE_S
    while not (seen := what()):
        assert time.monotonic() < end_s, "nothing came"
        time.sleep(0.02)
    return seen


@pytest.fixture(scope="module")
def store():
    """An endpoint with a store; its process can be stopped."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        endpoint = Endpoint("127.0.0.1", listening.getsockname()[1])
        keeper = Keeper(listening, lambda fd, port: own_python("store", [str(fd), str(port), str(os.getpid())]))
    with contextlib.closing(keeper):
        yield endpoint, keeper


def creed(chair="c", **more):
    told = {"chair": chair, "host": "n1", "must": {"torch": "2"}, "run_dir": "/r", "begins": "new", "generation": 4}
    return Creed(**{**told, **more})


@contextlib.contextmanager
def tables(endpoint, *names, lost_after_s=30.0):
    """The chair's table and those of others."""
    made = [found(endpoint, creed(names[0]), Line(names[0], "n1", 2), lost_after_s=lost_after_s)]
    made += [Shared(endpoint, creed(names[0]), Line(n, n, 2), lost_after_s=lost_after_s) for n in names[1:]]
    try:
        yield made
    finally:
        for table in made:
            table.close()
        soon(lambda: not [thread for thread in threading.enumerate() if thread.name == "lockstep table"])


def test_what_one_lays_down_the_others_pick_up(store):
    endpoint, _ = store
    with tables(endpoint, "c", "other") as (chair, other):
        assert chair.chairs
        assert not other.chairs
        soon(lambda: len(chair.seats()) == 2)
        assert [seat.line.host for seat in chair.seats()] == ["n1", "other"]
        plan = Plan(
            3, "generation", 4, 1, How.NOT, (Member("c", "n1", 2), Member("other", "n2", 2)), 77, 0, (("say", "é"),)
        )
        chair.publish(plan)
        assert soon(lambda: other.plan() == plan and other.plan()) == plan
        assert other.silent_s() < 30

        ending = RankExit(3, 1, 11.0, failure=RAISED, host="n2")
        other.post(Line("other", "n2", 2, generation=4, trouble=True), [ending])
        seat = soon(lambda: next((s for s in chair.seats() if s.endings), None))
        assert seat.line.trouble
        # One machine has one clock: what is added is at most how long the word was on its way.
        assert 11.0 <= seat.endings[0].at_s < 11.0 + DEADLINE_S
        assert seat.endings[0].failure.message == "bad label"
        other.post(Line("other", "n2", 2, generation=5, running=True), ())
        soon(lambda: chair.seats()[1].line.generation == 5)
        assert chair.seats()[1].endings == (), "those of another generation"


def test_a_node_that_says_nothing_grows_silent_and_one_that_left_says_so(store):
    endpoint, _ = store
    with tables(endpoint, "c", "quiet", "leaves") as (chair, quiet, leaves):
        soon(lambda: len(chair.seats()) == 3)
        quiet.close()
        leaves.post(Line("leaves", "leaves", 2, leaving=True), ())
        leaves.close()

        def seats():  # whoever came first sits first
            return {seat.line.seat: seat for seat in chair.seats()}

        soon(lambda: {name for name, seat in seats().items() if seat.line.leaving} == {"leaves"})
        soon(lambda: seats()["quiet"].silent_s > 1.0)
        assert seats()["c"].silent_s < seats()["quiet"].silent_s


def test_a_store_that_does_not_answer_is_noticed_and_asked_anew(store):
    endpoint, keeper = store
    with tables(endpoint, "c", "other", lost_after_s=0.5) as (_, other):
        soon(lambda: other.silent_s() < 0.4)
        keeper._process.send_signal(signal.SIGSTOP)
        try:
            soon(lambda: other.silent_s() > 1.0)
        finally:
            keeper._process.send_signal(signal.SIGCONT)
        soon(lambda: other.silent_s() < 0.4)


def test_a_new_agent_may_take_the_table_over_and_the_others_follow_it(store):
    endpoint, _ = store
    with tables(endpoint, "c", "other", lost_after_s=0.5) as (old, other):
        soon(lambda: len(old.seats()) == 2)
        old.close()
        new = found(endpoint, creed("new", generation=9), Line("new", "n1", 2), lost_after_s=0.5)
        # A store that was restarted would have closed the connections.
        other._exchange_anew()
        soon(lambda: other.chair == "new" and len(new.seats()) == 2)
        soon(lambda: other.plan().generation == 9)
        new.close()


def test_who_comes_reads_what_must_be_equal(store):
    endpoint, _ = store
    with tables(endpoint, "c"):
        told = read_creed(endpoint, within_s=DEADLINE_S, say=print, stopped=lambda: False)
        assert told == creed()
    assert differences({"torch": "3", "python": "3.11"}, "n2", {"torch": "2", "python": "3.11"}, "n1") == [
        "torch is 3 on n2, 2 on n1"
    ]


def test_who_finds_no_table_says_so_and_gives_up():
    said = []
    with socket.create_server(("127.0.0.1", 0)) as taken:
        free = Endpoint("127.0.0.1", taken.getsockname()[1])
    with pytest.raises(
        LaunchError, match=r"found no table of this job at 127.0.0.1:\d+ within 4 s \(Connection refused"
    ):
        read_creed(free, within_s=3.6, say=said.append, stopped=lambda: False)
    assert "where the nodes meet: Connection refused" in said[0]
    assert read_creed(free, within_s=3.6, say=said.append, stopped=lambda: True) is None


def test_an_endpoint_knows_whether_it_is_here():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(SettingError, match=rf"port {port} of this machine is used by process {os.getpid()} "):
            Endpoint("127.0.0.1", port).claim()
    with Endpoint("localhost", port).claim() as listening:
        assert listening.getsockname()[1] == port
    assert Endpoint("192.0.2.1", port).claim() is None, "an address of documentation is never here"
    assert Endpoint("127.0.0.1", port).reach() == "127.0.0.1"
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("192.0.2.1") == ""
    with pytest.raises(SettingError, match=r"cannot resolve 'nohost\.invalid' from node"):
        Endpoint("nohost.invalid", port).addresses()


def test_the_table_of_one_is_two_variables():
    alone = Alone()
    line = Line("alone", "n1", 2, generation=0)
    ending = RankExit(0, 0, 1.0)
    alone.post(line, [ending])
    alone.publish(Plan(generation=3))
    assert (alone.chairs, alone.seats()[0].line, alone.seats()[0].endings) == (True, line, (ending,))
    assert (alone.plan().generation, alone.silent_s()) == (3, 0.0)


def test_it_is_found_out_why_a_host_did_not_come():
    assert inquire("nohost.invalid", "n1:1").startswith("nohost.invalid is missing: its name cannot be resolved here (")
    assert "the network reaches it, but no lockstep run came from there" in inquire("127.0.0.1", "n1:1")
    assert "the network does not reach it (" in inquire("255.255.255.255", "n1:1")
