"""Whole runs through the command line: real ranks, real kills."""

import json
import os
import signal
import socket
import textwrap
from pathlib import Path

import pytest

import lockstep
from campaign_marks import combinations
from waiting import wait_until

SOURCE = str(Path(lockstep.__file__).parents[1])

ALL_REDUCE = """
    import json, os, random, sys, threading
    import numpy, torch, torch.distributed as dist
    dist.init_process_group("gloo")
    total = torch.tensor([float(dist.get_rank() + 1)])
    dist.all_reduce(total)
    facts = {
        "rank": dist.get_rank(), "sum": total.item(), "argv": sys.argv, "name": __name__, "path": sys.path[0],
        "main": sys.modules["__main__"].__file__, "env": dict(os.environ),
        "group": os.getpgid(0) == os.getsid(0) == os.getpid(),
        "unseeded": [random.random(), float(numpy.random.rand()), torch.rand(()).item()],
        "threads": torch.get_num_threads(),
        "stdin": sys.stdin.read(), "tty": sys.stdout.isatty(),
    }
    open(f"facts-{dist.get_rank()}.json", "w").write(json.dumps(facts))
    print(f"rank {dist.get_rank()} sees {total.item()}")
    dist.destroy_process_group()
"""
FAILS_ON_1 = """
    import torch, torch.distributed as dist
    dist.init_process_group("gloo")
    total = torch.ones(1)
    dist.all_reduce(total)
    print("the leader says so", flush=True)
    if dist.get_rank() == 1:
        raise ValueError("bad label 255 in sample 17")
    for _ in range(1000000):
        dist.all_reduce(total)
"""
KILLED_AT_FIRST = """
    import os, signal, torch, torch.distributed as dist
    generation = os.environ["LOCKSTEP_GENERATION"]
    dist.init_process_group("gloo")
    dist.all_reduce(torch.ones(1))
    if generation == "0" and dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(1))
    print("generation", generation, "resume", os.environ.get("LOCKSTEP_RESUME"), os.environ.get("LOCKSTEP_FRESH"))
    dist.destroy_process_group()
"""
DIES_AT_FIRST = """
    import os, time
    env = os.environ
    generation = env["LOCKSTEP_GENERATION"]
    print("generation", generation, "resume", env.get("LOCKSTEP_RESUME"), "fresh", env.get("LOCKSTEP_FRESH"))
    while generation == "0" and env["RANK"] != "0":
        time.sleep(0.05)  # the leader prints, and has done so when it dies
    1 / int(generation)
"""
WAITS = """
    import os, signal, subprocess, sys, time
    from pathlib import Path
    if "leave" in sys.argv:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
    if "stay" in sys.argv or "deaf" in sys.argv:
        signal.signal(signal.SIGTERM, lambda *_: Path("asked-" + os.environ["RANK"]).write_text(""))
    if "deaf" in sys.argv:
        signal.signal(signal.SIGINT, lambda *_: Path("urged-" + os.environ["RANK"]).write_text(""))
    if "child" in sys.argv:
        subprocess.Popen(["sleep", "1000"])
    Path("up-" + os.environ["RANK"]).write_text("")
    while True:
        time.sleep(0.05)
"""


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one CPU cannot be shared out")
@pytest.mark.parametrize("way", ["fork", pytest.param("plain", marks=pytest.mark.campaign)])
def test_ranks_keep_to_cpus_of_their_own(workshop, way):
    text = "import os, sys; print('numpy' in sys.modules, 'cpus', os.environ['RANK'], sorted(os.sched_getaffinity(0)))"
    ended = workshop.run("--nproc-per-node", 2, "--bind", "--start", way, "--run-dir", "r", workshop.script(text))
    assert ended.code == 0, ended.err
    logs = [(workshop.here / "r" / "logs" / f"rank-000{rank}.log").read_text() for rank in range(2)]
    assert all(log.startswith("False ") for log in logs), "torch, which imports numpy, is not waited for"
    first, second = (set(json.loads(log.partition(f"cpus {rank} ")[2])) for rank, log in enumerate(logs))
    assert first
    assert not first & second
    assert first | second == os.sched_getaffinity(0)
    if way == "fork":  # else the store, a Python of its own, may not be there yet
        assert "note: the 2 ranks never joined a process group: each has run the whole script by itself" in ended.err


@pytest.mark.parametrize("plain_ranks", [1, pytest.param(2, marks=pytest.mark.campaign)])
def test_ranks_of_a_script_with_a_run_begin_alike_and_every_time(workshop, plain_ranks):
    workshop.script("from lockstep import Run", "kit.py")
    workshop.script("""
        import kit, random, numpy, torch
        names = [f"name {number}" for number in range(20)]
        print(torch.rand(2), random.random(), numpy.random.rand(), list(set(names)))
    """)
    said = []
    for way, ranks in (("fork", 2), ("plain", plain_ranks)):
        ended = workshop.run("--nproc-per-node", ranks, "--start", way, "--run-dir", way, "train.py")
        assert ended.code == 0, ended.err
        said += [(workshop.here / way / "logs" / f"rank-000{rank}.log").read_text() for rank in range(ranks)]
    assert len(set(said)) == 1
    assert "name 7" in said[0]


def test_a_plain_torch_script_runs_unchanged(workshop):
    ended = workshop.run("--nproc-per-node", 2, "--standalone", workshop.script(ALL_REDUCE), "--resume", "--lr", "1")
    assert ended.code == 0, ended.err
    assert ended.out == "rank 0 sees 3.0\n"
    assert "never joined" not in ended.err
    facts = [json.loads((workshop.here / f"facts-{rank}.json").read_text()) for rank in range(2)]
    for rank, fact in enumerate(facts):
        assert fact["argv"] == ["train.py", "--resume", "--lr", "1"]
        assert fact["name"] == "__main__"
        assert fact["path"] == str(workshop.here)
        assert fact["main"] == str(workshop.here / "train.py")
        assert fact["group"], "a rank must be killable together with what it starts"
        assert fact["threads"] == 1
        assert fact["stdin"] == ""
        assert not fact["tty"]
        variables = {name: fact["env"][name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")}
        assert variables == {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
        assert fact["env"]["TORCHELASTIC_RESTART_COUNT"] == "0"
        assert "LOCKSTEP_RESUME" not in fact["env"]
    assert not set(facts[0]["unseeded"]) & set(facts[1]["unseeded"]), "copies must not draw the same random numbers"
    (run_dir,) = (workshop.here / "runs").iterdir()
    assert run_dir.name.startswith("train-")
    assert (run_dir / "logs" / "rank-0001.log").read_text() == "rank 1 sees 3.0\n"
    about = json.loads((run_dir / "run.json").read_text())
    assert about["starts"][0]["command"].endswith("--nproc-per-node 2 --standalone train.py --resume --lr 1")
    assert [generation["ranks"] for generation in about["generations"]] == [2]


PRINTS = """
    import time, torch
    from lockstep import Run
    with Run(seed=0) as run:
        model = run.model(torch.nn.Linear(3, 1))
        run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        batches, total = run.loader(torch.randn(16, 3), global_batch=8, micro_batch=2), 0.0
        for epoch in run.epochs(2):
            for batch in run.train(batches):
                total += 0.5 * len(batch)
                loss = model(batch).square().mean()
                run.step(loss)
            PRINT
"""


@pytest.mark.parametrize(
    "line",
    [
        "print(f'epoch {epoch}: loss {loss.item():.6f}, {time.time()} s')",
        pytest.param("[call(f'loss {loss.item():.6f}') for call in (print,)]", marks=pytest.mark.campaign),
    ],
)
def test_a_number_of_one_ranks_own_micro_batches_is_shown_once_with_both(workshop, line):
    """And neither what all ranks print alike nor what names its rank, though both are printed before."""
    alike = "print(f'epoch {epoch}: mean {run.metrics[\"loss\"]:.6f}, {time.time()} s')"
    names_its_rank = "print(f'local mean {loss.item():.6f} on rank {run.rank}')"
    script = workshop.script(PRINTS.replace("PRINT", f"{alike}; {names_its_rank}; {line}"))
    ended = workshop.run("--nproc-per-node", 2, "--run-dir", "r", script)
    assert ended.code == 0, ended.err
    logs = [(workshop.here / "r" / "logs" / f"rank-000{rank}.log").read_text().splitlines() for rank in range(2)]
    first = [next(line for line in lines if "loss" in line and "|" not in line) for lines in logs]
    said = f"rank 0 printed {first[0]!r}, and rank 1 {first[1]!r}: each rank has its own micro-batches"
    assert ended.err.count("each rank has its own micro-batches") == ended.err.count(said) == 1


def test_what_a_rank_says_of_a_variable_the_launcher_does_not_say_again(workshop):
    script = workshop.script(PRINTS.replace("PRINT", "print(f'loss {loss.item()}, samples {total}')"))
    ended = workshop.run("--nproc-per-node", 2, script)
    assert ended.code == 0, ended.err
    assert "total, which print(...) is computed from, is changed by the loop's body" in ended.out + ended.err
    assert (ended.out + ended.err).count("each rank has its own micro-batches") == 1


@pytest.mark.parametrize("way", ["fork", pytest.param("plain", marks=pytest.mark.campaign)])
def test_the_last_words_name_the_rank_that_failed_first_and_its_line(workshop, way):
    script = workshop.script(FAILS_ON_1)
    ended = workshop.run("--start", way, "--nproc-per-node", 2, "--run-dir", "r", script)
    assert ended.code == 1
    assert ended.out == "the leader says so\n", "the leader's collateral traceback must stay in its log"
    before, mark, block = ended.err.rpartition("✗ run failed: ")
    assert mark
    line = textwrap.dedent(FAILS_ON_1).splitlines().index('    raise ValueError("bad label 255 in sample 17")') + 1
    who, *rest = block.splitlines()
    assert who.startswith("rank 1 of 2 (host ")
    assert who.endswith(") raised ValueError")
    assert rest[:3] == [
        "    bad label 255 in sample 17",
        f"    at train.py:{line}",
        '        raise ValueError("bad label 255 in sample 17")',
    ]
    # The leader has half a second to fall by itself, which a busy machine may not give it; it is asked to end then.
    by_itself = rest[3:-1] == ["  rank 0 then lost its peer"]
    assert by_itself or not rest[3:-1]
    assert rest[-1] == "  full log: r/logs/rank-0001.log; the other ranks beside it"
    assert before.count("Traceback") == 1
    assert "runpy" not in before
    assert "lockstep/launch" not in before
    assert not by_itself or "Traceback" in (workshop.here / "r/logs/rank-0000.log").read_text()


def test_a_killed_rank_is_restarted_with_all_others_and_the_run_can_be_gone_on_with(workshop):
    args = ("--nproc-per-node", 2, "--max-restarts", 1, workshop.script(KILLED_AT_FIRST))
    ended = workshop.run("--run-dir", "r", *args)
    assert ended.code == 0, ended.err
    assert ended.out.splitlines()[-1] == "generation 1 resume 1 None"
    assert "rank 1 of 2 was killed by SIGKILL" in ended.err
    assert "restarting all 2 ranks as generation 1 (restart 1 of 1)" in ended.err
    assert "\n--- generation 1, " in "\n" + (workshop.here / "r/logs/rank-0001.log").read_text()

    refused = workshop.run("--run-dir", "r", *args)
    assert refused.code == 2
    assert refused.err.splitlines()[1:] == [
        "  lockstep run --resume --run-dir r --nproc-per-node 2 --max-restarts 1 train.py",
        "  lockstep run --fresh --run-dir r --nproc-per-node 2 --max-restarts 1 train.py",
    ]
    light = ("--run-dir", "r", *args[:-1], workshop.script(DIES_AT_FIRST, "light.py"))
    resumed = workshop.run("--resume", *light)
    assert resumed.out.splitlines() == ["generation 2 resume 1 fresh None"]
    fresh = workshop.run("--fresh", *light)
    assert fresh.out.splitlines() == [
        "generation 0 resume None fresh 1",
        "generation 1 resume 1 fresh None",  # or the restart would throw away what it is to go on from
    ]
    assert [path.name[:8] for path in workshop.here.iterdir() if path.is_dir()].count("r-before") == 1


def test_no_rank_outlives_a_launcher_that_is_killed(workshop, hit):
    launcher = workshop.start("--nproc-per-node", 2, workshop.script(WAITS), "child")
    for rank in range(2):
        workshop.wait_for_file(f"up-{rank}")
    names = {"rank 0", "rank 1", "sleep", "lockstep store"}
    wait_until(lambda: names <= set(workshop.processes().values()), lambda: f"{names} in {workshop.processes()}")
    fork_server = workshop.fork_server()
    hit(fork_server, "SIGTERM")  # as a scheduler might, to every process of a job
    assert fork_server in workshop.processes()
    hit(launcher, "SIGKILL")
    workshop.end_of(launcher)
    # The fixture waits until no process is left.


@pytest.mark.parametrize(
    ("how", "first", "code", "says"),
    [
        ("die", "SIGINT", 130, "stopped by Ctrl-C"),
        ("die", "SIGTERM", 143, "stopped by SIGTERM"),
        ("leave", "SIGINT", 75, "lockstep run --resume --run-dir r --nproc-per-node 2 train.py leave"),
        ("leave", "SIGUSR1", 75, "stopped with a complete checkpoint"),
        ("stay", "SIGINT", 130, "stopping now"),
        ("deaf", "SIGINT", 130, "killing all ranks"),
    ],
)  # fmt: skip
def test_a_stop_is_handed_to_the_ranks_and_only_ctrl_c_insists(workshop, hit, how, first, code, says):
    launcher = workshop.start("--run-dir", "r", "--nproc-per-node", 2, workshop.script(WAITS), how)
    for rank in range(2):
        workshop.wait_for_file(f"up-{rank}")
    hit(launcher, first)
    for sign in {"stay": ["asked"], "deaf": ["asked", "urged"]}.get(how, []):
        for rank in range(2):
            workshop.wait_for_file(f"{sign}-{rank}")
        hit(launcher, "SIGTERM")  # a scheduler's: it gives no less time for the save
        hit(launcher, first)
    ended = workshop.end_of(launcher)
    assert ended.code == code, ended.err
    assert says in ended.err
    assert "Traceback" not in ended.err


def test_a_rank_that_does_not_end_is_killed_after_the_grace(workshop):
    script = workshop.script("""
        import os, signal, time
        from pathlib import Path
        if os.environ["RANK"] == "0":
            signal.signal(signal.SIGTERM, lambda *_: Path("asked").write_text(""))
            Path("up").write_text("")
            while True:
                time.sleep(0.05)
        while not Path("up").exists():
            time.sleep(0.01)
        raise KeyError("label")
    """)
    ended = workshop.run("--grace", 0.1, "--nproc-per-node", 2, script)
    assert ended.code == 1
    assert (workshop.here / "asked").exists(), "it must be asked before it is killed"
    assert "✗ run failed: rank 1 of 2 (host" in ended.err
    assert "rank 0" not in ended.err.rpartition("✗")[2]


@pytest.mark.parametrize(
    ("does", "code", "says"),
    [
        ("sys.exit()", 0, ""),
        ("sys.exit(75)", 75, "stopped with a complete checkpoint"),
        ("sys.exit(74)", 74, "its end, but its last checkpoint is missing\n    begins\n  to go on: lockstep run"),
        ("sys.exit(3)", 3, "✗ run failed: all 2 ranks (host {host}) left with exit code 3\n    at train.py:7\n"),
        ("sys.exit(2)", 2, "left with exit code 2"),
        ("sys.exit('no data')", 1, "left with exit code 1\n    no data\n    at train.py:7"),
        ("os._exit(5)", 1, "✗ run failed: all 2 ranks (host {host}) left with exit code 5\n    at train.py:7\n"),
        ("os.kill(os.getpid(), 11)", 1, "were killed by SIGSEGV\n    a fault in compiled code"),
        ("os.kill(os.getpid(), 9)", 137, "were killed by SIGKILL"),
        ("sys.stdout.flush() or os.close(1) or 1/0", 1, "all 2 ranks (host {host}) raised ZeroDivisionError"),
    ],
)
def test_how_ranks_end_is_what_the_launcher_says(workshop, does, code, says):
    begin = """\
        import os, sys, time
        if os.environ["RANK"] == "0":
            print("begins")
            os.mkdir("begun")
        while not os.path.exists("begun"):
            time.sleep(0.01)
        """
    script = workshop.script(textwrap.dedent(begin) + does)
    ended = workshop.run("--nproc-per-node", 2, script)
    assert ended.code == code, ended.err
    assert ended.out.startswith("begins\n")
    assert says.format(host=socket.gethostname()) in ended.err


@pytest.mark.parametrize(
    "leaves",
    combinations(
        ["os._exit(0)", "os._exit(74)", "os._exit(75)", "sys.exit(75)", "sys.exit(0)"],
        campaign=lambda leaves: leaves != "os._exit(0)",
    ),
)
def test_a_rank_that_leaves_early_is_the_cause_whatever_its_exit_code_and_its_line_is_told(workshop, leaves):
    script = workshop.script(LEAVES.format(leaves=leaves))
    ended = workshop.run("--nproc-per-node", 2, "--run-dir", "r", script)
    assert ended.code == 1, ended.err
    _, _, told = ended.err.partition("✗ run failed: ")
    code = leaves.partition("(")[2].rstrip(")")
    line = next(n for n, text in enumerate((workshop.here / script).read_text().splitlines(), 1) if leaves in text)
    if leaves == "sys.exit(0)":  # which the ranks themselves agree on
        assert told.startswith("rank 1 of 2 (host"), told
        assert f"rank 1 left the loop over run.train(...) after step 3 (train.py:{line})" in told
    else:
        assert told.startswith(f"rank 1 of 2 (host {socket.gethostname()}) left with exit code {code}\n    while other")
        assert f"    at train.py:{line}\n        {leaves}\n  rank 0 then lost its peer\n" in told


LEAVES = """
    import os, sys
    import torch, lockstep

    with lockstep.Run(replay=False) as run:
        model = run.model(torch.nn.Linear(4, 1))
        run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        batches = run.loader(torch.ones(64, 4), global_batch=4, micro_batch=2, workers=0)
        for _ in run.epochs(1):
            for x in run.train(batches):
                run.step(model(x).mean())
                if run.rank == 1 and run.progress.step == 3:
                    {leaves}
"""


def test_a_program_that_is_no_python_is_started_as_it_is(workshop):
    ends = "if test $RANK = 0; then touch over; else until test -e over; do sleep 0.05; done; exit 3; fi"
    shell = f"echo rank $RANK of $WORLD_SIZE; yes | head -1; {ends}"
    ended = workshop.run("--ranks", 2, "--no_python", "--run-dir", "r", "sh", "-c", shell, "-m")
    assert ended.code == 1
    assert ended.out == "rank 0 of 2\ny\n"
    assert "✗ run failed: rank 1 of 2 left with exit code 3" in ended.err
    about = json.loads((workshop.here / "r" / "run.json").read_text())
    assert "--ranks 2 --no-python sh -c" in about["starts"][0]["command"]


CANNOT_SAVE = """
    import os, resource, signal, sys
    import torch, lockstep
    from torch.utils.data import TensorDataset

    def main():
        with lockstep.Run(save_every="1 step") as run:
            model = run.model(torch.nn.Linear(500, 500))
            run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
            batches = run.loader(TensorDataset(torch.ones(8, 500)), global_batch=4, workers=0)
            for _ in run.epochs(2):
                for (x,) in run.train(batches):
                    run.step(model(x).mean())
                    if run.progress.step == 3:  # as a full disk, but for this process alone
                        run._context.checkpointer._checkpoints.wait()
                        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
                        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))

    if __name__ == "__main__" and "notebook" not in sys.argv:
        main()
    elif __name__ == "__main__":
        try:
            lockstep.launch(main, ranks=2, run_dir="r", max_restarts=2)
        except lockstep.LaunchError as error:
            print(error)
"""


@pytest.mark.parametrize("notebook", [False, pytest.param(True, marks=pytest.mark.campaign)])
def test_a_run_that_could_not_save_its_end_says_so_last_and_is_not_restarted(workshop, notebook):
    script = workshop.script(CANNOT_SAVE)
    if notebook:
        ended = workshop.end_of(workshop.start(script, "notebook", command=()))
    else:
        ended = workshop.run("--run-dir", "r", "--nproc-per-node", 2, "--max-restarts", 2, "--requeue", script)
    assert ended.code == (0 if notebook else 74), ended.err
    said = (ended.out if notebook else ended.err).rpartition("not saved: ")[2].splitlines()
    assert said[0] == "the run is trained to its end, but its last checkpoint is missing"
    root = workshop.here / "r" / "checkpoints"
    assert said[1].startswith(f"    trained to step 4, which no checkpoint in {root} holds: ")
    assert "File too large" in said[1]
    assert "The last good one is of step 2" in said[1] or "The last good one is of step 3" in said[1]
    assert said[2].startswith("  to go on: ")
    assert ("resume=True, run_dir='r'" if notebook else "--resume --run-dir r") in said[2]
    assert said[3:] == ["  full log: r/logs/rank-0000.log; the other ranks beside it"]
    assert "restarting" not in ended.err
    assert "Traceback" not in ended.err
    status = json.loads((workshop.here / "r" / "status.json").read_text())
    assert (status["state"], status["step"], status["generation"]) == ("unsaved", 4, 0)
    assert status["last_saved_step"] in (2, 3)
    if not notebook:
        resumed = workshop.run("--resume", "--run-dir", "r", workshop.script(CANNOT_SAVE.replace("== 3:", "== 9:")))
        assert resumed.code == 0, resumed.err
        assert (root / "step-00000004").is_dir()


def test_a_module_and_a_directory_run_as_python_would(workshop):
    (workshop.here / "pack").mkdir()
    for name in ("__init__", "inner", "__main__"):
        workshop.script(f"import sys\nprint({name!r}, __name__, sys.argv[1:])\n", f"pack/{name}.py")
    assert workshop.run("-m", "pack.inner", "-m").out == (
        "__init__ pack []\ninner __main__ ['-m']\n".replace("[]", "['-m']")
    )
    assert workshop.run("pack", "x").out == "__main__ __main__ ['x']\n"


@pytest.mark.parametrize("code", [0, 74, 75])
def test_what_a_script_leaves_to_its_end_is_done(workshop, code):
    script = workshop.script("""
        import atexit, sys, threading, time
        sys.stdout.write("unfinished")
        atexit.register(lambda: print(" at exit", sys.modules["__main__"].__file__[-8:]))
        threading.Thread(target=lambda: (time.sleep(0.2), sys.stdout.write(" thread"))).start()
        sys.exit(int(sys.argv[1]))
    """)
    ended = workshop.run(script, code)
    assert (ended.code, ended.out) == (code, "unfinished thread at exit train.py\n")


def test_a_closed_pipe_does_not_end_the_run(workshop):
    script = workshop.script("""
        import time
        from pathlib import Path
        print("first", flush=True)
        while not Path("closed").exists():
            time.sleep(0.01)
        print("more\\n" * 1000, flush=True)
        Path("done").write_text("")
    """)
    launcher = workshop.start(script)
    assert launcher.stdout.readline() == "first\n"
    launcher.stdout.close()
    (workshop.here / "closed").write_text("")
    launcher.stdout = None
    assert launcher.wait(timeout=60) == 0
    assert (workshop.here / "done").exists()
    launcher.stderr.close()
    launcher.stderr = None


@pytest.mark.long
def test_a_function_runs_on_ranks_that_are_copies_and_gives_back_its_values(workshop):
    """Also in a process in whose copies threads start, and whose output nobody reads while the ranks begin anew."""
    workshop.script("""
        import fcntl, os, signal, sys, termios, threading, time
        from pathlib import Path
        import lockstep, torch
        offset, changed = 5, []
        torch.set_num_threads(2)  # which torch repeats in each copy, as some libraries do with theirs
        end, full = os.pipe()

        def main():
            import torch.distributed as dist
            dist.init_process_group("gloo")
            total = torch.ones(1)
            dist.all_reduce(total)
            changed.append(1)
            return dist.get_rank() + offset, total.item()

        def fails():
            raise ValueError("bad label")

        def is_full():
            return int.from_bytes(fcntl.ioctl(end, termios.FIONREAD, bytes(4)), "little") >= 1 << 16

        def begins_anew():
            if os.environ["LOCKSTEP_GENERATION"] == "1":
                Path("again").touch()
                return "begun anew"
            print("much\\n" * 50_000)
            while not is_full():
                time.sleep(0.01)
            os.kill(os.getppid(), signal.SIGKILL)
            time.sleep(60)

        def read_late():
            while not Path("again").exists():
                time.sleep(0.01)
            while os.read(end, 1 << 16):
                pass

        print(lockstep.launch(main, ranks=2), changed)
        try:
            lockstep.launch(fails, ranks=2)
        except lockstep.LaunchError as error:
            print(str(error).splitlines()[:2])
        screen, sys.stdout = sys.stdout, os.fdopen(full, "w")
        reader = threading.Thread(target=read_late, daemon=True)
        reader.start()
        print(*lockstep.launch(begins_anew, ranks=1, max_restarts=1), file=screen)
        sys.stdout.close()
        sys.stdout = screen
        reader.join()
    """)
    process = workshop.start(command=("train.py",))
    out, err = process.communicate(timeout=90)
    values, failure, again = out.splitlines()
    assert again == "begun anew", err
    assert values == "[(5, 2.0), (6, 2.0)] []"
    assert "all 2 ranks" in failure
    assert "raised ValueError" in failure
    assert "bad label" in failure


def test_two_launchers_do_not_share_a_run_directory(workshop, hit):
    script = workshop.script(WAITS)
    first = workshop.start("--run-dir", "r", script)
    workshop.wait_for_file("up-0")
    second = workshop.run("--run-dir", "r", "--resume", script)
    assert second.code == 2
    assert "another lockstep run works in r" in second.err
    hit(first, "SIGTERM")
    assert workshop.end_of(first).code == 128 + signal.SIGTERM


def test_a_process_with_threads_is_not_copied(workshop):
    (workshop.here / "site").mkdir()
    workshop.script(
        """
        import threading
        threading.Thread(target=threading.Event().wait, daemon=True).start()
        """,
        "site/sitecustomize.py",
    )
    script = workshop.script("print('up')\n")
    ended = workshop.run(script, PYTHONPATH=f"{workshop.here / 'site'}:{SOURCE}")
    assert ended.code == 0, ended.err
    assert ended.out == "up\n"
    assert "ranks start as separate processes, which is slower" in ended.err
    assert "importing torch, or another library, started 1 thread" in ended.err


SPAWNS = """
    import os
    import torch.distributed as dist, torch.multiprocessing as mp
    def work(rank, world_size):
        os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "localhost", "29511"
        dist.init_process_group("gloo", rank=rank, world_size=world_size)
    if __name__ == "__main__":
        mp.spawn(work, args=(2,), nprocs=2)
"""
OLD = """
    import argparse, json, os
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, required=True)
    parser.add_argument("--lr", type=float)
    args = parser.parse_args()
    names = ("RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE")
    print(json.dumps([vars(args), *(int(os.environ[name]) for name in names)]))
"""


@pytest.mark.parametrize("way", ["fork", pytest.param("plain", marks=pytest.mark.campaign)])
def test_a_script_that_starts_ranks_itself_is_told_so_and_does_not_hang(workshop, way):
    ended = workshop.run("--start", way, "--ranks", 2, "--run-dir", "r", workshop.script(SPAWNS))
    assert ended.code == 1
    block = ended.err.rpartition("✗ ")[2]
    assert "the script starts ranks of its own by torch.multiprocessing" in block
    assert 'call work(int(os.environ["LOCAL_RANK"]), ...) in its place' in block
    assert "    at train.py:8\n        mp.spawn(work, args=(2,), nprocs=2)\n" in block


def test_a_guides_command_line_of_two_machines_runs_as_it_is_printed(workshop):
    script = workshop.script(OLD)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    line = f"--nproc_per_node=1 --nnodes=2 --master_addr=127.0.0.1 --master_port={port} --use_env --pass-local-rank"
    words = [*line.split(), "--run_dir", "r"]
    second = workshop.start(*words, "--node_rank=1", script, "--lr", 2)  # the numbers hold, in whatever order they come
    first = workshop.start(*words, "--node_rank=0", script, "--lr", 2)
    for process in (first, second):
        ended = workshop.end_of(process)
        assert ended.code == 0, ended.err
    for rank in range(2):
        log = (workshop.here / "r" / "logs" / f"rank-000{rank}.log").read_text()
        assert json.loads(log) == [{"local_rank": 0, "lr": 2.0}, rank, 0, rank, 2]
