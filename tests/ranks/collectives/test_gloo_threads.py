"""Gloo's threads do not abort a rank at its end, and a forked process does not destroy what they belong to."""

import gc
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import lockstep
from lockstep.testing import run_ranks

DEADLINE_S = 90

#: Two ranks, each a copy that goes on to an interpreter's usual end. Gloo's threads get a processor only where the main
#: thread wants none, so that they are late to let go of what they have sent.
RANKS = """
import os, socket, sys, torch
import torch.distributed as dist
from pathlib import Path
from lockstep.collectives import open_group
from lockstep.world import World

with socket.create_server(("127.0.0.1", 0)) as free:
    port = free.getsockname()[1]
ranks = []
while len(ranks) < 2 and (not ranks or ranks[-1]):
    ranks.append(os.fork())
if ranks[-1]:
    sys.exit(max(abs(os.waitstatus_to_exitcode(os.waitpid(rank, 0)[1])) for rank in ranks))
rank = len(ranks) - 1
os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "WORLD_SIZE": "2"}
group = open_group(World(rank, 2, rank, 2, 0, 1, address="127.0.0.1", port=port), torch.device("cpu"), 60.0)
held = dist.group.WORLD, group  # as models and strategies hold them
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
for thread in Path("/proc/self/task").iterdir():
    if (thread / "comm").read_text().startswith("pt_gloo"):
        os.sched_setaffinity(int(thread.name), os.sched_getaffinity(0))
        os.sched_setscheduler(int(thread.name), os.SCHED_IDLE, os.sched_param(0))
for _ in range(3):
    group.barrier("the end")
exec(sys.argv[1])
"""


@pytest.mark.skipif(not hasattr(os, "SCHED_IDLE"), reason="a thread cannot be held back here")
def test_a_thread_that_is_late_does_not_abort_the_process():
    """With ``dist.destroy_process_group()`` alone every third process does."""
    words = [sys.executable, "-c", RANKS, "group.close()"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=DEADLINE_S)
    assert done.returncode == 0, done.stderr


#: What a rank does that trains a little: it opens groups of its own, and leaves right after the last collective.
TRAINS = """
import torch, lockstep
from torch.nn import functional as F

with lockstep.Run(seed=0) as run:
    model = run.model(torch.nn.Linear(4, 1))
    optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    data = torch.utils.data.TensorDataset(torch.ones(40, 4), torch.ones(40, 1))
    for _ in run.epochs(2):
        for x, y in run.train(run.loader(data, global_batch=20, micro_batch=2, workers=0)):
            run.step(F.mse_loss(model(x), y))
"""
LAUNCHERS = {
    "torchrun": (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"),
    "mpirun": ("mpirun", "--allow-run-as-root", "--oversubscribe", "-np"),
}
#: Together 300 with each launcher. More at once than there are CPUs, so that threads are late.
AT_ONCE, PARTS = 10, 30


@pytest.mark.campaign
@pytest.mark.timeout(290)
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_no_rank_aborts_at_its_end(launcher, part, tmp_path):
    """Where nothing waits for gloo's threads one in thirty does ("terminate called without an active exception")."""
    if launcher == "mpirun" and shutil.which("mpirun") is None:
        pytest.skip("no mpirun here")
    (tmp_path / "train.py").write_text(TRAINS)
    env = {**os.environ, "PYTHONPATH": str(Path(lockstep.__file__).parents[1])}
    program = [sys.executable, "train.py"] if launcher == "mpirun" else ["train.py"]
    words = [*LAUNCHERS[launcher], str(AT_ONCE), *program]
    done = subprocess.run(words, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    assert "terminate called" not in done.stderr, done.stderr


class Collecting:
    """A data set whose processes look for garbage at each sample."""

    def __len__(self):
        return 8

    def __getitem__(self, index):
        gc.collect()
        return torch.tensor([float(index)])


def train_with_groups_in_garbage():
    """Two runs in one process, as in a notebook: the second one's copies inherit the groups of the first as garbage."""
    gc.disable()
    for _ in range(2):
        with lockstep.Run(seed=0, strategy="fsdp") as run:
            model = run.model(torch.nn.Linear(1, 1))
            run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
            for _ in run.epochs(1):
                for x in run.train(run.loader(Collecting(), global_batch=4, micro_batch=2, workers=1)):
                    run.step(model(x).square().mean())
    child = os.fork()
    if not child:
        gc.collect()
        os._exit(0)
    return os.waitpid(child, 0)[1]


def test_process_groups_that_are_garbage_are_not_destroyed_by_forked_processes():
    assert run_ranks(train_with_groups_in_garbage, 2) == [0, 0]
