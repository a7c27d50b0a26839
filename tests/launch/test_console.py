"""What reaches the launcher's terminal."""

import contextlib
import io
import os
import pty

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.launch.console import Screen, Tail


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
    assert "".join(shown) + tail.unfinished() == b"".join(pieces).decode(errors="replace")
    tail.close()


def test_a_tail_stops_where_it_is_told(log):
    tail = Tail(log, 0)
    with log.open("a") as file:
        file.write("said\nTraceback ...\n")
    up_to = len("an earlier generation\nsaid\n")
    assert tail.read(up_to) == "an earlier generation\nsaid\n"
    assert tail.read(up_to) == ""
    tail.close()


def test_in_a_pipe_output_and_talk_go_separate_ways_in_whole_lines():
    out, err = io.StringIO(), io.StringIO()
    screen = Screen(out, err, {})
    screen.leader("loss 1\nloss 2\n")
    screen.unfinished("50%")
    screen.say("restarting")
    screen.close()
    assert out.getvalue() == "loss 1\nloss 2\n"
    assert err.getvalue() == "restarting\n"


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
