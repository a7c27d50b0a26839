"""Ranks that hang, each in a way of its own: the launcher names the right one, by the command line, and ends."""

import textwrap
from pathlib import Path

import pytest

from waiting import wait_until

HANGS = """
    import ctypes, functools, os, signal, sys, time
    import lockstep, torch, torch._dynamo, torch.distributed as dist  # all that a rank needs, imported once

    class Stuck(torch.utils.data.Dataset):
        def __len__(self):
            return 1
        def __getitem__(self, index):
            time.sleep(1000)  # in a worker

    def goes_on():
        while True:
            pass

    def hangs(case):
        if case == "sleeps":
            time.sleep(1000)  # by itself
        if case == "computes":
            goes_on()
        if case == "stopped":
            os.kill(os.getpid(), signal.SIGSTOP)
        if case == "locked":
            lock = ctypes.create_string_buffer(64)
            for _ in range(2):
                ctypes.PyDLL(None).pthread_mutex_lock(lock)
        if case == "loads":
            next(iter(torch.utils.data.DataLoader(Stuck(), num_workers=1)))
        if case == "leaves":
            reads, writes = os.pipe()
            if os.fork():
                os.read(reads, 1)  # of its group, the daemon would end with the rank
                os._exit(0)
            os.setsid()  # a daemon: the others do not see that their connections to the rank broke
            os.write(writes, b"1")
            while os.path.exists(os.environ["LOCKSTEP_CHANNEL"]):
                time.sleep(0.05)
            os._exit(0)
        if case == "apart":
            dist.broadcast(torch.ones(1), 1)

    def train(case):
        odd = os.environ["RANK"] == "1" and os.environ["LOCKSTEP_GENERATION"] == "0"
        if case == "never comes" and odd:
            time.sleep(1000)  # before the others
        dist.init_process_group("gloo")
        for step in range(20):
            dist.all_reduce(torch.ones(1))
            if step == 10 and odd:
                hangs(case)
        print("all steps are done")
        dist.destroy_process_group()

    if sys.argv[1] == "restart":
        train("sleeps")
    else:
        # In one process, which has imported torch once.
        for case in sys.argv[1:]:
            try:
                lockstep.launch(functools.partial(train, case), ranks=2, hang_after_s=2.0, run_dir=case)
            except lockstep.LaunchError as error:
                print(f"=== {case}: {error}", file=sys.stderr)
"""
#: What the headline says of rank 1, what is made of it, and a line of its stack or of a process of its.
CASES = {
    "sleeps": ("rank 1 in hangs", "rank 1 keeps the others waiting", "time.sleep(1000)  # by itself"),
    "computes": ("rank 1 in goes_on", "rank 1 keeps the others waiting", "in goes_on"),
    "stopped": ("rank 1 silent", "rank 1 is stopped", "kill -CONT"),
    "locked": (
        "rank 1 silent",
        "rank 1 is in compiled code that holds Python's lock",
        "ctypes.PyDLL(None).pthread_mutex_lock(lock)",
    ),
    "loads": ("rank 1 in next(loader)", "rank 1 waits for the processes of its", "time.sleep(1000)  # in a worker"),
    "leaves": ("rank 1 had left with exit code 0", "rank 1 has left, and the others wait for it", "dist.all_reduce("),
    "apart": ("rank 1 in broadcast", "ranks have parted ways: ranks 0, 1 wait", "dist.broadcast(torch.ones(1), 1)"),
    "never comes": ("rank 1 in train", "rank 1 keeps the others waiting", "time.sleep(1000)  # before the others"),
}
RUN_HANGS = """
    import time
    import torch, lockstep

    class Numbers(torch.utils.data.Dataset):
        def __len__(self):
            return 64
        def __getitem__(self, index):
            if index == 37:
                time.sleep(1000)
            return torch.full((4,), float(index))

    with lockstep.Run(seed=0, replay=False) as run:
        model = run.model(torch.nn.Linear(4, 1))
        run.optimizer(torch.optim.SGD(model.parameters(), lr=1e-5))
        numbers = run.loader(Numbers(), global_batch=8, micro_batch=4, shuffle=False, workers=0)
        for epoch in run.epochs(1):
            for batch in run.train(numbers):
                run.step(model(batch).mean())
"""
SLOW_TRACKER = """
    import time
    import torch, lockstep

    class Slow:
        def log(self, values, step):
            time.sleep(8)
            print("the tracker has", step)

    with lockstep.Run(track=Slow(), replay=False) as run:
        model = run.model(torch.nn.Linear(4, 1))
        run.optimizer(torch.optim.SGD(model.parameters(), lr=1e-5))
        for epoch in run.epochs(1):
            for x in run.train(run.loader(torch.ones(8, 4), global_batch=8, micro_batch=4, workers=0)):
                run.step(model(x).mean())
            run.log()
"""


def line_of(script, text):
    lines = textwrap.dedent(script).splitlines()
    return next(number for number, line in enumerate(lines, 1) if text in line)


@pytest.mark.long
def test_the_rank_that_hangs_is_named_with_its_place(workshop):
    script = workshop.script(HANGS)
    launcher = workshop.start(script, *CASES, command=())
    ended = workshop.end_of(launcher)
    assert ended.code == 0, ended.err
    told = ended.err
    for case in CASES:
        report, mark, rest = told.partition(f"=== {case}: ")
        assert mark, told
        block, _, told = rest.partition("; the other ranks beside it\n")
        check(case, report, block, workshop.here / case)
    assert not told


def check(case, err, block, run_dir):
    headline, means, stack = CASES[case]
    _, mark, told = err.partition("hang: no progress for ")
    assert mark, err
    seconds, waits, meaning, *rest = told.splitlines()
    assert int(seconds.split()[0]) in range(1, 60)  # as heard: on a busy machine a heartbeat comes late
    assert headline in waits
    waits_for = "init_process_group" if case == "never comes" else "all_reduce"
    assert f"rank 0 in {waits_for}" in waits
    assert f"(train.py:{line_of(HANGS, f'dist.{waits_for}(')})" in waits
    assert means in meaning
    assert any(stack in line for line in rest), err
    kept = (run_dir / "hangs/hang-1.txt").read_text()
    assert kept.startswith(mark)
    assert "--- rank 0" in kept
    assert block.startswith("run failed: all 2 ranks" if case == "apart" else "run failed: rank 1 of 2 (host ")
    assert block.splitlines()[0].endswith(" hung")
    assert block.splitlines()[-1].startswith(f"  full log: {case}/logs/"), block


def test_a_hang_is_restarted_while_the_budget_lasts(workshop):
    words = ("--nproc-per-node", 2, "--hang-after", 2.5, "--max-restarts", 1)
    ended = workshop.run(*words, workshop.script(HANGS), "restart")
    assert ended.code == 0, ended.err
    assert ended.err.count("hang: no progress") == 1
    assert "rank 1 of 2 (host " in ended.err
    assert "as generation 1 (restart 1 of 1)" in ended.err
    assert ended.out == "all steps are done\n"


def test_abort_leaves_no_restart(workshop):
    script = workshop.script("import time\ntime.sleep(1000)\n")
    words = ("--nproc-per-node", 1, "--hang-after", 1, "--on-hang", "abort", "--max-restarts", 1)
    ended = workshop.run(*words, script)
    assert ended.code == 1, ended.err
    assert ended.err.count("hang: no progress") == 1
    assert "rank 0 makes no progress, and nobody waits for another rank" in ended.err
    assert "restart" not in ended.err.partition("hang: ")[2]


def test_whoever_waits_is_told_once_and_of_the_recovery(workshop):
    script = workshop.script("""
        import time
        from pathlib import Path
        while not Path("go on").exists():
            time.sleep(0.05)
        for _ in range(100):
            if Path("seen").exists():
                break
            time.sleep(0.05)
    """)
    words = ("--nproc-per-node", 1, "--hang-after", 1, "--on-hang", "wait")
    launcher = workshop.start(*words, script)
    seen = ""
    while "the run waits; --on-hang abort" not in seen:
        seen += (line := launcher.stderr.readline())
        assert line, seen
    (workshop.here / "go on").write_text("")
    while "rank 0 moves again, after " not in seen:
        seen += (line := launcher.stderr.readline())
        assert line, seen
    (workshop.here / "seen").write_text("")
    ended = workshop.end_of(launcher)
    assert ended.code == 0
    # Of the script; on a busy machine Python's own end may take a second, too.
    assert (seen + ended.err).count("rank 0 in <module>") == 1


def test_a_run_tells_its_step_and_phase(workshop):
    ended = workshop.run("--nproc-per-node", 2, "--hang-after", 3, "--run-dir", "r", workshop.script(RUN_HANGS))
    assert ended.code == 1, ended.err
    (waits,) = [line for line in ended.err.splitlines() if line.startswith("  rank") and ";" in line]
    assert "rank 0 in the reduction of step 5 (train.py:" in waits
    assert f"rank 1 in __getitem__ for 3 s (train.py:{line_of(RUN_HANGS, 'time.sleep(1000)')})" in waits
    assert "rank 1 of 2 (host" in ended.err.rpartition("✗ run failed: ")[2]


def test_a_script_that_waits_for_nobody_is_left_alone(workshop):
    script = workshop.script("""
        import time
        end = time.monotonic() + 5
        while time.monotonic() < end:
            sum(range(1000))
    """)
    ended = workshop.run("--nproc-per-node", 2, "--hang-after", 3, script)
    assert ended.code == 0, ended.err
    assert "hang" not in ended.err


def test_a_deadline_that_is_none_is_refused(workshop):
    ended = workshop.run("--hang-after", 0, workshop.script("print('up')"))
    assert ended.code == 2
    assert "--hang-after 0.0: it must be more than 0 seconds" in ended.err


def test_a_launcher_that_is_killed_leaves_no_socket_behind(workshop, hit):
    script = workshop.script("""
        import os, time
        from pathlib import Path
        Path("told").write_text(os.environ["LOCKSTEP_CHANNEL"])
        Path("told").rename("up")
        time.sleep(1000)
    """)
    launcher = workshop.start("--nproc-per-node", 1, script)
    channel = Path(workshop.wait_for_file("up"))
    assert channel.is_socket()
    hit(launcher, "SIGKILL")
    workshop.end_of(launcher)
    wait_until(lambda: not channel.parent.exists(), "the end of the socket's directory")


def test_a_run_that_waits_for_its_tracker_does_not_hang(workshop):
    launcher = workshop.start("--hang-after", 4, workshop.script(SLOW_TRACKER))
    ended = workshop.end_of(launcher)
    assert ended.code == 0, ended.err
    assert "the tracker has 1" in ended.out
    assert "hang:" not in ended.err
