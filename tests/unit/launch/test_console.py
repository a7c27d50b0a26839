"""What reaches the launcher's terminal."""

import contextlib
import io
import itertools
import os
import pty

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.launch.host.timed_calls import ScreenThread
from lockstep.launch.terminal.console import Screen, Tail
from waiting import wait_until


@pytest.fixture
def log(tmp_path):
    path = tmp_path / "rank-0000.log"
    path.write_bytes(b"an earlier generation\n")
    return path


@given(st.lists(st.binary(max_size=20), max_size=8))
def test_a_tail_gives_every_line_once_and_whole_however_it_was_written(log, pieces):
    log.write_bytes(b"an earlier generation\n")
    tail = Tail(log, log.stat().st_size)
    shown = []
    for piece in pieces:
        with log.open("ab") as file:
            file.write(piece)
        text = tail.read(tail.size())
        assert text == "" or text.endswith("\n")
        shown.append(text)
    # A sign of several bytes may be torn between pieces, but never between lines.
    assert ("".join(shown) + tail.unfinished()).encode(errors="surrogateescape") == b"".join(pieces)
    tail.close()


def test_a_tail_stops_where_it_is_told(log):
    tail = Tail(log, 0)
    with log.open("a") as file:
        file.write("said\nTraceback ...\n")
    up_to = len("an earlier generation\nsaid\n")
    assert tail.read(up_to) == "an earlier generation\nsaid\n"
    assert tail.read(up_to) == ""
    tail.close()


@given(st.lists(st.text(st.sampled_from("7%\r\nü"), max_size=8), max_size=8))
def test_in_a_pipe_the_leaders_output_stays_as_it_is_and_talk_goes_another_way(log, pieces):
    log.write_bytes(b"")
    out, err = io.StringIO(newline=""), io.StringIO()
    screen, tail = Screen(out, err, {}), Tail(log, 0)
    for piece in pieces:
        with log.open("a", newline="") as file:
            file.write(piece)
        screen.leader(tail.read(tail.size()))
        screen.unfinished(tail.unfinished())
        written = log.read_bytes().decode()
        assert out.getvalue() == written[: max(written.rfind(sign) for sign in "\r\n") + 1]
    screen.leader(tail.unfinished())
    screen.say("restarting")
    screen.close()
    tail.close()
    assert out.getvalue() == "".join(pieces)
    assert err.getvalue() == "restarting\n"


def test_the_stack_of_torchs_own_code_stays_in_the_log():
    out, err = io.StringIO(), io.StringIO()
    screen = Screen(out, err, {})
    stack = (
        "recvValue failed on SocketImpl(fd=23): Broken pipe\n"
        "Exception raised from recvBytes at ../torch/csrc/Utils.hpp:678 (most recent call first):\n"
        "frame #0: c10::Error::Error(c10::SourceLocation, std::string) + 0x98 (0x7f1c7a in /lib/libc10.so)\n"
        "frame #1: <unknown function> + 0xdbbf4 (0x7f1c in /lib/libstdc++.so.6)\n\n"
    )
    screen.leader(f"{stack}frame #0: of my film\n")
    screen.say(stack)
    short = "recvValue failed on SocketImpl(fd=23): Broken pipe\n(the stack of torch's C++ code is in the log)\n\n"
    assert out.getvalue() == f"{short}frame #0: of my film\n"
    assert err.getvalue().rstrip() == short.rstrip()


@pytest.mark.parametrize(("encoding", "mark"), [("utf-8", "✗"), ("ascii", "x"), ("latin-1", "x")])
def test_a_failure_is_marked_as_the_stream_can(encoding, mark):
    err = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    Screen(io.StringIO(), err, {}).fail("run failed: why?")
    assert err.buffer.getvalue().decode(encoding) == f"{mark} run failed: why?\n"


def test_without_a_view_the_leader_is_still_heard():
    out = io.StringIO()
    Screen(out, io.StringIO(), {"LOCKSTEP_VIEW": "silent"}).leader("loss 1\n")
    assert out.getvalue() == "loss 1\n"


def test_a_stream_that_is_gone_is_no_trouble():
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "w", closefd=False) as out:
        screen = Screen(out, io.StringIO(), {})
        screen.leader("one\n" * 100000)
        screen.leader("two\n")
        screen.close()
        with contextlib.suppress(BrokenPipeError):
            out.close()
    os.close(writing)


def test_the_root_cause_is_told_though_nobody_reads_what_the_leader_wrote():
    reading, writing = os.pipe()
    err, asked = io.StringIO(), itertools.count()
    with open(writing, "w", closefd=False) as out:
        screen = ScreenThread(Screen(out, err, {}))
        screen.leader("one\n" * 100000)
        screen.fail("run failed: an earlier one")
        screen.fail("run failed: the true cause")
        screen.finish(lambda: next(asked))  # the user does not wait longer
        told = err.getvalue()
        os.close(reading)  # and the thread ends
        wait_until(lambda: screen._thread.close(0.05), "the end of the thread")
        with contextlib.suppress(BrokenPipeError):
            out.close()
    os.close(writing)
    assert told.endswith("run failed: the true cause\n")


def test_on_a_terminal_an_unfinished_line_is_drawn_over_and_wiped():
    ours, theirs = pty.openpty()
    with open(theirs, "w") as terminal:
        screen = Screen(terminal, terminal, {"LOCKSTEP_VIEW": "lines"})
        screen.unfinished("\r10%\r20%\r")
        screen.leader("done\n")
        screen.close()
        terminal.flush()
        seen = ""
        while not seen.endswith("done\r\n"):  # a terminal hands on what there is, so perhaps in parts
            seen += os.read(ours, 4096).decode()
    os.close(ours)
    assert "20%" in seen
    assert "10%" not in seen
    assert seen.endswith("\r\x1b[Kdone\r\n")
