"""Models that the run makes: from a function, from the device meta, from a file; the same values under any strategy."""

import json

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from campaign_marks import IN_CAMPAIGN
from lockstep.checkpoint import SafetensorsWriter, content_of, in_file, read_weights
from lockstep.collectives import single_rank_group
from lockstep.errors import MismatchError, SettingError, UsageError
from lockstep.run import Run
from lockstep.strategies.pipelined.division import made_apart
from lockstep.testing import state_hash
from worlds import on_world

#: Each strategy, and whether it ends in the bits of one rank.
WAYS = {
    "ddp": True,
    "zero": True,
    "zero:stage=2": True,
    "fsdp": True,
    "hsdp:shard=2,ignored_modules=Embedding+BatchNorm1d": True,
    "auto": True,
    "parameter-server:servers=1": True,
    "hybrid:servers=1": True,
    "pipeline": True,
    "pipeline:sample=2x5:int64": True,
    "local-sgd:period=1": False,
    "diloco:period=1": False,
}
#: Of the family of another one: from a file, these are tried in `make campaign` only.
TWINS = ("zero:stage=2", "auto", "pipeline:sample=2x5:int64", "diloco:period=1")
#: Tables, or stages, lie apart from the rest, and share no tensor with it.
APART = ("hybrid", "pipeline")


class Net(nn.Module):
    """Large enough to be divided while it is made; two of its parameters are one, if they are tied."""

    def __init__(self, tied=True):
        super().__init__()
        self.table = nn.Embedding(60, 24)
        self.blocks = nn.ModuleList([nn.TransformerEncoderLayer(24, 2, 50, batch_first=True) for _ in range(2)])
        self.norm, self.head = nn.BatchNorm1d(24), nn.Linear(24, 60, bias=False)
        if tied:
            self.head.weight = self.table.weight

    def forward(self, words):
        x = self.table(words)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x.mean(1)))


def on_meta(tied):
    with torch.device("meta"):
        return Net(tied)


FORMS = {
    "given": Net,
    "made": lambda tied: lambda: Net(tied),
    "meta": on_meta,
    "made on meta": lambda tied: lambda: on_meta(tied),
}


def trained(strategy, tied, form, weights):
    """The bits of the model at the beginning, and after two steps; and the random number that came next."""
    with Run(seed=4, strategy=strategy, replay=False) as run:
        model = run.model(FORMS[form](tied), weights=weights)
        then = torch.rand(1).item()
        optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9))
        begun = state_hash(run.state_dict(model))
        words = torch.randint(0, 60, (16, 5), generator=torch.Generator().manual_seed(1))
        for _ in run.epochs(1):
            for (x,) in run.train(run.loader((words,), global_batch=8, micro_batch=2)):
                run.step(lambda out, x: F.cross_entropy(out, x[:, 0]), x, (x,))
        assert len(optimizer.param_groups[0]["params"]) == len(list(model.parameters()))
        return begun, state_hash(run.state_dict(model)), then


def trained_in_stages(strategy, weights):
    """As `trained`, of a model that is given as functions, one for each stage."""

    def on_meta():
        with torch.device("meta"):
            return nn.Linear(8, 6)

    with Run(seed=4, strategy=strategy) as run:
        model = run.model([lambda: nn.Linear(6, 8), on_meta, nn.Tanh, lambda: nn.Linear(6, 6)], weights=weights)
        run.optimizer(torch.optim.SGD(model.parameters(), lr=0.01))
        begun = state_hash(run.state_dict(model))
        x = torch.arange(48.0).reshape(8, 6) / 48
        for _ in run.epochs(1):
            for (inputs,) in run.train(run.loader((x,), global_batch=8, micro_batch=2)):
                run.step(F.mse_loss, inputs, inputs)
        return begun, state_hash(run.state_dict(model)), 0.0


def differing(places):
    """What is said where each rank reads other weights."""
    with Run() as run:
        with pytest.raises(MismatchError) as refused:
            run.model(nn.Linear(6, 8), weights=places[run.rank])
        return str(refused.value)


def write(place, state):
    with SafetensorsWriter(place, [in_file(name, t.dtype, tuple(t.shape)) for name, t in state.items()]) as out:
        for tensor in state.values():
            out.write(content_of(tensor))


class Deep(nn.Sequential):
    """48 MiB of layers; remembers how many MiB of them were there at once while they were made."""

    def __init__(self):
        super().__init__()
        self.most = 0
        for _ in range(12):
            self.append(nn.Linear(1024, 1024, bias=False))
            self.most = max(self.most, mib(self))


def mib(model):
    with torch._C.DisableTorchFunction():
        storages = [p.untyped_storage() for p in model.parameters() if not p.is_meta]
    return sum(storage.nbytes() for storage in storages) / 2**20


def held(strategy):
    """MiB of parameters on this rank: the most while they were made, and afterwards."""
    with Run(strategy=strategy) as run:
        model = run.model(Deep)
        return model.most, mib(model)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Weights in two files, with an index, as large models come, and one name for what is shared; by ``tied``."""
    found = {}
    for tied in (True, False):
        place = tmp_path_factory.mktemp("weights")
        torch.manual_seed(11)
        state = {name: value for name, value in Net(tied).state_dict().items() if not tied or name != "head.weight"}
        names = list(state)
        parts = {"model-1.safetensors": names[::2], "model-2.safetensors": names[1::2]}
        for part, within in parts.items():
            write(place / part, {name: state[name] for name in within})
        index = {"weight_map": {name: part for part, within in parts.items() for name in within}}
        (place / "model.safetensors.index.json").write_text(json.dumps(index))
        found[tied] = place, state
    return found


def test_however_a_model_is_made_it_is_the_model_of_one_rank_under_every_strategy(files, tmp_path):
    given = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 6)).state_dict()
    write(stages := tmp_path / "stages.safetensors", given)
    alone = [(tied, from_file) for tied in (True, False) for from_file in (False, True)]
    calls = [(trained, "none", tied, "given", str(files[tied][0]) if from_file else None) for tied, from_file in alone]
    calls += [(trained_in_stages, "none", weights) for weights in (None, stages)]
    *found, drawn, read = [found for (found,) in on_world(1, calls)]
    references = dict(zip(alone, found, strict=True))
    cases = [(way, "made", False) for way in WAYS]
    cases += [(way, "meta", True) for way in WAYS if way not in TWINS or IN_CAMPAIGN]
    cases += [(way, "meta", False) for way in ("ddp", "fsdp", "hybrid:servers=1", "pipeline")]
    cases += [("fsdp", "made on meta", False), ("fsdp", "given", True), ("fsdp", "made", True)]
    calls = []
    for way, form, from_file in cases:
        tied = not way.startswith(APART)
        calls.append((trained, way, tied, form, str(files[tied][0]) if from_file else None))
    in_stages = [(trained_in_stages, way, weights) for way in ("pipeline", "ddp") for weights in (None, stages)]
    places = [tmp_path / "here.safetensors", tmp_path / "there.safetensors"]
    for place in places:
        write(place, nn.Linear(6, 8).state_dict())
    *found, divided, refused = on_world(2, [*calls, *in_stages, (held, "pipeline"), (differing, places)])
    assert all("weights=...) reads differs between ranks" in said for said in refused)
    assert [each[0] for each in found[len(calls) :]] == [drawn, read] * 2
    assert [after for _, after in divided] == [24, 24]
    assert max(most for most, _ in divided) <= 16 + 2 * 4, "what may stay whole, the layer that is made, and one more"
    wrong = {}
    for (_, way, tied, form, weights), (first, second) in zip(calls, found[: len(calls)], strict=True):
        begun, ended, then = references[tied, weights is not None]
        if isinstance(first, str):
            wrong[way, form, weights is not None] = first
            continue
        same = {
            "at the beginning": first[0] == begun,
            "at the end": first[1] == ended or not WAYS[way],
            "ranks go on with the same random numbers": first[2] == second[2],
            # The modules of this model draw in the order in which their constructors do; `reset_parameters` others.
            "the next random number": first[2] == then or "meta" in form,
        }
        if not all(same.values()):
            wrong[way, form, weights is not None] = same
    assert not wrong, "\n".join(f"{case}: {what}" for case, what in wrong.items())


def test_weights_are_those_of_the_file(files):
    place, state = files[True]
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


def test_what_nobody_initialises_is_refused_and_so_are_weights_of_another_model(files, tmp_path):
    place, _ = files[True]
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


class Shares(nn.Module):
    """Two names of one tensor; a buffer of integers; and something that its `state_dict` computes."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
        self.second.weight = self.first.weight
        self.register_buffer("seen", torch.zeros(2, dtype=torch.int64))
        self.extra = torch.ones(1)

    def get_extra_state(self):
        return self.extra

    def set_extra_state(self, state):
        self.extra = state


def test_weights_that_would_be_cut_off_or_lost_are_refused_and_so_are_files_that_contradict_themselves(tmp_path):
    w = torch.randn(3, 3)
    fine = {"first.weight": w, "second.weight": w, "seen": torch.ones(2, dtype=torch.int32)}
    write(tmp_path / "fine.safetensors", fine)
    write(tmp_path / "two.safetensors", fine | {"second.weight": w + 1})
    write(tmp_path / "fractions.safetensors", fine | {"seen": torch.ones(2)})
    write(tmp_path / "extra.safetensors", fine | {"_extra_state": torch.zeros(1)})
    whole = (tmp_path / "fine.safetensors").read_bytes()
    (tmp_path / "short.safetensors").write_bytes(whole[:-1])
    (tmp_path / "odd.safetensors").write_bytes(whole.replace(b"[3,3]", b"[3,2]"))
    index = {"weight_map": dict.fromkeys([*fine, "third.weight"], "fine.safetensors")}
    (tmp_path / "index.json").write_text(json.dumps(index))

    class WithoutExtra(Shares):
        get_extra_state = nn.Module.get_extra_state

    with Run() as run:
        for model, name, error, words in (
            (WithoutExtra(), "two.safetensors", UsageError, "first.weight and second.weight are one tensor"),
            (WithoutExtra(), "fractions.safetensors", UsageError, "seen is torch.float32 there, and torch.int64"),
            (Shares(), "fine.safetensors", UsageError, "such as _extra_state"),
            (Shares(), "extra.safetensors", UsageError, "_extra_state of Shares is neither a parameter nor a buffer"),
            (Shares(), "short.safetensors", SettingError, "short.safetensors: it is cut short: it has"),
            (Shares(), "odd.safetensors", SettingError, "first.weight has 36 bytes, which do not fit"),
            (Shares(), "index.json", SettingError, "fine.safetensors has no tensor third.weight"),
        ):
            with pytest.raises(error, match=words):
                run.model(model, weights=tmp_path / name)
        model = run.model(WithoutExtra(), weights=tmp_path / "fine.safetensors")
        assert torch.equal(model.first.weight, w)
        assert (model.second.weight is model.first.weight, model.seen.tolist()) == (True, [1, 1])
    stages = [lambda: nn.Linear(3, 3, bias=False), lambda: nn.Linear(3, 2)]
    with pytest.raises(UsageError, match=r"stage 1 of .*such as bias"):
        made_apart(stages, {"0.weight": w, "1.weight": torch.ones(2, 3)}, {0, 1}, single_rank_group())
