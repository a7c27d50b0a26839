"""What a run has saved, by the command line: listed, checked, pruned, exported. Checkpoints are made by hand here."""

import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

import lockstep
from lockstep import cli
from lockstep.checkpoint import Checkpoints, Holder, SavedModel, lock_root
from lockstep.collectives import single_rank_group
from lockstep.errors import DamagedCheckpoint, SettingError
from lockstep.run import Run

EXAMPLES = Path(__file__).parents[3] / "examples"


def tree_of(step, models, best=None, **kept):
    """A tree as a run saves it."""
    return {
        "models": [model.state_dict() for model in models],
        "about_models": [SavedModel.of(model).tree() for model in models],
        "kept": {name: value.state_dict() for name, value in kept.items()},
        "kept_transient": {name: {} for name, value in kept.items() if isinstance(value, nn.Module)},
        "progress": {"step": step, "epoch": step // 2},
        "metrics": {"accuracy": step / 10},
        "strategy": ("fsdp", {}),
        "best": best,
    }


def saved(root, *steps, models=(), best=None, **kept):
    """A root with a checkpoint for each of ``steps``; the model's weights are the step."""
    saves = Checkpoints(Path(root), single_rank_group(), keep=99, say=pytest.fail)
    for step in steps:
        model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
        nn.init.constant_(model[0].weight, step)
        saves.save(tree_of(step, models or [model], best, **kept), step, {})
        saves.wait()  # else a slow disk is told of
    saves.close()
    saves.release()
    return Path(root)


def damage(root, step):
    (part,) = (root / f"step-{step:08d}").glob("part-*")
    content = bytearray(part.read_bytes())
    content[-5] ^= 1
    part.write_bytes(content)


def test_list_tells_what_there_is_also_for_programs(tmp_path, capsys):
    saved(tmp_path / "checkpoints", 2, 4, best={"metric": "accuracy", "mode": "max", "value": 0.2, "step": 2})
    saved(tmp_path / "checkpoints", 3)
    (tmp_path / "checkpoints" / "step-00000003" / "manifest.json").unlink()
    assert cli.main(["checkpoints", "list", str(tmp_path)]) == 0
    head, newest, lost, best = capsys.readouterr().out.splitlines()
    assert head.split() == ["step", "epoch", "size", "age", "written", "by", "metrics"]
    assert newest.split()[:2] == ["4", "2"]
    assert newest.endswith("fsdp on 1   accuracy 0.4")
    assert "DAMAGED" in lost
    assert "has no manifest.json" in lost
    assert best.startswith("2 best  1 ")
    assert cli.main(["ckpt", "list", "--json", str(tmp_path / "checkpoints")]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [(r["step"], r["best"], bool(r["damaged"])) for r in rows] == [
        (4, False, False),
        (3, False, True),
        (2, True, False),
    ]
    assert rows[0]["metrics"] == {"accuracy": 0.4}


def test_verify_names_the_damaged_file_and_ends_with_1(tmp_path, capsys):
    root = saved(tmp_path, 1, 2, 3)
    assert cli.main(["ckpt", "verify", str(root)]) == 0
    damage(root, 2)
    capsys.readouterr()
    assert cli.main(["ckpt", "verify", str(root)]) == 1
    three, two, one = capsys.readouterr().out.splitlines()
    assert three.endswith("whole")
    assert one.endswith("whole")
    assert two.startswith("step-00000002  DAMAGED: ")
    assert "step-00000002/part-00000.safetensors, bytes" in two
    assert cli.main(["ckpt", "verify", "--step", "3", str(root)]) == 0
    assert cli.main(["ckpt", "verify", "--step", "9", str(root)]) == 2


def steps_in(root):
    return sorted(int(path.name.removeprefix("step-")) for path in root.glob("step-*"))


def test_prune_only_says_what_it_would_do_until_it_is_told_to(tmp_path, capsys):
    root = saved(tmp_path, 1, 2, 3, 4, 5, best={"metric": "accuracy", "mode": "max", "value": 0.2, "step": 2})
    assert cli.main(["ckpt", "prune", "--keep", "2", str(root)]) == 0
    said = capsys.readouterr()
    assert [Path(line).name for line in said.out.splitlines()] == ["step-00000003", "step-00000001"]
    assert said.err == "2 to be removed: say --yes as well\n"
    assert steps_in(root) == [1, 2, 3, 4, 5]
    assert cli.main(["ckpt", "prune", "--keep", "2", "--yes", str(root)]) == 0
    assert steps_in(root) == [2, 4, 5], "the best one stays"


def test_prune_never_removes_the_last_good_one(tmp_path, capsys):
    root = saved(tmp_path, 1, 2, 3)
    damage(root, 2)
    damage(root, 3)
    assert cli.main(["ckpt", "prune", "--keep", "1", "--yes", str(root)]) == 0
    assert steps_in(root) == [1]
    damage(root, 1)
    assert cli.main(["ckpt", "prune", "--keep", "1", "--yes", str(root)]) == 0
    assert steps_in(root) == [1], "none is whole: nothing goes"
    assert cli.main(["ckpt", "prune", "--keep", "0", str(root)]) == 2
    assert "the last good checkpoint is never removed" in capsys.readouterr().err


def test_prune_leaves_a_run_alone_that_works_there(tmp_path, capsys):
    root = saved(tmp_path, 1, 2, 3)
    with lock_root(root, Holder.here(), pytest.fail):
        assert cli.main(["ckpt", "prune", "--keep", "1", "--yes", str(root)]) == 2
    assert "is in use by another Run" in capsys.readouterr().err
    assert steps_in(root) == [1, 2, 3]


def test_export_takes_the_step_that_is_asked_for(tmp_path, capsys):
    root = saved(tmp_path / "run" / "checkpoints", 1, 2, 3)
    for step, found in (("newest", 3), ("2", 2)):
        assert cli.main(["export", "--step", step, str(root.parent), str(tmp_path / "out.safetensors")]) == 0
        assert load_file(tmp_path / "out.safetensors")["0.weight"].unique().tolist() == [found]
        assert lockstep.load(root, step)["0.weight"].unique().tolist() == [found]
    assert lockstep.load(root / "step-00000001")["0.weight"].unique().tolist() == [1], "of one checkpoint"
    capsys.readouterr()
    for step, says in (
        ("best", "does not know a best step: say Run(best=...)"),
        ("7", "has no checkpoint of step 7; it has 1, 2, 3"),
        ("last", "give a number, newest or best"),
    ):
        assert cli.main(["export", "--step", step, str(root), "never.pt"]) == 2
        assert says in capsys.readouterr().err
    best = saved(tmp_path / "best", 1, 2, best={"metric": "accuracy", "mode": "max", "value": 0.1, "step": 1})
    assert lockstep.load(best, "best")["0.weight"].unique().tolist() == [1]


def test_a_damaged_checkpoint_is_not_exported_and_the_whole_one_is_named(tmp_path, capsys):
    root, out = saved(tmp_path / "run", 1, 2, 3), tmp_path / "model.safetensors"
    out.write_text("before")
    damage(root, 3)
    for kind in (out, tmp_path / "model.pt", tmp_path / "directory"):
        assert cli.main(["export", str(root), str(kind)]) == 1
        assert "The newest whole one is of step 2: ask for that step" in capsys.readouterr().err
    assert out.read_text() == "before", "what was there before is still there"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["directory", "model.safetensors", "run"]
    assert [*(tmp_path / "directory").iterdir()] == []
    with pytest.raises(DamagedCheckpoint, match=r"are not what was committed.*step 2"):
        lockstep.load(root)


def test_one_of_several_models_is_named_by_number_class_or_the_name_it_is_kept_by(tmp_path, capsys):
    generator, critic = nn.Linear(2, 3), nn.Sequential(nn.Linear(3, 1))
    average = torch.optim.swa_utils.AveragedModel(generator)
    root = saved(
        tmp_path, 1, models=[generator, critic], average=average, schedule=torch.optim.SGD([torch.ones(1)], lr=1)
    )
    assert cli.main(["export", str(root), "never.pt"]) == 2
    assert "say --model with one of 0 (Linear), 1 (Sequential), average" in capsys.readouterr().err
    assert (
        lockstep.load(root, model="1").keys()
        == lockstep.load(root, model="Sequential").keys()
        == {"0.weight", "0.bias"}
    )
    kept = lockstep.load(root, model="average")
    assert all(torch.equal(kept[name], value) for name, value in generator.state_dict().items())
    assert kept.keys() == generator.state_dict().keys(), "an average is what it averages"
    with pytest.raises(SettingError, match="no model critic; it has 0"):
        lockstep.load(root, model="critic")


class Odd(nn.Module):
    """With what only some formats hold."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.register_buffer("wide", torch.ones(2, dtype=torch.complex128))
        self.register_buffer("none", torch.empty(0, 3, dtype=torch.int8))
        self.register_buffer("one", torch.tensor(7))

    def get_extra_state(self):
        return {"vocabulary": ["a", "b"]}

    def set_extra_state(self, state):
        self.vocabulary = state["vocabulary"]


def test_what_a_safetensors_file_cannot_hold_is_refused_and_a_pt_file_has_it(tmp_path, capsys):
    root = saved(tmp_path, 1, models=[Odd()])
    assert cli.main(["export", str(root), str(tmp_path / "odd.safetensors")]) == 2
    assert (
        "_extra_state cannot be stored in a safetensors file (2 such in all); write odd.pt" in capsys.readouterr().err
    )
    assert cli.main(["export", str(root), str(tmp_path / "odd.pt")]) == 0
    model = Odd()
    model.load_state_dict(torch.load(tmp_path / "odd.pt", weights_only=True))
    assert model.vocabulary == ["a", "b"]
    assert torch.equal(model.wide, Odd().wide)


def test_each_tensor_of_an_exported_file_begins_at_a_multiple_of_its_element(tmp_path):
    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            for number, dtype in enumerate((torch.int8, torch.float64, torch.bfloat16, torch.bool, torch.int32)):
                self.register_buffer(f"b{number}", torch.ones(3, dtype=dtype))

    lockstep_root = saved(tmp_path, 1, models=[Mixed()])
    cli.main(["export", str(lockstep_root), str(tmp_path / "m.safetensors")])
    content = (tmp_path / "m.safetensors").read_bytes()
    head = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    begin = 8 + int.from_bytes(content[:8], "little")
    assert begin % 16 == 0
    found = load_file(tmp_path / "m.safetensors")
    for name, tensor in found.items():
        assert (begin + head[name]["data_offsets"][0]) % tensor.element_size() == 0
        assert torch.equal(tensor, torch.ones(3, dtype=tensor.dtype))


def prepare_torchvision():
    """Other libraries import it, also where it has no build of its operators."""
    sys.path.insert(0, str(EXAMPLES))
    try:
        from vision import torchvision

        torchvision()
    except ImportError:
        pytest.skip("torchvision is not installed")
    finally:
        sys.path.remove(str(EXAMPLES))


def train_a_little(root, model, inputs, loss):
    """One step; what `Run.save` writes is in ``root``, too."""
    with Run(checkpoint=root / "checkpoints") as run:
        model = run.model(model)
        run.optimizer(torch.optim.AdamW(model.parameters(), lr=0.1))
        batches = run.loader(inputs, global_batch=4, micro_batch=2)
        for _ in run.epochs(1):
            for x in run.train(batches):
                run.step(loss(model, x))
        run.save(model, root / "by-run")
        run.save(model, root / "by-run.safetensors")


def test_from_pretrained_of_transformers_loads_what_was_exported(tmp_path):
    prepare_torchvision()
    transformers = pytest.importorskip("transformers")
    size = {"n_layer": 1, "n_head": 2, "n_embd": 8, "n_positions": 8, "bos_token_id": 1, "eos_token_id": 2}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=20, **size))
    assert model.lm_head.weight is model.transformer.wte.weight, "one tensor with two names"
    words = torch.randint(20, (4, 8), generator=torch.Generator().manual_seed(1))
    train_a_little(tmp_path, model, words, lambda model, x: model(x, labels=x).loss)
    assert cli.main(["export", str(tmp_path), str(tmp_path / "exported")]) == 0
    expected = model.eval()(words).logits
    for directory in ("exported", "by-run"):
        again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / directory)
        assert type(again) is transformers.GPT2LMHeadModel
        assert torch.equal(again(words).logits, expected)
        with safe_open(tmp_path / directory / "model.safetensors", "pt") as file:
            assert {"lm_head.weight", "transformer.wte.weight"} <= set(file.keys()), "load_state_dict finds both"


def test_timm_loads_what_was_exported(tmp_path):
    prepare_torchvision()
    timm = pytest.importorskip("timm")
    model = timm.create_model("test_resnet", num_classes=3)
    images = torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    train_a_little(tmp_path, model, images, lambda model, x: model(x).square().mean())
    assert cli.main(["export", str(tmp_path), str(tmp_path / "exported.safetensors")]) == 0
    expected = model.eval()(images)
    for file in ("exported.safetensors", "by-run.safetensors"):
        again = timm.create_model("test_resnet", num_classes=3, checkpoint_path=str(tmp_path / file)).eval()
        assert torch.equal(again(images), expected)
