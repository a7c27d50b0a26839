"""A scheduler signals every process of a job, at any moment, also before it is ready for it."""

import contextlib
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from lockstep.launch.host.child_process import stop_signals_blocked
from waiting import wait_until


def test_a_process_that_is_just_being_started_does_not_die_of_a_stop():
    ready = (
        "import signal\nsignal.signal(signal.SIGUSR1, signal.SIG_IGN)\nsignal.pthread_sigmask(signal.SIG_SETMASK, ())"
    )
    with stop_signals_blocked():
        process = subprocess.Popen(
            [sys.executable, "-c", f"{ready}\nprint('lives')"], stdout=subprocess.PIPE, text=True
        )
    # It is still reading its own interpreter.
    process.send_signal(signal.SIGUSR1)
    assert process.communicate(timeout=60)[0] == "lives\n"
    assert process.returncode == 0
    assert signal.SIGUSR1 not in signal.pthread_sigmask(signal.SIG_BLOCK, ())


TRAINS = """
    import hashlib, os, time
    from pathlib import Path
    import torch, lockstep

    with lockstep.Run(seed=1, save_every="10 steps", replay=False) as run:
        model = run.model(torch.nn.Linear(4, 1))
        run.optimizer(torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9))
        batches = run.loader(torch.sin(torch.arange(320.0)).reshape(80, 4), global_batch=4, micro_batch=2, workers=0)
        for epoch in run.epochs(3):
            for x in run.train(batches):
                run.step(model(x).square().mean())
                if run.leads:
                    Path(".step").write_text(str(run.progress.step))
                    os.replace(".step", "step")
                if not Path("go").exists():
                    time.sleep(0.05)  # slowly on
            run.log()
        if run.leads:
            bits = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
            Path(f"final-{os.environ['NAME']}").write_text(hashlib.sha256(bits).hexdigest())
"""


@pytest.mark.campaign
def test_a_stop_and_the_death_of_a_rank_together_lose_no_step(workshop, hit):
    """As where a node is pre-empted and its memory runs out: the survivor's step is in a checkpoint."""
    script = workshop.script(TRAINS)
    for first in ("stop", "death"):
        words = ("--nproc-per-node", 2, "--max-restarts", 1, "--run-dir", first)
        launcher = workshop.start(*words, script, NAME=first)
        wait_until(lambda: (workshop.here / "step").exists() and int(workshop.wait_for_file("step")) >= 13, "step 13")
        victim = next(pid for pid, name in workshop.processes().items() if name == "rank 1")
        for deed in ("stop", "death") if first == "stop" else ("death", "stop"):
            if deed == "stop":
                hit(launcher, "SIGTERM")
            else:
                hit(victim, "SIGKILL")
        done = int(workshop.wait_for_file("step"))
        ended = workshop.end_of(launcher)
        assert ended.code == 75, ended.err
        checkpoints = (workshop.here / first / "checkpoints").glob("step-*")
        assert max(int(path.name.removeprefix("step-")) for path in checkpoints) >= done, ended.err
        if first == "death" or "rank 1" in ended.err:
            assert "rank 1 of 2 was killed by SIGKILL; saving the last finished step before the job ends" in ended.err
        (workshop.here / "go").touch()
        assert workshop.run(*words, "--resume", script, NAME=first).code == 0
        for name in ("go", "step"):
            (workshop.here / name).unlink()
    (workshop.here / "go").touch()
    assert workshop.run("--nproc-per-node", 2, script, NAME="calm").code == 0
    finals = [workshop.wait_for_file(f"final-{name}") for name in ("stop", "death", "calm")]
    assert finals == finals[:1] * 3


def test_a_rank_that_dies_in_its_update_costs_no_mirrored_step_where_no_restart_is_left(workshop):
    """The other rank has begun its update and has no state of its own to leave: the mirrored one is saved."""
    script = workshop.script("""
        import os, signal
        import torch, lockstep

        class Dies(torch.optim.SGD):
            def step(self, closure=None):
                if run.rank == 1 and run.progress.step == 13 + 10 * int(os.environ["LOCKSTEP_GENERATION"]):
                    os.kill(os.getpid(), signal.SIGKILL)
                super().step(closure)

        with lockstep.Run(seed=1, save_every="10 steps") as run:
            model = run.model(torch.nn.Linear(4, 1))
            run.optimizer(Dies(model.parameters(), lr=0.01, momentum=0.9))
            batches = run.loader(torch.ones(80, 4), global_batch=4, micro_batch=2, workers=0)
            for epoch in run.epochs(3):
                for x in run.train(batches):
                    run.step(model(x).square().mean())
    """)
    words = ("--nproc-per-node", 2, "--max-restarts", 1, "--strategy", "zero", "--set", "mirror=true", "--run-dir", "r")
    ended = workshop.run(*words, script)
    assert "saving the last finished step before the job ends" in ended.err
    saved = [int(path.name.removeprefix("step-")) for path in (workshop.here / "r/checkpoints").glob("step-*")]
    assert max(saved) == 23, ended.err


@pytest.mark.parametrize("name", ["SIGHUP", pytest.param("SIGQUIT", marks=pytest.mark.campaign)])
def test_a_signal_to_every_process_of_a_job_at_once_stops_it_with_a_checkpoint(workshop, hit, name):
    launcher = workshop.start("--nproc-per-node", 2, "--run-dir", "r", workshop.script(TRAINS), NAME="a")
    wait_until(lambda: (workshop.here / "step").exists() and int(workshop.wait_for_file("step")) >= 13, "step 13")
    for process in workshop.processes():
        hit(process, name)
    done = int(workshop.wait_for_file("step"))
    ended = workshop.end_of(launcher)
    assert ended.code == 75, ended.err
    saved = max(int(path.name.removeprefix("step-")) for path in (workshop.here / "r/checkpoints").glob("step-*"))
    assert saved >= done, ended.err


def test_a_stop_that_comes_while_torch_is_imported_ends_in_order(workshop, hit):
    train = workshop.script("print('begun')")
    launcher = workshop.start("--nproc-per-node", 2, train)
    fork_server = None
    while fork_server is None:
        # By its words: the launcher may have other children, which end at once.
        words = {pid: Path(f"/proc/{pid}/cmdline") for pid in workshop.processes()}
        with contextlib.suppress(OSError):  # one has ended
            fork_server = next((pid for pid, file in words.items() if b"fork-server" in file.read_bytes()), None)
        assert launcher.poll() is None
    for _ in range(20):
        hit(fork_server, "SIGUSR1")
    ended = workshop.end_of(launcher)
    assert ended.code == 0, ended.err
    assert ended.out == "begun\n"
