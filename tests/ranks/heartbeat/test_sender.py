"""What a rank tells, and what it costs where nobody listens."""

import contextlib
import os
import queue
import signal
import socket
import threading
import time

import pytest
from hypothesis import given

from lockstep.heartbeat import HeartbeatSender, ProgressMarker, open_channel, progress_marker
from lockstep.heartbeat_message import Heartbeat
from rank_states import beats


@pytest.fixture
def opened():
    """`open_channel`, whose lines are closed at the end."""
    lines = []

    def open_it(channel):
        lines.append(open_channel(channel))
        return lines[-1]

    open_it.lines = lines
    yield open_it
    for line in lines:
        line.close()


@given(beats)
def test_a_heartbeat_reads_back_as_it_was(sent):
    assert Heartbeat.from_text(sent.to_text()) == sent
    assert len(sent.to_text().splitlines()) == 1


@pytest.mark.parametrize("text", ["", "{}", "[1]", "null", '{"rank": 0}', b"\xff\xfe", '"script"'])
def test_what_is_no_heartbeat_is_refused(text):
    with pytest.raises(ValueError, match=r"."):
        Heartbeat.from_text(text)


def test_a_phase_that_does_not_exist_is_refused():
    sent = HeartbeatSender(0, None, ProgressMarker()).now().to_text()
    with pytest.raises(ValueError, match="no phase"):
        Heartbeat.from_text(sent.replace('"script"', '"lunch"'))


def test_a_sender_tells_phase_step_and_the_users_line(tmp_path, opened):
    said = ProgressMarker()
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as line:
        line.bind(str(tmp_path / "b"))
        line.settimeout(30)
        sender = HeartbeatSender(3, opened(str(tmp_path / "b")), said)
        sender.beat()
        first = Heartbeat.from_text(line.recv(65536))
        assert (first.rank, first.step, first.phase, first.process) == (3, -1, "script", os.getpid())
        assert said.set_phase("forward") == "script"
        said.set_step(412)
        sender.beat()
        second = Heartbeat.from_text(line.recv(65536))
    assert (second.step, second.phase) == (412, "forward")
    assert second.phase_changes > first.phase_changes
    assert second.place.file == __file__
    assert second.place.function == "test_a_sender_tells_phase_step_and_the_users_line"
    assert abs(second.at - time.time()) < 60


def test_a_sender_also_sends_over_udp(opened):
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as line:
        line.bind(("127.0.0.1", 0))
        line.settimeout(30)
        HeartbeatSender(1, opened(f"127.0.0.1:{line.getsockname()[1]}"), ProgressMarker()).beat()
        assert Heartbeat.from_text(line.recv(65536)).rank == 1


@pytest.mark.parametrize("channel", ["", "/nowhere/at/all"])
def test_without_a_listener_there_is_no_thread(channel):
    before = threading.active_count()
    HeartbeatSender(0, open_channel(channel), progress_marker()).start()
    assert threading.active_count() == before


def test_a_listener_that_went_away_is_no_trouble(tmp_path, opened):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as line:
        line.bind(str(tmp_path / "b"))
        sender = HeartbeatSender(0, opened(str(tmp_path / "b")), ProgressMarker())
    sender.beat()


def test_a_process_that_closes_its_descriptors_is_heard_and_writes_to_no_file_of_its_own(tmp_path, opened):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as line:
        line.bind(str(tmp_path / "b"))
        line.settimeout(30)
        sent = opened(str(tmp_path / "b"))
        sender = HeartbeatSender(4, sent, ProgressMarker())
        own, other = socket.socketpair()
        with own, other:
            os.dup2(own.fileno(), sent.fileno())  # the program has closed it, and opened something in its place
            sender.beat()
            other.setblocking(False)
            assert Heartbeat.from_text(line.recv(65536)).rank == 4
            with pytest.raises(BlockingIOError):
                other.recv(65536)
        copy = os.fork()
        if copy == 0:
            sender.beat()
            os._exit(0)
        os.waitpid(copy, 0)
        line.setblocking(False)
        with pytest.raises(BlockingIOError):
            line.recv(65536)
        sender._line.close()


def test_a_heartbeat_is_sent_whatever_an_observation_raises(tmp_path, opened, monkeypatch):
    """As where a backend keeps no sequence numbers, or the next torch has another name for what is private."""
    said = ProgressMarker()

    def fail(*args):
        raise RuntimeError("ProcessGroup custom does not yet support sequence numbers")

    said.memory = fail
    for name in ("collectives_begun", "find_user_frame", "_cpu_s"):
        monkeypatch.setattr(f"lockstep.heartbeat.sender.{name}", fail)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as line:
        line.bind(str(tmp_path / "b"))
        line.settimeout(30)
        rank = os.fork()
        if rank == 0:
            HeartbeatSender(0, opened(str(tmp_path / "b")), said, beside=fail).start()
            signal.pause()
        try:
            beats = [Heartbeat.from_text(line.recv(65536)) for _ in range(3)]
        finally:
            os.kill(rank, signal.SIGKILL)
            os.waitpid(rank, 0)
    assert [(beat.process, beat.collectives) for beat in beats] == [(rank, 0)] * 3


def test_a_listener_that_does_not_catch_up_loses_beats_and_no_more(tmp_path, opened):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as line:
        line.bind(str(tmp_path / "b"))
        sender = HeartbeatSender(0, opened(str(tmp_path / "b")), ProgressMarker())
        opened.lines[0].settimeout(0.001)
        for _ in range(2000):
            sender.beat()
        line.setblocking(False)
        held = 0
        with contextlib.suppress(BlockingIOError):
            while line.recv(65536):
                held += 1
    assert 0 < held < 2000


def test_all_of_a_process_share_one_pulse():
    assert progress_marker() is progress_marker()


def test_what_a_line_has_called_is_named_by_what_lies_above_it():
    seen = []
    sender = HeartbeatSender(0, None, said := ProgressMarker())
    box = queue.Queue()

    def watch():
        while (now := sender.now()).call != "queue.get":
            time.sleep(0.01)
        seen.append(now)
        box.put("found")

    other = threading.Thread(target=watch)
    other.start()
    assert box.get(timeout=60) == "found"
    other.join()
    (now,) = seen
    assert (now.meets, now.place.file) == (False, __file__)
    assert now.place.function == "test_what_a_line_has_called_is_named_by_what_lies_above_it"
    assert said.phase == "script"
