"""What cannot work is refused in one line that says the way out, with exit code 2, before any rank starts."""

import os
import socket
import subprocess
import sys

import pytest

from lockstep.launch.host.machine import holder_of
from lockstep.testing import run_each

DEADLINE_S = 60


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["trian.py"], "no such file: trian.py; did you mean train.py?"),
        (["--nproc-per-nodes", "2", "train.py"], "no such option: --nproc-per-nodes; did you mean --nproc-per-node?"),
        (["--nproc-per-node", "two", "train.py"], "give a number of ranks"),
        (["--nproc-per-node", "gpu", "train.py"], "has no usable GPU"),
        (["--precision", "fp8", "train.py"], "fp32, bf16, fp16"),
        (["--ends-at", "soon", "train.py"], "--ends-at soon: give a time as 18:30"),
        (["--nnodes", "2", "--rdzv-endpoint", "host:abc", "train.py"], "'abc' is no port"),
        (["-m", "train.py"], "-m takes the name of a module: -m train"),
        (["--set", "track=tensorbord", "train.py"], "did you mean tensorboard?"),
        (["--nnodes", "2", "--rdzv-endpoint", "nohost.invalid:29500", "train.py"], "cannot resolve 'nohost.invalid'"),
    ],
)
def test_one_line_with_the_way_out(workshop, args, says):
    workshop.script("open('started', 'w')")
    ended = workshop.run(*args, CUDA_VISIBLE_DEVICES="")
    assert ended.code == 2
    (line,) = ended.err.splitlines()
    assert line.startswith("lockstep run: ")
    assert says in line
    assert ended.out == ""
    assert sorted(path.name for path in workshop.here.iterdir()) == ["train.py"], "nothing may be left of it"


def test_a_port_that_another_program_uses_is_told_with_its_holder(workshop):
    code = (
        "import socket, time; s = socket.create_server(('127.0.0.1', 0)); "
        "print(s.getsockname()[1], flush=True); time.sleep(100)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as holder:
        try:
            port = int(holder.stdout.readline())
            assert holder_of(port)[0] == holder.pid
            endpoint = f"localhost:{port}"
            ended = workshop.run("--nnodes", 2, "--rdzv-endpoint", endpoint, workshop.script("1"))
        finally:
            holder.kill()
    assert ended.code == 2
    (line,) = ended.err.splitlines()
    assert f"port {port} of this machine is used by process {holder.pid} (" in line
    assert "--rdzv-endpoint localhost:PORT" in line


def test_a_free_port_has_no_holder():
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        assert holder_of(bound.getsockname()[1]) is None


def test_more_ranks_than_micro_batches_is_said_once_and_not_tried_again(workshop):
    script = workshop.script(
        """
        import torch, lockstep
        from torch.utils.data import TensorDataset
        with lockstep.Run() as run:
            model = run.model(torch.nn.Linear(1, 1))
            run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
            batches = run.loader(TensorDataset(torch.ones(8, 1)), global_batch=8, micro_batch=4)
            for _ in run.train(batches):
                pass
        """
    )
    ended = workshop.run("--nproc-per-node", 3, "--max-restarts", 2, "--run-dir", "r", script)
    assert ended.code == 2
    assert ended.err.count("3 ranks for 2 micro-batches") == 1
    assert "all 3 ranks" in ended.err
    assert "    at train.py:8\n" in ended.err
    assert "Traceback" not in ended.err + ended.out
    assert "restarting" not in ended.err


def meet():
    import torch

    from lockstep.collectives import open_group
    from lockstep.world import World

    open_group(World.from_env(os.environ), torch.device("cpu"), 600.0)


def test_a_master_address_that_nobody_knows_is_refused_at_once():
    outcomes = run_each(meet, 2, env={"MASTER_ADDR": "nohost.invalid"}, timeout_s=DEADLINE_S)
    for outcome in outcomes:
        assert type(outcome.error).__name__ == "RendezvousError"
        assert "cannot resolve 'nohost.invalid'" in str(outcome.error)


def test_a_run_directory_that_does_not_answer_is_said_before_the_start_and_ctrl_c_ends_the_waiting(workshop, hit):
    # A pipe that nobody reads stands for a file system that does not answer: to open the lock waits for ever.
    (workshop.here / "r").mkdir()
    os.mkfifo(workshop.here / "r" / ".lock")
    launcher = workshop.start("--run-dir", "r", workshop.script("1"))
    said = launcher.stderr.readline()
    because = "the machine is busy, or the file system is gone"
    assert said == f"waiting for the run directory r, which does not answer: {because}\n"
    hit(launcher, "SIGINT")
    ended = workshop.end_of(launcher)
    assert ended.code == 130
    assert ended.err == "stopped by Ctrl-C, before any rank was started\n"


FEW_FILES = """
import os, resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, 2 * (int(sys.argv[1]),))
os.execv(sys.executable, [sys.executable, "-m", "lockstep", "run", *sys.argv[2:]])
"""
TRAINING = """
import torch
from torch import nn
from lockstep import Run

with Run(seed=1) as run:
    model = run.model(nn.Linear(4, 1))
    run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    batches = run.loader(torch.utils.data.TensorDataset(torch.ones(16, 4)), global_batch=4, micro_batch=1)
    for _ in run.epochs(2):
        for (x,) in run.train(batches):
            run.step(model(x).mean())
"""


def test_a_limit_of_open_files_that_is_too_low_is_told_before_ranks_fail_of_it(workshop):
    words = ("--nproc-per-node", "2", workshop.script(TRAINING))
    refused = workshop.end_of(workshop.start(40, *words, command=("-c", FEW_FILES)))
    assert refused.code == 2
    (line,) = refused.err.splitlines()
    assert "a process may open 40 files here, and each of 2 ranks needs up to 64: say 'ulimit -n 64' first" in line
    followed = workshop.end_of(workshop.start(64, *words, command=("-c", FEW_FILES)))
    assert followed.code == 0, followed.err
