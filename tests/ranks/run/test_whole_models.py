"""The model comes out of a run: the user's own module, whole, under every strategy, as the run itself saw it."""

import copy
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional as F

import lockstep
from campaign_marks import combinations
from lockstep.checkpoint.tensors import write_torch_file
from lockstep.errors import CheckpointError, MismatchError, SettingError, UsageError
from lockstep.run import Run
from lockstep.saved_run import export
from worlds import on_world

SAMPLES, HELD_OUT, PER_MICRO_BATCH = 20, 7, 2
#: Which strategies are tried on how many ranks.
WORLDS = {
    1: ("none", "dp", "fsdp", "zero"),
    2: (
        *("ddp", "zero", "fsdp", "hsdp:shard=2", "auto", "ddp:compress=powersgd", "local-sgd:period=2"),
        *("local-sgd:period=2,warmup=1,moments=average", "diloco:period=2", "parameter-server:servers=1"),
        *("parameter-server:servers=1,mode=async", "hybrid:servers=1", "pipeline:stages=2"),
    ),
    3: ("ddp", "fsdp:wrap=Linear", "zero", "parameter-server:servers=1", "hybrid:servers=2"),
    4: ("hsdp:shard=2", "pipeline:stages=2,schedule=interleaved"),
}
#: Under these a rank holds a part of the model.
DIVIDED = ("fsdp", "hsdp", "hybrid", "pipeline")


class Words(nn.Module):
    """With buffers, an attribute of its own, and a method beside `forward` that uses parameters."""

    def __init__(self):
        super().__init__()
        self.config = {"words": 9}
        self.embed = nn.Embedding(9, 4)
        self.hidden = nn.Sequential(nn.Linear(12, 7), nn.BatchNorm1d(7), nn.Tanh())
        self.out = nn.Linear(7, 5)

    def forward(self, x):
        return self.out(self.hidden(self.embed(x).flatten(1)))

    def decode(self, h):
        return self.out(h)


def data():
    random = torch.Generator().manual_seed(5)
    words, labels = (torch.randint(k, n, generator=random) for k, n in ((9, (SAMPLES, 3)), (5, (SAMPLES,))))
    return words, labels


def half_a_file(model, path):
    """How the leader is told that it would save half of a model, or not; and that a copy would be of half of it."""
    told = []
    for attempt in (lambda: torch.save({"model": model.state_dict()}, path), lambda: torch.save(model, path)):
        try:
            attempt()
            told.append("")
        except UsageError as error:
            told.append(str(error))
    try:
        twin = copy.deepcopy(model)
        average = torch.optim.swa_utils.AveragedModel(model)
        told.append("")
        assert type(twin) is type(average.module) is type(model)
        assert not any(a is b for a, b in zip(twin.parameters(), model.parameters(), strict=True))
        assert twin._compiled_call_impl is None
    except UsageError as error:
        told.append(str(error))
    return told


def trained(strategy, root):
    """What the run saw of the model, and what it gives out."""
    words, labels = data()
    given = {"rehearse": strategy == "dp", "replay": strategy in ("none", "ddp"), "peer_timeout_s": 60}
    with Run(seed=3, strategy=strategy, checkpoint=root, **given) as run:
        own = Words()
        keys = list(own.state_dict())
        model = run.model(own)
        own_module = model is own and isinstance(model, Words) and model.config == {"words": 9}
        run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
        # BatchNorm in two threads wants two samples for each.
        batches = run.loader((words, labels), global_batch=8, micro_batch=4 if strategy == "dp" else 2)
        held_out = run.loader((words[:HELD_OUT],), global_batch=HELD_OUT, micro_batch=PER_MICRO_BATCH, shuffle=False)
        for _ in run.epochs(2):
            for x, y in run.train(batches):
                run.step(F.cross_entropy, x, y)
            seen = []
            for (x,) in run.evaluate(held_out):
                output = model(x)
                if run.counts:
                    seen.append(output.cpu())
        outputs = torch.cat([one for rank in run.gather(seen) for one in rank])
        whole = run.state_dict(model)
        for name in ("saved.pt", "saved.safetensors", "directory"):
            run.save(model, Path(root) / name)
        told = half_a_file(model, Path(root) / f"half-{run.rank}.pt")
        return own_module and list(model.state_dict()) == keys, outputs, whole, told


@pytest.mark.parametrize("world", combinations(WORLDS, campaign=lambda world: world == 3))
def test_what_comes_out_is_what_the_run_evaluates(world, tmp_path):
    roots = {strategy: tmp_path / str(number) for number, strategy in enumerate(WORLDS[world])}
    ranks_of = on_world(world, [(trained, strategy, str(root)) for strategy, root in roots.items()])
    for (strategy, root), ranks in zip(roots.items(), ranks_of, strict=True):
        assert not any(isinstance(rank, str) for rank in ranks), f"{strategy}: {ranks}"
        assert all(own for own, *_ in ranks), f"{strategy}: not the user's own module"
        (_, outputs, whole, _), *others = ranks
        assert [state for _, _, state, _ in others] == [{}] * len(others), strategy
        export(root, root / "out.safetensors")
        export(root, root / "out.pt")
        forms = [
            *(
                load_file(root / name)
                for name in ("saved.safetensors", "out.safetensors", "directory/model.safetensors")
            ),
            *(torch.load(root / name, weights_only=True) for name in ("saved.pt", "out.pt")),
            lockstep.load(root),
        ]
        model = Words().eval()
        model.load_state_dict(whole)
        assert [*forms[-1]] == [*forms[-2]] == [*whole] == [*model.state_dict()], "in the model's own order"
        for form in forms:
            assert form.keys() == whole.keys(), strategy
            assert all(torch.equal(form[name], whole[name]) for name in whole), strategy
        rows = 1 if strategy == "dp" else PER_MICRO_BATCH  # that are computed at once: a product of matrices tells
        found = torch.cat([model(x) for x in data()[0][:HELD_OUT].split(rows)])
        assert torch.equal(found.detach(), outputs), f"{strategy} on {world} ranks evaluates something else"
        divides = strategy.partition(":")[0] in DIVIDED and world > 1
        for rank, (*_, (as_state, as_module, as_copy)) in enumerate(ranks):
            if divides and (rank == 0 or "hybrid" not in strategy):
                assert "run.save(model, path)" in as_state, (strategy, as_state)
                assert "run.save(model, path)" in as_module, (strategy, as_module)
            assert bool(as_copy) == divides, (strategy, as_copy)
            assert not divides or "use ddp or zero" in as_copy


def other_method(strategy, method):
    """The parameters after training through ``method``."""
    random = torch.Generator().manual_seed(5)
    hidden, labels = torch.randn(12, 7, generator=random), torch.randint(5, (12,), generator=random)
    with Run(seed=3, strategy=strategy, peer_timeout_s=60) as run:
        own = Words().requires_grad_(False)
        own.out.requires_grad_(True)
        model = run.model(own)
        run.optimizer(torch.optim.SGD(model.out.parameters(), lr=0.1))
        batches = run.loader((hidden, labels), global_batch=6, micro_batch=2)
        for _ in run.epochs(2):
            for h, y in run.train(batches):
                run.step(F.cross_entropy(getattr(model, method)(h), y))
        return run.state_dict(model)


def refused(strategy):
    try:
        other_method(strategy, "decode")
    except RuntimeError as error:
        return [str(error), *getattr(error, "__notes__", [])]


def test_another_method_than_forward_trains_rightly_or_is_refused_by_name():
    ((reference,),) = on_world(1, [(other_method, "none", "decode")])
    trains = ("ddp", "zero", "parameter-server:servers=1")
    found = on_world(2, [*((other_method, s, "decode") for s in trains), *((refused, s) for s in ("fsdp", "pipeline"))])
    for strategy, ranks in zip(trains, found, strict=False):
        assert not isinstance(ranks[0], str), ranks[0]
        assert all(torch.equal(ranks[0][name], value) for name, value in reference.items()), strategy
    for strategy, ranks in zip(("fsdp", "pipeline"), found[len(trains) :], strict=True):
        assert any(f"under strategy {strategy} they are" in line and "Words.decode(...)" in line for line in ranks[0])


class Tied(nn.Module):
    """One tensor under two names."""

    def __init__(self):
        super().__init__()
        self.words, self.out = nn.Embedding(5, 4), nn.Linear(4, 5, bias=False)
        self.out.weight = self.words.weight

    def forward(self, x):
        return self.out(self.words(x))


def tied(strategy, root):
    with Run(seed=3, strategy=strategy) as run:
        model = run.model(Tied())
        run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        batches = run.loader((torch.arange(5), torch.arange(5)), global_batch=4, micro_batch=2)
        for _ in run.epochs(1):
            for x, y in run.train(batches):
                run.step(F.cross_entropy, x, y)
        run.save(model, Path(root) / "tied.safetensors")
        return run.state_dict(model)


def test_a_tensor_with_two_names_is_found_under_both(tmp_path):
    for ranks in on_world(2, [(tied, strategy, str(tmp_path)) for strategy in ("ddp", "fsdp")]):
        assert isinstance(ranks[0], dict), ranks[0]
        assert torch.equal(ranks[0]["words.weight"], ranks[0]["out.weight"])
        model = Tied()
        model.load_state_dict(load_file(tmp_path / "tied.safetensors"))
        assert torch.equal(model.out.weight, ranks[0]["out.weight"])


def misused(root):
    """What is said, on each rank, to calls that cannot give a whole model."""
    told = []

    def note(call):
        try:
            call()
            told.append("")
        except (UsageError, SettingError, CheckpointError) as error:
            told.append(f"{type(error).__name__}: {error}")

    with Run(seed=3, strategy="fsdp") as run:
        model = run.model(nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)))
        run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        counter = nn.Linear(2, 2)
        run.keep(counter=counter)
        Path(root, "kept.pt").mkdir(exist_ok=True)
        note(lambda: run.state_dict(nn.Linear(1, 1)))
        note(lambda: run.save(model, Path(root) / "kept.pt"))
        note(lambda: run.save(model, "/proc/no/such/model.safetensors"))
        note(lambda: run.save(counter, Path(root) / "counter.pt"))
        batches = run.loader((torch.ones(8, 4), torch.zeros(8, dtype=torch.long)), global_batch=8, micro_batch=2)
        for _ in run.epochs(1):
            for number, (x, y) in enumerate(run.train(batches)):
                if number == 0:
                    note(lambda: run.state_dict(model))
                if run.step(F.cross_entropy(model(x), y)):
                    note(lambda: run.save(model, Path(root) / "in-the-loop.pt"))
    return told


def test_what_cannot_be_whole_is_said_on_all_ranks(tmp_path):
    (ranks,) = on_world(2, [(misused, str(tmp_path))])
    assert ranks[0] == ranks[1]
    stranger, directory, unwritable, kept, within, done = ranks[0]
    assert stranger.startswith("UsageError: run.state_dict(Linear): it is no model of this run")
    assert directory.startswith("SettingError: ")
    assert "is a directory" in directory
    assert unwritable.startswith("CheckpointError: /proc/no/such/model.safetensors was not written: ")
    assert kept == done == ""
    assert "if run.step(loss): run.state_dict(...)" in within
    assert sorted(path.name for path in tmp_path.iterdir()) == ["counter.pt", "in-the-loop.pt", "kept.pt"]


def changed_by_rank(path):
    """What is said of a model that each rank has changed by its own numbers before it is saved."""
    with Run() as run:
        model = run.model(nn.Linear(4, 3))
        run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        for (x,) in run.train(run.loader((torch.ones(8, 4),), global_batch=8, micro_batch=2)):
            run.step(model(x).square().mean())
        with torch.no_grad():
            model.weight.div_(1.0 + run.rank)
        try:
            run.save(model, path)
        except MismatchError as error:
            return str(error)
        finally:
            with torch.no_grad():
                model.weight.mul_(1.0 + run.rank)
    return ""


def test_a_model_that_ranks_have_made_different_is_not_written(tmp_path):
    ((one, other),) = on_world(2, [(changed_by_rank, str(tmp_path / "model.pt"))])
    assert "models.0.weight on rank 1" in one
    assert one == other
    assert not list(tmp_path.iterdir())


def test_a_torch_file_has_the_same_bytes_each_time(tmp_path):
    for name in ("one.pt", "other.pt"):
        write_torch_file(tmp_path / name, {"weight": torch.arange(3.0)})
    assert (tmp_path / "one.pt").read_bytes() == (tmp_path / "other.pt").read_bytes()
    assert torch.load(tmp_path / "one.pt")["weight"].tolist() == [0.0, 1.0, 2.0]
