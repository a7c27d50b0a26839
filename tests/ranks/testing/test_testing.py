"""Ranks for tests: results, errors, deaths, deadlines, and nothing left behind."""

import multiprocessing
import os
import signal
import threading
import time

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lockstep.collectives import open_group
from lockstep.errors import PeerLost
from lockstep.testing import run_each, run_ranks, state_hash
from lockstep.world import World
from waiting import wait_until


def place(word):
    world = World.from_env(os.environ)
    threads, method = torch.get_num_threads(), multiprocessing.get_start_method()
    return world.rank, world.size, world.local_size, threads, os.getcwd(), os.environ.get("WORD"), word, method


def test_each_rank_has_its_place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SLURM_PROCID", "7")
    monkeypatch.setenv("LOCKSTEP_PRECISION", "bf16")
    method = multiprocessing.get_start_method()
    expected = [(rank, 3, 3, 1, str(tmp_path), "from outside", "given", method) for rank in range(3)]
    assert run_ranks(place, 3, "given", env={"WORD": "from outside"}) == expected


def settings_seen():
    return sorted(name for name in os.environ if name.startswith(("LOCKSTEP_", "SLURM_")))


def test_the_callers_own_job_does_not_show(monkeypatch):
    monkeypatch.setenv("SLURM_PROCID", "7")
    monkeypatch.setenv("LOCKSTEP_PRECISION", "bf16")
    assert run_ranks(settings_seen, 1) == [[]]


def meet():
    return open_group(World.from_env(os.environ), torch.device("cpu"), 60)


def one_raises():
    group = meet()
    if group.rank == 1:
        raise KeyError("the cause")
    group.barrier("never met")


def test_the_cause_is_raised_and_what_follows_from_it_is_a_note():
    with pytest.raises(KeyError, match="the cause") as caught:
        run_ranks(one_raises, 3)
    first, *others = caught.value.__notes__
    assert first.startswith("rank 1 of 3:\nTraceback")
    assert 'raise KeyError("the cause")' in first
    assert [note.split(":")[0] for note in others] == ["rank 0 of 3", "rank 2 of 3"]
    assert all("never met" in note for note in others)


def test_run_each_tells_how_each_rank_ended():
    outcomes = run_each(one_raises, 2)
    assert isinstance(outcomes[0].error, PeerLost)
    assert outcomes[0].collateral
    assert isinstance(outcomes[1].error, KeyError)
    assert not outcomes[1].collateral


class Odd(Exception):
    def __init__(self, a, b):
        super().__init__(f"{a} and {b}")


def raises_odd():
    raise Odd(1, 2)


def returns_odd():
    return threading.Lock()


def leaves():
    raise SystemExit(75)


def test_what_cannot_be_pickled_is_told_all_the_same():
    with pytest.raises(RuntimeError, match="Odd: 1 and 2"):
        run_ranks(raises_odd, 1)
    with pytest.raises(RuntimeError, match=r"the result cannot be pickled: .*lock"):
        run_ranks(returns_odd, 1)
    with pytest.raises(SystemExit, match="75"):
        run_ranks(leaves, 2)


def is_killed():
    if os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)


def just_leaves():
    if os.environ["RANK"] == "1":
        os._exit(9)


def test_a_rank_that_dies_is_an_error():
    with pytest.raises(ChildProcessError, match="rank 1 was killed by SIGKILL before"):
        run_ranks(is_killed, 2)
    with pytest.raises(ChildProcessError, match="rank 1 left with exit code 9 before"):
        run_ranks(just_leaves, 2)


def stays(path):
    context = multiprocessing.get_context("fork")
    child = context.Process(target=time.sleep, args=(600,))
    child.start()
    with open(path, "a") as file:
        file.write(f"{os.getpid()} {child.pid}\n")
    child.join()


def is_alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_rank_that_does_not_end_is_ended_with_its_children_and_shows_where_it_was(tmp_path):
    with pytest.raises(TimeoutError, match="rank 0 was still running after 2 s") as caught:
        run_ranks(stays, 2, str(tmp_path / "pids"), timeout_s=2)
    assert "in stays" in caught.value.__notes__[0]
    pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    assert len(pids) == 4
    wait_until(lambda: not any(map(is_alive, pids)))


def dies_and_leaves_a_child():
    context = multiprocessing.get_context("fork")
    child = context.Process(target=time.sleep, args=(600,))
    child.start()
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_death_is_noticed_though_a_child_holds_the_line_open():
    with pytest.raises(ChildProcessError, match="SIGKILL"):
        run_ranks(dies_and_leaves_a_child, 1, timeout_s=60)


# ---- state_hash ------------------------------------------------------------------------------------------------------


def net(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))


def test_equal_states_hash_equal():
    assert state_hash(net()) == state_hash(net())
    assert state_hash(net()) == state_hash(net().state_dict())
    assert state_hash({"a": 1, "b": 2}) == state_hash({"b": 2, "a": 1})
    image = torch.rand(2, 3, 4, 5)
    assert state_hash(image) == state_hash(image.contiguous(memory_format=torch.channels_last))
    assert state_hash(torch.ones(3, requires_grad=True)) == state_hash(torch.ones(3))


DIFFERENT = [
    None,
    0,
    0.0,
    -0.0,
    1,
    True,
    "1",
    b"1",
    [],
    {},
    [[], []],
    [[[]]],
    ["ab"],
    ["a", "b"],
    {"a": 1},
    {"a": 2},
    {"b": 1},
    {1: "a"},
    torch.zeros(2),
    -torch.zeros(2),
    torch.zeros(3),
    torch.zeros(2, 1),
    torch.zeros(2, dtype=torch.float64),
    torch.zeros(2, dtype=torch.bfloat16),
    torch.zeros((), dtype=torch.int64),
    torch.nextafter(torch.zeros(2), torch.ones(2)),
    torch.zeros(0),
    net(0),
    net(1),
]


def test_different_states_hash_differently():
    assert len({state_hash(value) for value in DIFFERENT}) == len(DIFFERENT)
    assert state_hash(1, 2) != state_hash([1, 2])


def test_optimizers_count_with_their_state():
    hashes = []
    for _ in range(2):
        model = net()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        hashes.append(state_hash(optimizer))
        model(torch.ones(2, 3)).square().sum().backward()
        optimizer.step()
        hashes.append(state_hash(model, optimizer))
    assert hashes[:2] == hashes[2:]
    assert hashes[0] != hashes[1]


def wrapped():
    group = meet()
    model = net()
    same = state_hash(DistributedDataParallel(model)) == state_hash(model)
    group.barrier("end")
    group.close()
    return same


def test_a_wrapper_does_not_show():
    assert run_ranks(wrapped, 2) == [True, True]


def test_what_has_no_state_is_refused():
    with pytest.raises(TypeError, match="state_hash of a object: give tensors"):
        state_hash([object()])
