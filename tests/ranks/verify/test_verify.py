"""`lockstep verify` on whole scripts: planted faults are found with their lines, and what is right is not accused."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import lockstep.testing
from campaign_marks import combinations
from lockstep.cli import main
from lockstep.cli.verify import said_of
from lockstep.launch import Script, sources_hash
from planted import FAULTS, MARK, SCRIPT, VARIES, Planted
from tiny_voc import write_voc

EXAMPLES = Path(__file__).parents[3] / "examples"


#: One of what only other surroundings show; of what replays would find, the command finds one.
IN_SUITE = ("seed_from_the_process",)


def names_its_line(text, fault):
    """Whether ``text`` names the line of a script with ``fault``, under the way that shows it."""
    line = next(number for number, each in enumerate(fault.script().splitlines(), 1) if MARK in each)
    blocks = [block for block in text.split("\n\n")[1:] if fault.varies in block.splitlines()[0]]
    return any(f"train.py:{line} " in block and fault.what in block for block in blocks)


def test_a_right_script_is_the_same_on_other_ranks(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(Planted("", "").script())
    result = lockstep.testing.verify(path, only=("ranks",), time_s=20)
    assert result.is_equal
    assert [way.way[:5] for way in result.ways] == ["the s", "2 ran", "3 ran"]
    assert all(way.steps >= 6 for way in result.ways)


SMALLER = """\
import torch
from torch import nn
from torch.nn import functional as F
import lockstep

x = torch.randn(48, 6, generator=torch.Generator().manual_seed(0))
y = torch.arange(48) % 3
with lockstep.Run(seed=0) as run:
    model = run.model(nn.Linear(6, 3))
    run.optimizer(torch.optim.SGD(model.parameters(), lr=0.3))
    {hook}
    for _ in run.epochs(3):
        for a, b in run.train(run.loader((x, y), global_batch=16, micro_batch=4)):
            run.step({loss})
"""
#: What a loss and a hook are, and the first step whose loss shows that samples share a micro-batch.
SHARING = {
    "mean": ("F.cross_entropy(model(a), b)", "pass", ""),
    "counted": (
        "F.cross_entropy(model(a), b, ignore_index=1, reduction='sum'), count=(b != 1).sum(), loss_is='sum'",
        "pass",
        "",
    ),
    "weighted": (
        "F.cross_entropy(model(a), b, weight=torch.tensor([1.0, 2.0, 9.0]))",
        "pass",
        "the loss of step 1 was",
    ),
    "hooked": (
        "F.cross_entropy(limited(model(a)), b)",
        "limited = lambda out: out.register_hook(lambda gradient: gradient / gradient.norm()) and out",
        "the loss of step 2 was",
    ),
}


@pytest.mark.parametrize("name", combinations(SHARING, campaign=lambda name: name in ("mean", "weighted")))
def test_what_depends_on_the_samples_of_a_micro_batch_is_a_note(tmp_path, name):
    loss, hook, says = SHARING[name]
    (tmp_path / "train.py").write_text(SMALLER.format(loss=loss, hook=hook))
    result = lockstep.testing.verify(tmp_path / "train.py", only=("micro-batch",), time_s=20)
    (smaller,) = (way for way in result.ways if way.way == "micro-batches of 2 samples")
    assert result.is_equal
    assert smaller.status == ("note" if says else "equal")
    assert says in smaller.reason


@pytest.mark.parametrize("name", combinations(FAULTS, campaign=lambda name: name not in IN_SUITE))
def test_a_planted_fault_is_found_with_its_line(tmp_path, name):
    fault = FAULTS[name]
    path = tmp_path / "train.py"
    path.write_text(fault.script())
    with pytest.raises(AssertionError) as error:
        lockstep.testing.verify(path, only=(VARIES.get(fault.varies, "surroundings"),), time_s=30)
    assert names_its_line(str(error.value), fault), str(error.value)
    if name.endswith("_by_ranks"):
        assert "COUNT was '1', and then '2': it depends on a rank or on the number of ranks" in str(error.value)


def test_the_command_prints_a_table_and_writes_what_it_found(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    fault = FAULTS["counter_in_the_body"]
    Path("train.py").write_text(fault.script())
    assert main(["verify", "train.py", "--only", "ranks", "--time", "20"]) == 1
    said = capfd.readouterr()
    assert names_its_line(said.out, fault), said.out
    assert "DIFFERS" in said.out
    assert "micro-batch 2 of step 1" in said.out
    assert "seen += 1" in said.out
    assert "2 ranks once more, by modules" in said.err
    result = json.loads(Path("verify.json").read_text())
    assert not result["equal"]
    assert result["ways"][1]["place"] == "micro-batch 2 of step 1"
    assert os.listdir(tmp_path) == ["verify.json", "train.py"] or len(os.listdir(tmp_path)) == 2


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({}, "verified: equal in 2 ways"),
        ({"equal": False}, "not the same in 1 way"),
        ({"sha256": "of another one"}, ""),
        ({"ways": 3}, ""),
        ({"ways": [3, None]}, "equal in 0 ways"),
    ],
)
def test_a_later_run_says_what_was_verified(tmp_path, monkeypatch, change, says):
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("")
    program = Script("train.py")
    ways = [{"status": status} for status in ("equal", "equal", "differs", "left out")]
    written = {"sha256": sources_hash(program), "equal": True, "ways": ways}
    Path("verify.json").write_text(json.dumps(written | change))
    assert said_of(program)[: len(says)] == says or says in said_of(program)
    assert bool(said_of(program)) == bool(says)
    Path("verify.json").write_text("[")
    assert said_of(program) == ""


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["verify"], "give a script"),
        (["verify", "nothing.py"], "no such file"),
        (["verify", "train.py", "--time", "0"], "seconds above 0"),
        (["verify", "train.py", "--strategies", "dpp"], "dpp"),
        (["verify", "train.py", "--set", "precision=bf17"], "bf17"),
        (["verify", "train.py", "--out", "no/where.json"], "directory"),
    ],
)
def test_what_cannot_be_meant_is_a_usage_error(tmp_path, monkeypatch, capsys, words, says):
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("")
    assert main(words) == 2
    assert says in capsys.readouterr().err


def test_a_script_that_fails_as_it_is_is_told_with_its_line(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("import lockstep\nraise KeyError('missing')\n")
    assert main(["verify", "train.py"]) == 1
    said = capsys.readouterr().err
    assert "fails as it is" in said
    assert "missing" in said
    assert "train.py:2" in said


PLAIN = """\
import os
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

{seed}
x, y = torch.randn(32, 6), torch.randint(0, 3, (32,))
model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
optimizer = torch.optim.Adam(model.parameters())
first = 0
if os.path.exists("last.pt"):
    state = torch.load("last.pt")
    model.load_state_dict(state["model"])
    first = state["epoch"]{load}
for epoch in range(first, 6):
    torch.manual_seed(epoch)
    for a, b in DataLoader(TensorDataset(x, y), batch_size=8, shuffle=True):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(a), b).backward()
        optimizer.step()
    torch.save({{"model": model.state_dict(), "epoch": epoch + 1, "optimizer": optimizer.state_dict()}}, "last.pt")
"""
LOAD = '\n    optimizer.load_state_dict(state["optimizer"])'


@pytest.mark.parametrize(
    ("seed", "load", "way", "says"),
    [
        ("torch.manual_seed(0)", LOAD, None, ""),
        pytest.param("", LOAD, "the same again", "before the first step", marks=pytest.mark.campaign),
        pytest.param(
            *("torch.manual_seed(0)", "", "kill -9 after its first checkpoint, and run again", "parameter 0"),
            marks=pytest.mark.campaign,
        ),
    ],
)
def test_a_script_in_plain_torch(tmp_path, monkeypatch, seed, load, way, says):
    monkeypatch.chdir(tmp_path)
    Path("plain.py").write_text(PLAIN.format(seed=seed, load=load))
    if way is None:
        result = lockstep.testing.verify("plain.py", only=("checkpoint",), time_s=30)
        assert [each.status for each in result.ways] == ["equal", "equal"]
        listed = {each.line: each.instead for each in result.to_change}
        assert "run.step(loss)" in listed[20]
        assert "run.loader" in listed[18]
    else:
        with pytest.raises(AssertionError) as error:
            lockstep.testing.verify("plain.py", only=("checkpoint",), time_s=30)
        assert f"{way}: differs" in str(error.value)
        assert says in str(error.value)
    assert os.listdir(tmp_path) == ["plain.py"]


MIGRATIONS = EXAMPLES.parent / "tests" / "promises" / "migrations" / "after"
#: Scripts that train by `Run` in a loop, and those of the migrations.
CLEAN = {
    **{name: EXAMPLES / f"{name}.py" for name in ("contrastive", "digits", "embedding", "finetune", "gan", "gpt")},
    **{name: EXAMPLES / f"{name}.py" for name in ("reinforcement", "segmentation", "streaming", "uneven", "vit")},
    **{f"migrated {name}": MIGRATIONS / f"{name}.py" for name in ("classifier", "gan", "gpt", "lstm", "vae")},
}
SMALL = {
    "gpt": ("--quick",),
    "segmentation": [
        "--backbone",
        "mobilenet_v3_large",
        "--crop",
        "33",
        "--canvas",
        "72",
        "--global-batch",
        "4",
        "--micro-batch",
        "2",
    ],
}
#: Loops of docs/loops.md, as scripts of their own.
LOOPS = (
    "average_of_weights",
    "batch_sampler",
    "count_of_tokens",
    "early_stopping_by_hand",
    "gradient_penalty",
    "plateau",
    "replay_buffer",
    "steps",
    "two_loaders_zipped",
    "two_optimizers",
    "unfreezing",
    "weighted_stream",
)


def verified(tmp_path, script, *arguments):
    """Run the command on a script that is right."""
    command = [sys.executable, "-m", "lockstep", "verify", script, "--out", tmp_path / "verify.json", "--", *arguments]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=1500, env=env)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.campaign
@pytest.mark.parametrize("name", CLEAN)
def test_a_right_script_is_the_same_in_all_ways(tmp_path, name):
    arguments = list(SMALL.get(name, ()))
    if name == "segmentation":
        arguments += ["--data", str(write_voc(tmp_path, train=24, val=4))]
    verified(tmp_path, CLEAN[name], *arguments)


@pytest.mark.campaign
@pytest.mark.parametrize("name", LOOPS)
def test_a_right_loop_is_the_same_in_all_ways(tmp_path, name):
    (tmp_path / "train.py").write_text(f"import lockstep\nimport loop_shapes\n\nloop_shapes.{name}()\n")
    verified(tmp_path, "train.py")


def test_the_script_has_a_place_for_each_line():
    places = {line.strip()[1:-1] for line in SCRIPT.splitlines() if line.strip().startswith("{")}
    assert all(fault.lines.keys() <= places for fault in FAULTS.values())
    assert all(fault.script().count(MARK) == 1 for fault in FAULTS.values())
