"""P1: the same bits on any number of ranks. Each case trains for a few steps and hashes everything after each."""

import functools
import os
import random

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset, IterableDataset

from campaign_marks import IN_CAMPAIGN, combinations
from lockstep.run import Run
from lockstep.testing import state_hash
from worlds import WITHOUT_REPLAYS, on_world

pytestmark = pytest.mark.together  # what they compute once is computed on one worker

WORLDS = (1, 2, 4)  # on three, `test_by_hand` compares with plain torch
# 8 micro-batches of 4 in a step; the third and last step of an epoch holds 4 + 4 + 2, so that of 4 ranks one has none.
SIZES = {"global_batch": 32, "micro_batch": 4}
SAMPLES = 74
EPOCHS = 2
STEPS = 6


class Images(Dataset):
    """Augmented by all three generators, differently each time."""

    def __init__(self):
        generator = torch.Generator().manual_seed(5)
        self.images = torch.randn(SAMPLES, 1, 6, 6, generator=generator)
        self.labels = torch.randint(0, 4, (SAMPLES,), generator=generator)

    def __len__(self):
        return SAMPLES

    def __getitem__(self, i):
        image = self.images[i] + 0.1 * torch.randn(1, 6, 6)
        return (image.flip(2) if random.random() < 0.5 else image), self.labels[i]


class Stream(IterableDataset):
    def __iter__(self):
        images = Images()
        return (images[i] for i in range(SAMPLES))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.2), nn.Flatten())
        self.head = nn.Linear(64, 4)

    def forward(self, images):
        return self.head(self.body(images))


def trail(run, batches, learn, *state, until=None):
    """Hashes of ``state`` after each step and the means of each epoch, from where the run is to step ``until``."""
    told, seen = [], None

    def look():
        nonlocal seen
        if seen not in (None, run.progress.step):
            told.append(state_hash(*state))
        seen = run.progress.step

    for _ in run.epochs(EPOCHS):
        look()
        for batch in run.train(batches):
            look()
            learn(batch)
            if run.progress.step == until:
                break
        look()
        if run.progress.step == until:
            break
        told.append(f"epoch {sorted(run.metrics.items())}")
    return told


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=1e-3)


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=1e-2)


def classify(make_optimizer=sgd, dataset=Images, workers=0, memory_format=torch.contiguous_format, **settings):
    with Run(seed=3, **settings) as run:
        model = run.model(Net().to(memory_format=memory_format))
        optimizer = run.optimizer(make_optimizer(model.parameters()))
        scheduler = run.scheduler(torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS))
        batches = run.loader(dataset(), workers=workers, **SIZES)

        def learn(batch):
            images, labels = batch
            outputs = model(images.to(memory_format=memory_format))
            run.measure(accuracy=outputs.argmax(1) == labels)
            run.step(F.cross_entropy(outputs, labels))

        return trail(run, batches, learn, model, optimizer, scheduler)


def overflow():
    """In fp16, one sample's loss is infinite: its step is skipped."""
    with Run(seed=3, precision="fp16") as run:
        model = run.model(nn.Sequential(nn.Flatten(), nn.Linear(36, 16), nn.ReLU(), nn.Linear(16, 4)))
        optimizer = run.optimizer(adamw(model.parameters()))
        scheduler = run.scheduler(torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5))
        images = Images()
        weights = torch.ones(SAMPLES)
        weights[7] = torch.inf
        batches = run.loader((images.images, images.labels, weights), **SIZES)

        def learn(batch):
            x, y, weight = batch
            run.step((F.cross_entropy(model(x), y, reduction="none") * weight).mean())

        hashes = trail(run, batches, learn, model, optimizer, scheduler)
        return [*hashes, f"made {optimizer.state[next(model.parameters())]['step']:g}"]


class Words(nn.Module):
    """The embedding is the output layer, too."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.hidden = nn.Linear(8, 8)
        self.out = nn.Linear(8, 11, bias=False)
        self.out.weight = self.embedding.weight

    def forward(self, words):
        return self.out(torch.tanh(self.hidden(self.embedding(words))))


def tokens(**settings):
    """Sequences of unequal length: the mean is over words, not over samples."""
    with Run(seed=3, **settings) as run:
        model = run.model(Words())
        optimizer = run.optimizer(adamw(model.parameters()))
        generator = torch.Generator().manual_seed(5)
        words = torch.randint(1, 11, (SAMPLES, 9), generator=generator)
        lengths = torch.randint(2, 10, (SAMPLES, 1), generator=generator)
        words[torch.arange(9) >= lengths] = 0
        batches = run.loader(words, **SIZES)

        def learn(words):
            outputs, targets = model(words[:, :-1]), words[:, 1:]
            loss = F.cross_entropy(outputs.flatten(0, 1), targets.flatten(), ignore_index=0)
            run.step(loss, count=(targets != 0).sum())

        return trail(run, batches, learn, model, optimizer)


def adversaries(**sizes):
    """Two models and two optimizers; the generator learns through the discriminator."""
    with Run(seed=3) as run:
        forger = run.model(nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 36)))
        critic = run.model(nn.Sequential(nn.Linear(36, 16), nn.LeakyReLU(0.2), nn.Dropout(0.1), nn.Linear(16, 1)))
        opt_forger = run.optimizer(adamw(forger.parameters()))
        opt_critic = run.optimizer(adamw(critic.parameters()))
        batches = run.loader(Images(), workers=0, **(sizes or SIZES))

        def learn(batch):
            real = batch[0].flatten(1)
            forged = forger(torch.randn(len(real), 6))
            wrong = F.softplus(-critic(real)).mean() + F.softplus(critic(forged.detach())).mean()
            run.step(wrong, optimizer=opt_critic)
            run.step(F.softplus(-critic(forged)).mean(), optimizer=opt_forger)

        return trail(run, batches, learn, forger, critic, opt_forger, opt_critic)


def shared():
    """Two optimizers share one model, and its backward pass."""
    with Run(seed=3, clip_norm=0.5) as run:
        model = run.model(Net())
        matrices = run.optimizer(sgd([p for p in model.parameters() if p.dim() > 1]))
        others = run.optimizer(adamw([p for p in model.parameters() if p.dim() <= 1]))
        batches = run.loader(Images(), workers=0, **SIZES)

        def learn(batch):
            run.step(F.cross_entropy(model(batch[0]), batch[1]), optimizer=[matrices, others])

        return trail(run, batches, learn, model, matrices, others)


class Moody(nn.Module):
    """One layer is used for some micro-batches only, one never."""

    def __init__(self):
        super().__init__()
        self.always, self.sometimes, self.never = nn.Linear(36, 4), nn.Linear(36, 4), nn.Linear(36, 4)

    def forward(self, images):
        flat = images.flatten(1)
        return self.always(flat) + (self.sometimes(flat) if flat.sum() > 0 else 0)


def unused():
    with Run(seed=3) as run:
        model = run.model(Moody(), find_unused_parameters=True)
        optimizer = run.optimizer(adamw(model.parameters()))
        batches = run.loader(Images(), workers=0, **SIZES)

        def learn(batch):
            run.step(F.cross_entropy(model(batch[0]), batch[1]))

        return trail(run, batches, learn, model, optimizer)


def halves():
    """The two halves of a step, with the user's hands on the gradient in between."""
    with Run(seed=3) as run:
        model = run.model(Net())
        optimizer = run.optimizer(sgd(model.parameters()))
        batches = run.loader(Images(), workers=0, **SIZES)

        def learn(batch):
            run.backward(F.cross_entropy(model(batch[0]), batch[1]))
            run.update()

        return trail(run, batches, learn, model, optimizer)


CASES = {
    "sgd": (classify,),
    "adamw": (functools.partial(classify, adamw),),
    "fused adamw": (functools.partial(classify, functools.partial(torch.optim.AdamW, lr=1e-2, fused=True)),),
    "bf16 sgd": (functools.partial(classify, precision="bf16"),),
    "bf16 adamw": (functools.partial(classify, adamw, precision="bf16"),),
    "fp16": (functools.partial(classify, precision="fp16"),),
    "overflow": (overflow,),
    "loader workers": (functools.partial(classify, workers=2),),
    "stream": (functools.partial(classify, dataset=Stream),),
    "clipped": (functools.partial(classify, adamw, clip_norm=0.1),),
    "channels_last": (functools.partial(classify, memory_format=torch.channels_last),),
    "small buckets": (functools.partial(classify, bucket_mb=0.0005),),
    "tokens": (tokens,),
    "tokens clipped": (functools.partial(tokens, clip_norm=0.1, precision="fp16"),),
    "adversaries": (adversaries,),
    # 5 micro-batches in a step: of 4 ranks one computes two, while the others are already in the first reduction.
    "uneven adversaries": (functools.partial(adversaries, global_batch=30, micro_batch=6),),
    "shared": (shared,),
    "unused": (unused,),
    "halves": (halves,),
}
SKIPPING = ("overflow", "tokens clipped")  # the loss scale begins too high
NAMES = tuple(CASES)
#: Whose like is in the suite.
TWINS = ("small buckets", "halves", "fused adamw", "bf16 adamw", "tokens clipped", "adamw", "stream")
RUN = [name for name in NAMES if IN_CAMPAIGN or name not in TWINS]
# In a few launches, so that no single test waits for everything.
PARTS = [RUN[part::3] for part in range(3)]


@functools.cache
def trails(part, world):
    """For each case of a part, the hashes of every rank; one world has no replays."""
    env = WITHOUT_REPLAYS if world > 2 else None
    names = PARTS[part]
    return dict(zip(names, on_world(world, [CASES[name] for name in names], env=env), strict=True))


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", combinations(NAMES, campaign=lambda name: name in TWINS))
def test_same_bits_on_any_world(name):
    (part,) = (number for number, names in enumerate(PARTS) if name in names)
    alone = trails(part, 1)[name][0]
    assert isinstance(alone, list), alone
    hashes = [line for line in alone if " " not in line]
    assert len(hashes) == STEPS
    assert len(set(hashes)) >= (4 if name in SKIPPING else STEPS), "nothing was trained in some step"
    for world in WORLDS:
        for rank, theirs in enumerate(trails(part, world)[name]):
            assert theirs == alone, f"rank {rank} of {world}"


def test_a_step_that_overflows_is_skipped():
    """The sample with an infinite loss comes once in each epoch; four of six steps are made."""
    (part,) = (number for number, names in enumerate(PARTS) if "overflow" in names)
    (steps_made,) = {line for line in trails(part, 1)["overflow"][0] if line.startswith("made")}
    assert steps_made == "made 4"


def test_none_is_the_reference():
    alone = on_world(1, [CASES["sgd"], (functools.partial(classify, strategy="none"),)])
    assert alone[0] == alone[1]


def test_the_test_can_see():
    """With the reduction that everybody uses, the number of ranks shows in the bits."""
    case = (functools.partial(classify, reduction="fast"),)
    (alone,), (of_four,) = on_world(1, [case]), on_world(4, [case])
    assert of_four == of_four[:1] * 4, "not even in step"
    assert of_four[0][-1] != alone[0][-1]
    assert of_four[0][-1] != trails(0, 1)["sgd"][0][-1]


def part_of_a_run(root, until):
    os.environ["LOCKSTEP_RESUME"] = "1"
    with Run(seed=3, checkpoint=root, clip_norm=1.0) as run:
        model = run.model(Net())
        optimizer = run.optimizer(adamw(model.parameters()))
        scheduler = run.scheduler(torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS))
        batches = run.loader(Images(), workers=0, **SIZES)

        def learn(batch):
            outputs = model(batch[0])
            run.measure(accuracy=outputs.argmax(1) == batch[1])
            run.step(F.cross_entropy(outputs, batch[1]))

        return trail(run, batches, learn, model, optimizer, scheduler, until=until)


def test_same_bits_on_a_world_that_changes(tmp_path):
    (alone,) = on_world(1, [(part_of_a_run, str(tmp_path / "whole"), None)])
    legs = [
        line
        for world, until in ((4, 2), (3, 3), (1, 5), (2, None))
        for line in on_world(world, [(part_of_a_run, str(tmp_path / "legs"), until)])[0][0]
    ]
    assert legs == alone[0]
