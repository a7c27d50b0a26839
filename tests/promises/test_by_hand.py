"""P1 and P4 against plain torch: what is wrong alike on all worlds passes every law that compares worlds.

Each case is told once, as a `Training`; `by_hand` does it on one process without the library, `by_run` with it.
"""

import functools
import itertools
import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import spectral_norm
from torch.optim.lr_scheduler import CosineAnnealingWarmRestarts, OneCycleLR, StepLR
from torch.utils.data import Dataset

import by_hand
import by_run
from by_hand import Part, Seen, Training, assert_near
from campaign_marks import IN_CAMPAIGN, combinations
from lockstep.run import Run
from worlds import on_world

pytestmark = pytest.mark.together  # what they compute once is computed on one worker

WORLDS = (1, 3)
SAMPLES = 27  # three steps of 12, 12 and 3; of 6 micro-batches each of 3 ranks holds two that are no whole subtree


def numbers(*shape, seed=5, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def classes(samples=SAMPLES):
    return torch.randint(0, 3, (samples,), generator=torch.Generator().manual_seed(6))


def vectors(samples=SAMPLES):
    return numbers(samples, 6), classes(samples)


def mlp():
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def classify(models, batch):
    x, y = batch
    yield Part(F.cross_entropy(models[0](x), y))


def one(make):
    """For an optimizer of all that is trained."""
    return lambda models: [make([p for p in models[0].parameters() if p.requires_grad])]


def adam(parameters):
    return torch.optim.Adam(parameters, lr=0.01)


class Pictures(nn.Module):
    """A convolution of three channels: with one, all memory formats are the same."""

    def __init__(self, convolution, memory_format):
        super().__init__()
        self.convolution = convolution(3, 4, 2)
        self.out = nn.Linear(4, 3)
        self.to(memory_format=memory_format)
        self.memory_format = memory_format

    def forward(self, x):
        return self.out(self.convolution(x.to(memory_format=self.memory_format)).relu().flatten(2).mean(2))


class Transposed(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 3).t())
        self.cube = nn.Parameter(torch.randn(3, 2, 3).permute(2, 0, 1))

    def forward(self, x):
        return torch.einsum("bi,ij->bj", F.linear(x, self.weight), self.cube.sum(2))


class Complex(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(6, 3)
        self.turn = nn.Parameter(torch.randn(3, 3, dtype=torch.complex64))

    def forward(self, x):
        return (self.inner(x).to(torch.complex64) @ self.turn).abs()


class Mixed(nn.Module):
    """Parameters of several types, of no dimension, and of no element."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(6, 3)
        self.wide = nn.Parameter(torch.randn(3, dtype=torch.float64))
        self.scalar = nn.Parameter(torch.tensor(1.5))
        self.empty = nn.Parameter(torch.zeros(0, 3))

    def forward(self, x):
        return (self.inner(x) * self.scalar).double() * self.wide + self.empty.sum()


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(12, 5, sparse=True)
        self.out = nn.Linear(5, 3)

    def forward(self, words):
        return self.out(self.embedding(words).mean(1))


def words():
    return torch.randint(0, 12, (SAMPLES, 4), generator=torch.Generator().manual_seed(7)), classes()


def sparse_alone(models, batch):
    yield Part((models[0](batch[0]) - batch[1][:, None, None]).square().mean())


def sparse_and_dense(models):
    model = models[0]
    return [torch.optim.SparseAdam(list(model.embedding.parameters()), lr=0.01), adam(model.out.parameters())]


def by_items(models, batch):
    x, y, weights = batch
    each = F.cross_entropy(models[0](x), y, reduction="none")
    yield Part((each * weights).sum() / weights.sum().clamp(min=1), items=int(weights.sum()))


def weighted():
    """The second micro-batch of the first step holds no item, in the order in which samples are stored."""
    weights = torch.randint(0, 4, (SAMPLES,), generator=torch.Generator().manual_seed(8))
    weights[2:4], weights[-1] = 0, 2
    return (*vectors(), weights)


def steep(models, batch):
    x, y = batch
    yield Part(30 * F.cross_entropy(models[0](x), y))


class Augmented(Dataset):
    """By all three generators."""

    def __len__(self):
        return SAMPLES

    def __getitem__(self, i):
        x, y = vectors()
        x = x[i] + 0.1 * torch.randn(6) + 0.1 * random.random() + 0.1 * float(np.random.rand())
        return x, y[i]


def drawing(models, batch):
    x, y = batch
    outputs = models[0](F.dropout(x, 0.3))
    yield Part(F.cross_entropy(outputs, y), told=(x, torch.rand(2), random.random(), float(np.random.rand())))


def adversaries():
    forger = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 6))
    return [forger, nn.Sequential(nn.Linear(6, 8), nn.LeakyReLU(0.2), nn.Dropout(0.1), nn.Linear(8, 1))]


def adversarial(models, batch):
    forger, critic = models
    forged = forger(torch.randn(len(batch[0]), 4))
    yield Part(F.softplus(-critic(batch[0])).mean() + F.softplus(critic(forged.detach())).mean())
    yield Part(F.softplus(-critic(forged)).mean())


def critic_first(models):
    """The critic's loss comes first, so its optimizer does; were it to step at once, the forger's loss would see it."""
    forger, critic = models
    return [torch.optim.SGD(critic.parameters(), lr=0.5), torch.optim.SGD(forger.parameters(), lr=0.5)]


def measuring(models, batch):
    x, y = batch
    outputs = models[0](x)
    yield Part(
        F.cross_entropy(outputs, y),
        measured={"right": outputs.argmax(1) == y, "size": x.square().sum(1), "first": x[0, 0], "plain": 2.5},
        means={"weighed": (x.mean(), 3 + int(y[0]))},
    )


def matrices_and_others(models):
    matrices, others = ([p for p in models[0].parameters() if (p.dim() > 1) == big] for big in (True, False))
    return [torch.optim.SGD(matrices, lr=0.1, momentum=0.9), adam(others)]


def body_frozen():
    model = mlp()
    model[0].requires_grad_(False)
    return [model]


def unfreezes(models, _optimizers, step):
    if step >= 2:
        models[0][0].requires_grad_(True)


def all_parameters(models):
    return [torch.optim.SGD(models[0].parameters(), lr=0.1, momentum=0.9)]


def freezes(models, _optimizers, step):
    if step >= 2:
        models[0][0].requires_grad_(False)


def grows(models, optimizers, step):
    """A layer that was frozen gets a group of its own, as `add_param_group` is for."""
    if step >= 2 and len(optimizers[0].param_groups) == 1:
        models[0][0].requires_grad_(True)
        optimizers[0].add_param_group({"params": list(models[0][0].parameters()), "lr": 0.05})


class Moody(nn.Module):
    """One layer is used for some micro-batches only, one never."""

    def __init__(self):
        super().__init__()
        self.always, self.sometimes, self.never = nn.Linear(6, 3), nn.Linear(6, 3), nn.Linear(6, 3)

    def forward(self, x):
        return self.always(x) + (self.sometimes(x) if x.sum() > 0 else 0)


def predict(models, batch):
    x, y = batch
    outputs = models[0](x)
    return Seen(outputs, {"right": outputs.argmax(1) == y, "first": x[0, 0]})


def normed(momentum):
    return nn.Sequential(nn.Linear(6, 8, bias=False), nn.BatchNorm1d(8, momentum=momentum), nn.Tanh(), nn.Linear(8, 3))


def plain(**told):
    return Training(**{"models": lambda: [mlp()], "data": vectors, "learn": classify, **told})


def scheduled(make):
    return plain(schedulers=lambda optimizers, steps: [make(optimizers[0], steps)])


def pictures(dimensions):
    return lambda: (numbers(SAMPLES, 3, *[4] * dimensions), classes())


CASES = {
    "channels_last": plain(
        models=lambda: [Pictures(nn.Conv2d, torch.channels_last)], data=pictures(2), optimizers=one(adam)
    ),
    "channels_last_3d": plain(models=lambda: [Pictures(nn.Conv3d, torch.channels_last_3d)], data=pictures(3)),
    "transposed": plain(models=lambda: [Transposed()], clip_norm=1.0),
    "float64": plain(
        models=lambda: [mlp().double()], data=lambda: (numbers(SAMPLES, 6, dtype=torch.float64), classes())
    ),
    "complex clipped": plain(models=lambda: [Complex()], clip_norm=0.3),
    "complex adam": plain(models=lambda: [Complex()], optimizers=one(adam)),
    "mixed": plain(models=lambda: [Mixed()], clip_norm=0.5),
    "bf16": plain(precision="bf16"),
    "sparse adam": plain(
        models=lambda: [nn.Embedding(12, 5, sparse=True)],
        data=words,
        learn=sparse_alone,
        optimizers=one(lambda parameters: torch.optim.SparseAdam(parameters, lr=0.01)),
    ),
    "sparse sgd": plain(
        models=lambda: [Words()], data=words, optimizers=one(lambda parameters: torch.optim.SGD(parameters, lr=0.1))
    ),
    "sparse and dense": plain(models=lambda: [Words()], data=words, optimizers=sparse_and_dense, together=True),
    "one cycle": scheduled(lambda optimizer, steps: OneCycleLR(optimizer, max_lr=0.2, total_steps=2 * steps)),
    "warm restarts": scheduled(lambda optimizer, _: CosineAnnealingWarmRestarts(optimizer, 2)),
    "step lr": scheduled(lambda optimizer, _: StepLR(optimizer, 2, 0.5)),
    "items": plain(data=weighted, learn=by_items, shuffle=False),
    "items shuffled clipped": plain(data=weighted, learn=by_items, clip_norm=0.2, optimizers=one(adam)),
    "one sample is left": plain(data=lambda: vectors(25)),
    "drop_last": plain(drop_last=True),
    "one micro-batch is larger": plain(global_batch=7, micro_batch=3, data=lambda: vectors(19)),
    "fp16": plain(
        precision="fp16", learn=steep, epochs=5, schedulers=lambda optimizers, _: [StepLR(optimizers[0], 1, 0.9)]
    ),
    "augmented": plain(data=Augmented, learn=drawing),
    "batch norm": plain(models=lambda: [normed(0.1)], global_batch=9, micro_batch=3),
    "one micro-batch is left": plain(
        models=lambda: [normed(0.1)], global_batch=9, micro_batch=3, data=lambda: vectors(21)
    ),
    "cumulative batch norm": plain(models=lambda: [normed(None)], global_batch=9, micro_batch=3),
    "adversaries": Training(adversaries, vectors, adversarial, critic_first, global_batch=9, micro_batch=3),
    "together": plain(optimizers=matrices_and_others, together=True, clip_norm=0.5),
    "measures": plain(learn=measuring),
    "evaluated": plain(held_out=lambda: vectors(19), predict=predict),
    "clamped": plain(clamp=0.01),
    "clamped by a hook": plain(hook=lambda gradient: gradient.clamp(-0.01, 0.01), clip_norm=0.05),
    "a hook with items": plain(data=weighted, learn=by_items, hook=lambda gradient: gradient / gradient.norm()),
    "unfreezes": plain(models=body_frozen, optimizers=all_parameters, arrange=unfreezes),
    "freezes": plain(optimizers=all_parameters, arrange=freezes),
    "grows": plain(models=body_frozen, arrange=grows),
    "unused": plain(
        models=lambda: [Moody()],
        find_unused=True,
        optimizers=one(lambda parameters: torch.optim.AdamW(parameters, lr=0.01)),
    ),
    "average of weights": plain(models=lambda: [normed(0.1)], global_batch=9, micro_batch=3, ema=True),
}
TOLERANCE = {"float64": 1e-11, "bf16": 1e-5, "fp16": 1e-5}


def trained(name, replay):
    return by_run.train(CASES[name], by_run.Manner(replay=replay))


#: Whose like is on three ranks in the suite, too: what they do differently is done on each rank alone.
ALONE_IN_SUITE = ("channels_last_3d", "transposed", "complex adam", "sparse sgd", "one cycle", "warm restarts", "items")
ALONE_IN_SUITE += ("one micro-batch is left", "clamped by a hook", "cumulative batch norm", "freezes", "unfreezes")


def is_campaigns(name, world):
    return world == 3 and name in ALONE_IN_SUITE


@functools.cache
def on(world):
    """What every case came to on every rank; each case has replays, which take most of its time, on one world."""
    names = [name for name in CASES if is_campaigns(name, world) is IN_CAMPAIGN]
    calls = [(trained, name, (number + WORLDS.index(world)) % 2 == 0) for number, name in enumerate(names)]
    return dict(zip(names, on_world(world, calls), strict=True))


@functools.cache
def wanted(name):
    return by_hand.train(CASES[name])


@pytest.mark.parametrize(("name", "world"), combinations(CASES, WORLDS, campaign=is_campaigns))
def test_trains_what_plain_torch_trains(name, world):
    for rank, found in enumerate(on(world)[name]):
        assert not isinstance(found, str), f"rank {rank} of {world}: {found}"
        for part in vars(wanted(name)):
            where = f"rank {rank} of {world}: {part}"
            assert_near(getattr(found, part), getattr(wanted(name), part), where, tolerance=TOLERANCE.get(name, 2e-6))


def spectral():
    return nn.Sequential(spectral_norm(nn.Linear(6, 8)), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3))


WHOLE = {"global_batch": 9, "micro_batch": 9, "data": lambda: vectors(25)}  # a step is one micro-batch
EXACT = {
    "batch norm": plain(models=lambda: [normed(0.1)], **WHOLE),
    "spectral norm": plain(models=lambda: [spectral()], **WHOLE),
    "float64": plain(
        models=lambda: [spectral().double()],
        **{**WHOLE, "data": lambda: (numbers(25, 6, dtype=torch.float64), classes(25))},
    ),
}


def trained_exactly(name):
    return by_run.train(EXACT[name])


@pytest.mark.parametrize("name", EXACT)
def test_a_step_of_one_micro_batch_has_the_bits_of_plain_torch(name):
    """No mean is made of one value, so nothing is rounded that plain torch does not round."""
    ((found,),) = on_world(1, [(trained_exactly, name)])
    assert_near(found.trail, by_hand.train(EXACT[name]).trail, tolerance=0.0)


def test_every_case_trains_in_every_step():
    """Of those with a layer that is frozen or a loss that overflows, another one."""
    for name in CASES:
        states = [state["models"] for state in wanted(name).trail]
        same = sum(_equal(before, after) for before, after in itertools.pairwise(states))
        assert same == 0 or (name == "fp16" and same < len(states) - 5), name


def _equal(before, after):
    return all(torch.equal(a[n], b[n]) for a, b in zip(before, after, strict=True) for n in a)


def test_schedules_count_only_the_steps_that_were_made():
    rates = [state["lr"][0] for state in wanted("fp16").trail]
    made = sum(not _equal(a["models"], b["models"]) for a, b in itertools.pairwise(wanted("fp16").trail))
    assert 5 <= made < len(rates) - 2, "no step overflowed, or nearly all did"
    assert rates[0] == 0.1, "the first step was made"
    assert rates[-1] == pytest.approx(0.1 * 0.9**made)


def test_augmentation_and_dropout_are_drawn_again_in_each_epoch():
    draws = [str(notes) for notes in wanted("augmented").told]
    assert len(draws) == len(set(draws)) == 2 * 14


def evaluation_draws():
    with Run(seed=3) as run:
        model = run.model(mlp())
        run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        held_out = run.loader(torch.arange(40), global_batch=8, micro_batch=2, shuffle=False)
        mine = [
            (int(x[0]), float(torch.rand(1)), random.random(), float(np.random.rand())) for x in run.evaluate(held_out)
        ]
        return sorted(draw for part in run.gather(mine) for draw in part)


def test_every_micro_batch_of_an_evaluation_draws_other_numbers():
    ((alone,),), (of_three,) = on_world(1, [(evaluation_draws,)]), on_world(3, [(evaluation_draws,)])
    assert of_three == [alone] * 3
    for numbers in zip(*alone, strict=True):
        assert len(set(numbers)) == len(numbers) == 20


@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("items", {"learn": lambda models, batch: classify(models, batch[:2])}),
        ("complex clipped", {"clip_norm": None}),
        ("augmented", {"seed": 4}),
        ("step lr", {"schedulers": lambda optimizers, _: [StepLR(optimizers[0], 3, 0.5)]}),
        ("cumulative batch norm", {"models": lambda: [normed(0.1)]}),
        ("unfreezes", {"arrange": lambda models, optimizers, step: unfreezes(models, optimizers, step - 1)}),
    ],
)
def test_the_test_can_see(name, other):
    """A training that differs in one thing is not near."""
    found = by_hand.train(Training(**{**vars(CASES[name]), **other}))
    with pytest.raises(AssertionError):
        assert_near(found.trail, wanted(name).trail)
