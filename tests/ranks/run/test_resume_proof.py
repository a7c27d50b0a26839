"""The first step after a resume is the one that followed the checkpoint, or the run ends and says what differs."""

import copy
import enum
import itertools
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from campaign_marks import IN_CAMPAIGN
from lockstep.checkpoint import NEXT_STEP, list_checkpoints, verify
from lockstep.checkpoint.filesystem import FileSystem
from lockstep.checkpoint.next_step import read_next_step
from lockstep.collectives import TensorShard
from lockstep.errors import CheckpointError, MismatchError
from lockstep.launch_contract import RESUME
from lockstep.run import Run
from lockstep.run.proofs.resume_proof import ResumeProof, bit_sums
from lockstep.testing import state_hash
from waiting import wait_until
from worlds import error_of, on_world

X = torch.randn(38, 3, generator=torch.Generator().manual_seed(5))
SIZES = {"global_batch": 8, "micro_batch": 2}  # 5 steps an epoch, the last one of 3 micro-batches
KILLED = 8  # in its body; checkpoints are of steps 2, 4 and 6
RARELY = "100 steps"  # saves what goes on to the end


@pytest.fixture(autouse=True)
def quiet(monkeypatch):
    monkeypatch.setenv("TERM", "dumb")


class Lost(Exception):
    """Ends a script in the middle."""


def net():
    return nn.Sequential(nn.Linear(3, 6), nn.BatchNorm1d(6), nn.Dropout(0.2), nn.Linear(6, 2))


def trained(directory, how="good", strategy="ddp", until=None, resume=False, save_every="2 steps", **settings):
    """A script that loses ``how`` at a resume; the hash of its model, on the leader."""
    os.environ[RESUME] = str(int(resume))
    with Run(seed=1, strategy=strategy, checkpoint=directory, save_every=save_every, **settings) as run:
        model = run.model(net())
        teacher, queue, temperature, hard = copy.deepcopy(net()).eval(), torch.ones(4, 2), 1.0, torch.arange(38.0)
        average, decays = nn.Linear(2, 2), itertools.count(1)
        optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        scales = [1.0]
        if how == "hook":
            model[0].weight.register_hook(lambda gradient: gradient * scales[0])
        run.keep(queue=queue, average=average)
        order = (lambda epoch, generator: hard.argsort(descending=True)) if how == "order" else None
        batches = run.loader((X,), order=order, **SIZES)
        for _ in run.epochs(2):
            for (x,) in run.train(batches):
                y = model(x)
                loss = (y / (temperature if how == "temperature" else 1.0)).square().mean() + (y @ queue.T).exp().mean()
                if how == "teacher":
                    loss = loss + (y - teacher(x).detach()).square().mean()
                if run.step(loss):
                    with torch.no_grad():
                        queue.mul_(0.9)
                        if how in ("teacher", "write", "copy"):
                            teacher[0].weight.mul_(0.9)
                        average.weight.mul_(1 / next(decays) if how == "decay" else 0.9)
                    if how == "queue":
                        queue = queue + 1
                    if how == "rate":
                        optimizer.param_groups[0]["lr"] = 0.1 * 0.7 ** next(decays)
                    if how == "write":
                        model[3].bias.data.add_(teacher[0].weight.mean().detach())
                    scales[0] *= 0.9
                    if run.progress.step == until:
                        saved = run._context.checkpointer
                        wait_until(lambda saved=saved: saved.committed_step() == saved.saved_step)
                        run.barrier()  # a rank that leaves takes the store with it, which tells the others
                        raise Lost
            temperature *= 0.8
            hard = hard.flip(0)
        state = run.state_dict(model)
        return state_hash(state) if run.leads else None


def apart(directory, what, odd):
    """The rank ``odd`` parts ways in the body of the step after a checkpoint; what is said, and what is recorded."""
    said = ""
    try:
        with Run(seed=1, checkpoint=directory, save_every="2 steps") as run:
            model = run.model(net())
            optimizer = run.optimizer(torch.optim.Adam(model.parameters()))
            for _ in run.epochs(3):
                for (x,) in run.train(run.loader((X,), **SIZES)):
                    if not run.step(model(x).square().mean()) or run.progress.step != 3:
                        continue
                    wait_until(lambda: list_checkpoints(Path(directory)), "a checkpoint")
                    if run.rank == odd:
                        if what == "option":
                            optimizer.param_groups[0]["eps"] = 1e-3
                        else:
                            model[0].weight.data.view(torch.int32)[0, 0] ^= 1 << 20
    except MismatchError as error:
        said = str(error)
    return said, [has_step(one.path) for one in list_checkpoints(Path(directory))]


def has_step(checkpoint):
    """Whether the step after the ``checkpoint`` is recorded; before that step, what the script holds is."""
    return "samples" in (read_next_step(checkpoint, FileSystem()) or {})


def killed(directory, how="good", strategy="ddp", until=KILLED, **settings):
    try:
        trained(directory, how, strategy, until=until, **settings)
    except Lost:
        return True
    return False


def refused(directory, how, strategy="ddp", **settings):
    return error_of(CheckpointError, trained, directory, how, strategy, resume=True, **settings)


# ---- laws ------------------------------------------------------------------------------------------------------------


def test_on_any_world_and_under_any_strategy_a_resume_proves_itself(tmp_path):
    whole = trained(str(tmp_path / "whole"), save_every=RARELY)
    origin = tmp_path / "killed"
    assert on_world(2, [(killed, str(origin / how), how, "zero") for how in ("good", "teacher")]) == [[True] * 2] * 2
    assert (origin / "good" / "step-00000006" / NEXT_STEP).is_file()

    for world, strategies in ((1, ["none"]), (2, DIVIDED), (3, ["ddp"])):
        calls = []
        for strategy, how in itertools.product(strategies, HOWS):
            place = tmp_path / f"{how}-{strategy}-{world}"
            shutil.copytree(origin / how, place)
            calls.append((resumed, trained if how == "good" else refused, str(place), how, strategy))
        for (*_, how, strategy), results in zip(calls, on_world(world, calls), strict=True):
            if how == "good":
                assert results[0] == whole, (strategy, results)
            else:
                assert all("the loss of micro-batch 0 was" in result for result in results), results


HOWS = ("good", "teacher")
DIVIDED = ["fsdp", "zero:stage=2"] if IN_CAMPAIGN else ["fsdp"]


def resumed(function, directory, how, strategy):
    return function(directory, how, strategy, **({"resume": True, "save_every": RARELY} if function is trained else {}))


def test_a_step_that_ranks_have_made_apart_is_no_proof_of_any_resume(tmp_path):
    """Else a bit that is flipped on the leader just after a save would make all resumes from it fail."""
    calls = [(apart, str(tmp_path / f"{what}-{odd}"), what, odd) for what in ("option", "bit") for odd in (0, 1)]
    for (_, _, what, _), ranks in zip(calls, on_world(2, calls), strict=True):
        name = "eps of Adam's group 0" if what == "option" else "models.0.0.weight"
        for said, recorded in ranks:
            assert said.startswith(f"ranks hold different values after step 3: {name} ")
            assert recorded == [False]


def test_sums_of_bits_depend_on_no_division_and_on_every_bit():
    whole = torch.randn(7, 3, 2).transpose(1, 2)
    (expected,) = bit_sums({"a": (whole, 0)}).values()
    parts = [bit_sums({"a": (whole[first:end], first)})["a"] for first, end in ((0, 2), (2, 2), (2, 7))]
    assert sum(parts) % 2**64 == expected
    columns = [bit_sums({"a": (part, 0)})["a"] for part in whole.split(1, dim=1)]
    assert sum(columns) % 2**64 == expected
    assert bit_sums({"a": (whole.flip(0), 0)})["a"] != expected
    for dtype in (torch.bfloat16, torch.float64, torch.complex64, torch.complex128, torch.bool, torch.uint8):
        tensor = torch.arange(6).reshape(3, 2).to(dtype)
        other = tensor.clone()
        other[2, 1] = 0
        assert bit_sums({"a": (tensor, 0)}) != bit_sums({"a": (other, 0)}), dtype
    assert bit_sums({"a": (torch.tensor(1.0), 0), "meta": (torch.empty(2, device="meta"), 0)}).keys() == {"a"}
    assert TensorShard.whole(torch.tensor(1.0)).start == ()


# ---- cases -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("how", "differs"),
    [
        ("teacher", "the loss of micro-batch 0 was "),
        pytest.param("temperature", "the loss of micro-batch 0 was ", marks=pytest.mark.campaign),
        ("queue", "the loss of micro-batch 0 was "),
        pytest.param(
            "hook",
            "0.weight has other values after the update, with the same samples and losses",
            marks=pytest.mark.campaign,
        ),
        ("order", "micro-batch 0 holds other samples"),
    ],
)
def test_what_is_in_no_checkpoint_is_found_in_the_first_step(tmp_path, how, differs):
    every = "1 epoch" if how == "order" else "2 steps"  # within an epoch, another order is refused anyway
    assert killed(str(tmp_path), how, save_every=every)
    told = refused(str(tmp_path), how)
    assert f"not the one that followed the checkpoint: {differs}" in told
    # The way out that it names.
    (file,) = [word for word in told.split() if word.endswith(NEXT_STEP)]
    os.unlink(file)
    assert trained(str(tmp_path), how, resume=True, save_every=RARELY)


@pytest.mark.parametrize(
    ("how", "differs"),
    [
        ("rate", "lr of SGD's group 0 was 0.008"),
        ("decay", "run.kept.average.weight has other values"),
        ("write", "3.bias has other values"),
    ],
)
def test_so_is_what_only_the_end_of_the_body_shows(tmp_path, how, differs):
    assert killed(str(tmp_path), how, until=8)
    assert differs in refused(str(tmp_path), how)


def test_kernels_that_add_in_any_order_explain_no_other_rate(tmp_path, monkeypatch, capsys):
    assert killed(str(tmp_path / "rate"), "rate", until=8)
    assert killed(str(tmp_path / "decay"), "decay", until=8)
    monkeypatch.setattr(ResumeProof, "_repeats", False)
    assert "lr of SGD's group 0 was 0.008" in refused(str(tmp_path / "rate"), "rate")
    assert trained(str(tmp_path / "decay"), "decay", resume=True, save_every=RARELY)
    assert "Kernels that add in any order may be the reason" in capsys.readouterr().err


@pytest.mark.parametrize(("nondeterministic", "repeats"), [("refuse", True), ("warn", False)])
def test_on_a_gpu_steps_repeat_where_only_deterministic_kernels_compute(nondeterministic, repeats):
    settings = SimpleNamespace(compile=False, nondeterministic=nondeterministic)
    proof = SimpleNamespace(_context=SimpleNamespace(device=torch.device("cuda"), settings=settings))
    assert ResumeProof._repeats.fget(proof) is repeats


def test_weights_that_the_script_holds_are_found_before_anything_depends_on_them(tmp_path):
    assert killed(str(tmp_path), "copy")
    told = refused(str(tmp_path), "copy")
    assert "not the one that followed the checkpoint: teacher held other weights when it began" in told


def test_numbers_that_have_begun_anew_are_a_note(tmp_path, capsys):
    assert killed(str(tmp_path))
    assert trained(str(tmp_path), resume=True)
    (line,) = (line for line in capsys.readouterr().err.splitlines() if "have begun anew" in line)
    assert "temperature (0.8, now 1.0)" in line


def test_half_a_file_and_none_are_no_reason_to_refuse(tmp_path):
    assert killed(str(tmp_path / "teacher"), "teacher")
    for number, content in enumerate([None, b"", b"1234abcd {", b'00000000 {"samples": {}}']):
        place = tmp_path / str(number)
        shutil.copytree(tmp_path / "teacher", place)
        file = place / "step-00000006" / NEXT_STEP
        file.unlink() if content is None else file.write_bytes(content)
        verify(file.parent)
        assert trained(str(place), "teacher", resume=True, save_every=RARELY)


def test_what_was_changed_on_purpose_is_a_note(tmp_path, capsys):
    assert killed(str(tmp_path))
    assert trained(str(tmp_path), resume=True, clip_norm=0.01)
    said = capsys.readouterr()
    assert "is not the one that followed the checkpoint: 0.weight has other values" in said.out + said.err


def test_replay_false_leaves_it_out(tmp_path):
    assert killed(str(tmp_path), "teacher")
    assert trained(str(tmp_path), "teacher", resume=True, replay=False)
    assert killed(str(tmp_path / "none"), "teacher", replay=False)
    assert trained(str(tmp_path / "none"), "teacher", resume=True)


def test_a_good_script_is_resumed_after_each_step_and_keeps_no_more_than_it_should(tmp_path):
    whole = trained(str(tmp_path / "whole"), save_every=RARELY)
    for step in (5, 6):
        place = tmp_path / str(step)
        assert killed(str(place), until=step, save_every="1 steps", keep=2)
        there = list_checkpoints(place)
        assert [one.step for one in there] == [step - 1, step - 2]
        assert [has_step(one.path) for one in there] == [False, True], "the last one's step was not over"
        assert trained(str(place), resume=True, save_every="1 steps", keep=2) == whole
        assert not [path for path in place.iterdir() if path.name.startswith((".removing", ".saving"))]


def test_steps_that_have_no_bits_of_their_own_are_not_compared(tmp_path):
    strategies = ("local-sgd:period=2", "ddp:compress=fp16")
    places = [(str(tmp_path / strategy[:4]), "good", strategy) for strategy in strategies]
    assert on_world(2, [(killed, *place) for place in places]) == [[True] * 2] * 2
    found = on_world(3, [(resumed, trained, *place) for place in places])
    assert "Traceback" not in str(found)


def summed_by_hand(directory, resume=False):
    """A script that adds up its losses, and ends in the first epoch with a mean of them."""
    os.environ[RESUME] = str(int(resume))
    with Run(checkpoint=directory, save_every="5 steps") as run:
        model = run.model(nn.Linear(3, 1))
        run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        batches = run.loader((X,), **SIZES)
        for _ in run.epochs(2):
            total, number = 0.0, 0
            for (x,) in run.train(batches):
                loss = model(x).square().mean()
                total, number = total + loss.item(), number + 1
                run.step(loss)
            saved, mean = run._context.checkpointer, run.metrics["loss"]
            wait_until(lambda saved=saved: saved.committed_step() == 5)
            raise Lost(mean, total / number)


def test_what_a_script_adds_up_is_explained_where_a_resumed_pass_has_no_micro_batch_left(tmp_path):
    with pytest.raises(Lost) as lost:
        summed_by_hand(str(tmp_path))
    assert not hasattr(lost.value, "__notes__")
    with pytest.raises(ZeroDivisionError) as caught:
        summed_by_hand(str(tmp_path), resume=True)
    assert "this run has resumed at the end of a pass" in caught.value.__notes__[0]
    frame = caught.traceback[-1].frame
    assert frame.f_locals["mean"] == lost.value.args[0], "the note's advice: run.metrics is restored"


class Phases(enum.Enum):
    WARM = enum.auto()
    COLD = enum.auto()


class Meter:
    def __init__(self):
        self.values = {"loss": {"last": [None]}}


def with_variables_of_many_kinds(directory, until=10, resume=False):
    """An epoch has four steps; a checkpoint is of step 6, in the middle of the second."""
    os.environ[RESUME] = str(int(resume))
    with Run(checkpoint=directory, save_every="3 steps", keep=9) as run:
        model = run.model(nn.Linear(3, 2))
        groups = [{"params": [model.weight], "weight_decay": 0.1}, {"params": [model.bias], "weight_decay": 0.0}]
        optimizer = run.optimizer(torch.optim.SGD(groups, lr=0.1))
        decayed, _ = optimizer.param_groups
        batches = run.loader(X[:32], global_batch=8, micro_batch=4, workers=0)
        total, phase, flat, meter = torch.zeros(2), Phases.WARM, np.zeros(9), Meter()
        steps = itertools.accumulate(itertools.repeat(2))
        for epoch in run.epochs(4):
            decayed["weight_decay"] = 0.1 * epoch
            for x in run.train(batches):
                run.step(model(x).square().mean())
                if run.progress.step == until:
                    raise Lost
            total += run.metrics["loss"]
            phase = Phases.COLD
            flat = flat + 1
            meter.values["loss"]["last"][0] = run.metrics["loss"]
            next(steps)
        return state_hash(model), phase, float(total[0]), flat[0], next(steps)


def test_variables_of_many_kinds_are_told_and_groups_that_a_script_holds_are_the_optimizers(tmp_path, capsys):
    whole = with_variables_of_many_kinds(str(tmp_path / "whole"), until=None)
    with pytest.raises(Lost):
        with_variables_of_many_kinds(str(tmp_path / "cut"), until=8)
    capsys.readouterr()
    resumed = with_variables_of_many_kinds(str(tmp_path / "cut"), until=None, resume=True)
    assert resumed[0] == whole[0]
    (line,) = (line for line in capsys.readouterr().err.splitlines() if "have begun anew" in line)
    for name in ("total (a tensor", "phase (COLD, now WARM)", "flat (a tensor", "meter.values", "steps"):
        assert name in line


def with_a_rate_by_a_counter(directory, until=10, resume=False):
    """The loop over the groups runs at the end of an epoch for the first time."""
    os.environ[RESUME] = str(int(resume))
    with Run(checkpoint=directory, save_every="3 steps", keep=9) as run:
        model = run.model(nn.Linear(3, 2))
        optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        batches = run.loader(X[:32], global_batch=8, micro_batch=4, workers=0)
        best, bad = 0.0, 0
        for _ in run.epochs(4):
            for x in run.train(batches):
                run.step(model(x).square().mean())
                if run.progress.step == until:
                    raise Lost
            bad = bad + 1 if run.metrics["loss"] > best else 0
            if bad >= 3:
                for group in optimizer.param_groups:
                    group["lr"] *= 0.5


def test_what_decides_a_rate_is_found_before_the_loop_over_the_groups_has_run(tmp_path):
    with pytest.raises(Lost):
        with_a_rate_by_a_counter(str(tmp_path), until=8)
    with pytest.raises(CheckpointError, match=r"bad, which group\['lr'\] depends on, was 1 when it began"):
        with_a_rate_by_a_counter(str(tmp_path), until=None, resume=True)
