"""The shapes that training loops have, each as a function that any rank can call, and the table of docs/loop_shapes.md.

    python tests/harness/loop_shapes.py            run each on 1, 2 and 3 ranks, and killed and resumed; print the table
    python tests/harness/loop_shapes.py --write    the same, and put the table into docs/loop_shapes.md
    python tests/harness/loop_shapes.py NAME...    only these; what each rank returned or raised

A shape returns what must be equal on all ranks and for any number of them. Where it is refused, the error is one of
Lockstep's own, the same on every number of ranks.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, update_bn
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, TensorDataset, WeightedRandomSampler

import lockstep
from lockstep.checkpoint import list_checkpoints
from lockstep.errors import LockstepError, PeerLost
from lockstep.heartbeat import progress_marker
from lockstep.launch_contract import RESUME
from lockstep.testing import run_each, state_hash
from waiting import wait_until
from worlds import on_world

PAGE = Path(__file__).parents[2] / "docs" / "loop_shapes.md"
WORLDS = (1, 2, 3)
SIZES = {"global_batch": 12, "micro_batch": 3}

_RANDOM = torch.Generator().manual_seed(0)
X = torch.randn(48, 4, generator=_RANDOM)
Y = X.sum(1, keepdim=True)
DATA = TensorDataset(X, Y)


@dataclass(frozen=True, slots=True)
class Shape:
    """A loop of a certain shape."""

    words: str  #: what it is, for the table
    loop: Callable[[], Any]
    group: str
    may_be_killed: bool  #: whether it saves, so that it can be killed and resumed

    @property
    def name(self) -> str:
        """As it is called on the command line."""
        return self.loop.__name__


SHAPES: dict[str, Shape] = {}
_GROUP = ""


def group(words: str) -> None:
    """The shapes that follow belong together."""
    global _GROUP  # noqa: PLW0603 - the page is written from top to bottom, and so is this module
    _GROUP = words


def shape(words: str, *, may_be_killed: bool = True) -> Callable[[Callable[[], Any]], Callable[[], Any]]:
    """Put a loop into the table."""

    def known(loop: Callable[[], Any]) -> Callable[[], Any]:
        SHAPES[loop.__name__] = Shape(words, loop, _GROUP, may_be_killed)
        return loop

    return known


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


def prepared(run: lockstep.Run, **more: Any) -> tuple[nn.Module, torch.optim.Optimizer, DataLoader[Any]]:
    """A model, its optimizer and a loader, as most shapes have them."""
    model = run.model(net())
    optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    return model, optimizer, run.loader(DATA, **{**SIZES, **more})


def squares(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (model(x) - y).square().mean(1)


def trained(run: lockstep.Run, model: nn.Module, batches: DataLoader[Any], epochs: int = 2) -> str:
    """The loop itself, for shapes whose point is elsewhere."""
    for _ in run.epochs(epochs):
        for x, y in run.train(batches):
            run.step(F.mse_loss(model(x), y))
    return state_hash(model)


# ---- epochs and steps ------------------------------------------------------------------------------------------------

group("Epochs and steps")


@shape("`for epoch in run.epochs(n)` around `for x, y in run.train(batches)`")
def epochs() -> Any:
    with lockstep.Run() as run:
        model, _, batches = prepared(run)
        return trained(run, model, batches)


@shape("a limit of steps: `break` from both loops")
def limit_of_steps_by_break() -> Any:
    with lockstep.Run() as run:
        model, _, batches = prepared(run)
        for _ in run.epochs(1000):
            for x, y in run.train(batches):
                run.step(F.mse_loss(model(x), y))
                if run.progress.step >= 6:
                    break
            if run.progress.step >= 6:
                break
        return state_hash(model), run.progress.step


@shape("`for step in run.steps(total, every=n)`, which goes through the data again and again")
def steps() -> Any:
    with lockstep.Run() as run:
        model, _, batches = prepared(run)
        seen = []
        for step in run.steps(10, every=3):
            for x, y in run.train(batches):
                run.step(F.mse_loss(model(x), y))
            seen.append((step, run.progress.step))
        return state_hash(model), seen[-1]


@shape("steps over an endless stream")
def steps_of_a_stream() -> Any:
    with lockstep.Run() as run:
        model = run.model(net())
        run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        batches = run.loader(Endless(), **SIZES)
        for _ in run.steps(6):
            for x, y in run.train(batches):
                run.step(F.mse_loss(model(x), y))
        return state_hash(model)


class Endless(IterableDataset):
    def __iter__(self) -> Iterator[Any]:
        number = 0
        while True:
            yield DATA[number % 48]
            number += 1


@shape("an endless stream, left by `break`")
def endless_stream() -> Any:
    with lockstep.Run() as run:
        model = run.model(net())
        run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        batches = run.loader(Endless(), **SIZES)
        for _ in run.epochs(1):
            for x, y in run.train(batches):
                run.step(F.mse_loss(model(x), y))
                if run.progress.step >= 5:
                    break
        return state_hash(model), run.progress.step


@shape("`for epoch in range(n)` instead of `run.epochs(n)`")
def range_for_epochs() -> Any:
    with lockstep.Run() as run:
        model, _, batches = prepared(run)
        for _ in range(2):
            for x, y in run.train(batches):
                run.step(F.mse_loss(model(x), y))


@shape("`next(iterator)` of micro-batches, so many times")
def next_of_an_iterator() -> Any:
    with lockstep.Run() as run:
        model, _, batches = prepared(run)

        def forever() -> Iterator[Any]:
            while True:
                yield from run.train(batches)

        micro_batches = forever()
        for _ in range(12):
            x, y = next(micro_batches)
            run.step(F.mse_loss(model(x), y))


@shape("leaving `run.train` by `break`, evaluating, and taking it up again in the same epoch")
def train_taken_up_again() -> Any:
    with lockstep.Run() as run:
        model, _, batches = prepared(run)
        held_out = run.loader(DATA, shuffle=False, **SIZES)
        for _ in run.epochs(2):
            while run.progress.epoch_step < len(batches):
                for x, y in run.train(batches):
                    if run.step(F.mse_loss(model(x), y)) and run.progress.step % 2 == 0:
                        break
                for x, y in run.evaluate(held_out):
                    run.measure(error=squares(model, x, y))
        return state_hash(model), run.metrics["error"]


@shape("evaluating every n steps, in the body of the training loop")
def evaluation_in_the_body() -> Any:
    with lockstep.Run() as run:
        model, _, batches = prepared(run)
        held_out = run.loader(DATA, shuffle=False, **SIZES)
        for _ in run.epochs(2):
            for x, y in run.train(batches):
                if run.step(F.mse_loss(model(x), y)) and run.progress.step % 3 == 0:
                    for a, b in run.evaluate(held_out):
                        run.measure(error=squares(model, a, b))
        return state_hash(model), run.metrics["error"]


@shape("two passes over two data sets in one epoch")
def two_passes_in_an_epoch() -> Any:
    with lockstep.Run() as run:
        model, _, batches = prepared(run)
        more = run.loader(TensorDataset(X[:24], -Y[:24]), **SIZES)
        for _ in run.epochs(2):
            for x, y in run.train(batches):
                run.step(F.mse_loss(model(x), y))
            for x, y in run.train(more):
                run.step(F.l1_loss(model(x), y))
        return state_hash(model)


@shape("two data sets side by side: `run.train(a, b)`")
def two_loaders_zipped() -> Any:
    with lockstep.Run() as run:
        model, _, batches = prepared(run)
        more = run.loader(TensorDataset(-X, Y), **SIZES)
        for _ in run.epochs(2):
            for (x, y), (u, _) in run.train(batches, more):
                run.step(F.mse_loss(model(x), y) + model(u).square().mean())
        return state_hash(model)


@shape("`zip(run.train(a), run.train(b))`")
def zip_of_two_passes() -> Any:
    with lockstep.Run() as run:
        model, _, batches = prepared(run)
        more = run.loader(DATA, **SIZES)
        for _ in run.epochs(1):
            for (x, y), (u, v) in zip(run.train(batches), run.train(more), strict=True):
                run.step(F.mse_loss(model(x), y) + F.mse_loss(model(u), v))


@shape("another batch size from some epoch on")
def batch_size_that_grows() -> Any:
    with lockstep.Run() as run:
        model, _, batches = prepared(run)
        larger = run.loader(DATA, global_batch=24, micro_batch=6)
        for epoch in run.epochs(2):
            for x, y in run.train(larger if epoch else batches):
                run.step(F.mse_loss(model(x), y))
        return state_hash(model), run.progress.step


@shape("early stopping by a value in `run.metrics`")
def early_stopping_by_hand() -> Any:
    with lockstep.Run() as run:
        model, _, batches = prepared(run)
        for _ in run.epochs(50):
            for x, y in run.train(batches):
                run.step(F.mse_loss(model(x), y))
            if run.metrics["loss"] < 0.5:
                break
        return state_hash(model), run.progress.epoch


@shape("`len(loader)` for a schedule, `len(run.train(...))` for a progress bar")
def lengths() -> Any:
    with lockstep.Run() as run:
        model, optimizer, batches = prepared(run)
        run.scheduler(torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, epochs=2, steps_per_epoch=len(batches)))
        for _ in run.epochs(2):
            micro_batches = run.train(batches)
            assert len(micro_batches) * run.world_size >= len(batches)
            for x, y in micro_batches:
                run.step(F.mse_loss(model(x), y))
        return state_hash(model), len(batches), optimizer.param_groups[0]["lr"]


# ---- losses ----------------------------------------------------------------------------------------------------------

group("Losses, optimizers, schedules")


@shape("a loss of several terms")
def several_terms() -> Any:
    with lockstep.Run() as run:
        model, _, batches = prepared(run)
        for _ in run.epochs(2):
            for x, y in run.train(batches):
                fit = F.mse_loss(model(x), y)
                size = sum(p.square().sum() for p in model.parameters())
                run.measure(fit=fit.detach(), size=size.detach())
                run.step(fit + 0.01 * size)
        return state_hash(model), run.metrics


@shape("two `run.step` for the same parameters")
def two_steps_for_the_same_parameters() -> Any:
    with lockstep.Run() as run:
        model, _, batches = prepared(run)
        for _ in run.epochs(1):
            for x, y in run.train(batches):
                run.step(F.mse_loss(model(x), y))
                run.step(model(x).square().mean())


@shape("two optimizers, as for a GAN")
def two_optimizers() -> Any:
    with lockstep.Run() as run:
        writer, judge = run.model(nn.Linear(4, 4)), run.model(net())
        first = run.optimizer(torch.optim.SGD(writer.parameters(), lr=0.1))
        second = run.optimizer(torch.optim.SGD(judge.parameters(), lr=0.1))
        batches = run.loader(DATA, **SIZES)
        for _ in run.epochs(2):
            for x, _ in run.train(batches):
                run.step(judge(x).mean() - judge(writer(x).detach()).mean(), optimizer=second)
                run.step(judge(writer(x)).mean(), optimizer=first)
        return state_hash(writer, judge)


@shape("a gradient penalty: double backward")
def gradient_penalty() -> Any:
    with lockstep.Run() as run:
        model, _, batches = prepared(run)
        for _ in run.epochs(1):
            for x, y in run.train(batches):
                outputs = model(x.requires_grad_())
                (slope,) = torch.autograd.grad(outputs.sum(), x, create_graph=True)
                run.step(F.mse_loss(outputs, y) + 0.1 * slope.square().sum(1).mean())
        return state_hash(model)


@shape("a contrastive loss within each micro-batch")
def contrastive_within_a_micro_batch() -> Any:
    with lockstep.Run() as run:
        model = run.model(nn.Linear(4, 4))
        run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        batches = run.loader(DATA, **SIZES)
        for _ in run.epochs(1):
            for x, _ in run.train(batches):
                z = F.normalize(model(x), dim=1)
                run.step(F.cross_entropy(z @ z.T, torch.arange(len(x))))
        return state_hash(model)


@shape("padding, and a mean over tokens: `run.step(loss, count=tokens)`")
def count_of_tokens() -> Any:
    def pad(rows: list[torch.Tensor]) -> torch.Tensor:
        return nn.utils.rnn.pad_sequence(rows, batch_first=True)

    with lockstep.Run() as run:
        model = run.model(nn.Embedding(8, 1))
        run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        batches = run.loader([torch.arange(1, 2 + i % 5) for i in range(48)], collate_fn=pad, **SIZES)
        for _ in run.epochs(2):
            for words in run.train(batches):
                tokens = (words > 0).sum()
                run.step((model(words).squeeze(2).square() * (words > 0)).sum() / tokens, count=tokens)
        return state_hash(model)


@shape("`loss.backward()`, `optimizer.step()` and `zero_grad()` by hand")
def all_by_hand() -> Any:
    with lockstep.Run() as run:
        model, optimizer, batches = prepared(run)
        for _ in run.epochs(1):
            for x, y in run.train(batches):
                F.mse_loss(model(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()


@shape("`loss.backward()` and then `run.step(loss)`")
def backward_by_hand_too() -> Any:
    with lockstep.Run() as run:
        model, _, batches = prepared(run)
        for _ in run.epochs(1):
            for x, y in run.train(batches):
                loss = F.mse_loss(model(x), y)
                loss.backward(retain_graph=True)
                run.step(loss)


@shape("`loss.backward()` for a gradient by the input, as for adversarial samples")
def backward_for_the_input() -> Any:
    with lockstep.Run() as run:
        model, _, batches = prepared(run)
        for x, y in run.train(batches):
            worse = x.clone().requires_grad_()
            F.mse_loss(model(worse), y).backward()
            run.step(F.mse_loss(model(x + 0.1 * worse.grad.sign()), y))
        return state_hash(model)


@shape("`torch.autograd.grad(loss, x)` for a gradient by the input")
def gradient_by_the_input() -> Any:
    with lockstep.Run() as run:
        model, _, batches = prepared(run)
        for _ in run.epochs(2):
            for x, y in run.train(batches):
                worse = x.clone().requires_grad_()
                (gradient,) = torch.autograd.grad(F.mse_loss(model(worse), y), worse)
                run.step(F.mse_loss(model(x + 0.1 * gradient.sign()), y))
        return state_hash(model)


@shape("`run.step(loss)` and then `optimizer.step()`")
def optimizer_step_by_hand_too() -> Any:
    with lockstep.Run() as run:
        model, optimizer, batches = prepared(run)
        for _ in run.epochs(1):
            for x, y in run.train(batches):
                run.step(F.mse_loss(model(x), y))
                optimizer.step()


@shape("`continue` before `run.step`")
def a_micro_batch_without_a_step() -> Any:
    with lockstep.Run() as run:
        model, _, batches = prepared(run)
        for _ in run.epochs(1):
            for index, (x, y) in enumerate(run.train(batches)):
                if index == 1:
                    continue
                run.step(F.mse_loss(model(x), y))


@shape("clipping by hand, between `run.backward` and `run.update`")
def clipping_by_hand() -> Any:
    with lockstep.Run() as run:
        model, _, batches = prepared(run)
        for _ in run.epochs(2):
            for x, y in run.train(batches):
                run.backward(F.mse_loss(model(x), y))
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                run.update()
        return state_hash(model)


@shape("clipping by hand after `run.step`")
def clipping_after_the_step() -> Any:
    with lockstep.Run() as run:
        model, _, batches = prepared(run)
        for _ in run.epochs(1):
            for x, y in run.train(batches):
                run.step(F.mse_loss(model(x), y))
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        return state_hash(model)


@shape("a `GradScaler` of one's own")
def own_grad_scaler() -> Any:
    with lockstep.Run() as run:
        model, _, batches = prepared(run)
        scaler = torch.amp.GradScaler("cpu")
        for _ in run.epochs(1):
            for x, y in run.train(batches):
                run.step(scaler.scale(F.mse_loss(model(x), y)))
                scaler.update()


@shape("L-BFGS with `run.step(loss)`")
def lbfgs_without_a_function() -> Any:
    with lockstep.Run() as run:
        model = run.model(net())
        run.optimizer(torch.optim.LBFGS(model.parameters()))
        return trained(run, model, run.loader(DATA, **SIZES), 1)


@shape("L-BFGS with `run.step(function, x, y)`, which is evaluated as often as it asks")
def lbfgs() -> Any:
    with lockstep.Run() as run:
        model = run.model(net())
        run.optimizer(torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4))
        batches = run.loader(DATA, **SIZES)
        for _ in run.epochs(2):
            for x, y in run.train(batches):
                run.step(F.mse_loss, x, y)
        return state_hash(model)


@shape("L-BFGS with a closure of one's own")
def lbfgs_by_hand() -> Any:
    with lockstep.Run() as run:
        model = run.model(net())
        optimizer = run.optimizer(torch.optim.LBFGS(model.parameters()))
        for _ in run.epochs(1):
            for x, y in run.train(run.loader(DATA, **SIZES)):

                def closure(x: torch.Tensor = x, y: torch.Tensor = y) -> torch.Tensor:
                    optimizer.zero_grad()
                    loss = F.mse_loss(model(x), y)
                    loss.backward()
                    return loss

                optimizer.step(closure)


@shape("SAM by hand: a second pass from moved parameters")
def sam_by_hand() -> Any:
    with lockstep.Run() as run:
        model, _, batches = prepared(run)
        for _ in run.epochs(1):
            for x, y in run.train(batches):
                run.backward(F.mse_loss(model(x), y))
                with torch.no_grad():
                    for p in model.parameters():
                        if p.grad is not None:
                            p.add_(p.grad, alpha=0.01)
                run.step(F.mse_loss(model(x), y))


class Around(torch.optim.Optimizer):
    """Steps by another optimizer, as many implementations of SAM do; with ``shares``, both have one state."""

    def __init__(self, parameters: Any, shares: bool = False) -> None:
        super().__init__(parameters, {})
        self.inner = torch.optim.SGD(self.param_groups, lr=0.1, momentum=0.9)
        self.shares = shares
        self._share()

    def step(self, closure: Any = None) -> None:
        self.inner.step()

    def load_state_dict(self, state: Any) -> None:
        super().load_state_dict(state)
        self.inner.param_groups = self.param_groups
        self._share()

    def _share(self) -> None:
        if self.shares:
            self.inner.state = self.state


@shape("an optimizer around another one, whose state is in no `state_dict()`")
def optimizer_with_a_hidden_state() -> Any:
    with lockstep.Run() as run:
        model = run.model(net())
        run.optimizer(Around(model.parameters()))


@shape("an optimizer around another one, both with one state")
def optimizer_around_another() -> Any:
    with lockstep.Run() as run:
        model = run.model(net())
        run.optimizer(Around(model.parameters(), shares=True))
        return trained(run, model, run.loader(DATA, **SIZES))


@shape("a parameter outside of a model, in the optimizer")
def parameter_outside_of_models() -> Any:
    with lockstep.Run() as run:
        model = run.model(net())
        run.optimizer(torch.optim.SGD([*model.parameters(), nn.Parameter(torch.ones(1))], lr=0.1))


@shape("a parameter of its own: `run.model(nn.ParameterList([temperature]))`")
def parameter_of_its_own() -> Any:
    with lockstep.Run() as run:
        model, temperature = run.model(net()), nn.Parameter(torch.ones(1))
        run.model(nn.ParameterList([temperature]))
        run.optimizer(torch.optim.SGD([*model.parameters(), temperature], lr=0.1))
        batches = run.loader(DATA, **SIZES)
        for _ in run.epochs(2):
            for x, y in run.train(batches):
                run.step(F.mse_loss(model(x) * temperature, y))
        return state_hash(model), temperature.item()


@shape("a learning rate by hand, before each step")
def learning_rate_by_hand() -> Any:
    with lockstep.Run() as run:
        model, optimizer, batches = prepared(run)
        for _ in run.epochs(2):
            for x, y in run.train(batches):
                for parameters in optimizer.param_groups:
                    parameters["lr"] = 0.1 / (1 + run.progress.step)
                run.step(F.mse_loss(model(x), y))
        return state_hash(model), optimizer.param_groups[0]["lr"]


@shape("a scheduler that steps once an epoch, by hand, and is kept")
def scheduler_by_epoch() -> Any:
    with lockstep.Run() as run:
        model, optimizer, batches = prepared(run)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        run.keep(scheduler=scheduler)
        for _ in run.epochs(2):
            for x, y in run.train(batches):
                run.step(F.mse_loss(model(x), y))
            scheduler.step()
        return state_hash(model), optimizer.param_groups[0]["lr"]


@shape("`ReduceLROnPlateau` given to `run.scheduler`")
def plateau_as_a_scheduler() -> Any:
    with lockstep.Run() as run:
        _, optimizer, _ = prepared(run)
        run.scheduler(torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer))


@shape("`ReduceLROnPlateau` stepped by hand with a metric, and kept")
def plateau() -> Any:
    with lockstep.Run() as run:
        model, optimizer, batches = prepared(run)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.9)
        run.keep(scheduler=scheduler)
        for _ in run.epochs(3):
            for x, y in run.train(batches):
                run.step(F.mse_loss(model(x), y))
            scheduler.step(run.metrics["loss"])
        return state_hash(model), optimizer.param_groups[0]["lr"]


@shape("a loss that is not a number")
def loss_that_is_nan() -> Any:
    with lockstep.Run() as run:
        model, _, batches = prepared(run)
        for _ in run.epochs(1):
            for x, y in run.train(batches):
                run.step(F.mse_loss(model(x), y) * float("nan"))


@shape("no optimizer at all")
def no_optimizer() -> Any:
    with lockstep.Run() as run:
        model = run.model(net())
        return trained(run, model, run.loader(DATA, **SIZES), 1)


# ---- what is kept ----------------------------------------------------------------------------------------------------

group("Models, averages, states")


@shape("an average of weights: `if run.step(loss): average.update_parameters(model)`")
def average_of_weights() -> Any:
    with lockstep.Run() as run:
        model, _, batches = prepared(run)
        average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        run.keep(average=average)
        for _ in run.epochs(2):
            for x, y in run.train(batches):
                if run.step(F.mse_loss(model(x), y)):
                    average.update_parameters(model)
        return state_hash(model, average)


class Codebook(nn.Module):
    """Moves its codes in the forward pass: as a parameter that it replaces, or as a buffer."""

    def __init__(self, *, buffer: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 1)
        if buffer:
            self.register_buffer("codes", torch.zeros(4))
        else:
            self.codes = nn.Parameter(torch.zeros(4), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        moved = (0.9 * self.codes + 0.1 * x.mean(0)).detach()
        self.codes = nn.Parameter(moved, requires_grad=False) if isinstance(self.codes, nn.Parameter) else moved
        return self.linear(x + self.codes)


@shape("a parameter that the forward pass replaces, as in a codebook")
def parameter_replaced() -> Any:
    with lockstep.Run() as run:
        model = run.model(Codebook(buffer=False))
        run.optimizer(torch.optim.SGD(model.linear.parameters(), lr=0.1))
        return trained(run, model, run.loader(DATA, **SIZES))


@shape("a buffer that the forward pass moves, as in a codebook")
def buffer_moved() -> Any:
    with lockstep.Run() as run:
        model = run.model(Codebook(buffer=True))
        run.optimizer(torch.optim.SGD(model.linear.parameters(), lr=0.1))
        return trained(run, model, run.loader(DATA, **SIZES))


class Routed(nn.Module):
    """Between two experts; a bias, by hand, evens out how many samples each of them gets."""

    def __init__(self, *, buffer: bool) -> None:
        super().__init__()
        self.gate, self.first, self.second = nn.Linear(4, 2), nn.Linear(4, 1), nn.Linear(4, 1)
        if buffer:
            self.register_buffer("bias", torch.zeros(2))
        else:
            self.bias = nn.Parameter(torch.zeros(2), requires_grad=False)
        self.register_buffer("share", torch.zeros(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = self.gate(x).softmax(1)
        to_first = (scores + self.bias).argmax(1, keepdim=True) == 0
        self.share.copy_(torch.cat([to_first, ~to_first], 1).float().mean(0))
        return torch.where(to_first, self.first(x) * scores[:, :1], self.second(x) * scores[:, 1:])

    def balance(self) -> None:
        with torch.no_grad():
            self.bias += 0.05 * torch.sign(0.5 - self.share)


def balanced(*, buffer: bool) -> Any:
    with lockstep.Run() as run:
        model = run.model(Routed(buffer=buffer))
        run.optimizer(torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1))
        batches = run.loader(DATA, **SIZES)
        for _ in run.epochs(2):
            for x, y in run.train(batches):
                if run.step(F.mse_loss(model(x), y)):
                    model.balance()
        return state_hash(model), model.bias.tolist()


@shape("a buffer that the script sets once a step")
def buffer_set_by_hand() -> Any:
    return balanced(buffer=True)


@shape("a parameter without a gradient that the script sets once a step, as a codebook or a bias of experts")
def parameter_set_by_hand() -> Any:
    return balanced(buffer=False)


@shape("a memory of keys: `run.gather` where `run.step` returns True")
def memory_of_keys() -> Any:
    with lockstep.Run() as run:
        model, _, batches = prepared(run)
        memory, keys = torch.zeros(24, 1), []
        run.keep(memory=memory)
        for _ in run.epochs(2):
            for x, y in run.train(batches):
                found = model(x)
                keys.append(found.detach())
                if run.step(F.mse_loss(found - memory.mean(), y)):
                    new = torch.cat([key for part in run.gather(keys) for key in part])
                    memory.copy_(torch.cat([memory, new])[-len(memory) :])
                    keys.clear()
        return state_hash(model), memory.sum().item()


@shape("a hidden state carried from step to step: `run.carry`")
def hidden_state() -> Any:
    data = torch.randn(40, 6, 4, generator=torch.Generator().manual_seed(0))
    with lockstep.Run() as run:
        model = run.model(nn.RNN(4, 4))
        run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        batches = run.loader(TensorDataset(data), shuffle=False, global_batch=10, micro_batch=2)
        for _ in run.epochs(2):
            for (x,) in run.train(batches):
                outputs, hidden = model(x.transpose(0, 1), run.carry.get("hidden"))
                run.carry["hidden"] = hidden.detach()
                run.step(outputs.square().mean())
        return state_hash(model)


@shape("a layer that is frozen, and learns from some epoch on")
def unfreezing() -> Any:
    with lockstep.Run() as run:
        model, _, batches = prepared(run)
        for epoch in run.epochs(2):
            for p in model.parameters():
                p.requires_grad_(epoch == 1 or p.ndim == 1)
            for x, y in run.train(batches):
                run.step(F.mse_loss(model(x), y))
        return state_hash(model)


@shape("`optimizer.add_param_group` from some epoch on")
def parameters_added_later() -> Any:
    with lockstep.Run() as run:
        model = net()
        model[0].requires_grad_(False)
        model = run.model(model)
        optimizer = run.optimizer(torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1))
        batches = run.loader(DATA, **SIZES)
        for epoch in run.epochs(2):
            if epoch == 1:
                model[0].requires_grad_(True)
                optimizer.add_param_group({"params": list(model[0].parameters())})
            for x, y in run.train(batches):
                run.step(F.mse_loss(model(x), y))
        return state_hash(model)


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.outer = nn.Linear(4, 1)

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x).tanh()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.outer(self.encode(x))


@shape("methods of the model other than `forward`")
def methods_of_the_model() -> Any:
    with lockstep.Run() as run:
        model = run.model(Decoder())
        run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        for _ in run.epochs(2):
            for x, y in run.train(run.loader(DATA, **SIZES)):
                hidden = model.encode(x)
                run.step(F.mse_loss(model.outer(hidden), y))
        return state_hash(model), type(model).__name__, sorted(model.state_dict())


@shape("a model of `transformers`, and its own loss")
def transformers_model() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    words = torch.arange(48)[:, None].add(torch.arange(8)) % 32
    with lockstep.Run() as run:
        shape_of_it = GPT2Config(vocab_size=32, n_embd=8, n_layer=1, n_head=2, n_positions=8)
        model = run.model(GPT2LMHeadModel(shape_of_it))
        run.optimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))
        for _ in run.epochs(1):
            for (w,) in run.train(run.loader(TensorDataset(words), **SIZES)):
                run.step(model(input_ids=w, labels=w).loss)
        return state_hash(model), hasattr(model, "generate"), hasattr(model, "save_pretrained")


# ---- data ------------------------------------------------------------------------------------------------------------

group("Data")


class Named(Dataset):
    def __len__(self) -> int:
        return 48

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"x": X[index], "y": Y[index], "name": str(index)}


@shape("batches that are dicts, with strings in them")
def dicts() -> Any:
    with lockstep.Run() as run:
        model = run.model(net())
        run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        for _ in run.epochs(2):
            for batch in run.train(run.loader(Named(), **SIZES)):
                run.step(F.mse_loss(model(batch["x"]), batch["y"]))
        return state_hash(model)


class Windows(Dataset):
    """A window at a random place, as language models are often trained."""

    def __len__(self) -> int:
        return 20_000_000

    def __getitem__(self, index: int) -> torch.Tensor:
        start = int(torch.randint(990, ()))
        return torch.arange(start, start + 8) % 17


@shape("random windows of a text; a data set of 20 million samples")
def random_windows() -> Any:
    with lockstep.Run() as run:
        model = run.model(nn.Sequential(nn.Embedding(17, 8), nn.Linear(8, 17)))
        run.optimizer(torch.optim.AdamW(model.parameters()))
        for _ in run.epochs(1):
            for words in run.train(run.loader(Windows(), shuffle=False, **SIZES)):
                run.step(F.cross_entropy(model(words[:, :-1]).flatten(0, 1), words[:, 1:].flatten()))
                if run.progress.step >= 4:
                    break
        return state_hash(model)


@shape("`sampler=WeightedRandomSampler(...)`")
def weighted_sampler() -> Any:
    with lockstep.Run() as run:
        model, _, batches = prepared(run, sampler=WeightedRandomSampler(torch.arange(48.0) + 1, 48))
        return trained(run, model, batches)


@shape("`batch_sampler=`, whose batches differ in size")
def batch_sampler() -> Any:
    batches_of = [list(range(12)), list(range(12, 32)), list(range(32, 36)), list(range(36, 48))]
    with lockstep.Run() as run:
        model = run.model(net())
        run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        return trained(run, model, run.loader(DATA, batch_sampler=batches_of, micro_batch=3))


@shape("`batch_sampler=BatchSampler(...)` beside `global_batch=`")
def batch_sampler_and_size() -> Any:
    with lockstep.Run() as run:
        prepared(run, batch_sampler=BatchSampler(range(48), 12, False))


@shape("`order=`, a function of the epoch and a generator")
def order() -> Any:
    def easy_first(epoch: int, random: torch.Generator) -> torch.Tensor:
        return torch.randperm(24 * (epoch + 1), generator=random)

    with lockstep.Run() as run:
        model, _, batches = prepared(run, order=easy_first)
        return trained(run, model, batches)


class Weighted(IterableDataset):
    def __iter__(self) -> Iterator[Any]:
        for index in WeightedRandomSampler(torch.arange(48.0) + 1, 48):
            yield DATA[index]


@shape("a replay buffer: `order=` that depends on what is kept, and `run.steps(n, every=1)`")
def replay_buffer() -> Any:
    with lockstep.Run() as run:
        model = run.model(net())
        run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        states, filled = torch.zeros(64, 4), torch.zeros((), dtype=torch.long)
        run.keep(states=states, filled=filled)

        def any_so_far(epoch: int, generator: torch.Generator) -> torch.Tensor:
            return torch.randint(max(1, int(filled)), (12,), generator=generator)

        batches = run.loader((states,), order=any_so_far, **SIZES)
        for _ in run.steps(8, every=1):
            states[filled : filled + 8] = torch.randn(8, 4) + 0.1 * model(torch.ones(1, 4)).item()
            filled += 8
            for (state,) in run.train(batches):
                run.step((model(state) - state.sum(1, keepdim=True)).square().mean())
        return state_hash(model), states.sum().item()


@shape("labels from predictions: `run.gather` after `run.evaluate`")
def labels_from_predictions() -> Any:
    with lockstep.Run() as run:
        model, _, batches = prepared(run)
        labels = torch.zeros(48, 1)
        run.keep(labels=labels)
        relabelled, all_of_it = run.loader((X, labels), **SIZES), run.loader((X,), global_batch=12, shuffle=False)
        for _ in run.epochs(2):
            for x, y in run.train(batches):
                run.step(F.mse_loss(model(x), y))
            mine = [model(x) for (x,) in run.evaluate(all_of_it)]
            labels.copy_(torch.cat([found for part in run.gather(mine) for found in part]))
            for x, y in run.train(relabelled):
                run.step(F.mse_loss(model(x), y))
        return state_hash(model)


@shape("weighted draws in an `IterableDataset`")
def weighted_stream() -> Any:
    with lockstep.Run() as run:
        model = run.model(net())
        run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        return trained(run, model, run.loader(Weighted(), **SIZES))


@shape("a data set of `datasets`")
def datasets_map() -> Any:
    import datasets

    with lockstep.Run() as run:
        model = run.model(net())
        run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        data = datasets.Dataset.from_dict({"x": X.tolist(), "y": Y.tolist()}).with_format("torch")
        for _ in run.epochs(1):
            for batch in run.train(run.loader(data, **SIZES)):
                run.step(F.mse_loss(model(batch["x"]), batch["y"]))
        return state_hash(model)


@shape("a shuffled stream of `datasets`")
def datasets_stream() -> Any:
    import datasets

    with lockstep.Run() as run:
        model = run.model(net())
        run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        data = datasets.Dataset.from_dict({"x": X.tolist(), "y": Y.tolist()}).to_iterable_dataset()
        batches = run.loader(data.shuffle(seed=1, buffer_size=20).with_format("torch"), **SIZES)
        for _ in run.epochs(2):
            for batch in run.train(batches):
                run.step(F.mse_loss(model(batch["x"]), batch["y"]))
        return state_hash(model)


@shape("a `DataLoader` given to `run.train`")
def own_data_loader() -> Any:
    with lockstep.Run() as run:
        model, _, _ = prepared(run)
        for _ in run.epochs(1):
            for x, y in run.train(DataLoader(DATA, 12)):
                run.step(F.mse_loss(model(x), y))


@shape("a second loader beside `run.train`: `zip(run.train(a), b)`", may_be_killed=False)
def zip_with_a_loader() -> Any:
    with lockstep.Run() as run:
        model, _, batches = prepared(run)
        more = run.loader(DATA, **SIZES)
        for _ in run.epochs(1):
            for (x, y), (u, v) in zip(run.train(batches), more, strict=False):
                run.step(F.mse_loss(model(x), y) + F.mse_loss(model(u), v))
        return state_hash(model)


# ---- evaluation ------------------------------------------------------------------------------------------------------

group("Evaluation")


@shape("evaluation only", may_be_killed=False)
def evaluation_only() -> Any:
    with lockstep.Run() as run:
        model = run.model(net())
        for x, y in run.evaluate(run.loader(DATA, shuffle=False, **SIZES)):
            run.measure(error=squares(model, x, y))
        return run.metrics


@shape("an evaluation of fewer samples than ranks")
def small_evaluation() -> Any:
    with lockstep.Run() as run:
        model, _, batches = prepared(run)
        held_out = run.loader(TensorDataset(X[:2], Y[:2]), shuffle=False, global_batch=2, micro_batch=2)
        for _ in run.epochs(1):
            for x, y in run.train(batches):
                run.step(F.mse_loss(model(x), y))
            for x, y in run.evaluate(held_out):
                run.measure(error=squares(model, x, y))
        return state_hash(model), run.metrics["error"]


@shape("predictions gathered in the order of the data")
def gathered_predictions() -> Any:
    with lockstep.Run() as run:
        model, _, batches = prepared(run)
        digest = trained(run, model, batches, 1)
        found = [model(x) for x, _ in run.evaluate(run.loader(DATA, shuffle=False, **SIZES))]
        return digest, state_hash(torch.cat([one for rank in run.gather(found) for one in rank]))


@shape("a loop of one's own over a loader outside of `run.train`, as `update_bn` has it")
def own_loop_over_a_loader() -> Any:
    with lockstep.Run() as run:
        model = run.model(nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)))
        run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        average, batches = AveragedModel(model), run.loader(DATA, **SIZES)
        run.keep(average=average)
        seen = sum(len(x) for x, _ in batches)
        for _ in run.epochs(2):
            for x, y in run.train(batches):
                if run.step(F.mse_loss(model(x), y)):
                    average.update_parameters(model)
        update_bn(batches, average)
        for x, y in run.evaluate(batches):
            run.measure(error=squares(average, x, y))
        return seen, run.metrics["error"], state_hash(average)


@shape("a forward pass on the leader alone, between two steps")
def forward_on_the_leader() -> Any:
    with lockstep.Run() as run:
        model, _, batches = prepared(run)
        for _ in run.epochs(1):
            for x, y in run.train(batches):
                if run.step(F.mse_loss(model(x), y)) and run.leads:
                    model.eval()
                    with torch.no_grad():
                        model(X)
                    model.train()
        return state_hash(model)


@shape("a prediction after the loop")
def prediction_after_the_loop() -> Any:
    with lockstep.Run() as run:
        model, _, batches = prepared(run)
        trained(run, model, batches, 1)
        with torch.no_grad():
            return float(model(X).sum())


# ---- the table -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Verdict:
    """How a shape ends."""

    words: str  #: for the table: ``same bits`` or ``refused: UsageError``
    details: str  #: what else is to be said of it: the error, or what differs


def called(loop: Callable[[], Any]) -> Any:
    """On a rank: what the loop returns, or the error of Lockstep's that it raises, or one it says more about."""
    try:
        return loop()
    except LockstepError as error:
        return error
    except Exception as error:
        if not getattr(error, "__notes__", None):
            raise
        return error


def verdicts(shapes: list[Shape], worlds: tuple[int, ...] = WORLDS) -> dict[str, Verdict]:
    """How each shape ends on each of the worlds, by its name."""
    env = {"LOCKSTEP_VIEW": "silent"}
    found = [on_world(size, [(called, one.loop) for one in shapes], env=env) for size in worlds]
    return {one.name: _verdict([rank for world in found for rank in world[i]]) for i, one in enumerate(shapes)}


def _verdict(results: list[Any]) -> Verdict:
    errors = [one for one in results if isinstance(one, Exception)]
    if errors and len(errors) == len(results):
        own = [error for error in errors if not isinstance(error, PeerLost)] or errors  # others lost a rank that raised
        kinds = " or ".join(sorted({type(error).__name__ for error in own}))
        return Verdict(f"refused: {kinds}", "\n".join([str(own[0]), *getattr(own[0], "__notes__", ())]))
    if all(repr(one) == repr(results[0]) for one in results) and "Traceback" not in str(results[0]):
        return Verdict("same bits", repr(results[0]))
    return Verdict("differs", "\n".join(map(str, results)))


def resumed(one: Shape, at_step: int, before: int, after: int) -> Verdict:
    """A rank is killed in the shape's loop, and it is begun again on another number of ranks: what it ends with."""
    with tempfile.TemporaryDirectory(prefix="lockstep-shape-") as directory:
        env = {"LOCKSTEP_VIEW": "silent", "LOCKSTEP_CHECKPOINT": directory, "LOCKSTEP_SAVE_EVERY": "1 step"}
        outcomes = run_each(_killed, before, one.loop, at_step, directory, env=env)
        assert isinstance(outcomes[0].error, ChildProcessError), f"{one.name}: not killed at step {at_step}: {outcomes}"
        again = run_each(called, after, one.loop, env=env | {RESUME: "1"})
        return _verdict([rank.trace or rank.value for rank in again])


def _killed(loop: Callable[[], Any], at_step: int, directory: str) -> None:
    def die(marker: Any) -> None:
        if marker.step == at_step and os.environ["RANK"] == "0":
            wait_until(lambda: list_checkpoints(Path(directory)), "a checkpoint")
            os.kill(os.getpid(), signal.SIGKILL)

    progress_marker().listeners += (die,)
    loop()


def table() -> list[str]:
    """The table of docs/loop_shapes.md, measured."""
    found = verdicts(list(SHAPES.values()))
    lines = ["| the loop | on 1, 2 and 3 ranks | killed and resumed |", "| --- | --- | --- |"]
    last = ""
    for name, one in SHAPES.items():
        if one.group != last:
            lines.append(f"| **{one.group}** | | |")
            last = one.group
        verdict, again = found[name], "-"
        if verdict.words == "same bits" and one.may_be_killed and "run.progress" not in verdict.details:
            ends = [resumed(one, 3, before, after) for before, after in ((2, 3), (3, 1))]
            again = "same bits" if all(end.details == verdict.details for end in ends) else "differs"
        lines.append(f"| {one.words} | {verdict.words} | {again} |")
        print(lines[-1], file=sys.stderr, flush=True)
    return lines


def main(arguments: list[str]) -> None:
    """See the module."""
    names = [name for name in arguments if not name.startswith("-")]
    if names:
        for name, verdict in verdicts([SHAPES[name] for name in names]).items():
            print(f"{name}: {verdict.words}\n{verdict.details}\n")
        return
    text = "\n".join(table())
    if "--write" in arguments:
        page = PAGE.read_text()
        begin, end = "<!-- table: tests/harness/loop_shapes.py --write -->\n", "\n<!-- end of the table -->"
        before, after = page.partition(begin)[0], page.partition(end)[2]
        PAGE.write_text(before + begin + text + end + after)
    else:
        print(text)


if __name__ == "__main__":
    main(sys.argv[1:])
