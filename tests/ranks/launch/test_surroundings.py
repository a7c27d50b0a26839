"""Where users start runs, and what scripts do to their own processes: it hides no cause, and nothing is left."""

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

import lockstep
from lockstep.errors import SettingError
from lockstep.launch.host.machine import threads_of_rank
from lockstep.launch.run_dir.owned_directory import emergency_memory
from waiting import wait_until

SOURCE = str(Path(lockstep.__file__).parents[1])
TWO = ("--nproc-per-node", 2, "--run-dir", "r")
WAITS = """
    import os, signal, time
    from pathlib import Path

    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    Path("up-" + os.environ["RANK"]).touch()
    while not Path("go").exists():
        time.sleep(0.02)
"""
#: Goes on as the launcher, with signals as some shells and daemons leave them.
INHERITS = """
import os, signal, sys
signal.signal(signal.SIGHUP, signal.SIG_IGN)
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD, signal.SIGTERM, signal.SIGIO])
os.execv(sys.executable, [sys.executable, "-m", "lockstep", "run", *sys.argv[1:]])
"""


def test_under_nohup_a_run_outlives_its_terminal_and_signals_that_were_blocked_are_handled(workshop, hit):
    script = workshop.script(WAITS)
    for ends, code in (("go", 0), ("SIGTERM", 143)):
        launcher = workshop.start(*TWO, "--fresh", script, command=("-c", INHERITS))
        for rank in range(2):
            workshop.wait_for_file(f"up-{rank}")
        hit(launcher, "SIGHUP")
        if ends == "go":
            (workshop.here / "go").touch()
        else:
            hit(launcher, ends)
        ended = workshop.end_of(launcher)
        assert ended.code == code, ended.err
        assert "SIGHUP" not in ended.err
        for path in workshop.here.glob("*-[01]"):
            path.unlink()
        (workshop.here / "go").unlink(missing_ok=True)


def test_a_run_needs_no_standard_streams_and_no_short_path_for_temporary_files(workshop):
    temporary = workshop.here / ("long" * 30)
    temporary.mkdir()
    script = workshop.script("import os; print('begun'); open('done-' + os.environ['RANK'], 'w').close()")
    command = [sys.executable, "-m", "lockstep", "run", *map(str, TWO), script]
    closed = subprocess.run(
        ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", *command],
        cwd=workshop.here,
        env={**os.environ, "PYTHONPATH": SOURCE, "TMPDIR": str(temporary)},
        check=False,
        timeout=90,
    )
    assert closed.returncode == 0
    assert {path.name for path in workshop.here.glob("done-*")} == {"done-0", "done-1"}
    assert list(temporary.glob("lockstep-*")) == []


def test_a_working_directory_and_logs_that_go_away_hide_no_cause_and_a_start_without_one_is_refused(workshop):
    (workshop.here / "w").mkdir()
    workshop.script("""
        import os
        if os.environ["RANK"] == "1":
            if os.environ["LOCKSTEP_GENERATION"] == "0":
                os.rmdir(os.getcwd())
                log = os.path.join(os.environ["LOCKSTEP_RUN_DIR"], "logs", "rank-0000.log")
                os.unlink(log)
                os.mkdir(log)
            raise ValueError("the true cause")
    """)
    run = [sys.executable, "-m", "lockstep", "run", *map(str, TWO[:-1]), str(workshop.here / "r")]
    command = ["sh", "-c", 'cd w; $WHERE; exec "$@"', "sh", *run, "--max-restarts", "1", "--fresh"]
    for where, code, says in (("true", 1, "the true cause"), ("rmdir ../w", 2, "working directory has been removed")):
        (workshop.here / "w").mkdir(exist_ok=True)
        ended = subprocess.run(
            [*command, str(workshop.here / "train.py")],
            cwd=workshop.here,
            env={**os.environ, "PYTHONPATH": SOURCE, "WHERE": where},
            capture_output=True,
            text=True,
            check=False,
            timeout=90,
        )
        assert ended.returncode == code, ended.stderr
        assert says in ended.stderr.split("✗ ")[-1]
        assert ended.stderr.count("✗ ") == 2 * code % 4
        assert "lockstep/launch" not in ended.stderr


ODD = """
    import os, signal, sys, time
    from pathlib import Path

    class Tee:
        def write(self, text):
            raise RuntimeError("a stream that is broken")

    class Odd(Exception):
        def __str__(self):
            raise RuntimeError("an error that cannot say what it is")

    def hook(*_):
        raise RuntimeError("a hook that is broken")

    rank = os.environ["RANK"]
    if rank == "1":
        child = os.fork()
        if child == 0:
            raise KeyError("of a copy, which is no rank")
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
        Path("copied").touch()
    sys.excepthook = hook
    sys.stdout = sys.stderr = Tee() if rank == "1" else None
    os.environ.clear()
    if rank == "1" and sys.argv[1] == "raise":
        error = Odd()
        error.__notes__ = 7
        raise error
    if rank == "1" and sys.argv[1] == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if sys.argv[1] != "end":
        time.sleep(300)
"""


@pytest.mark.parametrize(
    ("does", "code", "says"),
    [("raise", 1, "raised Odd\n    (its text"), ("kill", 137, "was killed by SIGKILL"), ("end", 0, "")],
)
def test_what_a_script_does_to_its_streams_hooks_and_copies_changes_neither_its_end_nor_the_cause(
    workshop, does, code, says
):
    ended = workshop.run(*TWO, "--grace", 1, workshop.script(ODD), does)
    assert ended.code == code, ended.err
    assert (workshop.here / "copied").exists()
    block = ended.err.partition("✗ ")[2]
    assert block.startswith("run failed: rank 1 of 2") if code else not block
    assert says in block
    assert "raised KeyError" not in block
    assert "fork_server" not in (workshop.here / "r/logs/rank-0001.log").read_text()


def test_a_file_receives_each_byte_of_the_leader_also_of_a_line_that_is_long_and_does_not_end(workshop):
    written = bytes(range(256)) * 3 + b"\nx\xff\r" + b"long " * 600_000
    script = workshop.script(f"""
        import os
        unwritten = memoryview({written[:800]!r} + b"long " * 600_000)
        while os.environ["RANK"] == "0" and unwritten:
            unwritten = unwritten[os.write(1, unwritten):]
    """)
    with (workshop.here / "out").open("wb") as out:
        streams = {"stdin": subprocess.DEVNULL, "stdout": out, "stderr": subprocess.DEVNULL}
        launcher = workshop.start(*TWO, script, streams=streams, LC_ALL="C", PYTHONUTF8="0", PYTHONCOERCECLOCALE="0")
        assert launcher.wait(90) == 0
    assert (workshop.here / "out").read_bytes() == written[:800] + b"long " * 600_000


def test_who_reads_the_leaders_output_late_gets_all_of_it(workshop):
    script = workshop.script("""
        import os
        line = b"z" * 99_999 + b"\\n"
        for _ in range(1000):
            if os.environ["RANK"] == "0":
                os.write(1, line)
        open("written-" + os.environ["RANK"], "w").close()
    """)
    reading, writing = os.pipe()
    streams = {"stdin": subprocess.DEVNULL, "stdout": writing, "stderr": subprocess.DEVNULL}
    launcher = workshop.start(*TWO, script, streams=streams)
    os.close(writing)
    workshop.wait_for_file("written-0")
    # Now the ranks end, and the pipe has held none of it for long.
    wait_until(lambda: not any("rank" in name for name in workshop.processes().values()), "the end of the ranks")
    read = 0
    with open(reading, "rb", buffering=0) as pipe:
        while part := pipe.read(1 << 20):
            read += len(part)
    assert launcher.wait(60) == 0
    assert read == 100_000 * 1000


def test_room_for_the_last_step_is_found_or_its_lack_is_told_and_leaves_nothing(tmp_path):
    taken = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.dup(0)
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, taken[1]))
    try:
        # A directory can be made, and no file in it be opened.
        with pytest.raises(SettingError, match="Too many open files"), emergency_memory(tmp_path, tmp_path):
            pass
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, taken)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("given", "threads"), [("", 1), (" ", 1), ("3", 3), ("2,1", 2)])
def test_the_threads_of_a_rank_are_those_of_the_outermost_level(given, threads):
    assert threads_of_rank({"OMP_NUM_THREADS": given}) == threads


@pytest.mark.parametrize("kind", ["link", "link to a directory", "pipe", "another user's"])
def test_what_others_have_put_into_the_memory_is_not_opened(tmp_path, kind):
    memory, elsewhere = tmp_path / "shm", tmp_path / "elsewhere"
    left = memory / "lockstep-emergency-x"
    elsewhere.mkdir()
    (elsewhere / "owner").write_text("x")
    memory.mkdir()
    if kind == "link to a directory":
        left.symlink_to(elsewhere)
    else:
        left.mkdir()
        if kind == "link":
            (left / "owner").symlink_to(elsewhere / "owner")
        elif kind == "pipe":
            os.mkfifo(left / "owner")
        else:
            (left / "owner").write_text("x")
            if os.geteuid():
                pytest.skip("only root can give a directory to another user")
            os.chown(left, 65534, 65534)
    with emergency_memory(tmp_path, memory) as own:
        assert own.parent == memory
    assert (elsewhere / "owner").read_text() == "x"
    assert left.exists() == (kind != "pipe")
