"""The launcher's watch over its ranks, with a clock of the test's: what it says of a hang stays said."""

import contextlib
import os
import socket
from pathlib import Path

from lockstep.heartbeat_message import Heartbeat, SourceLine
from lockstep.launch.diagnosis.hang_analysis import HangTimeouts, RankState
from lockstep.launch.diagnosis.hang_monitor import HangMonitor
from lockstep.launch.diagnosis.rank_places import RankPlaces
from lockstep.launch.host.timed_calls import FileThread
from lockstep.launch.job.request import Request, Script
from lockstep.launch.run_dir.run_directory import Job
from lockstep.launch.workers.rank_messages import RankChannel
from lockstep.launch_contract import LOST_ADDRESSES, STOP_REASON


def no_note(text):
    raise AssertionError(f"no rank has anything to say: {text}")


@contextlib.contextmanager
def monitored(path, said, files, clock, **timeouts):
    """A monitor, and the address that its ranks send to."""
    with RankChannel(no_note) as channel:
        yield _monitor(channel, path, said, files, clock, **timeouts), channel.address


def _monitor(channel, path, said, files, clock, **timeouts):
    return HangMonitor(
        channel,
        HangTimeouts(**timeouts),
        Job(Request(Script("train.py")), 1, path, "new", None, 0, "fork"),
        files=files,
        say=said.append,
        now=clock,
    )


def test_a_rank_that_others_wait_for_on_another_node_is_named_and_its_node_ends_the_generation(tmp_path):
    now, said = [100.0], {"n1": [], "n2": []}
    files = FileThread(print)
    hangs = {}
    with contextlib.ExitStack() as stack:
        opened = {
            host: stack.enter_context(monitored(tmp_path / host, said[host], files, lambda: now[0], hang_after_s=4.0))
            for host in said
        }
        watches = {host: watch for host, (watch, _) in opened.items()}
        line = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM))
        for rank, host in enumerate(said):
            watches[host].begin(range(rank, rank + 1), 2)
        while "n2" not in hangs:  # rank 0 on n1 waits for rank 1 on n2
            assert now[0] < 120
            for rank, (host, call) in enumerate(zip(said, ("all_reduce", ""), strict=True)):
                line.sendto(_beat(rank, call).to_text().encode(), opened[host][1])
                other = {"n1": "n2", "n2": "n1"}[host]
                watches[host].current.note_elsewhere({other: watches[other].current.places})
            for host, watch in watches.items():
                if (hang := watch.poll()) is not None:
                    hangs[host] = hang
            now[0] += 0.5
        failures = {host: watch.hang_failures() for host, watch in watches.items()}
    files.close()
    assert list(hangs) == ["n2"], "the node whose rank it is can say why"
    assert {host: list(found) for host, found in failures.items()} == {"n1": [], "n2": [1]}
    for host in said:
        (text,) = said[host]
        assert "rank 0 in all_reduce" in text
        assert "=> rank 1 keeps the others waiting" in text
    assert "  rank 1 on n2, innermost first:\n      train.py:8 in train" in said["n1"][0]


def test_where_no_other_node_ends_a_hang_this_one_does(tmp_path):
    now, said, files = [100.0], [], FileThread(print)
    elsewhere = RankPlaces.from_text(_places(1, ""), "n2")
    with (
        monitored(tmp_path, said, files, lambda: now[0], hang_after_s=4.0) as (watch, address),
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as line,
    ):
        watch.begin(range(1), 2)
        hang = None
        while hang is None:
            assert now[0] < 120
            line.sendto(_beat(0, "all_reduce").to_text().encode(), address)
            watch.current.elsewhere = elsewhere
            hang = watch.poll()
            now[0] += 0.5
        assert list(watch.hang_failures()) == [0]
    files.close()


def test_a_new_generation_finds_nothing_of_the_one_before():
    with RankChannel(no_note) as channel, socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as line:
        home = Path(channel.address).parent
        reason, lost = home / STOP_REASON, home / LOST_ADDRESSES
        for _ in range(2):
            channel.leave_reason("a signal")
            channel.leave_lost({"10.0.0.2", "10.0.0.1"})
            assert (reason.read_text(), lost.read_text()) == ("a signal", "10.0.0.1\n10.0.0.2\n")
            lost.unlink()
            channel.leave_lost(["10.0.0.1", "10.0.0.2"])
            assert not lost.exists(), "written only if something is new"
            channel.leave_lost(["10.0.0.1"])
            assert lost.read_text() == "10.0.0.1\n"
            line.sendto(_beat(0, "").to_text().encode(), channel.address)
            channel.begin()
            assert channel.receive() == ([], [])
            assert not reason.exists()
            assert not lost.exists()
        line.sendto(b"not a message", channel.address)
        line.sendto(_beat(1, "").to_text().encode(), channel.address)
        beats, failures = channel.receive()
        assert ([beat.rank for beat in beats], failures) == ([1], [])
    assert not home.exists()


def _beat(rank, call):
    place = SourceLine("train.py", 7 + rank, "train")
    return Heartbeat(rank, os.getpid(), -1, 0, "script", place, call, bool(call), 3, 0.0, 100.0)


def _places(rank, call):
    return RankPlaces((RankState(rank, _beat(rank, call), 0.0, 9.0, 9.0, True),), {rank: "sleeping"}).to_text()


def test_places_are_read_as_they_were_written_and_strange_ones_are_none():
    assert RankPlaces.from_text(_places(1, "all_reduce"), "n2") == RankPlaces(
        (RankState(1, _beat(1, "all_reduce"), 0.0, 9.0, 9.0, True),), {1: "sleeping"}, {}, {1: "n2"}
    )
    for text in ("", "[]", "{}", '{"states": [{"rank": 1}], "exited": {}}', '{"states": [], "exited": []}'):
        assert RankPlaces.from_text(text, "n2") == RankPlaces()


def test_ranks_that_are_ended_for_a_hang_are_not_blamed_for_falling_silent(tmp_path):
    now, said = 100.0, []
    files = FileThread(said.append)
    with (
        monitored(tmp_path, said, files, lambda: now, hang_after_s=2.0) as (hang_monitor, address),
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as line,
    ):
        left = Path(address).with_name("rank-of-the-generation-before") / "pymp-1"
        left.mkdir(parents=True)
        hang_monitor.begin(range(2))
        assert not left.parent.exists(), "what a rank leaves goes with its generation"
        hang = None
        while hang is None:  # rank 0 waits for rank 1
            assert now < 105
            for rank, call in enumerate(("all_reduce", "")):
                place = SourceLine("train.py", 7, "train")
                beat = Heartbeat(rank, os.getpid(), -1, 0, "script", place, call, bool(call), 3 + (not rank), 0.0, now)
                line.sendto(beat.to_text().encode(), address)
            hang = hang_monitor.poll()
            now += 0.5
        while now < 120:  # both are being ended, and say nothing more
            assert hang_monitor.poll() is None
            now += 0.5
        failures = hang_monitor.hang_failures()
    files.close()
    assert len(said) == 1
    assert hang.diagnosis.culprits == (1,)
    assert list(failures) == [1]
