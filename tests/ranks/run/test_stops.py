"""Stops: all ranks after the same step, saved, code 75; and without a directory at once."""

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed import HashStore
from torch.nn import functional as F
from torch.utils.data import Dataset, TensorDataset

import lockstep
from lockstep.checkpoint import list_checkpoints
from lockstep.collectives import KeyValueStore
from lockstep.run.setup.shutdown import write_torchelastic_error
from lockstep.run.stopping.step_agreement import StoreAgreement
from lockstep.run.stopping.stop_requests import JobDeadline, StopRequests
from lockstep.testing import run_each, run_ranks, state_hash
from waiting import wait_until

SOURCE = str(Path(lockstep.__file__).parents[1])
STEPS_PER_EPOCH, EPOCHS = 5, 3
DEADLINE_S = 60


class Slow(Dataset):
    """Fast for so many samples of the first epoch, then slow."""

    def __init__(self, fast, slow_s):
        self.fast, self.slow_s, self.read = fast, slow_s, 0

    def __len__(self):
        return 4000

    def __getitem__(self, index):
        self.read += 1
        if self.read > self.fast:
            Path("slow").touch()
            time.sleep(self.slow_s)
        return torch.sin(torch.arange(4.0) * index), index % 3


def table():
    x = torch.sin(torch.arange(4.0 * 8 * STEPS_PER_EPOCH)).reshape(-1, 4)
    return TensorDataset(x, torch.arange(len(x)) % 3)


def train(directory, act, *, dataset=None, epochs=EPOCHS, pause_s=0.0, replay=True):
    """Train, calling ``act(run, where)`` after each step and in each evaluation; the state in the end and metrics."""
    with lockstep.Run(seed=1, checkpoint=directory, replay=replay) as run:
        net = nn.Linear(4, 3)
        model = run.model(net)
        optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
        batches = run.loader(dataset or table(), global_batch=8, micro_batch=2, workers=0)
        held_out = run.loader(table(), global_batch=8, micro_batch=2, shuffle=False)
        for _ in run.epochs(epochs):
            for x, y in run.train(batches):
                before = run.progress.step
                run.step(F.cross_entropy(model(x), y))
                if run.progress.step != before:
                    act(run, "train")
                    time.sleep(pause_s)
            for x, y in run.evaluate(held_out):
                run.measure(right=model(x).argmax(1) == y)
                act(run, "evaluate")
        return state_hash(net, optimizer), run.metrics


def nothing(run, where):
    pass


def whole(directory):
    return train(directory, nothing)


class At:
    """Does something once, on one rank, at one step; then each step takes a while, so that it is noticed."""

    def __init__(self, rank, step, where, what):
        self.rank, self.step, self.where, self.what, self.done = rank, step, where, what, False

    def __call__(self, run, where):
        if not self.done and run.rank == self.rank and (run.progress.step, where) >= (self.step, self.where):
            self.done = True
            self.what(run)
        if run.progress.step >= self.step:
            time.sleep(0.05)


def signalled(directory, number, where="train"):
    return train(
        directory,
        At(1 if int(os.environ["WORLD_SIZE"]) > 1 else 0, 2, where, lambda run: os.kill(os.getpid(), number)),
        epochs=200,
        replay=False,
    )


def left_by(outcomes):
    return [(type(o.error).__name__, getattr(o.error, "code", None)) for o in outcomes]


STOPPED = ("SystemExit", 75)


def only_step(root):
    (one,) = list_checkpoints(Path(root))
    return one.step


# ---- the agreement on a step: its law -------------------------------------------------------------------------------


@pytest.mark.parametrize("in_step", [True, False], ids=["ranks in step", "ranks that run freely"])
@pytest.mark.parametrize("seed", range(3))
def test_all_ranks_meet_after_the_same_step(seed, in_step):
    dice, size, steps = random.Random(seed), 4, 20000
    store, barrier = HashStore(), threading.Barrier(size)
    request = threading.Event()
    met = [[] for _ in range(size)]

    def rank(number):
        one = StoreAgreement(
            KeyValueStore(store, "save-stop"),
            number,
            size,
            request.is_set if number == 2 else bool,
            bool,
            peer_timeout_s=DEADLINE_S,
        )
        try:
            for step in range(1, steps + 1):
                if number == 0 and step == 20:
                    request.set()
                if in_step:
                    barrier.wait(DEADLINE_S)
                time.sleep(dice.uniform(0, 0.002) if in_step else 0.001 * (1 + number))
                if one.due(step):
                    met[number].append((step, one.stop_pending()))
                    # All stand still here, so all must be here.
                    barrier.wait(DEADLINE_S)
                    return
        finally:
            one.close()

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    assert len(met[0]) == 1, met
    assert met[0][0][1], "the ranks must know that it is urgent"
    assert met == [met[0]] * size


def test_who_waits_for_a_rank_that_does_not_answer_is_told_at_the_deadline():
    one = StoreAgreement(KeyValueStore(HashStore(), "save-stop"), 0, 2, lambda: True, bool, peer_timeout_s=0.1)

    def step_on():
        for step in range(1, 10000):
            one.due(step)
            time.sleep(0.01)

    try:
        with pytest.raises(lockstep.errors.PeerLost, match="could not agree"):
            step_on()
    finally:
        one.close()


# ---- stops of whole runs --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    return run_ranks(whole, 1, str(tmp_path_factory.mktemp("whole")))[0]


@pytest.mark.parametrize(
    ("name", "ranks"),
    [("SIGTERM", 1), ("SIGINT", 3), ("SIGUSR1", 2), ("SIGUSR2", 2), ("SIGXCPU", 2), ("SIGHUP", 2), ("SIGQUIT", 2)],
)
def test_a_signal_to_one_rank_stops_all_after_the_same_saved_step(tmp_path, name, ranks):
    outcomes = run_each(signalled, ranks, str(tmp_path), signal.Signals[name])
    assert left_by(outcomes) == [STOPPED] * ranks, outcomes
    assert 2 <= only_step(tmp_path) < 2 + 60, "the stop must come through while the run goes on"


def stopped_in_evaluation(directory):
    seen = []

    def act(run, where):
        if where == "evaluate" and run.progress.step == STEPS_PER_EPOCH * EPOCHS:
            if run.rank == 1 and not seen:
                os.kill(os.getpid(), signal.SIGTERM)
            seen.append(1)
            Path(directory, f"evaluated-{run.rank}").write_text(str(len(seen)))
            wait_until(run._context.save_stop.stop_pending, "the stop, of which ranks hear through the store")

    return train(directory, act)


def test_a_stop_within_an_evaluation_cuts_it_short_and_ends_in_the_same_bits_and_metrics(tmp_path, uninterrupted):
    # In the last epoch, so that the metrics of its training must come from the checkpoint.
    outcomes = run_each(stopped_in_evaluation, 2, str(tmp_path))
    assert left_by(outcomes) == [STOPPED] * 2, outcomes
    assert only_step(tmp_path) == STEPS_PER_EPOCH * EPOCHS
    for rank in range(2):
        assert int((tmp_path / f"evaluated-{rank}").read_text()) < 2 * STEPS_PER_EPOCH, "it must be left early"
    resumed = run_ranks(whole, 3, str(tmp_path), env={"LOCKSTEP_RESUME": "1"})
    assert resumed == [uninterrupted] * 3


class Stream:
    """An iterable table, over which ranks tell each other in each step what they found."""

    def __iter__(self):
        return iter(table())


def stopped_in_evaluation_of_a_stream(directory):
    """Rank 1 knows of the stop when rank 0 waits for its next count: it may not leave rank 0 alone with the stream."""
    with lockstep.Run(seed=1, checkpoint=directory) as run:
        model = run.model(nn.Linear(4, 3))
        run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        held_out = run.loader(Stream(), global_batch=8, micro_batch=4, workers=0)
        for _ in run.epochs(1):
            for number, _batch in enumerate(run.evaluate(held_out)):
                if run.rank == 1 and number == 1:
                    os.kill(os.getpid(), signal.SIGTERM)
                    wait_until(run._context.save_stop.stop_pending, "the stop")
    raise AssertionError("it was not stopped")


def test_a_stop_within_the_evaluation_of_a_stream_parts_no_ranks(tmp_path):
    outcomes = run_each(stopped_in_evaluation_of_a_stream, 2, str(tmp_path))
    assert left_by(outcomes) == [STOPPED] * 2, outcomes


def warned_and_asked(directory):
    def signals(run):
        for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGUSR2, signal.SIGTERM):
            os.kill(os.getpid(), number)

    return train(directory, At(0, 2, "train", signals), epochs=200)


def test_a_scheduler_that_warns_and_then_asks_does_not_cut_off_the_save(tmp_path):
    outcomes = run_each(warned_and_asked, 2, str(tmp_path))
    assert left_by(outcomes) == [STOPPED] * 2, outcomes
    assert only_step(tmp_path) >= 2


def in_slow_data(directory):
    os.chdir(directory)
    act = At(1, 10**9, "train", lambda run: None)

    def tell(run, where):
        if run.rank == 1 and Path("slow").exists() and not act.done:
            act.done = True
            Path("asked").write_text(str(run.progress.step))
            os.kill(os.getpid(), signal.SIGTERM)

    return train(directory, tell, dataset=Slow(200, 0.3))


def test_a_stop_comes_through_where_steps_have_become_slow(tmp_path):
    outcomes = run_each(in_slow_data, 2, str(tmp_path))
    assert left_by(outcomes) == [STOPPED] * 2, outcomes
    assert only_step(tmp_path) <= int((tmp_path / "asked").read_text()) + 3


def with_stop_file(directory):
    return train(directory, At(0, 2, "train", lambda run: Path(directory, "STOP").touch()), epochs=200)


def test_the_stop_file_is_obeyed_once(tmp_path, uninterrupted):
    outcomes = run_each(with_stop_file, 2, str(tmp_path))
    assert left_by(outcomes) == [STOPPED] * 2, outcomes
    assert not (tmp_path / "STOP").exists(), "it must not stop the next run"
    assert only_step(tmp_path) >= 2


def slowly(directory):
    return train(directory, nothing, epochs=200, pause_s=0.02)


def test_a_run_stops_before_its_job_ends(tmp_path):
    # 65 s are kept free while nobody knows how long a save takes.
    ends_at = time.time() + 66
    outcomes = run_each(slowly, 2, str(tmp_path), env={"LOCKSTEP_ENDS_AT": str(ends_at)})
    assert left_by(outcomes) == [STOPPED] * 2, outcomes
    assert time.time() < ends_at - 30


def test_the_margin_before_the_end_is_what_was_measured():
    now = [1000.0]
    end = JobDeadline(1100.0, wall=lambda: now[0])
    assert end.margin_s == 65.0
    end.save_s = 4.0
    for seconds in (1.0, 1.0, 90.0):  # the last one with an evaluation in it
        end.step_took(seconds)
    assert end.margin_s == 2 * 1.0 + 2 * 4.0 + 5.0
    assert end.left_s == 100.0 - 15.0
    assert end.reason() is None
    now[0] += 85.0
    assert end.reason().startswith("the end of its job at ")
    assert JobDeadline(None).reason() is None
    assert JobDeadline(None).left_s is None


@pytest.mark.parametrize("env", [{"SLURM_JOB_END_TIME": "1795279000"}, {"LOCKSTEP_ENDS_AT": "1795279000"}])
def test_the_end_of_the_job_is_read_from_the_environment(env):
    assert JobDeadline.from_env(env).left_s is not None
    with pytest.raises(ValueError, match="seconds since 1970"):
        JobDeadline.from_env(dict.fromkeys(env, "tomorrow"))


def test_a_request_once_seen_stays(tmp_path):
    now = [0.0]
    requests = StopRequests(tmp_path / "STOP", JobDeadline(None), now=lambda: now[0])
    assert requests.reason() is None
    (tmp_path / "STOP").touch()
    now[0] += 1.0
    assert requests.reason() == f"the file {tmp_path / 'STOP'}"
    requests.acknowledge()
    requests.acknowledge()
    assert not (tmp_path / "STOP").exists()
    assert requests.reason() is not None


# ---- processes of their own -----------------------------------------------------------------------------------------

SCRIPT = """
import ctypes, os, sys, time
from pathlib import Path
import torch, lockstep
from torch.utils.data import TensorDataset

how, directory = sys.argv[1:]
with lockstep.Run(checkpoint=directory or None, save_every="1 step" if how == "saved" else None) as run:
    model = run.model(torch.nn.Linear(1, 1))
    run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    batches = run.loader(TensorDataset(torch.ones(40000, 1)), global_batch=4, workers=0)
    for epoch in run.epochs(1000):
        for (x,) in run.train(batches):
            if how == "saved" and run.progress.step == 3:
                while not Path(directory, "step-00000003", "manifest.json").exists():
                    time.sleep(0.01)
                Path(f"up-{run.rank}").touch()
                time.sleep(600)
            run.step(model(x).mean())
            if run.progress.step == 3 and how != "saved":  # which is up in the next body
                if how == "raise" and run.rank == 1:
                    raise ValueError("bad label 255")
                Path(f"up-{run.rank}").touch()
                if how == "waits":  # elsewhere an interrupt may meet a destructor, in which Python ignores it
                    time.sleep(600)
                if how == "stuck":  # in a call that no signal ends
                    lock = ctypes.create_string_buffer(256)
                    while True:
                        ctypes.CDLL(None).pthread_mutex_lock(lock)
"""


@pytest.fixture
def start(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    running = []

    def start(*words, before=()):
        env = {name: value for name, value in os.environ.items() if not name.startswith("LOCKSTEP_R")}
        process = subprocess.Popen(
            [sys.executable, *before, "train.py", *words],
            cwd=tmp_path,
            env=env | {"PYTHONPATH": SOURCE},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        running.append(process)
        return process

    yield start
    for process in running:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def test_an_interrupt_without_a_directory_ends_the_process_at_once_and_without_a_traceback(start, tmp_path):
    process = start("waits", "")
    wait_until((tmp_path / "up-0").exists)
    os.kill(process.pid, signal.SIGINT)
    out, _ = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == -signal.SIGINT  # a shell says 128 more: 130
    assert "Traceback" not in out
    assert "interrupted at step" in out


def test_without_a_directory_sigterm_ends_the_process_at_once():
    (outcome,) = run_each(signalled, 1, None, signal.SIGTERM)
    assert str(outcome.error) == "rank 0 was killed by SIGTERM before the function returned"


def test_the_second_interrupt_stops_now_also_where_the_program_hears_nothing(start, tmp_path):
    process = start("stuck", "r")
    wait_until((tmp_path / "up-0").exists)
    os.kill(process.pid, signal.SIGINT)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.5)  # saves at its next step, which never comes
    os.kill(process.pid, signal.SIGUSR1)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(2.5)  # only the user insists
    os.kill(process.pid, signal.SIGINT)
    process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 130


@pytest.mark.parametrize("ranks", [0, 2])
def test_the_second_interrupt_stops_with_a_checkpoint_where_the_last_step_is_in_one(start, tmp_path, ranks):
    before = ("-m", "lockstep", "run", "--nproc-per-node", str(ranks), "--run-dir", "r") if ranks else ()
    process = start("saved", "saved", before=before)
    for rank in range(max(ranks, 1)):
        wait_until((tmp_path / f"up-{rank}").exists)
    os.kill(process.pid, signal.SIGINT)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.5)  # until it has noticed the first
    os.kill(process.pid, signal.SIGINT)
    out, _ = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 75, out
    again = "to go on: lockstep run --resume --run-dir r" if ranks else "run it again with --resume to go on"
    assert "at step 3, which is saved" in out
    assert again in out
    assert "without a checkpoint" not in out


def test_torchrun_tells_the_error_of_the_rank_that_failed(start):
    torchrun = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone")
    process = start("raise", "", before=torchrun)
    out, _ = process.communicate(timeout=DEADLINE_S)
    _, mark, root = out.rpartition("Root Cause (first observed failure)")
    assert mark, out
    assert "rank      : 1 (local_rank: 1)" in root
    assert "ValueError: bad label 255" in root


def test_a_lost_peer_is_dated_after_the_error_of_the_same_second(tmp_path):
    seconds = []
    for number, error in enumerate((ValueError("bad"), lockstep.errors.PeerLost("rank 1 left"))):
        file = tmp_path / str(number)
        write_torchelastic_error(error, {"TORCHELASTIC_ERROR_FILE": str(file)}, now_s=1000.9)
        seconds.append(json.loads(file.read_text())["message"]["extraInfo"]["timestamp"])
    assert seconds == ["1000", "1001"]
    write_torchelastic_error(ValueError("bad"), {})


def saved_by_the_clock(directory):
    """How many checkpoints there are after a second and a half of training."""
    with lockstep.Run(checkpoint=directory, save_every="0.1 s", keep=100) as run:
        model = run.model(nn.Linear(2, 1))
        run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        for batch in run.train(run.loader(torch.ones(1200, 2), global_batch=4, micro_batch=1)):
            run.step(model(batch).square().mean())
            time.sleep(0.005)
        return len(list_checkpoints(directory))


@pytest.mark.campaign
def test_a_cadence_in_seconds_saves_again_and_again(tmp_path):
    for world in (1, 2):
        found = run_ranks(saved_by_the_clock, world, tmp_path / str(world))
        assert min(found) >= 3
