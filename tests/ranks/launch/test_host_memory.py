"""Host memory: the kernel's words in both versions, and who held what."""

import os
import re
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from lockstep.launch.diagnosis.error_record import Failure
from lockstep.launch.diagnosis.host_memory import MemoryTracker, RankMemory, memory_by_rank
from lockstep.memory_use import ControlGroup
from lockstep.report import RanksFile
from waiting import wait_until

GIB = 1 << 30


def tree(root, files):
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return ControlGroup.read(root / "cgroup", root / "sys")


def test_version_2_the_least_limit_counts_and_the_own_kills(tmp_path):
    found = tree(
        tmp_path,
        {
            "cgroup": "0::/job/step\n",
            "sys/job/memory.max": f"{8 * GIB}\n",
            "sys/job/memory.current": f"{7 * GIB}\n",
            "sys/job/memory.stat": f"anon 1\ninactive_file {2 * GIB}\n",
            "sys/job/step/memory.max": "max\n",
            "sys/job/step/memory.events": "low 0\noom 5\noom_kill 2\noom_group_kill 0\n",
            "sys/job/memory.events": "oom_kill 7\n",
        },
    )
    assert found == ControlGroup(8 * GIB, 2, 5 * GIB, "job", free_bytes=3 * GIB)


def test_version_1(tmp_path):
    found = tree(
        tmp_path,
        {
            "cgroup": "5:cpu,cpuacct:/x\n4:memory:/job\n",
            "sys/memory/job/memory.limit_in_bytes": f"{GIB}\n",
            "sys/memory/job/memory.usage_in_bytes": f"{GIB // 2}\n",
            "sys/memory/job/memory.stat": f"inactive_file 7\ntotal_inactive_file {GIB // 4}\n",
            "sys/memory/memory.limit_in_bytes": "9223372036854771712\n",
            "sys/memory/job/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 3\n",
        },
    )
    assert found == ControlGroup(GIB, 3, GIB // 4, "job", free_bytes=GIB - GIB // 4)


def test_in_a_container_the_own_group_is_the_root(tmp_path):
    found = tree(
        tmp_path,
        {"cgroup": "0::/elsewhere/x\n", "sys/memory.max": f"{GIB}\n", "sys/memory.events": "oom_kill 1\n"},
    )
    assert found == ControlGroup(GIB, 1, free_bytes=GIB)


def test_what_cannot_be_read_is_no_limit(tmp_path):
    assert ControlGroup.read(tmp_path / "none", tmp_path) == ControlGroup(None, 0)


def test_the_reason_says_the_limit_and_who_held_what():
    now, group = [0.0], [ControlGroup(4 * GIB, 5, 3 * GIB)]
    held = [{0: RankMemory(GIB), 1: RankMemory(GIB, 2 * GIB, 2)}]
    tracker = MemoryTracker(1, lambda names: group[0], lambda fork_server: held[0], lambda: now[0])
    tracker.poll()
    held[0] = {0: RankMemory(GIB)}  # rank 1 is gone
    now[0] += 2.0
    tracker.poll()
    assert tracker.reason(1) == "", "kills before the generation are not its own"
    group[0] = ControlGroup(4 * GIB, 6)
    assert tracker.reason(1).splitlines() == [
        "the kernel killed 1 process of this job: host memory ran out, of which this job may use 4.00 GiB, "
        "and used 3.00 GiB when last looked at",
        "rank 1 held 1.00 GiB and its 2 workers 2.00 GiB",
        "beside it: rank 0 1.00 GiB",
        "use fewer loader workers (--set workers=1), smaller batches or fewer ranks on this node, "
        "or ask for more memory",
    ]
    tracker.begin()
    assert tracker.reason(1) == ""


def test_a_rank_in_a_group_of_its_own_is_told_with_that_groups_limit():
    groups = {"": ControlGroup(64 * GIB, 5), "0::/job/rank-1\n": ControlGroup(GIB, 2, GIB - 1, "job/rank-1")}
    held = {0: RankMemory(GIB), 1: RankMemory(GIB, groups="0::/job/rank-1\n")}
    tracker = MemoryTracker(1, groups.__getitem__, lambda fork_server: held, lambda: 0.0)
    tracker.poll()
    groups["0::/job/rank-1\n"] = ControlGroup(GIB, 3, 0, "job/rank-1")
    assert tracker.reason(1).splitlines()[0] == (
        "the kernel killed 1 process of this job: host memory ran out, of which this rank may use 1.00 GiB (control "
        "group job/rank-1), and used 1.00 GiB when last looked at"
    )
    assert tracker.reason(0) == ""


def test_what_ranks_hold_is_seen_in_real_processes():
    code = """
        import ctypes, os, time
        ctypes.CDLL(None).prctl(15, b"rank 3", 0, 0, 0)
        own = bytearray(os.urandom(1)) * (40 << 20)
        if os.fork() == 0:
            more = bytearray(os.urandom(1)) * (90 << 20)
            print("up", flush=True)
            time.sleep(100)
        os.wait()
    """
    started = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, start_new_session=True
    )
    try:
        assert started.stdout.readline() == b"up\n"
        held = memory_by_rank(os.getpid())[3]
        assert held.workers == 1
        assert 40 << 20 <= held.own_bytes < 120 << 20
        assert held.workers_bytes >= 90 << 20
    finally:
        os.killpg(started.pid, signal.SIGKILL)
        started.communicate()


def test_a_rank_that_has_ended_is_left_out():
    """The kernel says of it that it is in the root's control groups, where it was not killed."""
    code = """
        import ctypes, os, sys
        ctypes.CDLL(None).prctl(15, b"rank 3", 0, 0, 0)
        if (child := os.fork()) == 0:
            os._exit(0)
        os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
        print(child, flush=True)
        sys.stdin.read()
    """
    started = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        ended = int(started.stdout.readline())
        assert Path(f"/proc/{ended}/comm").read_text() == "rank 3\n"
        assert not memory_by_rank(started.pid)
        assert 3 in memory_by_rank(os.getpid()), "the one that lives"
    finally:
        started.communicate()


@pytest.mark.parametrize(
    ("message", "lost"),
    [
        ("DataLoader worker (pid 17) is killed by signal: Killed. ", True),
        ("DataLoader worker (pid(s) 17, 18) exited unexpectedly", True),
        ("DataLoader worker (pid 17) is killed by signal: Bus error. ", False),
        ("bad label", False),
    ],
)
def test_a_lost_loader_worker_is_known(message, lost):
    error = RuntimeError(message)
    error.add_note("a note")
    failure = Failure.of(error, rank=0, host="n", now_s=0.0, log_bytes=0)
    assert failure.lost_worker == lost
    assert failure.message == f"{message}\na note"


GREEDY = """
    import os, time
    from pathlib import Path

    def wait_until_looked_at():
        # The launcher looks, and says what it saw, once a second each, in one loop.
        file, before = Path(os.environ["LOCKSTEP_RUN_DIR"], "ranks-0000.json"), None
        for _ in range(4):  # the first is what there is
            while not file.exists() or file.stat().st_mtime_ns == before:
                time.sleep(0.01)
            before = file.stat().st_mtime_ns

    held = [bytearray(os.urandom(1)) * (30 << 20)]
    Path("up-" + os.environ["RANK"]).touch()
    while not all(Path(f"up-{rank}").exists() for rank in range(2)):
        time.sleep(0.01)
    wait_until_looked_at()
    if (own := os.environ.get("OWN_GROUP")) and os.environ["RANK"] == "1":
        Path(own).write_text(str(os.getpid()))
        wait_until_looked_at()
    while os.environ["RANK"] == "1":
        held.append(bytearray(os.urandom(1)) * (10 << 20))
    time.sleep(60)
"""


@pytest.fixture
def small_group():
    """A control group of this machine that holds half a gibibyte."""
    own = next(
        (line.split(":")[2] for line in Path("/proc/self/cgroup").read_text().splitlines() if ":memory:" in line), None
    )
    root = Path("/sys/fs/cgroup/memory" if own is not None else "/sys/fs/cgroup")
    group = root / (own or "/").lstrip("/") / f"lockstep-test-{os.getpid()}"
    limit = group / ("memory.limit_in_bytes" if own is not None else "memory.max")
    try:
        group.mkdir()
        limit.write_text(str(GIB // 2))
    except OSError as error:
        if group.is_dir():
            group.rmdir()
        pytest.skip(f"no control group can be made here: {error}")
    yield group
    wait_until(lambda: not (group / "cgroup.procs").read_text().split(), "the end of the group's processes")
    group.rmdir()


def test_a_rank_that_the_kernel_kills_for_memory_is_told_with_limit_and_holders(workshop, small_group):
    file = small_group / "cgroup.procs"
    join = (
        "import os, sys; "
        f"open({str(file)!r}, 'w').write(str(os.getpid())); "
        "os.execv(sys.executable, [sys.executable, '-m', 'lockstep', 'run', *sys.argv[1:]])"
    )
    started = workshop.start("--nproc-per-node", 2, "--run-dir", "r", workshop.script(GREEDY), command=("-c", join))
    ended = workshop.end_of(started)
    assert ended.code == 137, ended.err
    assert "rank 1 of 2 was killed by SIGKILL" in ended.err
    assert "host memory ran out, of which this job may use 512 MiB" in ended.err
    assert re.search(r"^    rank 1 held \d", ended.err, re.MULTILINE), ended.err
    assert re.search(r"^    beside it: rank 0 \d", ended.err, re.MULTILINE)
    last = {one.rank: one.memory for one in RanksFile.read_all(workshop.here / "r")}
    assert last[0].host_peak > 30 << 20
    assert last[1].host_peak > 30 << 20, "as of its last heartbeat"
    assert 0 <= last[1].host_free < GIB // 2, "what the group allows"
    assert "most often" not in ended.err


def test_so_is_one_in_a_group_of_its_own(workshop, small_group):
    own = f"OWN_GROUP={small_group / 'cgroup.procs'}"
    script = workshop.script(
        f"import os\nname, _, value = {own!r}.partition('=')\nos.environ[name] = value\n" + textwrap.dedent(GREEDY)
    )
    ended = workshop.end_of(workshop.start("--nproc-per-node", 2, "--run-dir", "r", script))
    assert ended.code == 137, ended.err
    assert "host memory ran out, of which this rank may use 512 MiB (control group" in ended.err
    assert re.search(r"rank 1 held \d", ended.err), ended.err
