"""Models that the run makes: from a function, from the device meta, from a file; the same values under any strategy."""

import json

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lockstep.checkpoint import SafetensorsWriter, content_of, in_file, read_weights
from lockstep.errors import SettingError, UsageError
from lockstep.run import Run
from lockstep.testing import state_hash
from worlds import on_world

WAYS = ("ddp", "fsdp", "hsdp:shard=2,ignored_modules=Embedding+BatchNorm1d", "auto")


class Net(nn.Module):
    """Large enough to be divided while it is made; two of its parameters are one."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(60, 24)
        self.blocks = nn.ModuleList([nn.TransformerEncoderLayer(24, 2, 50, batch_first=True) for _ in range(2)])
        self.norm, self.head = nn.BatchNorm1d(24), nn.Linear(24, 60, bias=False)
        self.head.weight = self.table.weight

    def forward(self, words):
        x = self.table(words)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x.mean(1)))


def on_meta():
    with torch.device("meta"):
        return Net()


FORMS = {"given": Net, "made": lambda: Net, "meta": on_meta, "made on meta": lambda: on_meta}


def trained(strategy, form, weights):
    """The bits of the model at the beginning, and after two steps; and the random number that came next."""
    with Run(seed=4, strategy=strategy) as run:
        model = run.model(FORMS[form](), weights=weights)
        then = torch.rand(1).item()
        optimizer = run.optimizer(torch.optim.AdamW(model.parameters(), lr=0.01))
        begun = state_hash(run.state_dict(model))
        words = torch.randint(0, 60, (16, 5), generator=torch.Generator().manual_seed(1))
        for _ in run.epochs(1):
            for (x,) in run.train(run.loader((words,), global_batch=8, micro_batch=2)):
                run.step(lambda out, x: F.cross_entropy(out, x[:, 0]), x, (x,))
        assert len(optimizer.param_groups[0]["params"]) == len(list(model.parameters()))
        return begun, state_hash(run.state_dict(model)), then


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    """Weights in two files, with an index, as large models come; one name for what is shared."""
    place = tmp_path_factory.mktemp("weights")
    torch.manual_seed(11)
    state = {name: value for name, value in Net().state_dict().items() if name != "head.weight"}
    names = list(state)
    parts = {"model-1.safetensors": names[::2], "model-2.safetensors": names[1::2]}
    for part, within in parts.items():
        with SafetensorsWriter(
            place / part, [in_file(n, state[n].dtype, tuple(state[n].shape)) for n in within]
        ) as out:
            for name in within:
                out.write(content_of(state[name]))
    index = {"weight_map": {name: part for part, within in parts.items() for name in within}}
    (place / "model.safetensors.index.json").write_text(json.dumps(index))
    return place, state


def test_however_a_model_is_made_it_is_the_model_of_one_rank(file):
    place, _ = file
    forms = [("given", None), ("made", None), ("meta", None), ("made on meta", None)]
    forms += [("given", str(place)), ("made", str(place)), ("meta", str(place))]
    (alone,) = on_world(1, [(trained, "none", form, weights) for form, weights in forms[:1]])
    reference = alone[0]
    calls = [(trained, way, form, weights) for way in WAYS for form, weights in forms]
    from_file = None
    for (_, way, form, weights), (first, second) in zip(calls, on_world(2, calls), strict=True):
        assert not isinstance(first, str), f"{way}, {form}, {weights}: {first}"
        begun, ended, then = first
        assert second[2] == then, "ranks go on with the same random numbers"
        if weights is None:
            # The modules of this model draw in the order in which their constructors do.
            assert first == reference or ("meta" in form and (begun, ended) == reference[:2]), f"{way}, {form}"
        else:
            from_file = from_file or (begun, ended)
            assert (begun, ended) == from_file, f"{way}, {form}, from a file"
            assert begun != reference[0]


def test_weights_are_those_of_the_file(file):
    place, state = file
    for path in (place, place / "model.safetensors.index.json"):
        assert {name: value.whole() for name, value in read_weights(path).items()}.keys() == state.keys()
    for name, stored in read_weights(place).items():
        assert torch.equal(stored.whole(), state[name])
        if stored.dim() == 2:
            assert torch.equal(stored.box((3, 1), (5, 4)), state[name][3:8, 1:5])


class Unset(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.scale = nn.Linear(3, 3), nn.Parameter(torch.ones(3))


class Grown(nn.Module):
    """Some of it is there already, and only the rest is on the device meta."""

    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Sequential(nn.Linear(3, 3), nn.Dropout()), nn.Linear(3, 2, device="meta")
        self.body.append(nn.Linear(3, 3))

    def reset_parameters(self):
        for parameter in self.parameters():
            nn.init.zeros_(parameter)

    def _init_weights(self, module):
        for parameter in module.parameters(recurse=False):
            nn.init.ones_(parameter)


class Constant(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.mask = nn.Linear(3, 3), torch.ones(3)


def test_what_has_its_values_keeps_them():
    grown = Grown()
    before = state_hash(grown.body.state_dict())
    with Run() as run:
        model = run.model(grown)
        assert state_hash(model.body.state_dict()) == before
        assert all(bool((p == 1).all()) for p in model.head.parameters())


def test_what_nobody_initialises_is_refused_and_so_are_weights_of_another_model(file, tmp_path):
    place, _ = file
    with torch.device("meta"):
        unset, constant = Unset(), Constant()
    (tmp_path / "odd.safetensors").write_bytes(b"\0" * 40)
    (tmp_path / "odd.pt").write_bytes(b"")
    with Run() as run:
        for model, weights, error, words in (
            (unset, None, UsageError, "scale of Unset has no values"),
            (constant, None, UsageError, "Constant.mask"),
            (nn.Linear(2, 2), place, UsageError, "weights of another model than Linear"),
            (lambda: 3, None, UsageError, "returns a int"),
            (3, None, UsageError, "give a torch.nn.Module"),
            (nn.Linear(2, 2), tmp_path / "odd.safetensors", SettingError, "no safetensors file"),
            (nn.Linear(2, 2), tmp_path / "odd.pt", SettingError, "load_state_dict"),
            (nn.Linear(2, 2), tmp_path / "none.safetensors", SettingError, "FileNotFoundError"),
        ):
            with pytest.raises(error, match=words):
                run.model(model, weights=weights)
