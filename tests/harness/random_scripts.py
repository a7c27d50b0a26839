"""Training scripts at random: what they may be made of, how they are run, and the law that all of them keep.

    Recipe ──► training_of ──► by_run.train on 1 rank, on several, and interrupted and resumed on others
                          └──► by_hand.train, where that knows the rules

Each example is a script that a user could have written, right or wrong. Either every world trains the same bits, and
what plain torch trains; or somebody refuses it, in Lockstep's own words. State that is hidden from Lockstep on purpose
is refused on every world, or changes nothing.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pickle
import re
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Client, Connection, Listener, wait
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import weight_norm
from torch.optim.lr_scheduler import OneCycleLR, StepLR
from torch.utils.data import Dataset

import by_hand
import by_run
from by_hand import Part, Seen, Trained, Training
from by_run import Manner
from lockstep.errors import LockstepError, PeerLost
from lockstep.launch_contract import RESUME
from lockstep.testing import run_ranks, state_hash

# ---- what a script may be made of ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Pause:
    """The run ends before its end, on one world, and goes on on another."""

    how: str  #: as `Manner.leave`
    after: int
    before: int  #: ranks
    then: int  #: ranks


@dataclass(frozen=True)
class Recipe:
    """The default of each field is the plainest there is."""

    body: str = "linear"  #: or "picture", "picture channels_last", "words", "sparse words"
    norm: str | None = None  #: or "batch", "cumulative"
    dropout: bool = False
    weight_norm: bool = False
    tied: bool = False
    odd: frozenset[str] = frozenset()  #: parameters: of "transposed", "scalar", "empty", "float64", "complex"
    buffer: str | None = None  #: see `BUFFERS` and `REFUSED_BUFFERS`
    optimizer: str = "sgd"  #: see `OPTIMIZERS`
    scheduler: str | None = None  #: or "step", "one cycle"
    epochs: int = 1
    evaluates: str | None = None  #: or "epochs", "steps"
    halves: bool = False
    counted: bool = False
    change: str | None = None  #: of the trained parameters, in the middle: "unfreeze", "freeze", "add"
    change_at: int = 2
    ema: str | None = None  #: or "right", "naive"
    measured: bool = False
    between: bool = False  #: draws between epochs
    modes: str | None = None  #: see `MODES`
    critic: int = 0  #: a second model has an optimizer and a loss of its own, in one of so many steps
    hook: str | None = None  #: see `HOOKS`
    attribute: str | None = None  #: when the script changes plain attributes of the model, see `ATTRIBUTES`
    hidden: str | None = None  #: state that no checkpoint holds: see `HIDDEN`, `HARMLESS`, or "step counter"
    samples_are: str = "stored"  #: or "drawn", "set by epoch", "resized by epoch"
    noise: bool = False  #: added to gradients
    scheduled: str = "run"  #: by whom schedulers are stepped, as `Training.stepped`
    numpy: str | None = None  #: learning rates that are NumPy's: "given", "moved" after each step
    rows: str | None = None  #: gathered once a step: of all bodies ("plain"), or where ``run.counts`` ("counted")
    checks: str | None = None  #: on several ranks: in "each step", or "never"
    clip_norm: float | None = None
    precision: str = "fp32"
    strategy: str = "ddp"
    samples: int = 24
    global_batch: int = 8
    micro_batch: int = 2
    world: int = 2
    pause: Pause | None = None

    def __str__(self) -> str:
        told = (f for f in dataclasses.fields(self) if getattr(self, f.name) != f.default)
        return f"Recipe({', '.join(f'{f.name}={getattr(self, f.name)!r}' for f in told)})"

    @property
    def micro_batches(self) -> int:
        """Of a full step, so the most ranks."""
        return -(-self.global_batch // self.micro_batch)

    @property
    def has_a_rule(self) -> bool:
        """Whether `by_hand` knows what it is to come to."""
        wrong = self.ema == "naive" or self.buffer in REFUSED_BUFFERS or self.hidden in HIDDEN
        rounds = self.counted and self.precision == "bf16"  # half precision rounds the weights, too
        return not (wrong or rounds or self.between or self.noise)


BUFFERS = (None, "moved", "data", "assigned", "complex", "counter", "volatile", "in evaluation")
REFUSED_BUFFERS = ("histogram", "late")  # what they hold would depend on who computed what
MODES = ("eval later", "eval at a step", "own train", "probe")
HOOKS = ("forward", "tensor", "parameter", "backward", "before update", "after update")
ATTRIBUTES = ("by epoch", "before passes", "after passes", "after steps")
#: Must be refused on every world, for what is trained depends on who computes what. Always with replays.
HIDDEN = ("calls", "body calls", "generator", "last output", "generator of data")
HARMLESS = ("unused calls", "list of losses")  # trains as if nothing was there


# torch wraps the `step` of a class when the first optimizer of the class is made, and hooks run in each wrapped `step`:
# the hooks of `Counting` run twice where an SGD was made before. Each process that lives on is to do the same.
torch.optim.SGD([torch.zeros(1)], lr=0.1)


class Counting(torch.optim.SGD):
    """Counts its steps in an attribute, by which it slows down."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.05, momentum=0.9)
        self.calls = 0

    def step(self, closure: Any = None) -> None:
        self.calls += 1
        before = [group["lr"] for group in self.param_groups]
        for group in self.param_groups:
            group["lr"] = group["lr"] / (1 + 0.1 * self.calls)
        super().step(closure)
        for group, lr in zip(self.param_groups, before, strict=True):
            group["lr"] = lr


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=0.02),
    "counting": Counting,
    "rmsprop": lambda parameters: torch.optim.RMSprop(parameters, lr=0.003),
}
ODD = ("transposed", "scalar", "empty", "float64", "complex")


def possible(recipe: Recipe) -> Recipe:
    """The recipe without what plain torch cannot do either."""
    told: dict[str, Any] = {}
    sparse = recipe.body == "sparse words"
    if sparse and recipe.optimizer not in ("sgd", "adagrad", "sparse adam"):
        told["optimizer"] = "sparse adam"
    if not sparse and recipe.optimizer == "sparse adam":
        told["optimizer"] = "adam"
    if recipe.halves and (sparse or "complex" in recipe.odd):
        told["halves"] = False  # it clamps what cannot be clamped
    if recipe.change == "add" and recipe.scheduler is not None:
        told["scheduler"] = None  # a scheduler knows its groups from the beginning
    if recipe.ema is not None and recipe.buffer == "late":
        told["ema"] = None  # torch's own average takes no buffer that comes later
    if recipe.scheduler is None or "scheduler" in told:
        told["scheduled"] = "run"
    if recipe.samples_are == "resized by epoch" and recipe.body == "linear":
        told["samples_are"] = "set by epoch"
    if recipe.hidden == "step counter" and recipe.pause is not None and recipe.pause.how != "kill":
        told["hidden"] = None  # the next step of a run that leaves is never made, so nothing proves its resume
    if recipe.hidden in HIDDEN:
        told |= {"checks": None, "samples_are": "stored"}
    if recipe.critic and sparse:
        told["critic"] = 0  # its optimizers share a loss
    elif recipe.critic:
        told |= {"change": None, "rows": None, "noise": False}  # that is drawn once every optimizer had its loss
        if recipe.critic > 1:  # no call of run.step completes each of its steps
            told |= {"ema": None, "numpy": None} | ({"hidden": None} if recipe.hidden == "step counter" else {})
            told |= {"attribute": None} if recipe.attribute == "after steps" else {}
            told |= {"modes": None} if recipe.modes in ("probe", "eval at a step") else {}
            told |= {"evaluates": "epochs"} if recipe.evaluates == "steps" else {}
            told |= {"scheduled": "run"} if recipe.scheduled in ("script", "kept") else {}
    if recipe.norm is not None and not recipe.body.startswith("picture"):
        # Of two samples BatchNorm makes +1 and -1, whatever they are: all that is left is rounding.
        sizes = {n % recipe.micro_batch for n in (recipe.global_batch, recipe.samples % recipe.global_batch)}
        if recipe.micro_batch < 3 or sizes & {1, 2}:
            told["norm"] = None
    return dataclasses.replace(recipe, **told)


def random_recipe(random: Random, *, kills: bool = False) -> Recipe:
    """Most scripts have a few oddities at once."""

    def rarely(plain: Any, *others: Any) -> Any:
        return random.choice(others) if random.random() < 0.15 else plain

    def often(*values: Any) -> Any:
        return random.choice(values)

    global_batch = random.randint(4, 14)
    micro_batch = random.randint(1, global_batch // 2)
    most = min(4, -(-global_batch // micro_batch))
    how = often(*("break", "stop", "kill") if kills else ("break", "stop"))
    pause = Pause(how, random.randint(0, 3), random.randint(1, most), random.randint(1, most))
    recipe = Recipe(
        body=often("linear", "picture", "picture channels_last", "words", "sparse words"),
        norm=often(None, "batch", "cumulative"),
        dropout=often(False, True),
        weight_norm=rarely(False, True),
        tied=rarely(False, True),
        odd=often(frozenset(), frozenset(name for name in ODD if random.random() < 0.3)),
        buffer=rarely(often(*BUFFERS), *REFUSED_BUFFERS),
        optimizer=often(*OPTIMIZERS, "sparse adam"),
        scheduler=often(None, "step", "one cycle"),
        epochs=often(1, 2),
        evaluates=rarely(often(None, "epochs"), "steps"),
        halves=rarely(False, True),
        counted=rarely(False, True),
        change=rarely(None, "unfreeze", "freeze", "add"),
        change_at=random.randint(1, 4),
        ema=rarely(often(None, "right"), "naive"),
        measured=often(False, True),
        between=rarely(False, True),
        modes=rarely(None, *MODES),
        critic=rarely(0, 1, 2, 3),
        hook=rarely(None, *HOOKS),
        attribute=rarely(None, *ATTRIBUTES),
        hidden=rarely(None, *HIDDEN, *HARMLESS, "step counter"),
        samples_are=often("stored", rarely("stored", "drawn", "set by epoch", "resized by epoch")),
        noise=rarely(False, True),
        scheduled=rarely("run", "script", "kept", "epochs"),
        numpy=rarely(None, "given", "moved"),
        rows=rarely(None, "plain", "counted"),
        checks=often(None, "each step", "never"),
        clip_norm=often(None, 0.1),
        precision=rarely("fp32", "bf16"),
        strategy=often("ddp", "ddp", "zero"),
        samples=random.randint(global_batch, 40),
        global_batch=global_batch,
        micro_batch=micro_batch,
        world=random.randint(2, most),
        pause=often(None, pause),
    )
    return possible(recipe)


class Net(nn.Module):
    """Four layers, and what the recipe asks for between them."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        self.recipe = recipe
        momentum = None if recipe.norm == "cumulative" else 0.1
        if recipe.body.startswith("picture"):
            self.inner: nn.Module = nn.Conv2d(3, 8, 2, bias=recipe.norm is None)
            self.norm = nn.BatchNorm2d(8, momentum=momentum) if recipe.norm else nn.Identity()
        else:
            if recipe.body == "linear":
                self.inner = nn.Linear(6, 8, bias=recipe.norm is None)
            else:
                self.inner = nn.Embedding(12, 8, sparse=recipe.body == "sparse words")
            self.norm = nn.BatchNorm1d(8, momentum=momentum) if recipe.norm else nn.Identity()
        self.middle = nn.Linear(8, 8)
        if recipe.tied:
            self.again = nn.Linear(8, 8)
            self.again.weight = self.middle.weight
        self.out = nn.Linear(8, 3)
        self.drop = nn.Dropout(0.2 if recipe.dropout else 0.0)
        self.gain, self.calls = 1.0, 0
        if recipe.weight_norm:
            weight_norm(self.out)
        for name, make in (
            ("transposed", lambda: torch.randn(3, 4).t()),
            ("scalar", lambda: torch.tensor(0.5)),
            ("empty", lambda: torch.zeros(0, 3)),
            ("float64", lambda: torch.randn(3, dtype=torch.float64)),
            ("complex", lambda: torch.randn(3, dtype=torch.complex64)),
        ):
            if name in recipe.odd:
                self.register_parameter(f"odd_{name}", nn.Parameter(make()))
        self._make_buffer(recipe.buffer)
        if recipe.hook == "forward":
            self.register_buffer("seen", torch.zeros(8))
            self.middle.register_forward_hook(self._see)
        elif recipe.hook == "backward":
            self.middle.register_full_backward_hook(lambda _module, given, _outputs: tuple(0.5 * g for g in given))
        elif recipe.hook == "parameter":
            self.middle.bias.register_hook(lambda gradient: gradient.clamp(-0.02, 0.02))
        if recipe.body.endswith("channels_last"):
            self.to(memory_format=torch.channels_last)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        recipe = self.recipe
        if recipe.body.endswith("channels_last"):
            x = x.to(memory_format=torch.channels_last)
        h = self.inner(x)
        h = h.mean(1) if "words" in recipe.body else h
        h = torch.tanh(self.norm(h))
        h = h.mean((2, 3)) if recipe.body.startswith("picture") else h
        h = torch.tanh(self.middle(self.drop(h)))
        if recipe.hook == "tensor" and h.requires_grad:
            h.register_hook(lambda gradient: 0.5 * gradient)
        if recipe.tied:
            h = torch.tanh(self.again(h))
        if self.training and recipe.hidden in ("calls", "unused calls"):
            self.calls += 1
        return self._slowed() * self._odd(self.out(h - self._buffer(h.detach())))

    def _slowed(self) -> float:
        return self.gain

    def train(self, mode: bool = True) -> Net:
        super().train(mode)
        if self.recipe.modes == "own train":
            self.norm.eval()
            self.drop.eval()
        return self

    def _see(self, _module: nn.Module, _inputs: Any, outputs: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.seen.mul_(0.9).add_(outputs.detach().float().mean(0), alpha=0.1)
        return outputs - self.seen

    def _odd(self, o: torch.Tensor) -> torch.Tensor:
        for name in filter(self.recipe.odd.__contains__, ODD):  # a set has another order in each process
            p = getattr(self, f"odd_{name}")
            if name == "transposed":
                o = o * (1 + (o @ p.t()).tanh().mean(1, keepdim=True))
            elif name == "empty":
                o = o + p.sum()
            elif name == "complex":
                o = o + (o.to(torch.complex64) * p).abs()
            elif name == "scalar":
                o = o * (1 + p)  # added to all of a row, it would change nothing
            else:
                o = (o + p).to(o.dtype)
        return o

    def _make_buffer(self, kind: str | None) -> None:
        if kind in ("moved", "data", "assigned", "in evaluation"):
            self.register_buffer("kept", torch.zeros(8))
        elif kind == "volatile":
            self.register_buffer("kept", torch.zeros(8), persistent=False)
        elif kind == "complex":
            self.register_buffer("kept", torch.zeros(8, dtype=torch.complex64))
        elif kind == "late":
            self.register_buffer("kept", None)
        elif kind == "counter":
            self.register_buffer("kept", torch.zeros((), dtype=torch.int64))
        elif kind == "histogram":
            self.register_buffer("kept", torch.zeros(8, dtype=torch.int64))

    def _buffer(self, h: torch.Tensor) -> torch.Tensor | float:
        """What is to be taken off; the buffer moves in training."""
        kind = self.recipe.buffer
        if kind is None:
            return 0.0
        if self.training or kind == "in evaluation":
            mean = h.float().mean(0)
            with torch.no_grad():
                if kind in ("moved", "volatile", "in evaluation"):
                    self.kept.mul_(0.9).add_(mean, alpha=0.1)
                elif kind == "data":
                    self.kept.data.mul_(0.9).add_(mean, alpha=0.1)
                elif kind == "assigned":
                    self.kept = 0.9 * self.kept + 0.1 * mean
                elif kind == "complex":
                    self.kept.mul_(0.9).add_(torch.complex(mean, mean.square()), alpha=0.1)
                elif kind == "late":
                    self.kept = mean if self.kept is None else 0.9 * self.kept + 0.1 * mean
                elif kind == "counter":
                    self.kept.add_(1)
                else:
                    self.kept.add_((h > 0).sum(0))
        if kind == "counter":
            return 0.01 * self.kept.float()
        if kind == "histogram":
            return 0.001 * self.kept.float()
        return 0.0 if self.kept is None else self.kept.real if kind == "complex" else self.kept


def _inputs(recipe: Recipe, samples: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(5)
    if "words" in recipe.body:
        return torch.randint(0, 12, (samples, 4), generator=generator)
    shape = (3, 4, 4) if recipe.body.startswith("picture") else (6,)
    return torch.randn(samples, *shape, generator=generator)


def _labels(samples: int) -> torch.Tensor:
    return torch.randint(0, 3, (samples,), generator=torch.Generator().manual_seed(6))


class SlowingNet(Net):
    """Counts its forward passes, and slows down by them."""

    def _slowed(self) -> float:
        return self.gain / (1 + 0.01 * self.calls)


class Samples(Dataset[tuple[torch.Tensor, ...]]):
    """Stored samples, as the recipe changes them."""

    def __init__(self, recipe: Recipe, columns: tuple[torch.Tensor, ...]) -> None:
        self.recipe, self.columns, self.epoch = recipe, columns, 0
        self.generator = np.random.default_rng(0)

    def __len__(self) -> int:
        return len(self.columns[0])

    def __getitem__(self, index: int) -> tuple[torch.Tensor, ...]:
        x, *others = (column[index] for column in self.columns)
        if self.recipe.samples_are == "resized by epoch":
            x = x[..., : 3 + self.epoch % 2]
        elif self.recipe.samples_are == "set by epoch":
            x = (x + self.epoch) % 12 if "words" in self.recipe.body else x + 0.5 * self.epoch
        elif self.recipe.samples_are == "drawn":
            x = x.flip(-1) if torch.rand(()) < 0.5 else x
        elif "words" in self.recipe.body:  # with state of its own
            x = (x + torch.from_numpy(self.generator.integers(0, 12, x.shape))) % 12
        else:
            x = x + self.generator.random()
        return x, *others


def training_of(recipe: Recipe) -> Training:
    """What the script of ``recipe`` trains."""
    own = SimpleNamespace(calls=0, steps=0, last=0.0, losses=[], generator=torch.Generator().manual_seed(0))

    def models() -> list[nn.Module]:
        net = SlowingNet(recipe) if recipe.hidden == "calls" else Net(recipe)
        if recipe.change in ("unfreeze", "add"):
            net.middle.requires_grad_(False)
        critic = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
        return [net, critic] if recipe.critic else [net]

    def data() -> Any:
        items = torch.randint(0, 4, (recipe.samples,), generator=torch.Generator().manual_seed(7))
        columns = _inputs(recipe, recipe.samples), _labels(recipe.samples), items
        plain = recipe.samples_are == "stored" and recipe.hidden != "generator of data"
        return columns if plain else Samples(recipe, columns)

    def begin(models: list[nn.Module], _optimizers: list[Any], data: Any, epoch: int) -> None:
        if isinstance(data, Samples):
            data.epoch = epoch
        if recipe.modes == "eval later" and epoch:
            models[0].norm.eval()
            models[0].drop.eval()
        if recipe.attribute == "by epoch":
            models[0].gain, models[0].drop.p = 1.0 - 0.2 * epoch, 0.3 * epoch
        elif recipe.attribute == "before passes":
            change_attributes(models[0])

    def after(models: list[nn.Module], optimizers: list[torch.optim.Optimizer]) -> None:
        own.steps += 1
        if recipe.attribute == "after steps":
            change_attributes(models[0])
        if recipe.numpy == "moved":
            for group in (group for optimizer in optimizers for group in optimizer.param_groups):
                group["lr"] = np.float32(group["lr"] * 0.9)
        if recipe.modes == "probe":
            models[0].eval()
            with torch.no_grad():
                own.probed = models[0](_inputs(recipe, 3))
            models[0].train()

    def end(models: list[nn.Module], _optimizers: list[torch.optim.Optimizer]) -> None:
        if recipe.attribute == "after passes":
            change_attributes(models[0])

    def learn_at(step: int) -> Callable[[list[nn.Module], Any], Iterator[Part]]:
        def learns(models: list[nn.Module], batch: Any) -> Iterator[Part]:
            yield from learn(models, batch)
            if step % recipe.critic == 0:
                wrong = models[1](models[0](batch[0]).float().detach()).float() - batch[1][:, None]
                yield Part(wrong.square().mean())

        return learns

    def by_calls(outputs: torch.Tensor) -> torch.Tensor:
        return outputs / (1 + 0.01 * own.calls)

    def by_generator(outputs: torch.Tensor) -> torch.Tensor:
        return outputs + 0.1 * torch.randn(outputs.shape, generator=own.generator)

    def by_last_output(outputs: torch.Tensor) -> torch.Tensor:
        before, own.last = own.last, outputs.detach().mean(0)
        return outputs + 0.1 * before

    def by_steps(outputs: torch.Tensor) -> torch.Tensor:
        return outputs / (1 + 0.1 * own.steps)

    def unchanged(outputs: torch.Tensor) -> torch.Tensor:
        return outputs

    hidden = {
        "body calls": by_calls,
        "generator": by_generator,
        "last output": by_last_output,
        "step counter": by_steps,
    }
    change_outputs = hidden.get(recipe.hidden or "", unchanged)

    def learn(models: list[nn.Module], batch: tuple[torch.Tensor, ...]) -> Iterator[Part]:
        x, y, items = batch
        outputs = models[0](x).float()
        own.calls += 1
        outputs = change_outputs(outputs)
        each = F.cross_entropy(outputs, y, reduction="none")
        measured = {"right": outputs.argmax(1) == y, "each": each, "first": outputs[0, 0]} if recipe.measured else {}
        means = {"weighed": (each.mean(), 1 + int(items[0]))} if recipe.measured else {}
        loss = (each * items).sum() / items.sum().clamp(min=1) if recipe.counted else each.mean()
        if recipe.critic:
            loss = loss + 0.1 * models[1](outputs).float().square().mean()
        if recipe.hidden == "list of losses":
            own.losses.append(loss.item())
        rows = torch.stack([each, y], dim=1) if recipe.rows is not None else None
        yield Part(loss, int(items.sum()) if recipe.counted else None, measured, means, torch.rand(1), rows=rows)

    def optimizers(models: list[nn.Module]) -> list[torch.optim.Optimizer]:
        parameters = [p for p in models[0].parameters() if recipe.change != "add" or p.requires_grad]
        if recipe.optimizer == "sparse adam":
            embedding = models[0].inner.weight
            others = [p for p in parameters if p is not embedding]
            made = [torch.optim.SparseAdam([embedding], lr=0.01), torch.optim.Adam(others, lr=0.01)]
        else:
            lists = [parameters, *(list(model.parameters()) for model in models[1:])]
            made = [OPTIMIZERS[recipe.optimizer](each) for each in lists]
        for optimizer in made:
            if recipe.numpy == "given":
                optimizer.param_groups[0]["lr"] = np.float32(optimizer.param_groups[0]["lr"])
            if recipe.hook == "before update":
                optimizer.register_step_pre_hook(halve_gradients)
            elif recipe.hook == "after update":
                optimizer.register_step_post_hook(shrink)
        return made

    def schedulers(optimizers: list[torch.optim.Optimizer], steps: int) -> list[Any]:
        if recipe.scheduler is None:
            return []
        if recipe.scheduler == "step":
            return [StepLR(optimizers[0], 2, 0.5)]
        cycles = recipe.optimizer in ("sgd", "adam", "adamw")
        return [OneCycleLR(optimizers[0], 0.1, epochs=recipe.epochs, steps_per_epoch=steps, cycle_momentum=cycles)]

    def arrange(models: list[nn.Module], optimizers: list[torch.optim.Optimizer], step: int) -> None:
        steps = recipe.epochs * -(-recipe.samples // recipe.global_batch)
        if not recipe.change_at <= step < steps:  # after the last step nothing learns any more
            return
        if recipe.modes == "eval at a step":
            models[0].norm.eval()
            models[0].drop.eval()
        if recipe.change is not None:
            models[0].middle.requires_grad_(recipe.change != "freeze")
        if recipe.change == "add" and len(optimizers[-1].param_groups) == 1:
            optimizers[-1].add_param_group({"params": list(models[0].middle.parameters())})

    def between(models: list[nn.Module]) -> None:
        with torch.no_grad():
            models[0].out.bias.add_(0.1 * torch.randn(3))

    def predict(models: list[nn.Module], batch: tuple[torch.Tensor, torch.Tensor]) -> Seen:
        outputs = models[0](batch[0]).float()
        return Seen(outputs, {"right in evaluation": outputs.argmax(1) == batch[1]})

    return Training(
        models,
        data,
        learn,
        optimizers,
        schedulers,
        learn_at=learn_at if recipe.critic else None,
        stepped=recipe.scheduled,
        begin=begin,
        after=None if recipe.critic > 1 else after,
        end=end,
        noise=0.01 if recipe.noise else None,
        together=recipe.optimizer == "sparse adam",
        global_batch=recipe.global_batch,
        micro_batch=recipe.micro_batch,
        epochs=recipe.epochs,
        clip_norm=recipe.clip_norm,
        clamp=0.02 if recipe.halves else None,
        precision=recipe.precision,
        arrange=None if recipe.change is None and recipe.modes != "eval at a step" else arrange,
        ema=recipe.ema is not None,
        held_out=(lambda: (_inputs(recipe, 11), _labels(11))) if recipe.evaluates else None,
        predict=predict,
        evaluates=recipe.evaluates or "epochs",
        between=between if recipe.between else None,
    )


def change_attributes(net: Net) -> None:
    net.gain *= 0.9
    net.drop.p *= 0.5


def halve_gradients(optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
    for p in (p for group in optimizer.param_groups for p in group["params"] if p.grad is not None):
        p.grad.mul_(0.5)


def shrink(optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
    with torch.no_grad():
        for p in (p for group in optimizer.param_groups for p in group["params"]):
            p.mul_(0.999)


# ---- ranks that live on from one script to the next ------------------------------------------------------------------

GRACE_S = 40.0  # for what is left of a world once one of its ranks has failed: its peers live on, so a deadline passes
ANSWER_S = 90.0


def rehearse(recipe: Recipe, manner: Manner, resumed: bool) -> Trained:
    """On a rank."""
    os.environ[RESUME] = str(int(resumed))
    torch.set_grad_enabled(True)
    trained = by_run.train(training_of(recipe), manner)
    if recipe.strategy == "zero":
        trained.optimizers = []  # each rank holds a part
    return trained


def serve(address: str) -> None:
    """A rank that does what it is told until nobody tells it any more."""
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)
    os.dup2(quiet, 2)
    with Client(address) as reporter:
        reporter.send((int(os.environ["RANK"]), os.getpid()))
        while True:
            try:
                fn, args = reporter.recv()
            except EOFError:
                return
            try:
                answer: tuple[str, Any] = ("done", fn(*args))
            except SystemExit as left:
                answer = ("left", left.code)
            except BaseException as error:  # noqa: BLE001 - the process that reads it will judge
                kind = (
                    "lost"
                    if isinstance(error, PeerLost)
                    else "refused"
                    if isinstance(error, LockstepError)
                    else "broke"
                )
                answer = (kind, traceback.format_exc())
            reporter.send_bytes(pickle.dumps(answer))  # not by shared memory, as multiprocessing sends tensors


class World:
    """Ranks in processes of their own, which do one script after another."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._ends: dict[int, Connection] = {}
        self._pids: dict[int, int] = {}
        self._thread: threading.Thread | None = None

    def ask(self, fn: Callable[..., Any], *args: object) -> list[tuple[str, Any]]:
        """How ``fn(*args)`` ended on each rank: "done" and its value, "left" and the code, or how it failed."""
        if self._thread is None:
            self._start()
        for end in self._ends.values():
            end.send((fn, args))
        answers: dict[int, tuple[str, Any]] = {}
        deadline = time.monotonic() + ANSWER_S
        while len(answers) < self.size:
            missing = {self._ends[rank]: rank for rank in range(self.size) if rank not in answers}
            ready = wait(list(missing), max(0.0, deadline - time.monotonic()))
            if not ready:
                answers.update((rank, ("hung", "it was still running")) for rank in missing.values())
            for end in ready:
                try:
                    answers[missing[end]] = pickle.loads(end.recv_bytes())
                except (EOFError, ConnectionResetError):
                    answers[missing[end]] = ("died", "its process is gone")
            if any(kind not in ("done", "left") for kind, _ in answers.values()):
                deadline = min(deadline, time.monotonic() + GRACE_S)
        if any(kind in ("broke", "hung", "died") for kind, _ in answers.values()):
            self.close()  # the next script is not to suffer for it
        return [answers[rank] for rank in range(self.size)]

    def close(self) -> None:
        """None of its processes is left."""
        for pid in self._pids.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for end in self._ends.values():
            end.close()
        if self._thread is not None:
            self._thread.join()
        self._ends, self._pids, self._thread = {}, {}, None

    def _start(self) -> None:
        with Listener(family="AF_UNIX", backlog=self.size) as listener:

            def run() -> None:
                with contextlib.suppress(ChildProcessError):
                    run_ranks(serve, self.size, listener.address, timeout_s=1e6, env={"LOCKSTEP_PEER_TIMEOUT_S": "30"})

            self._thread = threading.Thread(target=run, name=f"world of {self.size}")
            self._thread.start()
            for _ in range(self.size):
                end = listener.accept()
                rank, self._pids[rank] = end.recv()
                self._ends[rank] = end


class Worlds:
    """A world of each size, begun when it is asked for."""

    def __init__(self) -> None:
        self._worlds = {size: World(size) for size in range(1, 5)}

    def __enter__(self) -> Worlds:
        return self

    def __exit__(self, *_: object) -> None:
        for world in self._worlds.values():
            world.close()

    def ask(self, size: int, fn: Callable[..., Any], *args: object) -> list[tuple[str, Any]]:
        """As `World.ask`, of ``size`` ranks."""
        return self._worlds[size].ask(fn, *args)


# ---- the law ---------------------------------------------------------------------------------------------------------


class Broken(AssertionError):
    """The law does not hold for a script: how, in a line that is alike for one cause, and details."""


def judge(recipe: Recipe, worlds: Worlds) -> str:
    """ "trained" or "refused: ...", where the law holds.

    Raises:
        Broken: where it does not.
    """
    plain = Manner(strategy=recipe.strategy, naive_ema=recipe.ema == "naive", asks_counts=recipe.rows == "counted")
    every = 1 if recipe.checks == "each step" else plain.check_every
    manner = dataclasses.replace(plain, replay=recipe.checks != "never", check_every=every)
    ways = {1: plain, recipe.world: manner}
    outcomes = {size: worlds.ask(size, rehearse, recipe, way, False) for size, way in ways.items()}
    refused = [_refusal(answers, "alone" if size == 1 else "together") for size, answers in outcomes.items()]
    if recipe.hidden in HIDDEN and not all(refused):
        raise Broken(f"a hidden state was not refused {'together' if refused[0] else 'alone'}: {recipe.hidden}", "")
    if any(refused):
        return f"refused: {next(filter(None, refused))}"
    (_, alone), *_ = outcomes[1]
    _compare([value for _, value in outcomes[recipe.world]], alone, "n ranks and 1")
    if recipe.has_a_rule:
        wanted = by_hand.train(training_of(recipe))
        if recipe.strategy == "zero":
            wanted.optimizers = []
        # RMSprop divides a small gradient by its own size, and what is rounded in it grows to a step of full size.
        tolerance = 2e-3 if recipe.optimizer == "rmsprop" else 5e-4
        for part in vars(wanted):
            try:
                by_hand.assert_near(getattr(alone, part), getattr(wanted, part), part, tolerance=tolerance)
            except AssertionError as error:
                raise Broken(f"not what plain torch trains: {part}", str(error)) from None
    if recipe.pause is not None:
        return _resumed(recipe, manner, alone, worlds)
    return "trained"


def _resumed(recipe: Recipe, manner: Manner, whole: Trained, worlds: Worlds) -> str:
    pause = recipe.pause
    assert pause is not None
    with tempfile.TemporaryDirectory(prefix="lockstep-random-") as place:
        saving = "1 steps" if pause.how == "kill" else None
        first = dataclasses.replace(manner, checkpoint=place, save_every=saving)
        left = dataclasses.replace(first, leave=pause.how, leave_after=pause.after)
        before = worlds.ask(pause.before, rehearse, recipe, left, False)
        killed = pause.how == "kill" and any(kind == "died" for kind, _ in before)
        refusal = _refusal(before, "leaving", killed=killed)
        after = worlds.ask(pause.then, rehearse, recipe, first, True) if refusal is None else []
        refusal = refusal or _refusal(after, "resumed")
        if refusal is not None:
            return f"refused: {refusal}"
    resumed = killed or any(kind == "left" for kind, _ in before) or pause.how == "break"
    for kind, found in after:
        if kind != "done":
            raise Broken(f"resumed, a rank {kind}", str(found))
        for part in ("trail", "metrics", "predictions", "rows"):
            steps = len(getattr(found, part))
            setattr(found, part, getattr(whole, part)[: len(getattr(whole, part)) - steps] + getattr(found, part))
        found.told = whole.told
    _compare([found for _, found in after], whole, "resumed and whole")
    return f"trained, resumed after {pause.how}" if resumed else "trained, over before it was to pause"


def _refusal(answers: list[tuple[str, Any]], when: str, *, killed: bool = False) -> str | None:
    """The words in which Lockstep refused, if it did; nobody may fail in another way."""
    words = [text for kind, text in answers if kind == "refused"]
    for kind in ("broke", "hung", "died", "lost"):
        texts = [str(text) for this, text in answers if this == kind]
        if texts and not (kind in ("lost", "died") and (words or killed)):
            raise Broken(f"{when}, a rank {kind}: {_last_line(texts[0])}", texts[0])
    return _last_line(words[0]) if words else None


def _last_line(trace: str) -> str:
    """Of a traceback, without its numbers."""
    return re.sub(r"[0-9.e+-]*[0-9]+", "#", trace.strip().splitlines()[-1])[:150]


def _compare(found: list[Trained], wanted: Trained, what: str) -> None:
    """Equal bits, on every rank."""
    for rank, mine in enumerate(found):
        for part, theirs in vars(wanted).items():
            if state_hash(getattr(mine, part)) != state_hash(theirs):
                raise Broken(f"other bits: {part}, {what}", f"rank {rank} of {len(found)}")


def simplest(recipe: Recipe, breaks: Callable[[Recipe], bool]) -> Recipe:
    """One field after the other as plain as it may be, as long as it still breaks."""
    plain = Recipe()
    for field in dataclasses.fields(Recipe):
        if getattr(recipe, field.name) == getattr(plain, field.name):
            continue
        simpler = dataclasses.replace(recipe, **{field.name: getattr(plain, field.name)})
        if possible(simpler) == simpler and simpler.world <= simpler.micro_batches and breaks(simpler):
            recipe = simpler
    return recipe


if __name__ == "__main__":  # python tests/harness/random_scripts.py "Recipe(buffer='data')"
    with Worlds() as these:
        print(judge(eval(sys.argv[1]), these))
