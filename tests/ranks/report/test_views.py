import io
import os
import re
import struct
import subprocess
import sys
import termios
from fcntl import ioctl

import pytest

from lockstep.errors import SettingError
from lockstep.report import SilentView, Status, choose_view


class Clock:
    def __init__(self):
        self.now_s = 0.0

    def __call__(self):
        return self.now_s


def lines_of(seconds, status_at, *, per_s=4):
    """What a log holds after ``show`` was called for so many seconds: (time, line)."""
    clock, stream = Clock(), io.StringIO()
    view = choose_view(stream, {}, now=clock)
    found = []
    for tick in range(seconds * per_s):
        clock.now_s = tick / per_s
        before = stream.tell()
        view.show(status_at(clock.now_s))
        found += [(clock.now_s, line) for line in stream.getvalue()[before:].splitlines()]
    view.close()
    return found


def test_lines_come_ever_less_often():
    times = [at for at, _ in lines_of(400, lambda s: Status(step=int(s)))]
    assert times == [*range(10), *range(19, 120, 10), *range(179, 400, 60)]


def test_a_day_of_short_epochs_stays_a_short_log():
    found = lines_of(7200, lambda s: Status(step=int(s * 10), epoch=int(s)), per_s=2)
    assert 7200 / 60 < len(found) < 7200 / 5


def test_an_epoch_or_checkpoint_has_a_line_at_once():
    def status(seconds):
        return Status(step=int(seconds), epoch=int(seconds >= 150), last_saved_step=170 if seconds >= 170 else None)

    found = dict(lines_of(200, status))
    assert "epoch 2" in found[150.0]
    assert "saved at step 170" in found[170.0]


def test_the_end_is_written_once_and_at_once():
    found = lines_of(300, lambda s: Status(step=int(s), state="done" if s >= 130.25 else "training"))
    assert [at for at, line in found if line.startswith("done | ")] == [130.25]


def test_the_end_is_written_once_also_where_what_it_does_not_show_changes():
    stream = io.StringIO()
    view = choose_view(stream, {})
    for late in ("1 rank waits 40 % for rank 0", ""):
        view.show(Status(step=3, state="done", late=late))
    view.close()
    assert len(stream.getvalue().splitlines()) == 1


def test_closing_writes_what_was_not_written():
    clock, stream = Clock(), io.StringIO()
    view = choose_view(stream, {}, now=clock)
    view.show(Status(step=1))
    view.show(Status(step=2))
    view.close()
    view.close()
    assert stream.getvalue().splitlines() == ["step 1 | epoch 1", "step 2 | epoch 1"]


def test_a_line_tells_all_that_is_known():
    stream = io.StringIO()
    choose_view(stream, {}).show(
        Status(1240, 2000, 2, 10, 2140.4, 0.43214, 725, 1200, world_size=4, generation=1, state="training")
    )
    assert stream.getvalue() == (
        "step 1 240/2 000 | epoch 3/10 | 2 140 samples/s | loss 0.4321 on rank 0 | 12 m 05 s left | saved at step 1 200"
        " | generation 1\n"
    )


def test_lines_drop_what_was_drawn_over():
    stream = io.StringIO()
    choose_view(stream, {}).line("10%\r50%\r100%\r\nnext\r\n")
    assert stream.getvalue() == "100%\nnext\n"


def test_a_stream_of_ascii_gets_ascii():
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii")
    choose_view(stream, {}).line("größer ✗")
    assert raw.getvalue() == rb"gr\xf6\xdfer \u2717" + b"\n"


def test_each_line_of_a_pipe_arrives_in_one_piece():
    reading, writing = os.pipe2(os.O_DIRECT | os.O_NONBLOCK)  # a pipe that keeps each write apart
    with open(reading, "rb", buffering=0) as reader, open(writing, "w", encoding="utf-8") as stream:
        view = choose_view(stream, {})
        view.line("x" * 3000 + "\n" + "y" * 900)
        assert reader.read(4096) == b"x" * 3000 + b"\n" + b"y" * 900 + b"\n"
        view.show(Status(step=1))
        assert reader.read(4096) == b"step 1 | epoch 1\n"


SHOW = """
import os, sys
from lockstep.report import Status, choose_view
view = choose_view(sys.stderr, os.environ)
for step in range(1, 6):
    view.show(Status(step * 100, 1000, 0, 2, 64.0, 1 / step, 60.0, world_size=2))
    view.line(f"line {step} [bold] of a rank")
    {extra}
view.close()
view.line("after")
{last}
"""


def child(stderr, env=(), *, extra="pass", last="", **more):
    code = SHOW.replace("{extra}", extra).replace("{last}", last)
    environ = {name: os.environ[name] for name in ("PATH", "PYTHONPATH") if name in os.environ}
    environ["TERM"] = "xterm-256color"
    return subprocess.Popen([sys.executable, "-c", code], stderr=stderr, env=environ | dict(env), **more)


def test_a_pipe_that_closes_does_not_end_the_run():
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    run = child(subprocess.PIPE, extra="input()", last="print('trained to the end')", **pipes)
    assert run.stderr.readline() == b"step 100/1 000 | epoch 1/2 | 64.0 samples/s | loss 1 on rank 0 | 1 m 00 s left\n"
    run.stderr.close()
    run.stdin.write(b"\n" * 5)
    run.stdin.close()
    assert run.stdout.read() == b"trained to the end\n"
    run.stdout.close()
    assert run.wait(30) == 0


@pytest.mark.parametrize("env", [{}, {"FORCE_COLOR": "1"}, {"TERM": "dumb"}, {"LANG": "C", "PYTHONUTF8": "0"}])
def test_a_pipe_gets_plain_lines_whatever_is_said_about_colour(env):
    run = child(subprocess.PIPE, env)
    content = run.stderr.read()
    run.stderr.close()
    assert run.wait(30) == 0
    assert content.isascii()
    assert b"\r" not in content
    assert b"\x1b" not in content
    assert content.count(b"of a rank") == 5
    assert content.splitlines()[-1] == b"after"


# The live view, on a real pseudo-terminal.


def on_terminal(env=(), *, columns=100, **more):
    """All bytes that a run sent to a terminal of 30 lines."""
    ours, theirs = os.openpty()
    ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 30, columns, 0, 0))
    run = child(theirs, env, **({"stdin": theirs, "stdout": theirs} | more))
    os.close(theirs)
    content = b""
    while True:
        try:
            block = os.read(ours, 65536)
        except OSError:  # the other end is gone
            break
        if not block:
            break
        content += block
    os.close(ours)
    assert run.wait(30) == 0
    return content.decode()


def screen(content):
    """The lines that a person sees after ``content``; refuses what this small terminal does not know."""
    rows, row, column = [""], 0, 0
    for control, final, text in re.findall(r"\x1b\[([\d;?]*)([A-Za-z])|([^\x1b])", content, re.DOTALL):
        if text == "\r":
            column = 0
        elif text == "\n":
            row += 1
            if row == len(rows):
                rows.append("")
        elif text:
            rows[row] = rows[row][:column].ljust(column) + text + rows[row][column + 1 :]
            column += 1
        elif final == "A":
            row -= int(control or 1)
            assert row >= 0
        elif final == "K":
            assert control == "2"
            rows[row] = ""
        else:
            assert final in "mlh", (control, final)
    return [line.rstrip() for line in rows]


def test_a_terminal_shows_the_lines_and_below_them_one_live_picture():
    content = on_terminal(extra="print(f'printed {step}')")
    rows = screen(content)
    assert rows[:10] == [line for n in range(1, 6) for line in (f"line {n} [bold] of a rank", f"printed {n}")]
    assert re.fullmatch(r"training +epoch 1/2 +[━╸╺ ]+ +step 500/1 000", rows[10])
    assert rows[11] == "2 ranks | 64.0 samples/s | loss 0.2 on rank 0 | 1 m 00 s left"
    assert rows[12:] == ["after", ""]


def test_the_cursor_is_never_left_hidden():
    content = on_terminal(extra="os._exit(0)")  # as a process that is killed
    assert "\x1b[?25l" in content
    assert content.rindex("\x1b[?25h") > content.rindex("\x1b[?25l")


def test_colours_follow_the_environment():
    colour = re.compile(r"\x1b\[[\d;]*(?:3[0-7]|38|9[0-7])[\d;]*m")
    assert colour.search(on_terminal())
    assert not colour.search(on_terminal({"NO_COLOR": "1"}))
    assert not colour.search(on_terminal({"NO_COLOR": "1", "FORCE_COLOR": "1"}))


def test_a_dumb_terminal_gets_lines():
    content = on_terminal({"TERM": "dumb"})
    assert "\x1b" not in content
    assert content.splitlines()[0] == "step 100/1 000 | epoch 1/2 | 64.0 samples/s | loss 1 on rank 0 | 1 m 00 s left"


def test_an_ascii_terminal_gets_ascii():
    content = on_terminal({"PYTHONIOENCODING": "ascii"})
    assert content.isascii()
    assert "step 500/1 000" in screen(content)[5]


def test_a_narrow_terminal_is_not_wrapped():
    rows = screen(on_terminal(columns=40))
    assert all(len(row) <= 40 for row in rows)
    assert "step 500/1 000" in rows[5]


def test_what_is_printed_between_two_pictures_stays_as_where_ranks_are_restarted():
    stream = io.StringIO()
    view = choose_view(stream, {"LOCKSTEP_VIEW": "live", "TERM": "xterm", "COLUMNS": "60"})
    for step in (1, 2, 3, 4):
        view.show(Status(step=step))
        if step % 2 == 0:
            view.close()
            view.line("rank 1 was killed")
            view.line("restarting")
    rows = screen(stream.getvalue().replace("\n", "\r\n"))  # as a terminal makes of it
    assert [row for row in rows if row.startswith("r")] == ["rank 1 was killed", "restarting"] * 2
    assert [re.search(r"step \d+$", row)[0] for row in rows if row.startswith("training")] == ["step 2", "step 4"]


def test_what_goes_to_a_file_is_not_drawn(tmp_path):
    with (tmp_path / "out").open("wb") as out:
        content = on_terminal(extra="print(f'printed {step}')", stdout=out)
    assert (tmp_path / "out").read_text() == "".join(f"printed {n}\n" for n in range(1, 6))
    assert "printed" not in content


def test_the_user_has_the_last_word():
    assert isinstance(choose_view(io.StringIO(), {"LOCKSTEP_VIEW": "silent"}), SilentView)
    with pytest.raises(SettingError, match="auto, live, lines, silent"):
        choose_view(io.StringIO(), {"LOCKSTEP_VIEW": "loud"})
    stream = io.StringIO()
    view = choose_view(stream, {"LOCKSTEP_VIEW": "live", "TERM": "xterm"})
    view.show(Status(step=1))
    view.close()
    assert "\x1b[" in stream.getvalue()


def test_a_closed_stream_ends_the_view_only():
    stream = io.StringIO()
    view = choose_view(stream, {})
    stream.close()
    view.line("nobody sees this")
    view.show(Status(step=1))
    view.close()
