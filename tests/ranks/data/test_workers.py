"""Loader processes end with their rank, and not before it."""

import os
import signal
import subprocess
import sys

import pytest

from waiting import wait_until

#: Torch is loaded once: for each line that it reads, a copy of the process is a rank.
RANKS = """
import os, signal, sys, time
import torch.utils.data
from lockstep.batch import BatchPlan
from lockstep.data import WorkerOptions, open_micro_batch_loader, open_order

class Numbers:
    def __init__(self, stuck):
        self.stuck = stuck
    def __len__(self):
        return 400
    def __getitem__(self, index):
        if self.stuck and index == 4:
            print("stuck", flush=True)
            open(f"{__file__}.{os.getppid()}", "w").close()
            time.sleep(600)
        return index

torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL = 0.5  # how long torch waits for a stuck worker

def main(how):
    if how == "stuck, killed":
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # what a worker says of its broken pipe does not matter
    numbers = Numbers(how.startswith("stuck"))
    loader = open_micro_batch_loader(
        numbers, BatchPlan(4, 2, 1), 0, order=open_order(numbers, seed=0, shuffle=False), seed=0, drop_last=False,
        workers=WorkerOptions(2), agree=None,
    )
    batches = loader.epoch(0, padding="one")
    seen = len(next(batches).data)
    if not loader.data_loader.dataset.dataset.stuck:
        seen += len(next(batches).data)  # the other worker has begun too
    workers = [w.pid for w in loader._source._own_loader._iterator._workers]
    while how.startswith("stuck") and not os.path.exists(f"{__file__}.{os.getpid()}"):
        time.sleep(0.01)  # else this process might end before its worker is stuck
    print(os.getpid(), *workers, flush=True)
    if how == "signals":
        for worker in workers:
            for name in ("SIGTERM", "SIGINT", "SIGUSR1", "SIGUSR2", "SIGHUP", "SIGQUIT", "SIGXCPU"):
                os.kill(worker, getattr(signal, name))
        assert seen + sum(len(b.data) for b in batches) == 400
        loader.close()
        loader.close()
    if how == "stuck, killed":
        time.sleep(600)

def serve():
    for line in sys.stdin:
        child = os.fork()
        if not child:
            return main(line.strip())
        print("ended", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)

if __name__ == "__main__":
    serve()
"""


def gone(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def test_workers_end_with_their_rank_and_not_before(tmp_path):
    script = tmp_path / "ranks.py"
    script.write_text(RANKS)
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, script], **pipes) as ranks:
        try:
            for how in ("signals", "left open", "stuck, left open", "stuck, killed"):
                ranks.stdin.write(f"{how}\n")
                ranks.stdin.flush()
                check_one(ranks, how)
            assert (ranks.communicate(timeout=90)[1], ranks.returncode) == ("", 0)
        finally:
            ranks.kill()


def check_one(ranks, how):
    # In either order: a worker reads ahead.
    lines = {ranks.stdout.readline() for _ in range(2 if how.startswith("stuck") else 1)}
    rank, *workers = (int(pid) for line in lines - {"stuck\n"} for pid in line.split())
    try:
        assert len(workers) == 2
        assert ("stuck\n" in lines) == how.startswith("stuck")
        if how == "stuck, killed":
            assert not any(gone(pid) for pid in workers)
            os.kill(rank, signal.SIGKILL)
        assert ranks.stdout.readline() == f"ended {-signal.SIGKILL if how == 'stuck, killed' else 0}\n", how
        wait_until(lambda: all(gone(pid) for pid in workers))
    finally:
        for pid in (rank, *workers):
            if not gone(pid):
                os.kill(pid, signal.SIGKILL)


ONE_WORKER = """
import multiprocessing, os, signal, sys, time
from lockstep.data import workers

def late(rank):
    while os.getppid() == rank:  # which may be gone already
        time.sleep(0.01)
    early(rank)

def early(rank):
    looks, wait = [], workers.wait
    workers.wait = lambda *args: looks.append(args) or wait(*args)
    workers._LOOK_EVERY_S = 0.02
    workers.begin_worker(0)
    while len(looks) < 10:
        time.sleep(0.01)
    print("still here", flush=True)
    time.sleep(600)

if __name__ == "__main__":
    method, when = sys.argv[1:]
    worker = multiprocessing.get_context(method).Process(target=early if when == "early" else late, args=(os.getpid(),))
    worker.start()
    print(worker.pid, flush=True)
    if when == "late":
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(600)
"""


@pytest.mark.parametrize(
    ("method", "when"),
    [("fork", "early"), ("fork", "late"), pytest.param("forkserver", "early", marks=pytest.mark.campaign)],
)
def test_a_worker_ends_with_its_rank_however_it_began_and_when(tmp_path, method, when):
    script = tmp_path / "rank.py"
    script.write_text(ONE_WORKER)
    with subprocess.Popen([sys.executable, script, method, when], stdout=subprocess.PIPE, text=True) as rank:
        worker = int(rank.stdout.readline())
        try:
            if when == "early":
                assert rank.stdout.readline() == "still here\n"
            rank.kill()
            wait_until(lambda: gone(worker))
        finally:
            if not gone(worker):
                os.kill(worker, signal.SIGKILL)
