"""One root, one run: who holds it, who is refused, and when it is free again."""

import errno
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import lockstep
from lockstep.checkpoint.lock import LOCK_FILE, Holder, lock_root, superseded_by
from lockstep.errors import SettingError

SOURCE = str(Path(lockstep.__file__).parents[1])
HOLDS = """
import os, sys, time
from pathlib import Path
from lockstep.checkpoint.lock import Holder, lock_root
root, generation, forks = sys.argv[1:]
held = lock_root(Path(root), Holder.here("job", int(generation)), print)
if forks and os.fork() == 0:
    time.sleep(60)
    os._exit(0)
print("held", flush=True)
for line in sys.stdin:
    held.close()
    print("free", flush=True)
"""


class Other:
    """Another process that holds a root."""

    def __init__(self, root, *, generation=0, forks=False):
        self.process = subprocess.Popen(
            [sys.executable, "-c", HOLDS, str(root), str(generation), "yes" * forks],
            env=os.environ | {"PYTHONPATH": SOURCE},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        assert self.process.stdout.readline() == "held\n"

    def let_go(self):
        self.process.stdin.write("let go\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline() == "free\n"

    def die(self):
        self.process.kill()
        self.process.wait()


@pytest.fixture
def other(tmp_path):
    made = []

    def make(root=tmp_path, **options):
        made.append(Other(root, **options))
        return made[-1]

    yield make
    for one in made:
        os.killpg(one.process.pid, signal.SIGKILL)
        one.process.communicate()


class Time:
    """A clock that only sleep moves; what is to happen at which second."""

    def __init__(self, events=()):
        self.now_s, self.events = 0.0, dict(events)

    def clock(self):
        return self.now_s

    def sleep(self, seconds):
        self.now_s += seconds
        for at_s in [at_s for at_s in self.events if at_s <= self.now_s]:
            self.events.pop(at_s)()


def take(root, generation=0, job="job", time=None):
    time, said = time or Time(), []
    return lock_root(root, Holder.here(job, generation), said.append, clock=time.clock, sleep=time.sleep), said


def refused(root, **options):
    time = Time()
    with pytest.raises(SettingError) as caught:
        take(root, time=time, **options)
    return str(caught.value), round(time.now_s)


def is_free(root):
    code = "import fcntl, sys; fcntl.lockf(open(sys.argv[1], 'r+'), fcntl.LOCK_EX | fcntl.LOCK_NB)"
    return subprocess.run([sys.executable, "-c", code, root / LOCK_FILE], capture_output=True).returncode == 0


def test_another_process_is_refused_at_once_and_told_who_is_there_until_it_lets_go(tmp_path, other):
    there = other()
    text, waited_s = refused(tmp_path)
    assert waited_s == 0, "a run that lives is not waited for"
    assert f"checkpoint={str(tmp_path)!r} is in use by another run" in text
    assert f"process {there.process.pid} on {socket.gethostname()}" in text
    assert "Wait for it or stop it, or give another directory" in text
    there.let_go()
    held, said = take(tmp_path)
    assert not is_free(tmp_path)
    assert said == []
    held.close()
    held.close()
    assert is_free(tmp_path)


def test_the_root_is_free_when_its_holder_is_killed_though_a_copy_of_it_lives(tmp_path, other):
    there = other(forks=True)
    there.die()
    os.killpg(there.process.pid, 0)  # the copy
    time = Time()
    held, _ = take(tmp_path, time=time)
    assert time.now_s == 0
    held.close()


def test_runs_of_one_process_follow_each_other_and_do_not_nest(tmp_path):
    for _ in range(2):
        held, _ = take(tmp_path / "root")
        (tmp_path / "link").unlink(missing_ok=True)
        (tmp_path / "link").symlink_to("root")
        for way in ("root", "link"):
            text, waited_s = refused(tmp_path / way)
            assert waited_s == 0
            assert "another Run of this process" in text
            assert f"process {os.getpid()} on " in text
        assert not is_free(tmp_path / "root"), "a run that was refused must not have unlocked it"
        elsewhere, _ = take(tmp_path / "elsewhere")
        elsewhere.close()
        held.close()


def test_a_copy_of_the_holder_does_not_let_go_for_it(tmp_path):
    held, _ = take(tmp_path)
    if (child := os.fork()) == 0:
        held.close()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert not is_free(tmp_path)
    assert Holder.read(tmp_path / LOCK_FILE).process == os.getpid()
    held.close()


def test_an_earlier_generation_on_its_way_out_is_waited_for(tmp_path, other):
    there = other(generation=2)
    time = Time({3.0: there.let_go})
    held, said = take(tmp_path, generation=3, time=time)
    assert (said, round(time.now_s)) == ([], 3)
    assert not is_free(tmp_path)
    held.close()


def test_an_earlier_generation_whose_lock_stays_stops_nobody(tmp_path, other):
    other(generation=2)
    time = Time()
    held, said = take(tmp_path, generation=3, time=time)
    assert round(time.now_s) == 10
    (line,) = said
    assert "still locked by generation 2 of this job" in line
    assert superseded_by(tmp_path) == ""
    held.close()


def test_a_holder_that_slept_while_its_job_went_on_without_it_knows_that_when_it_wakes_up(tmp_path):
    held, _ = take(tmp_path, generation=2)
    assert superseded_by(tmp_path) == ""
    (tmp_path / LOCK_FILE).write_text("")  # the later generation is about to write its name
    assert superseded_by(tmp_path) == "another run"
    later = json.dumps({"host": "n2", "process": 7, "job": "job", "generation": 3})
    (tmp_path / LOCK_FILE).write_text(later)
    assert superseded_by(tmp_path) == "generation 3 of this job (process 7 on n2)"
    held.close()
    assert (tmp_path / LOCK_FILE).read_text() == later, "it is not this one's to remove"
    assert superseded_by(tmp_path) == ""


@pytest.mark.parametrize(("generation", "job"), [(3, "another job"), (2, "job"), (1, "job"), (3, "")])
def test_only_an_earlier_generation_of_the_same_job_is_on_its_way_out(tmp_path, other, generation, job):
    other(generation=2)
    _, waited_s = refused(tmp_path, generation=generation, job=job)
    assert waited_s == 0


def test_a_holder_that_has_ended_or_says_no_name_is_given_some_seconds(tmp_path, other):
    there = other()
    ended = subprocess.Popen([sys.executable, "-c", ""])
    os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)  # a zombie
    words = [json.dumps({"host": socket.gethostname(), "process": ended.pid, "job": "", "generation": 0}), "", "{}"]
    for word in words:
        (tmp_path / LOCK_FILE).write_text(word)
        text, waited_s = refused(tmp_path)
        assert waited_s == 10
        assert (str(ended.pid) if "host" in word else "a process that does not say its name") in text
    ended.wait()
    (tmp_path / LOCK_FILE).write_text(words[0])
    held, _ = take(tmp_path, time=Time({1.0: there.let_go}))
    held.close()


def test_another_hosts_process_is_not_looked_for_here():
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    assert Holder(socket.gethostname(), gone.pid).is_gone
    assert not Holder("another-host", gone.pid).is_gone
    assert not Holder.here().is_gone


def test_where_nothing_can_be_locked_nothing_is_held(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("in the way")
    held, said = take(tmp_path / "file" / "root")
    held.close()
    assert said == []

    def none_left(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    files = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(fcntl, "lockf", none_left)
    for _ in range(2):
        held, said = take(tmp_path / "root")
        (line,) = said
        assert "cannot be locked (No locks available)" in line
    assert len(os.listdir("/proc/self/fd")) == files
