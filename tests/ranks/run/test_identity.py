"""What the bits depend on is compared: between ranks, and with the run that is resumed."""

import contextlib
import importlib
import io
import json
import os
import runpy
import sys
from types import ModuleType

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

import lockstep
from lockstep.errors import CheckpointError, MismatchError
from lockstep.run import Run
from lockstep.run.setup.identity import arguments_of, changed_code, code_of_user, differences, optimizers_of
from lockstep.testing import run_ranks
from worlds import on_world

X = torch.sin(torch.arange(64.0)).view(32, 2)


@pytest.fixture(autouse=True)
def quiet(monkeypatch):
    monkeypatch.setenv("TERM", "dumb")


# ---- what is known of a script ---------------------------------------------------------------------------------------


def module(name, file):
    made = ModuleType(name)
    if file is not None:
        made.__file__ = str(file)
    return made


def test_code_is_that_of_the_user_and_nobody_elses(tmp_path):
    (tmp_path / "train.py").write_text("script")
    (tmp_path / "nets.py").write_text("nets")
    installed = tmp_path / "lib" / "site-packages" / "timm" / "models.py"
    installed.parent.mkdir(parents=True)
    installed.write_text("installed")
    modules = {
        "__main__": module("__main__", tmp_path / "train.py"),
        "__mp_main__": module("__mp_main__", tmp_path / "train.py"),
        "nets": module("nets", tmp_path / "nets.py"),
        "timm.models": module("timm.models", installed),
        "json": json,
        "lockstep": lockstep,
        "torch": torch,
        "notebook": module("notebook", None),
        "fast": module("fast", tmp_path / "fast.so"),
        "gone": module("gone", tmp_path / "gone.py"),
        "odd": module("odd", 3),
    }
    found = code_of_user(modules)
    assert set(found) == {"script", "nets"}
    (tmp_path / "nets.py").write_text("other nets")
    assert changed_code(code_of_user(modules), found) == ["nets"]
    assert changed_code({"new": "1"} | found, found) == [], "what only one has loaded is not compared"
    assert code_of_user({"__main__": module("__main__", None)}) == {}


@pytest.mark.parametrize(
    ("argv", "kept"),
    [
        (["--lr=0.1", "data"], ["--lr=0.1", "data"]),
        (["--local_rank=1", "--lr", "0.1"], ["--lr", "0.1"]),
        (["--local-rank", "1", "--lr", "0.1"], ["--lr", "0.1"]),
        (["--rank", "2", "rank"], ["rank"]),
        (["--ranking=3"], ["--ranking=3"]),
        (["--node_rank=1", "--master_addr", "host", "--master-port", "29500"], []),
    ],
)
def test_arguments_that_differ_by_nature_are_left_out(argv, kept):
    assert arguments_of(argv) == kept


class Odd(torch.optim.SGD):
    """With an option that prints itself by its address."""

    def __init__(self, parameters, rule, **options):
        super().__init__(parameters, **options)
        for group in self.param_groups:
            group["rule"] = rule


def test_optimizers_are_told_by_class_and_plain_options():
    weight = nn.Parameter(torch.ones(2))
    ((kind, (group,)),) = optimizers_of([torch.optim.AdamW([weight], lr=torch.tensor(0.5), betas=(0.5, 0.9))])
    assert kind == "AdamW"
    assert (group["lr"], group["betas"], group["fused"]) == ("0.5", "(0.5, 0.9)", "None")
    assert "params" not in group
    rules = [optimizers_of([Odd([weight], rule, lr=0.1)]) for rule in (lambda x: x, lambda x: x, object(), object())]
    assert rules[0] == rules[1], "an address is no difference"
    assert rules[2] == rules[3]
    assert rules[0] != rules[2]


def test_what_differs_in_a_resumed_run_is_said_in_words():
    before = {"seed": 0, "clip_norm": None, "lengths": [32, 8], "arguments": ["a"], "code": {"script": "1", "x": "1"}}
    assert differences(before, before) == []
    assert differences({}, before) == [], "what an older run did not know"
    now = before | {"seed": 1, "clip_norm": 0.5, "lengths": [32, 9], "arguments": [], "code": {"script": "2", "y": "1"}}
    seed, clip, length, arguments, code = differences(before, now)
    assert seed == "resumed with seed=1, saved with 0: the bits differ from here on"
    assert clip == "resumed with clip_norm=0.5, saved with None: the bits differ from here on"
    assert length == (
        "a data set has 9 samples, and had 8: unless the script itself makes the data longer or shorter, the bits "
        "differ from here on"
    )
    assert arguments == "the script's arguments are '', and were 'a' when the checkpoint was saved"
    assert "script" in code
    assert differences(before | {"sizes": [8, 2]}, now | {"sizes": [4, 2]}) == differences(before, now)


# ---- ranks that differ -----------------------------------------------------------------------------------------------


SCRIPT = """
import sys, torch, lockstep
import nets

with lockstep.Run(checkpoint="saved" if "save" in sys.argv else None) as run:
    model = run.model(nets.make())
    lr = 0.1 + (run.rank if "lr" in sys.argv else 0)
    run.optimizer(torch.optim.SGD(model.parameters(), lr=lr))
    for _ in run.epochs(1):
        for batch in run.train(run.loader(torch.ones(8, 2), global_batch=4, micro_batch=1)):
            run.step(model(batch).mean())
"""
NETS = """
import torch

def make():
    return torch.nn.Linear(2, 1)
"""


def copied(directory, edit=None):
    directory.mkdir()
    (directory / "train.py").write_text(SCRIPT)
    (directory / "nets.py").write_text(NETS)
    if edit:
        with (directory / edit).open("a") as file:
            file.write("# edited on one node\n")


def as_script(directories, arguments):
    """Runs this rank's own copy of the script as Python does; what it says, and the error that it ends with."""
    rank = int(os.environ["RANK"])
    os.chdir(directories[rank])
    sys.argv = ["train.py", *(word.format(rank=rank) for word in arguments)]
    sys.path.insert(0, directories[rank])
    sys.modules.pop("nets", None)
    importlib.invalidate_caches()
    with contextlib.redirect_stderr(io.StringIO()) as said:
        try:
            runpy.run_path("train.py", run_name="__main__")
        except MismatchError as error:
            return said.getvalue(), str(error)
        finally:
            sys.path.remove(directories[rank])
    return said.getvalue(), ""


CASES = {
    "script": ("train.py", (), "rank 1 runs another script than rank 0: the files differ in content. Give every node"),
    "module": ("nets.py", (), "rank 1 runs another nets than rank 0: the files differ in content. Give every node"),
    "arguments": (
        None,
        ["--width={rank}"],
        "the arguments of the script differ: rank 0 has '--width=0', rank 1 '--width=1'",
    ),
    "rank arguments": (None, ["--local_rank={rank}", "--node-rank", "{rank}", "--width=3"], ""),
    "lr": (None, ["lr"], "the optimizers of the script differ in lr: rank 0 has '0.1', rank 1 '1.1'. All ranks must"),
}


def test_ranks_that_run_something_else_are_refused(tmp_path):
    calls = []
    for case, (edit, arguments, _) in CASES.items():
        places = [tmp_path / f"{case} on node {rank}" for rank in range(2)]
        for rank, place in enumerate(places):
            copied(place, edit if rank else None)
        calls.append((as_script, [str(place) for place in places], arguments))
    for (*_, message), ranks in zip(CASES.values(), on_world(2, calls), strict=True):
        for _, error in ranks:
            assert error.startswith(message), error
            assert bool(error) == bool(message), error
        assert "4 samples/step" in ranks[0][0] or message


# ---- runs that go on -------------------------------------------------------------------------------------------------


def trained(directory, make=torch.optim.SGD, samples=32, until=3, data=None, **settings):
    options = {name: settings.pop(name) for name in ("lr", "weight_decay", "schedule") if name in settings}
    schedule = options.pop("schedule", False)
    with Run(checkpoint=directory, **settings) as run:
        model = run.model(nn.Linear(2, 1))
        optimizer = run.optimizer(make(model.parameters(), **({"lr": 0.1} | options)))
        if schedule:
            schedule_of_lr = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
            run.keep(schedule=schedule_of_lr) if schedule == "keep" else run.scheduler(schedule_of_lr)
        for _ in run.epochs(2):
            data = X[:samples] if data is None else data
            for batch in run.train(run.loader(data, global_batch=8, micro_batch=2, workers=0)):
                if run.step(model(batch).square().mean()) and run.progress.step == until:
                    break
            if run.progress.step == until:
                break
            if schedule == "keep":
                schedule_of_lr.step()
        return optimizer.param_groups[0]["lr"]


@pytest.fixture
def resumed(tmp_path, monkeypatch, capfd):
    """Trains in part, and goes on with other settings; what is said of it, and the lr at the end."""

    def resumed(first=None, **then):
        trained(tmp_path, **(first or {}))
        capfd.readouterr()
        monkeypatch.setenv("LOCKSTEP_RESUME", "1")
        lr = trained(tmp_path, **({"until": None} | then))
        return capfd.readouterr().err, lr

    return resumed


def test_nothing_is_said_of_the_same_run(resumed):
    said, lr = resumed({"schedule": True}, schedule=True)
    assert "resumed at step 3" in said
    assert lr == 0.1 * 0.5**8
    for word in ("differ", "holds", "changed", "arguments"):
        assert word not in said


def test_another_learning_rate_is_said_with_which_one_holds(resumed):
    said, lr = resumed(lr=0.01, weight_decay=0.5)
    assert "SGD: lr=0.1 of the checkpoint holds, not the 0.01 of this script (the run began with 0.1); to take" in said
    assert "SGD: weight_decay=0 of the checkpoint holds, not the 0.5 of this script" in said
    assert lr == 0.1


def test_what_a_script_said_that_did_not_hold_is_forgotten(resumed):
    said, _ = resumed(lr=0.5, until=6)
    assert "SGD: lr=0.1 of the checkpoint holds, not the 0.5" in said
    said, lr = resumed({"until": 6}, lr=0.1)
    assert "lr=" not in said, "it is what the run began with, and what holds"
    assert lr == 0.1


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_the_script_s_options_hold_where_they_are_to(resumed, strategy):
    here = {"resume_options": "script", "strategy": strategy, "until": 6}
    said, lr = resumed({"strategy": strategy}, lr=0.01, weight_decay=0.5, **here)
    assert "SGD: lr=0.01 of this script holds now, not 0.1\n" in said
    assert "SGD: weight_decay=0.5 of this script holds now, not 0\n" in said
    assert lr == 0.01
    said, lr = resumed({"lr": 0.01, "weight_decay": 0.5, **here}, lr=0.01, weight_decay=0.5, **here)
    assert "of this script" not in said, "they have held since"
    assert lr == 0.01


@pytest.mark.parametrize("kept", [False, True])
def test_a_schedule_goes_on_from_the_script_s_learning_rate(resumed, kept):
    first = {"schedule": "keep" if kept else "register"}
    said, lr = resumed(first, **first, lr=0.4, resume_options="script")
    now = 0.4 if kept else 0.4 * 0.5**3
    assert f"SGD: lr=0.4 of this script holds now, not 0.1; by its schedule it is {now:.6g} now" in said
    assert lr == pytest.approx(0.4 * 0.5 ** (2 if kept else 8))


def test_a_clip_norm_and_a_seed_are_said(resumed):
    said, _ = resumed({"seed": 1}, clip_norm=0.5)
    assert "resumed with clip_norm=0.5, saved with None: the bits differ from here on" in said
    assert "resumed with seed=0, saved with 1: the bits differ from here on" in said


def test_other_arguments_are_said(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(sys, "argv", ["train.py", "--width=8"])
    trained(tmp_path)
    monkeypatch.setattr(sys, "argv", ["train.py", "--width=16", "--local_rank=1"])
    monkeypatch.setenv("LOCKSTEP_RESUME", "1")
    trained(tmp_path, until=None)
    said = capfd.readouterr().err
    assert "the script's arguments are '--width=16', and were '--width=8' when the checkpoint was saved" in said


def test_another_length_of_the_data_is_refused_within_an_epoch(resumed):
    with pytest.raises(CheckpointError, match="taken within an epoch of 32 samples, and this script's data set has 24"):
        resumed(samples=24)


def test_another_length_of_the_data_is_said_between_epochs(tmp_path, monkeypatch, capfd):
    trained(tmp_path, until=None)
    monkeypatch.setenv("LOCKSTEP_RESUME", "1")
    with Run(checkpoint=tmp_path) as run:
        model = run.model(nn.Linear(2, 1))
        run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        for _ in run.epochs(3):
            for batch in run.train(run.loader(X[:24], global_batch=8, micro_batch=2)):
                run.step(model(batch).square().mean())
    assert "a data set has 24 samples, and had 32: unless the script itself makes" in capfd.readouterr().err


class Rows(Dataset):
    """Samples by index, each with noise of its own; another split than ``X`` where it is ``shifted``."""

    def __init__(self, shifted=0):
        self.rows = X.roll(shifted, 0)

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return self.rows[index] + 0.1 * torch.randn(2)


def rolled(shifted):
    return X.roll(shifted, 0)


@pytest.mark.parametrize("of", [rolled, Rows])
def test_other_samples_are_said(resumed, of):
    said, _ = resumed({"data": of(0)}, data=of(1))
    assert said.count("holds other samples") == 1
    assert "holds other samples than when the checkpoint was saved, in the same epoch: the bits differ" in said


def test_samples_that_draw_for_themselves_are_the_same_again(resumed):
    said, _ = resumed({"data": Rows()}, data=Rows())
    assert "other samples" not in said


def test_other_samples_are_said_in_a_later_epoch_unless_they_change_anyway():
    first, changed = [3, [0, 9], 11, False], [3, [0, 9], 11, True]
    now = {"contents": {"0": [4, [0, 9], 12, False]}}
    (said,) = differences({"contents": {"0": first}}, now)
    assert "unless the script makes new samples in each epoch" in said
    assert not differences({"contents": {"0": changed}}, now)
    assert not differences({"contents": {"0": [3, [0, 8], 11, False]}}, now)  # others were looked at
    assert not differences({"contents": {"1": first}}, now)


def split_by_rank(of, pass_over):
    with Run() as run:
        model = run.model(nn.Linear(2, 1))
        run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        alike, split = (
            run.loader(of(shifted), global_batch=8, micro_batch=2, workers=workers)
            for shifted, workers in ((0, 0), (run.rank, 1))
        )
        for _ in run.epochs(2):
            for batch in run.train(alike if pass_over == "evaluate" else split):
                run.step(model(batch).square().mean())
            for batch in run.evaluate(split):
                model(batch)


def relabelled_by_rank():
    """A few rows are other ones on another rank, and none of those that each pass reads."""
    labels = torch.arange(32.0)
    labels[5 + torch.randint(4, ())] += float(os.environ["RANK"])
    with Run() as run:
        model = run.model(nn.Linear(2, 1))
        run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        for batch, label in run.train(run.loader((X, labels), global_batch=8, micro_batch=2)):
            run.step((model(batch)[:, 0] - label).square().mean())


def labels_of_own_samples():
    labels = torch.zeros(32, 2)
    with Run() as run:
        model = run.model(nn.Linear(2, 1))
        run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        batches = run.loader((X, labels), global_batch=8, micro_batch=2)
        for _ in run.epochs(2):
            for batch, more in run.train(batches):
                run.step(model(batch + more).square().mean())
            labels[run.rank :: run.world_size] += 1.0


def noise_after_the_leader_has_drawn():
    """The data set is the same on all ranks, where the generators of the script are not."""
    with Run() as run:
        run.model(nn.Linear(2, 1))
        if run.leads:
            torch.rand(1)
        for _ in run.evaluate(run.loader(Rows(), global_batch=8, micro_batch=2, workers=0)):
            pass


def test_ranks_that_hold_other_samples_are_refused():
    calls = [(split_by_rank, of, pass_over) for of in (rolled, Rows) for pass_over in ("train", "evaluate")]
    calls += [(relabelled_by_rank,), (labels_of_own_samples,), (noise_after_the_leader_has_drawn,)]
    *refused, alike = on_world(3, calls)
    assert alike == [None] * 3
    for messages in refused:
        for message in messages:
            assert "MismatchError: ranks 1, 2 hold other samples than rank 0 in the data set of 32 samples" in message


def test_another_class_of_optimizer_is_refused(resumed):
    with pytest.raises(CheckpointError, match=r"the checkpoint's optimizer is SGD, and this script's AdamW, which"):
        resumed(make=torch.optim.AdamW)


def backwards(parameters, **options):
    return torch.optim.SGD([*parameters][::-1], **options)


def test_another_order_of_the_optimizer_s_parameters_is_refused(resumed):
    with pytest.raises(CheckpointError, match=r"had weight where this script's has bias among its parameters"):
        resumed(make=backwards)


def test_a_script_that_was_changed_is_said(tmp_path):
    place = tmp_path / "here"
    copied(place)
    run_ranks(as_script, 1, [str(place)], ["save"])
    ((said, _),) = run_ranks(as_script, 1, [str(place)], ["save"], env={"LOCKSTEP_RESUME": "1"})
    assert len(said.splitlines()) == 3, said  # where it was resumed, that it was complete, and that it is done
    for file, name in (("nets.py", "nets"), ("train.py", "script")):
        with (place / file).open("a") as script:
            script.write("# edited since\n")
        ((said, _),) = run_ranks(as_script, 1, [str(place)], ["save"], env={"LOCKSTEP_RESUME": "1"})
        assert name in said.splitlines()[1], said


def options_by_rank():
    with Run() as run:
        model = run.model(nn.Linear(2, 1))
        run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5 if run.rank == 2 else 0.9))
        try:
            next(iter(run.epochs(1)))
        except MismatchError as error:
            return str(error)
    return ""


def order_by_rank():
    with Run() as run:
        model = run.model(nn.Linear(2, 1))
        run.optimizer((backwards if run.rank == 2 else torch.optim.SGD)(model.parameters(), lr=0.1))
        try:
            next(iter(run.epochs(1)))
        except MismatchError as error:
            return str(error)
    return ""


def addresses_by_rank():
    keep = [object() for _ in range(1 + 100 * int(os.environ["RANK"]))]
    with Run() as run:
        model = run.model(nn.Linear(2, 1))
        run.optimizer(Odd(model.parameters(), lambda x: keep, lr=0.1))
        return next(iter(run.epochs(1)))


def test_options_of_optimizers_that_differ_by_rank_are_refused():
    options, orders, addresses = on_world(3, [(options_by_rank,), (order_by_rank,), (addresses_by_rank,)])
    for message in orders:
        assert message.startswith("rank 0 has weight where rank 2 has bias among the parameters of an optimizer")
    for message in options:
        assert message.startswith("the optimizers of the script differ in momentum: rank 0 has '0.9', rank 2 '0.5'. ")
    assert addresses == [0, 0, 0]
