"""Buffers that a step of several micro-batches moves otherwise than one large batch are told, and no others."""

import contextlib
import io

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lockstep.run import Run
from worlds import on_world

X = torch.randn(24, 6, generator=torch.Generator().manual_seed(1))
Y = torch.arange(24) % 3
X[:, 0] = torch.arange(24)
X[:, 1] = 0  # as a pixel that is black in all pictures
X[:20, 2] = 0


class Memory(nn.Module):
    """A model whose forward pass, in training, does something with a buffer."""

    def __init__(self, **buffers):
        super().__init__()
        self.inner = nn.Linear(6, 4)
        self.out = nn.Linear(4, 3)
        for name, value in buffers.items():
            self.register_buffer(name, value)

    def forward(self, x, y):
        h = self.inner(x)
        if self.training:
            with torch.no_grad():
                self.learn(x, h, y)
        return self.out(h)


class Queue(Memory):
    """As MoCo's, with a place."""

    def __init__(self):
        super().__init__(queue=torch.randn(4, 48), place=torch.zeros(1, dtype=torch.long))

    def learn(self, x, h, y):
        place = int(self.place)
        self.queue[:, place : place + len(h)] = h.T
        self.place[0] = (place + len(h)) % 48


class Newest(Memory):
    def __init__(self):
        super().__init__(queue=torch.randn(48, 4))

    def learn(self, x, h, y):
        self.queue = torch.cat([h, self.queue])[:48]


class Bank(Memory):
    """A row for each sample, whose number is its first feature."""

    def __init__(self):
        super().__init__(bank=torch.randn(24, 4))

    def learn(self, x, h, y):
        self.bank[x[:, 0].long()] = h


class Seen(Memory):
    """A mean over all samples so far, by their number."""

    def __init__(self):
        super().__init__(total=torch.zeros(6), samples=torch.zeros(()))

    def learn(self, x, h, y):
        self.total += x.sum(0)
        self.samples += len(x)


class Used(Memory):
    """How often each of the outputs was the largest."""

    def __init__(self):
        super().__init__(used=torch.zeros(4))

    def learn(self, x, h, y):
        self.used += h.argmax(1).bincount(minlength=4)


class Running(Memory):
    def __init__(self):
        super().__init__(mean=torch.zeros(6), steps=torch.zeros(1, dtype=torch.long))

    def learn(self, x, h, y):
        self.mean.lerp_(x.mean(0), 0.1)
        self.steps += 1


class Codebook(Memory):
    """As of a vector-quantised autoencoder: counts and sums decay, also those of codes that no sample has."""

    def __init__(self):
        super().__init__(codes=torch.randn(5, 4), counts=torch.ones(5), sums=torch.randn(5, 4))

    def learn(self, x, h, y):
        own = F.one_hot(torch.cdist(h, self.codes).argmin(1), 5).float()
        self.counts.lerp_(own.sum(0), 0.1)
        self.sums.lerp_(own.T @ h, 0.1)
        self.codes.copy_(self.sums / self.counts[:, None])


class Centers(Memory):
    """A row of one moves by a part of its way, and the first rows of the other are the newest outputs."""

    def __init__(self):
        super().__init__(centers=torch.randn(24, 4), newest=torch.zeros(48, 4))

    def learn(self, x, h, y):
        self.centers[int(x[0, 0])].lerp_(h.mean(0), 0.1)
        self.newest[:4] = h


class Normalised(Memory):
    """By torch's own, which the data chooses among, beside a constant table."""

    def __init__(self):
        super().__init__(table=torch.arange(6.0))
        self.norms = nn.ModuleList([nn.BatchNorm1d(6), nn.BatchNorm1d(6, momentum=1.0)])

    def learn(self, x, h, y):
        self.norms[int(y[0]) % 2](x.relu() + self.table)


def lines_of(make):
    torch.manual_seed(4)
    said = io.StringIO()
    with contextlib.redirect_stderr(said), Run(on_nan="ignore") as run:
        model = run.model(make(), find_unused_parameters=True)
        run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        for _ in run.epochs(2):
            for x, y in run.train(run.loader((X, Y), global_batch=12, micro_batch=4)):
                run.step(F.cross_entropy(model(x, y), y))
    return [line for line in said.getvalue().splitlines() if " buffer " in line]


TOLD = {
    Queue: "the buffer place moved by 4,",
    Newest: "the rows of the buffer queue moved on by 4 samples",
    Bank: "each micro-batch of 4 samples changed 4 rows of its own of the buffer bank",
    Seen: "the buffer samples moved by 4,",
    Used: "the buffer used moved by 4,",
}


@pytest.mark.parametrize("world", [1, 2])
def test_what_one_large_batch_would_move_otherwise_is_told_once(world):
    for make, found in zip(TOLD, on_world(world, [(lines_of, make) for make in TOLD]), strict=True):
        (line,) = found[0]
        assert TOLD[make] in line


def test_statistics_are_left_alone():
    right = (Running, Codebook, Centers, Normalised)
    assert on_world(1, [(lines_of, make) for make in right]) == [[[]]] * len(right)
