"""Stacks of processes that cannot help it."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

import lockstep
from lockstep.heartbeat import Stack, is_registered, read_stacks
from lockstep.heartbeat_message import SourceLine
from lockstep.launch_contract import STACKS_SIGNAL
from waiting import wait_until

SOURCE = str(Path(lockstep.__file__).parents[1])
STUCK = r"""
    import ctypes, os, sys, threading
    from pathlib import Path
    from lockstep.heartbeat import register_stacks

    def worker():
        threading.Event().wait()

    def spin():
        lock = ctypes.create_string_buffer(64)
        for _ in range(2):  # the second waits for the first, for ever, with Python's lock in its hand
            ctypes.PyDLL(None).pthread_mutex_lock(lock)

    def main():
        if sys.argv[2] == "registered":
            register_stacks(Path(sys.argv[1]))
        threading.Thread(target=worker, daemon=True).start()
        if "fork" in sys.argv and (child := os.fork()):
            os.write(1, f"{child}\n".encode())
            os.waitpid(child, 0)
            return
        os.write(1, b"up\n")
        spin()

    main()
"""


@pytest.fixture
def stuck(tmp_path):
    (tmp_path / "stuck.py").write_text(textwrap.dedent(STUCK))
    started = []

    def start(*words):
        command = [sys.executable, str(tmp_path / "stuck.py"), str(tmp_path / "s" / "rank.txt"), *words]
        env = {**os.environ, "PYTHONPATH": SOURCE}
        process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True, start_new_session=True)
        started.append(process)
        return process

    yield start
    for process in started:
        os.killpg(process.pid, signal.SIGKILL)  # with what it has forked
        process.communicate()


def status(process):
    return Path(f"/proc/{process}/status").read_text()


def dump(path, process):
    before = path.read_text()
    os.kill(process, STACKS_SIGNAL)
    wait_until(lambda: "in <module>" in path.read_text()[len(before) :], path.read_text)
    return read_stacks(before, path.read_text()[len(before) :])


def dump_of_the_stuck(path, process):
    """As `dump`, once the process is where it stays."""
    end = time.monotonic() + 30
    while (stacks := dump(path, process)).main.frames[0].function != "spin":
        assert time.monotonic() < end, stacks
    return stacks


def test_a_process_that_holds_pythons_lock_in_c_tells_where_it_is(stuck, tmp_path):
    process = stuck("registered")
    assert process.stdout.readline() == "up\n"
    path = tmp_path / "s" / "rank.txt"
    assert is_registered(status(process.pid))
    stacks = dump_of_the_stuck(path, process.pid)
    assert [(Path(f.file).name, f.function) for f in stacks.main.own()] == [
        ("stuck.py", "spin"), ("stuck.py", "main"), ("stuck.py", "<module>"),
    ]  # fmt: skip
    line = textwrap.dedent(STUCK).splitlines().index("        ctypes.PyDLL(None).pthread_mutex_lock(lock)") + 1
    assert stacks.main.frames[0].line == line
    assert "in worker" in stacks.text
    again = dump(path, process.pid)
    assert again.main == stacks.main
    assert process.poll() is None, "to be asked must do no harm"


def test_a_process_that_it_forked_answers_into_the_same_file(stuck, tmp_path):
    process = stuck("registered", "fork")
    told = {process.stdout.readline().strip(), process.stdout.readline().strip()}
    (child,) = map(int, told - {"up"})
    assert is_registered(status(child))
    stacks = dump_of_the_stuck(tmp_path / "s" / "rank.txt", child)
    assert stacks.main.frames[0].function == "spin"


def test_a_process_that_would_die_of_the_question_is_known_by_its_status(stuck):
    process = stuck("plain")
    assert process.stdout.readline() == "up\n"
    assert not is_registered(status(process.pid))
    assert not is_registered("")


def test_the_main_thread_is_found_among_others():
    written = (
        "Thread 0x00000000000000aa (most recent call first):\n"
        '  File "/home/ada/loop.py", line 3 in beat\n\n'
        "Current thread 0x00000000000000bb (most recent call first):\n"
        '  File "/home/ada/odd, line 7 in x.py", line 5 in <module>\n'
        "Thread 0x00000000000000cc (most recent call first):\n  <no Python frame>\n"
    )
    header = "# main thread 0xbb of process 12\n"
    assert read_stacks(header, written).main.frames == (SourceLine("/home/ada/odd, line 7 in x.py", 5, "<module>"),)
    assert read_stacks(header.replace("bb", "cc"), written).main.frames == ()
    assert read_stacks(f"{header.replace('bb', 'cc')}{header}", written).main.frames[0].line == 5


def test_nothing_written_is_no_stack():
    assert read_stacks("", "").main == Stack(())
    assert read_stacks("", "Fatal Python error").main.own() == ()
