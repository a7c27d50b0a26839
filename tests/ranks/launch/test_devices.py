"""The device of a rank that has computed wrong bits is left out from then on."""

import os
import re
import runpy
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.errors import AuditError
from lockstep.launch.diagnosis.error_record import Failure
from lockstep.launch.host.machine import Devices
from worlds import on_world

TRAINS = """
import sys, os, torch
from torch.nn import functional as F
from lockstep import Run
from lockstep.testing import state_hash
from audit import Faulty, Flip, Net, Waves

with Run(seed=3, audit="3 steps", save_every="2 steps") as run:
    again = os.environ["LOCKSTEP_GENERATION"] != "0"
    flip = Flip("gradient", "broken", "ddp", run.world_size, (int(sys.argv[1]),), 3, 20, 3)
    faulty = Faulty(None if again else flip, run.rank)
    torch.manual_seed(0)
    net = Net(faulty)
    optimizer = run.optimizer(torch.optim.AdamW(run.model(net).parameters(), lr=1e-3))
    batches = run.loader(Waves(), global_batch=16, micro_batch=4, workers=0)
    for _ in run.steps(8):
        for x, y in run.train(batches):
            faulty.step, faulty.check = run.progress.step, run.micro_batch.check
            run.step(F.mse_loss(net(x), y))
    told = f"{run.world_size} ranks: {state_hash(net, optimizer)}"
    run.say(told)
"""


@given(st.integers(1, 8), st.integers(0, 12), st.data())
def test_ranks_take_the_devices_that_are_not_left_out_while_there_are_any(ranks, gpus, data):
    names = [f"GPU-{number}" for number in range(gpus)]
    devices, gone = Devices(ranks), set()
    free = list(names) if gpus >= ranks else list(range(ranks))
    while devices.can_start:
        local_ranks = data.draw(st.sets(st.integers(0, devices.can_start - 1), min_size=1))
        gone |= {free[rank] for rank in local_ranks}
        free = [one for one in free if one not in gone]
        devices = devices.without(local_ranks, lambda: names)
        assert devices.can_start == min(ranks, len(free))
        assert devices.variables() == ({"CUDA_VISIBLE_DEVICES": ",".join(free)} if gpus >= ranks else {})
    assert Devices(ranks).without((), lambda: names) == Devices(ranks)
    assert Devices(ranks).variables() == {}


def test_the_record_of_a_failure_names_the_accused():
    error = AuditError("a text", (2, 5), "ranks 2 and 5 computed wrong bits")
    failure = Failure.of(error, rank=0, host="n", now_s=0.0, log_bytes=0)
    assert (failure.accused, failure.headline) == ((2, 5), "ranks 2 and 5 computed wrong bits")
    assert Failure.from_message(failure.to_message()) == failure


def trained_in(directory, script, *args):
    """On a rank: what the script tells at its end."""
    os.chdir(directory)
    sys.argv = [script, *args]
    os.environ |= {"LOCKSTEP_GENERATION": "0", "LOCKSTEP_CHECKPOINT": "alone"}
    return runpy.run_path(script, run_name="__main__")["told"]


@pytest.mark.timeout(240)
def test_the_run_goes_on_without_the_rank_that_was_wrong_and_ends_with_the_same_bits(workshop):
    script, path = workshop.script(TRAINS), os.pathsep.join(sys.path)
    ended = workshop.run("--nproc-per-node", 3, "--max-restarts", 1, script, 1, PYTHONPATH=path)
    assert ended.code == 0, ended.err
    assert "✗ run failed: rank 1 of 3 (host " in ended.err
    assert "wrong bits on rank 1, whose device is left out from now on: 2 ranks of 3 can start here" in ended.err
    assert "restarting all 2 ranks as generation 1" in ended.err
    ((alone,),) = on_world(1, [(trained_in, workshop.here, script, "9")])
    hashes = [re.search(r"(\d) ranks: (\w+)", told) for told in (ended.out, alone)]
    assert [found[1] for found in hashes] == ["2", "1"]
    assert hashes[0][2] == hashes[1][2]
