"""The optimizer's work divided: the bits of one rank, whatever the optimizer, and no state of others' parameters."""

import functools

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from campaign_marks import combinations
from lockstep.collectives import TensorShard
from lockstep.errors import UsageError
from lockstep.run import Run
from lockstep.testing import state_hash
from worlds import WITHOUT_REPLAYS, on_world

pytestmark = pytest.mark.together  # what they compute once is computed on one worker

WORLDS = (1, 2, 3, 4)


def merged(states):
    """The whole state, from what each rank would write of it."""
    first = states[0]
    if isinstance(first, TensorShard):
        (here,) = [part.tensor for part in states if part.tensor is not None]
        return here
    if isinstance(first, dict):
        assert all(list(state) == list(first) for state in states)
        return {key: merged([state[key] for state in states]) for key in first}
    if isinstance(first, list | tuple):
        return [merged(list(inner)) for inner in zip(*states, strict=True)]
    return first


class Net(nn.Module):
    """Of one parameter there is more than of all others; one is never used, and one has no dimension."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(40, 8)
        self.norm = nn.BatchNorm1d(8)
        self.body = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 5))
        self.forgotten = nn.Linear(3, 3)
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, words):
        return self.scale * self.body(self.norm(self.embedding(words)))


def learn(make_optimizer, *, weights=None, **settings):
    """Hashes of the model after each step; and the optimizer's state, as this rank would save it."""
    with Run(seed=3, **settings) as run:
        net = Net()
        model = run.model(net, find_unused_parameters=True)
        optimizer = run.optimizer(make_optimizer(net))
        run.scheduler(torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 9))
        generator = torch.Generator().manual_seed(5)
        words = torch.randint(0, 40, (42,), generator=generator)
        weigh = torch.ones(42)
        if weights:
            weigh[7] = weights
        hashes = []
        for _ in run.epochs(2):
            for word, weight in run.train(run.loader((words, weigh), global_batch=16, micro_batch=4)):
                step = run.progress.step
                run.step((F.cross_entropy(model(word), word % 5, reduction="none") * weight).mean())
                if run.progress.step != step:
                    hashes.append(state_hash(net))
        saved = run._context.strategy.state_layout.optimizer_state(optimizer)
        return hashes, saved, sorted(optimizer.state_dict()["state"])


def groups(net):
    slow = [{"params": net.embedding.parameters(), "lr": 0.01, "weight_decay": 0.1}, {"params": net.body.parameters()}]
    return torch.optim.RMSprop([*slow, {"params": [net.scale]}], lr=0.02, momentum=0.5, centered=True)


def adversaries(**settings):
    """Two optimizers that step apart, the second one only in every other step."""
    with Run(seed=3, **settings) as run:
        nets = [nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4)) for _ in range(2)]
        models = [run.model(net, find_unused_parameters=True) for net in nets]
        optimizers = [run.optimizer(torch.optim.AdamW(net.parameters(), lr=0.02)) for net in nets]
        hashes = []
        for _ in run.epochs(2):
            data = torch.randn(20, 4, generator=torch.Generator().manual_seed(1))
            for x in run.train(run.loader(data, global_batch=10, micro_batch=2)):
                step = run.progress.step
                run.step(models[0](x).square().mean(), optimizer=optimizers[0])
                if step % 2:
                    run.step(models[1](models[0](x).detach()).square().mean(), optimizer=optimizers[1])
                hashes.append(state_hash(*nets))
        saved = [run._context.strategy.state_layout.optimizer_state(o) for o in optimizers]
        return hashes[-1:], saved, None


def sgd(net):
    return torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-3)


def adamw(net, **options):
    return torch.optim.AdamW(net.parameters(), lr=0.02, **options)


def adagrad(net):
    return torch.optim.Adagrad(net.parameters(), lr=0.02)


CASES = {
    "sgd": functools.partial(learn, sgd),
    "adamw": functools.partial(learn, functools.partial(adamw, amsgrad=True)),
    "fused": functools.partial(learn, functools.partial(adamw, fused=True), clip_norm=0.05),
    "one by one": functools.partial(learn, functools.partial(adamw, foreach=False), clip_norm=0.05),
    "groups": functools.partial(learn, groups),
    "state from the start": functools.partial(learn, adagrad),
    "fp16": functools.partial(learn, functools.partial(adamw, fused=True), precision="fp16", weights=torch.inf),
    "fp16 sgd": functools.partial(learn, sgd, precision="fp16", weights=torch.inf),
    "adversaries": adversaries,
}


@functools.cache
def results(world, strategy):
    calls = [(functools.partial(case, strategy=strategy),) for case in CASES.values()]
    env = WITHOUT_REPLAYS if world == 4 else None
    return dict(zip(CASES, on_world(world, calls, env=env), strict=True))


@pytest.mark.parametrize(("name", "world"), combinations(CASES, WORLDS, campaign=lambda _, world: world == 2))
def test_the_bits_are_those_of_one_rank_and_so_is_what_is_saved(name, world):
    ((hashes, saved, _),) = results(1, "none")[name]
    assert len(hashes) == 1 or len(set(hashes)) >= 3, "nothing was trained"
    found = results(world, "zero")[name]
    assert not [one for one in found if isinstance(one, str)], found
    for rank, (theirs, _, _) in enumerate(found):
        assert theirs == hashes, f"rank {rank}"
    whole = merged([state for _, state, _ in found])
    assert state_hash(whole) == state_hash(saved), "other states are saved"


@pytest.mark.parametrize("world", combinations(WORLDS[1:], campaign=lambda world: world == 2))
def test_each_rank_has_the_states_of_its_own_parameters_only(world):
    ((_, _, everything),) = results(1, "none")["sgd"]
    held = [here for _, _, here in results(world, "zero")["sgd"]]
    assert sorted(place for here in held for place in here) == everything
    assert [1] in held, "the embedding is more than all the rest"
    assert all(held), "a rank holds nothing, though there is enough for all"


class Learner(torch.optim.SGD):
    """Its groups learn from all gradients that it sees, as do optimizers that find their own learning rate."""

    def step(self, closure=None):
        self.param_groups[0]["d"] = sum(
            float(p.grad.sum()) for p in self.param_groups[0]["params"] if p.grad is not None
        )
        return super().step(closure)


def learns_from_all(directory):
    with pytest.raises(UsageError) as caught, Run(seed=3, strategy="zero", checkpoint=directory) as run:  # noqa: PT012
        model = run.model(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)))
        run.optimizer(Learner(model.parameters(), lr=0.1))
        for x in run.train(run.loader(torch.ones(8, 4), global_batch=8, micro_batch=2)):
            run.step(model(x).square().mean())
    return str(caught.value)


def test_an_optimizer_that_learns_from_all_parameters_together_is_refused(tmp_path):
    for rank in on_world(2, [(learns_from_all, tmp_path)])[0]:
        assert rank.startswith("Learner computes a step of one parameter from others, too"), rank
        assert rank.endswith("or use ddp or fsdp")
