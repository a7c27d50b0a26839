"""A training loop around a strategy, as `Run` has it, without data sets, files and devices."""

import contextlib
import copy
import os

import torch
from torch import nn
from torch.nn import functional as F

from lockstep.batch import BatchPlan, MicroBatchPosition
from lockstep.collectives import TensorShard, open_group, single_rank_group
from lockstep.strategies import (
    ParameterSet,
    StrategyContext,
    open_strategy,
)
from lockstep.testing import state_hash
from lockstep.world import World

MICRO_BATCHES = 4
SAMPLES = 3  # of each micro-batch


class Net(nn.Module):
    """With all that may move: BatchNorm, a count, a frozen parameter that follows another; and a table that stays."""

    def __init__(self, *, follows=True):
        super().__init__()
        self.follows = follows
        self.first, self.norm, self.second = nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 2)
        self.register_buffer("seen", torch.tensor(0))
        self.register_buffer("table", torch.tensor([0.1, 0.7]))
        self.teacher = nn.Parameter(torch.zeros(5), requires_grad=False)

    def forward(self, x):
        if self.training:
            self.seen += len(x)
            with torch.no_grad():
                self.teacher.lerp_(self.first.bias, 0.25 * self.follows)
        return self.second(torch.tanh(self.norm(self.first(x)))) * self.table


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.2, momentum=0.9)


def plain_sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.2)


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=0.05)


def batch(step, micro_batch):
    random = torch.Generator().manual_seed(100 * step + micro_batch)
    return torch.randn(SAMPLES, 3, generator=random), torch.randn(SAMPLES, 2, generator=random)


class Loop:
    """One rank's model, optimizer and strategy."""

    def __init__(self, group, word, make=sgd, seed=0, net=Net):
        self.group, self.said = group, []
        self.plan = BatchPlan(SAMPLES * MICRO_BATCHES, SAMPLES, group.size)
        terms = StrategyContext(group, self.plan.run, say=self.said.append)
        self.strategy = open_strategy(word, terms)
        torch.manual_seed(seed)
        self.net = net()
        self.model = self.strategy.setup_model(self.net, find_unused_parameters=False)
        self.optimizer = make(self.net.parameters())
        self.target = ParameterSet(tuple(p for p in self.net.parameters() if p.requires_grad), everything=True)
        self.norms = []
        self.done = 0
        self.strategy.resync()

    def step(self, micro_batches=MICRO_BATCHES, counts=None):
        """One step of so many micro-batches; ``counts``: items of each, which its loss is a mean over."""
        strategy, run = self.strategy, self.plan.run(self.group.rank, micro_batches)
        samples = SAMPLES * micro_batches
        turns = [MicroBatchPosition(m, micro_batches, m == run[-1], False, SAMPLES, samples) for m in run]
        for position in turns or [MicroBatchPosition(0, micro_batches, True, True, 0, samples)]:
            strategy.begin_micro_batch(position)
            inputs, outputs = batch(self.done, position.index)
            loss = F.mse_loss(self.model(inputs), outputs)
            items = SAMPLES if counts is None else counts[position.index]
            own = None if counts is None or not position.last else sum(counts[m] for m in run)
            total = None if own is None else strategy.begin_count(own)
            strategy.backward(loss, torch.tensor(items / position.step_samples), self.target, position)
            if position.last:
                if total is not None:
                    strategy.normalize_by_count(self.target, position.step_samples, total())
                self.norms.append(float(strategy.state_layout.norm(self.target.parameters)))
                strategy.before_optimizer_step(self.target)
                self.optimizer.step()
                self.optimizer.zero_grad()
            strategy.end_micro_batch(position)
        self.done += 1

    def steps(self, number):
        for _ in range(number):
            self.step()
        return self

    def save(self):
        """What a checkpoint would give back."""
        state_layout = self.strategy.state_layout
        tree = {"model": state_layout.model_state(self.net), "optimizer": state_layout.optimizer_state(self.optimizer)}
        return whole(tree | {"strategy": self.strategy.state_dict(), "done": self.done}, self.group)

    def load(self, tree, *, same_strategy=True):
        tree = copy.deepcopy(tree)  # optimizers keep what they are given
        self.strategy.state_layout.load_model(self.net, tree["model"])
        self.strategy.state_layout.load_optimizer(self.optimizer, tree["optimizer"])
        self.strategy.load_state_dict(tree["strategy"] if same_strategy else {})
        self.strategy.resync()
        self.done = tree["done"]
        return self

    def hash(self):
        return state_hash(self.net, self.optimizer)

    def parameters(self):
        return torch.cat([p.detach().reshape(-1) for p in self.target.parameters])


def whole(tree, group):
    """``tree`` with each part in its whole, in memory of its own; as a checkpoint would load it."""
    if isinstance(tree, dict):
        return {key: whole(value, group) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)(whole(value, group) for value in tree)
    if isinstance(tree, TensorShard):
        out = torch.empty(tree.shape, dtype=tree.dtype)
        for start, box in group.gather_objects((tree.start, tree.tensor), "boxes"):
            out[tuple(slice(a, a + n) for a, n in zip(start, box.shape, strict=True))] = box
        return out
    if isinstance(tree, torch.Tensor):
        return group.broadcast_object(tree.detach().clone(), "a tensor")  # what all hold alike, the leader writes
    return tree


def unlike(loop):
    """How far the ranks' parameters lie apart: the greatest difference of any element."""
    every = loop.group.gather_objects(loop.parameters(), "parameters")
    return max(float((a - b).abs().max()) for a in every for b in every)


@contextlib.contextmanager
def met(nodes=None):
    """The ranks' group; on so many nodes, as if the ranks were spread over them."""
    world = World.from_env(os.environ)
    if world.size == 1:
        yield single_rank_group()
        return
    if nodes:
        each = world.size // nodes
        place = (world.rank % each, each, world.rank // each, nodes)
        world = World(world.rank, world.size, *place, address=world.address, port=world.port)
    group = open_group(world, torch.device("cpu"), 30)
    try:
        yield group
        group.barrier("end")
    finally:
        group.close()


def ends(word, steps, nodes=None):
    """A hash of all that this rank holds at the end; on so many nodes, sums travel over sockets."""
    with met(nodes) as group:
        loop = Loop(group, word).steps(steps)
        ended = loop.hash()
        group.barrier("all are through")  # none may hang up before
        loop.strategy.close()
        return ended
