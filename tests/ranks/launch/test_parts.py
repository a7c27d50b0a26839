"""What the launcher stands on dies, is stopped, or does not answer: it is named, no rank is blamed, and all ends."""

import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import lockstep
from doc_blocks import free_port
from lockstep.launch.diagnosis.part_monitor import PartMonitor
from lockstep.launch.host import procfs
from lockstep.launch_contract import CHANNEL
from waiting import wait_until

SOURCE = str(Path(lockstep.__file__).parents[1])
RAISES_WHEN_TOLD = """
    import os, signal, sys, time
    from pathlib import Path

    rank, generation = os.environ["RANK"], os.environ["LOCKSTEP_GENERATION"]
    if "deaf" in sys.argv:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    Path(f"up-{generation}-{rank}").write_text("")
    while not Path("go").exists():
        time.sleep(0.02)
    if rank == "1":
        raise ValueError("the true cause")
    time.sleep(300)
"""
#: Without torch in the ranks, which it is not about.
PLAIN = ("--start", "plain", "--nproc-per-node", 2)


@pytest.fixture
def launched(workshop):
    """Start a launcher whose ranks wait, with what it says in a file; returns it and a function that reads that."""

    def start(*options, args=()):
        heard = workshop.here / "screen"
        with heard.open("w") as screen:
            streams = {"stdin": subprocess.DEVNULL, "stdout": screen, "stderr": screen}
            script = workshop.script(RAISES_WHEN_TOLD)
            launcher = workshop.start(*PLAIN, "--run-dir", "r", *options, script, *args, streams=streams)
        return launcher, heard.read_text

    return start


def process_of(workshop, name):
    return wait_until(lambda: next((pid for pid, n in workshop.processes().items() if n == name), None), name)


def fork_server_of(launcher):
    return wait_until(lambda: procfs.children(launcher.pid), "the fork server")[0]


def ranks_are_up(workshop, generation):
    for rank in range(2):
        workshop.wait_for_file(f"up-{generation}-{rank}")


def test_a_launcher_that_lives_keeps_its_ranks_however_soon_a_silent_one_is_given_up(workshop):
    """On several nodes its ranks have a lease, which it renews before that is over."""
    script = workshop.script("import time; time.sleep(1.5); print('done')")
    conf = "lost_after=0.9,last_call_timeout=0.1"
    nodes = ("--nnodes", "1:2", "--rdzv-endpoint", f"localhost:{free_port()}", "--rdzv-conf", conf)
    ended = workshop.run("--start", "plain", "--run-dir", "r", *nodes, script)
    assert (ended.code, "done" in ended.out) == (0, True), ended


def test_each_part_that_dies_is_named_and_costs_one_generation_and_the_cause_is_told_at_last(workshop, launched):
    launcher, screen = launched("--max-restarts", 2)
    ranks_are_up(workshop, 0)
    os.kill(process_of(workshop, "lockstep store"), signal.SIGKILL)
    ranks_are_up(workshop, 1)
    os.kill(fork_server_of(launcher), signal.SIGKILL)
    ranks_are_up(workshop, 2)
    store = process_of(workshop, "lockstep store")
    os.kill(store, signal.SIGSTOP)
    wait_until(lambda: "the store where the ranks meet was stopped" in screen(), screen)
    wait_until(lambda: procfs.state(store) not in "Tt", "the store to go on")
    (workshop.here / "go").touch()
    assert launcher.wait(60) == 1
    blocks = screen().split("✗ ")[1:]
    assert len(blocks) == 3, screen()
    assert blocks[0].startswith("run failed: the store where the ranks meet was killed by SIGKILL")
    assert blocks[1].startswith("run failed: the fork server, which starts the ranks, was killed by SIGKILL")
    assert all("no rank is to blame" in block for block in blocks[:2])
    assert blocks[2].startswith("run failed: rank 1 of 2 (host ")
    assert "the true cause" in blocks[2]
    assert screen().count("restarting all 2 ranks") == 2


def test_a_fork_server_that_cannot_serve_says_why(workshop):
    workshop.script("raise ImportError('libcudart.so.13 is not there')", "torch.py")
    ended = workshop.run(workshop.script("import torch"), PYTHONPATH=f"{workshop.here}:{SOURCE}")
    assert ended.code == 1
    _, failure = ended.err.split("✗ ")
    assert "left with exit code 1: ImportError: libcudart.so.13 is not there\n" in failure
    assert "no rank is to blame" in failure


def test_a_run_directory_that_goes_away_does_not_hide_the_cause(workshop, launched):
    launcher, screen = launched()
    ranks_are_up(workshop, 0)
    # At once: a directory in which the launcher writes meanwhile cannot be removed.
    shutil.rmtree((workshop.here / "r").rename(workshop.here / "gone"), ignore_errors=True)
    wait_until(lambda: "note: r" in screen(), screen)
    (workshop.here / "go").touch()
    assert launcher.wait(60) == 1
    assert "rank 1 of 2" in screen().split("✗ ")[-1]
    assert "the true cause" in screen().split("✗ ")[-1]
    assert "Traceback" not in screen().split("✗ ")[-1]


@pytest.mark.parametrize("urged", [["TERM", "INT", "INT", "INT"], ["KILL"]])
def test_nothing_is_left_where_the_fork_server_is_stopped(workshop, launched, urged):
    launcher, _ = launched("--grace", 1, args=["deaf"])
    ranks_are_up(workshop, 0)
    fork_server = fork_server_of(launcher)
    os.kill(fork_server, signal.SIGSTOP)
    before_s = time.monotonic()
    for name in urged:
        launcher.send_signal(signal.Signals[f"SIG{name}"])
        time.sleep(0.2)  # one signal after the other, as a user types them
    launcher.wait(60)
    # Soon, where a machine is not busy; without its deadlines it would never end.
    assert time.monotonic() - before_s < 30
    wait_until(lambda: not workshop.processes(), lambda: f"the end of {workshop.processes()}", deadline_s=30)


def test_a_fork_server_that_imports_torch_does_not_outlive_its_launcher(workshop):
    """On a busy machine that takes half a minute; here it would take longer, and orders wait to be read meanwhile."""
    (workshop.here / "torch").mkdir()
    begun = workshop.here / "begun"
    workshop.script(f"import time\nopen({str(begun)!r}, 'w').close()\ntime.sleep(600)", "torch/__init__.py")
    path = os.pathsep.join([str(workshop.here), str(Path(lockstep.__file__).parents[1])])
    launcher = workshop.start("--run-dir", "r", workshop.script("import torch"), PYTHONPATH=path)
    workshop.wait_for_file("begun")
    variables = Path(f"/proc/{fork_server_of(launcher)}/environ").read_text().split("\0")
    channel = next(Path(each.partition("=")[2]) for each in variables if each.startswith(f"{CHANNEL}="))
    assert channel.parent.is_dir()
    launcher.kill()
    wait_until(lambda: not workshop.processes(), workshop.said_of_processes, deadline_s=20)
    assert not channel.parent.exists(), "what the launcher had in the file system is gone, too"


@pytest.mark.campaign
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", range(5))
def test_wherever_in_its_start_a_launcher_is_killed_nothing_outlives_it(workshop, seed):
    train = workshop.script("open('begun', 'w').close(); import time; time.sleep(600)")
    begin_s = time.monotonic()
    launcher = workshop.start("--nproc-per-node", 2, train)
    workshop.wait_for_file("begun")
    takes_s = 1.2 * (time.monotonic() - begin_s)
    launcher.kill()
    choose = random.Random(seed)
    for kills in range(10):
        launcher = workshop.start("--nproc-per-node", 2, train)
        # Where it is then depends on the machine; any place will do.
        with contextlib.suppress(subprocess.TimeoutExpired):
            launcher.wait(choose.uniform(0.0, takes_s))
        assert launcher.poll() is None
        launcher.kill()
        wait_until(
            lambda: not workshop.processes(),
            lambda kills=kills: f"{workshop.said_of_processes()} (after {kills} kills)",
        )


def test_a_part_is_told_to_go_on_before_it_is_given_up():
    now, said, states = [0.0], [], {7: "S"}
    monitor = PartMonitor(said.append, lambda process: states.get(process, ""), lambda: now[0])

    def looks(count):
        found = None
        for _ in range(count):
            now[0] += 0.6
            found = found or monitor.poll()
        return found

    monitor.watch({1 << 30: "another", 7: "the store"})
    assert looks(20) is None
    states[7] = "T"
    assert looks(3) is None
    assert monitor.suspects
    assert not said
    states[7] = "S"
    assert looks(1) is None
    assert not monitor.suspects, "it runs again"
    states[7] = "t"
    # The process with this number, if there is one, is not the test's to signal.
    monitor.watch({1 << 30: "another"})
    assert looks(9) is None
    states[1 << 30] = "T"
    assert looks(4) is None
    assert len(said) == 1
    assert looks(4).name == "another"


def test_a_process_is_told_apart_from_another_with_its_number():
    own, child = procfs.begun(os.getpid()), subprocess.Popen(["sleep", "100"])
    try:
        assert procfs.begun(os.getpid()) == own != ""
        assert procfs.begun(child.pid) not in (own, "")
        child.send_signal(signal.SIGSTOP)
        wait_until(lambda: procfs.state(child.pid) == "T", "it to be stopped")
    finally:
        child.kill()
        child.wait()
    assert procfs.begun(child.pid) == procfs.state(child.pid) == ""
    assert Path("/proc/self/stat").exists(), "this test is for Linux"


def test_the_flags_of_python_reach_the_ranks_but_for_those_that_hide_the_package():
    """`python -O -X dev -m lockstep run train.py` is to run the script as `python -O -X dev train.py` does."""
    command = "from lockstep.launch.host.child_process import own_python; print(*own_python('rank', []))"
    ended = subprocess.run(
        [sys.executable, "-O", "-s", "-X", "dev", "-c", command], capture_output=True, text=True, check=True
    )
    _, *flags = ended.stdout.partition(" -P ")[0].split()
    assert "-O" in flags
    assert "-X dev" in " ".join(flags)
    assert "-s" not in flags
