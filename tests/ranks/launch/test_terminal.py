"""A rank that has the terminal: a real one, with a launcher in its foreground."""

import fcntl
import os
import pty
import select
import struct
import termios
import time

import pytest

from waiting import wait_until

DEADLINE_S = 90
AGAIN_S = 5  #: a user presses a key again
COLUMNS, LINES = 91, 27
ASKS = """
    import os, subprocess, sys
    columns, lines = os.get_terminal_size()
    print("size", columns, lines, subprocess.check_output(["stty", "size"], text=True).split(), sys.stdin.isatty())
    name = input("name? ")
    breakpoint()
    print("answer", name, 40 + more)
"""


class Window:
    """A terminal with a launcher in it."""

    def __init__(self, workshop, *args, **env):
        self.seen, self.code = b"", None
        self._ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", LINES, COLUMNS, 0, 0))
        self.before = termios.tcgetattr(theirs)
        self.theirs = theirs

        def own():
            os.setsid()
            fcntl.ioctl(0, termios.TIOCSCTTY, 0)

        self.process = workshop.start(
            *args, streams={"stdin": theirs, "stdout": theirs, "stderr": theirs, "preexec_fn": own}, **env
        )

    def wait_for(self, text, again=None):
        """Read until ``text`` stands on the screen, after what was waited for before; type ``again`` meanwhile."""
        pressed = time.monotonic()
        end = pressed + DEADLINE_S
        while text.encode() not in self.seen:
            if again is not None and time.monotonic() > pressed + AGAIN_S:
                pressed = time.monotonic()
                self.type(again)
            assert self.process.poll() is None or select.select([self._ours], [], [], 0)[0], self.seen.decode()
            assert time.monotonic() < end, f"no {text!r} in {self.seen.decode()!r}"
            if select.select([self._ours], [], [], 0.1)[0]:
                self.seen += os.read(self._ours, 4096)
        before, _, self.seen = self.seen.partition(text.encode())
        return before.decode()

    def type(self, text):
        os.write(self._ours, text.encode())

    def rest(self):
        """What comes until the launcher ends; its exit code is `code` then."""
        while self.process.poll() is None or select.select([self._ours], [], [], 0)[0]:
            if select.select([self._ours], [], [], 0.1)[0]:
                self.seen += os.read(self._ours, 4096)
        self.code = self.process.returncode
        return self.seen.decode()

    def close(self):
        os.close(self._ours)
        os.close(self.theirs)


@pytest.fixture
def window(workshop):
    windows = []

    def open_window(*args, **env):
        windows.append(Window(workshop, *args, **env))
        return windows[-1]

    yield open_window
    for each in windows:
        each.process.kill()
        each.process.wait()
        each.close()


def test_the_only_rank_has_the_terminal(workshop, window):
    w = window("--run-dir", "r", "--nproc-per-node", 1, workshop.script(ASKS))
    w.wait_for(f"size {COLUMNS} {LINES} ['{LINES}', '{COLUMNS}'] True\r\n")
    w.wait_for("name? ")
    w.type("Ada\n")
    w.wait_for("(Pdb) ")
    w.type("p name\n")
    w.wait_for("'Ada'\r\n(Pdb) ")
    # Ctrl-C is the debugger's while it prompts. One that comes after Python has written the prompt and before it waits
    # for a key is seen with the next key only, also without a launcher.
    w.type("\x03")
    w.wait_for("(Pdb) ", again="\x03")
    w.type("more = 2\n")
    w.wait_for("(Pdb) ")
    w.type("c\n")
    assert "answer Ada 42\r\n" in w.rest()
    assert w.code == 0
    assert termios.tcgetattr(w.theirs) == w.before, "the terminal is given back as it was"
    log = (workshop.here / "r" / "logs" / "rank-0000.log").read_text()
    assert "answer Ada 42\n" in log
    assert "\r\n" not in log


STEPS = """
    import os, sys, torch, lockstep
    from torch.utils.data import TensorDataset
    rank = int(os.environ["RANK"])
    with lockstep.Run(seed=0) as run:
        model = run.model(torch.nn.Linear(2, 1))
        run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        batches = run.loader(TensorDataset(torch.ones(8, 2)), global_batch=4, micro_batch=2)
        for epoch in run.epochs(2):
            for (x,) in run.train(batches):
                run.step(model(x).mean())
            if epoch == 0 and rank == 1:
                print("timeout", run.settings.values.peer_timeout_s)
                answer = input("go on? ")
            run.barrier()
        print("rank", rank, "is done", sys.stdin.isatty())
"""


def test_one_of_several_has_it_and_the_others_wait_for_as_long_as_its_user_thinks(workshop, window):
    hang_s = 2
    w = window("--run-dir", "r", "--ranks", 2, "--attach", 1, "--hang-after", hang_s, workshop.script(STEPS))
    w.wait_for("timeout 86400.0\r\n")
    w.wait_for("go on? ")
    began = time.monotonic()
    # Twice as long as any rank may otherwise be in one place; nothing may be drawn behind the prompt meanwhile.
    wait_until(lambda: time.monotonic() > began + 2 * hang_s, "the user to have thought")
    w.type("yes\n")
    shown = w.rest()
    assert w.code == 0, shown
    assert "yes\r\n" in shown  # behind a line of rank 0's, where a busy launcher came to it late
    assert "hang" not in shown
    assert "rank 1 is done True\r\n" in shown
    assert "rank 0 is done False\r\n" in shown
    assert "done   " in shown or "done |" in shown, "the progress view comes back"


def test_what_has_no_terminal_says_how_to_get_one(workshop):
    ended = workshop.run("--attach", 0, "--run-dir", "r", workshop.script("1"))
    assert ended.code == 2
    assert "--attach 0: there is no terminal here" in ended.err
    assert not (workshop.here / "r").exists()
