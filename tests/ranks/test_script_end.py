"""A script that leaves its run open: it is closed at the end, with the exit code of a ``with`` statement."""

import json
import multiprocessing
import signal
import subprocess
import sys

import pytest

from lockstep import script_end
from lockstep.checkpoint import list_checkpoints
from lockstep.errors import UsageError
from lockstep.run import Run
from lockstep.testing import run_ranks

SCRIPT = """
import os, signal, sys, torch
from torch import nn
from lockstep import Run

run = Run(checkpoint="saved", threads=1)
model = run.model(nn.Linear(4, 2))
run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
data = torch.utils.data.TensorDataset(torch.randn(16, 4), torch.randn(16, 2))
batches = run.loader(data, global_batch=8, micro_batch=2)
for epoch in run.epochs(2):
    for x, y in run.train(batches):
        done = run.step(nn.functional.mse_loss(model(x), y))
        if done and run.progress.step == 3:
            exec(sys.argv[1])
"""


#: Torch is loaded once. Each copy runs the script and goes on to an interpreter's usual end.
DRIVER = """
import os, sys, torch, torch._dynamo, lockstep.run
for number, what in enumerate(sys.argv[1:]):
    child = os.fork()
    if not child:
        os.makedirs(str(number))
        os.chdir(str(number))
        sys.argv[1:] = [what]
        output = os.open("output", os.O_WRONLY | os.O_CREAT)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.environ["TORCHELASTIC_ERROR_FILE"] = os.path.abspath("error")
        exec(open("../train.py").read())
        break
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
FORKS = "child = os.fork()\nif not child: sys.exit(5)\nprint(os.waitpid(child, 0)[1] >> 8, flush=True)"
STOPPED = """
import pathlib, time
pathlib.Path("saved/STOP").touch()
while not run._context.stop_requests.reason():
    time.sleep(0.01)
"""


@pytest.mark.timeout(240)
def test_python_alone(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    ways = [FORKS, "os.rename('saved', 'gone'); open('saved', 'w').close()", "raise ValueError('mine')", STOPPED]
    ways += ["raise KeyboardInterrupt"]
    command = [sys.executable, "-c", DRIVER, *ways]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True, timeout=220)
    outputs = [(tmp_path / str(way) / "output").read_text() for way in range(len(ways))]
    assert ended.stdout.split() == ["0", "74", "1", "75", str(-signal.SIGINT)], "\n---\n".join(outputs)
    assert [steps_in(tmp_path / str(way) / "saved") for way in range(len(ways))] == [[4], [], [], [3], []]
    copied, missing, raised, stopped, interrupted = outputs
    assert "\n5\n" in copied
    assert copied.count("done | step 4/4") == 1
    assert "NOT SAVED: trained to step 4" in missing
    assert raised.endswith("ValueError: mine\n")
    assert raised.count("Traceback") == 1
    assert json.loads((tmp_path / "2" / "error").read_text())["message"]["message"] == "ValueError: mine"
    assert "done" not in stopped
    assert interrupted.endswith("interrupted at step 3; nothing is saved\n")


@pytest.mark.timeout(240)
def test_ranks_of_the_launcher(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "lockstep", "run", "--nproc-per-node", "2", "train.py", "pass"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=220, check=False)
    assert (ended.returncode, steps_in(tmp_path / "saved")) == (0, [4]), ended.stderr


def steps_in(directory):
    return [saved.step for saved in list_checkpoints(directory)] if directory.is_dir() else []


def closed_early():
    closed = []
    script_end.close_at_script_end(closed.append)
    with pytest.raises(ZeroDivisionError), script_end.closing():
        raise ZeroDivisionError
    with script_end.closing():
        pass
    with Run() as run:
        run.close()
    run.close()
    before = sys.excepthook
    with Run():
        assert sys.excepthook is not before
    assert sys.excepthook is before
    multiprocessing.current_process()._inheriting = True
    with pytest.raises(UsageError, match="__main__"):
        Run()
    return [type(error).__name__ for error in closed]


def test_each_is_closed_once():
    assert run_ranks(closed_early, 1) == [["ZeroDivisionError"]]
