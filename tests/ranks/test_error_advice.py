"""What is said to errors of Python and torch whose own text does not say what to do."""

import bdb
import errno
import io
import multiprocessing
import os
import signal
from datetime import timedelta
from multiprocessing.reduction import ForkingPickler
from multiprocessing.resource_sharer import DupFd

import pytest
import torch
import torch.distributed as dist
from torch import nn

import lockstep.run  # the advice on models is for scripts that use it
from lockstep.error_advice import add_advice, advice_for
from lockstep.launch.diagnosis.error_record import Failure
from lockstep.testing import run_ranks
from lockstep.torch_private import shut_down

TERMINAL = "lockstep run --attach RANK"


def caught(deed, *args):
    try:
        deed(*args)
    except Exception as error:  # noqa: BLE001 - whatever it raises is looked at
        return error
    pytest.fail("it did not raise")


def ask_size():
    nothing = ()
    _, columns = nothing  # what `stty size` has to say where there is no terminal
    return columns


def quit_debugger():
    raise bdb.BdbQuit


ONE_HAS_IT = "only one of them can be lent yours; shutil.get_terminal_size() answers without one"


@pytest.mark.parametrize(
    ("deed", "says"),
    [
        (input, TERMINAL),
        (quit_debugger, TERMINAL),
        (ask_size, ONE_HAS_IT),
        (lambda: os.get_terminal_size(os.open(os.devnull, 0)), ONE_HAS_IT),
    ],
)
def test_what_needs_a_terminal_is_told_how_to_do(deed, says, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO())
    monkeypatch.setattr("sys.argv", ["/home/me/main.py"])
    error = caught(deed)
    assert says in advice_for(error, attached=False)
    assert "python main.py is the same script on one rank" in advice_for(error, attached=False)
    assert advice_for(error, attached=True) == "", "it has one"


def test_a_gradient_that_is_looked_at_after_the_step_is_told_where_it_is():
    layer = nn.Linear(2, 1)
    assert "where run.backward(loss) has returned True" in advice_for(
        caught(lambda: float(layer.weight.grad.norm())), attached=True
    )
    assert advice_for(caught(lambda: str(layer.bias.grad_fn.name())), attached=True) == ""
    nothing = None
    assert advice_for(caught(lambda: float(nothing.norm())), attached=True) == ""


def test_what_another_rank_has_made_is_told_how_to_make(tmp_path, monkeypatch):
    assert advice_for(caught(os.makedirs, tmp_path), attached=True) == ""
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "exist_ok=True" in advice_for(caught(os.makedirs, tmp_path), attached=True)


@pytest.mark.parametrize(
    "error", [EOFError("Ran out of input"), ValueError("bad label"), OSError("stty"), KeyError("x")]
)
def test_what_says_enough_is_left_alone(error):
    def fail():
        raise error

    assert advice_for(caught(fail), attached=False) == ""


@pytest.mark.parametrize(
    ("name", "says"),
    [("module", "leave .module out"), ("no_sync", "accumulates"), ("register_comm_hook", "ddp:compress")],
)
def test_a_script_that_used_ddp_is_told_what_the_model_is_now(name, says):
    assert lockstep.run.Run
    assert says in advice_for(caught(lambda: getattr(nn.Linear(2, 1), name)), attached=False)
    assert advice_for(caught(lambda: getattr(object(), name)), attached=False) == ""


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_device_that_is_not_there_is_no_business_of_the_script():
    lines = [
        lambda: torch.ones(1).to("cuda"),
        lambda: torch.ones(1).to(0),
        lambda: torch.cuda.set_device(0),
        lambda: torch.distributed.init_process_group(
            "nccl", store=torch.distributed.HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=9)
        ),
    ]
    for line in lines:
        says = advice_for(caught(line), attached=False)
        assert "the device cpu and the backend gloo; with lockstep.Run leave .to(...) and .cuda() out" in says


class OnGpu(torch.utils.data.Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        # As torch does on a machine with a GPU.
        raise RuntimeError(
            "Cannot re-initialize CUDA in forked subprocess. To use CUDA with multiprocessing, you must use the "
            "'spawn' start method"
        )


def test_a_loader_process_that_uses_a_gpu_is_told_to_leave_it_alone():
    batches = iter(torch.utils.data.DataLoader(OnGpu(), num_workers=1))
    error = caught(next, batches)
    shut_down(batches)
    assert "run.loader(..., workers=0)" in advice_for(error, attached=True)


def test_who_looks_at_a_part_of_a_parameter_is_told_where_the_whole_is():
    class Part(torch.Tensor):
        @staticmethod
        def __new__(cls):
            return torch.Tensor._make_wrapper_subclass(cls, (2,))

        @classmethod
        def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
            raise NotImplementedError

    assert "run.state_dict(model)" in advice_for(caught(Part().numpy), attached=False)


def trains_with_a_scaler_of_its_own():
    with lockstep.run.Run() as run:
        model = run.model(nn.Linear(2, 1))
        run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        scaler = torch.amp.GradScaler("cpu")
        for x in run.train(run.loader(torch.ones(4, 2), global_batch=2, workers=0)):
            run.step(scaler.scale(model(x).mean()))
            scaler.update()


def asks_for_what_ddp_had():
    with lockstep.run.Run() as run:
        _ = run.model(nn.Linear(2, 1)).module


@pytest.mark.parametrize(
    ("script", "says"),
    [(trains_with_a_scaler_of_its_own, "leave the GradScaler out"), (asks_for_what_ddp_had, "leave .module out")],
)
def test_a_run_says_it_itself_and_a_launcher_not_again(script, says):
    error = caught(script)
    add_advice(error, attached=False)  # as a rank of `lockstep run` does with whatever ends it
    (note,) = error.__notes__
    assert says in note


def collates_wrongly():
    with lockstep.run.Run() as run:
        run.model(nn.Linear(2, 1))
        batches = run.loader([{"x": 1}] * 4, global_batch=4, workers=0, collate_fn=lambda samples: samples[0]["label"])
        next(run.train(batches))


def test_an_error_in_the_data_set_or_its_collation_is_placed_there():
    error = caught(collates_wrongly)
    assert isinstance(error, KeyError)
    assert "in the data set or its collate function" in "".join(error.__notes__)


def hand_over(send):
    """In a loader process: what a tensor in shared memory is sent as; who receives it asks back for the descriptor."""
    send.send_bytes(ForkingPickler.dumps(DupFd(os.dup(0))))
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_loader_process_that_is_killed_while_it_hands_a_sample_over_is_named():
    receive, send = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("fork").Process(target=hand_over, args=(send,))
    process.start()
    handed = ForkingPickler.loads(receive.recv_bytes())
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # and not `join`, after which its end is not known
    error = caught(handed.detach)
    add_advice(error)
    assert error.__notes__ == ["a loader process was killed by SIGKILL while it handed a sample over"]
    assert Failure.of(error, rank=0, host="h", now_s=0.0, log_bytes=0).lost_worker
    process.join()


def test_memory_for_files_that_takes_no_lock_is_named(monkeypatch):
    def refused(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("multiprocessing.synchronize._multiprocessing.SemLock", refused)
    error = caught(multiprocessing.get_context("fork").Lock)
    assert "lie in /dev/shm, which takes nothing" in advice_for(error, attached=True)


def alone_in_a_collective():
    """What is said to rank 0, whose own collective rank 1 leaves alone."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    if dist.get_rank():
        return ""
    error = caught(dist.all_reduce, torch.ones(2))
    return advice_for(error, attached=True)


def test_who_waits_in_a_collective_of_its_own_is_told_that_bodies_are_not_run_equally_often():
    said, nothing = run_ranks(alone_in_a_collective, 2)
    assert "ranks do not run the loop's body equally often" in said
    assert not nothing


class OfFewLabels(torch.utils.data.Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        return {"cat": 0, "dog": 1}["bird"]  # as a data set does


def test_an_error_in_a_loader_process_is_told_with_its_own_line():
    batches = iter(torch.utils.data.DataLoader(OfFewLabels(), num_workers=1))
    with pytest.raises(KeyError) as caught:
        next(batches)
    shut_down(batches)
    failed = Failure.of(caught.value, rank=0, host="a", now_s=0.0, log_bytes=0)
    assert failed.kind == "KeyError"
    assert failed.message == "'bird' (in loader process 0)"
    assert failed.file == __file__
    assert failed.source == 'return {"cat": 0, "dog": 1}["bird"]  # as a data set does'
    assert "Original Traceback" in failed.traceback
