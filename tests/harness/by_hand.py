"""A training in plain torch, on one process and without Lockstep: what it is by definition.

Laws that compare a world with another world cannot see what is wrong alike on all of them. So the rules are written
down here once more, from their definition, and nothing is imported from the package:

    order           epoch e visits the samples in `torch.randperm` under the seed of (seed, "order", e)
    a step          is `global_batch` samples of that order, the last one of an epoch what is left
    a micro-batch   is `micro_batch` samples of the step, the last one what is left
    seeds           weights are drawn under (seed, "init"), a micro-batch's samples under (seed, "samples", e, its first
                    sample), its loop body under (seed, "step", number of the step, number in the step)
    gradient        the sum over micro-batches, each weighted with its part of the step's items, along the tree that
                    splits at midpoints
    buffers         every micro-batch begins with those of before the step; then they move by the mean of the moves,
                    and whole numbers to the greatest one; a single micro-batch leaves what it leaves, without
                    rounding. An evaluation leaves them as they are
    optimizers      step once, at the step's end, if they had a loss: no loss of a step sees what another one changed
    metrics         the loss is weighted by items, what is measured by samples
"""

import contextlib
import hashlib
import math
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import default_collate

FIRST_SCALE = 65536.0  # of fp16's loss; halved after a step that overflowed


@dataclass(frozen=True)
class Part:
    """One loss of a micro-batch, and what else the loop's body says of it."""

    loss: Tensor
    items: int | Tensor | None = None  #: that the loss is the mean over; None: the samples
    measured: Mapping[str, object] = field(default_factory=dict)
    means: Mapping[str, tuple[object, int]] = field(default_factory=dict)  #: measured: a mean, and over how many
    told: object = None  #: noted for each micro-batch
    optimizer: int | None = None  #: whose loss it is, by its place; None: that of the body's losses
    rows: Tensor | None = None  #: one for each sample, gathered at the step's end


@dataclass(frozen=True)
class Seen:
    """What a model says about a micro-batch in an evaluation."""

    outputs: Tensor  #: one row per sample
    measured: Mapping[str, object] = field(default_factory=dict)


def _no_schedulers(_optimizers: list[torch.optim.Optimizer], _steps: int) -> list[Any]:
    return []


def plain_sgd(models: list[nn.Module]) -> list[torch.optim.Optimizer]:
    return [torch.optim.SGD([p for p in models[0].parameters() if p.requires_grad], lr=0.1, momentum=0.9)]


@dataclass(frozen=True)
class Training:
    """A training, told once: `train` does it by hand, `by_run.train` with the library."""

    models: Callable[[], list[nn.Module]]
    data: Callable[[], Any]  #: a tuple of tensors, or samples by index
    learn: Callable[[list[nn.Module], Any], Iterator[Part]]  #: the loop's body: one loss for each optimizer
    optimizers: Callable[[list[nn.Module]], list[torch.optim.Optimizer]] = plain_sgd
    schedulers: Callable[[list[torch.optim.Optimizer], int], list[Any]] = _no_schedulers  #: told the steps of an epoch
    learn_at: Callable[[int], Callable[[list[nn.Module], Any], Iterator[Part]]] | None = None  #: that of each step
    stepped: str = "run"  #: schedulers, by the "run", by the "script" after each step, also "kept", or after "epochs"
    together: bool = False  #: the optimizers share one loss
    global_batch: int = 12
    micro_batch: int = 2
    epochs: int = 2
    seed: int = 3
    shuffle: bool = True
    drop_last: bool = False
    clip_norm: float | None = None
    hook: Callable[[Tensor], Tensor | None] | None = None  #: of each parameter's gradient
    clamp: float | None = None  #: of each number of the gradient, between the two halves of a step
    precision: str = "fp32"
    #: What the script changes once so many steps are made; may be called more than once for the same number.
    arrange: Callable[[list[nn.Module], list[torch.optim.Optimizer], int], None] | None = None
    #: The script's lines before the pass of each epoch, after each step, and at the end of each epoch; these once each.
    begin: Callable[[list[nn.Module], list[torch.optim.Optimizer], Any, int], None] | None = None
    after: Callable[[list[nn.Module], list[torch.optim.Optimizer]], None] | None = None
    end: Callable[[list[nn.Module], list[torch.optim.Optimizer]], None] | None = None
    noise: float | None = None  #: added to gradients, between the two halves of a step; has no rule here
    ema: bool = False  #: of the first model, after each step
    held_out: Callable[[], Any] | None = None
    predict: Callable[[list[nn.Module], Any], Seen] | None = None
    evaluates: str = "epochs"  #: when: after each of the "epochs" or of the "steps"
    between: Callable[[list[nn.Module]], None] | None = None  #: at each epoch's end, with draws that have no rule here
    find_unused: bool = False


@dataclass
class Trained:
    """What came of it."""

    trail: list[dict[str, Any]] = field(default_factory=list)  #: after each step, see `look`
    optimizers: list[Any] = field(default_factory=list)  #: their states at the end
    metrics: list[dict[str, float]] = field(default_factory=list)  #: of each epoch
    end: dict[str, Any] = field(default_factory=dict)  #: what `look` sees at the end
    told: list[Any] = field(default_factory=list)  #: of each micro-batch, in the step's order
    predictions: list[Tensor] = field(default_factory=list)  #: of each epoch, in the data set's order
    rows: list[Tensor] = field(default_factory=list)  #: of each step, in its order
    ema: dict[str, Tensor] | None = None


def train(training: Training) -> Trained:
    """By hand."""
    seed_everything(seed_of(training.seed, "init"))
    models, data, trained = training.models(), training.data(), Trained()
    optimizers = training.optimizers(models)
    samples = len(data[0]) if isinstance(data, tuple) else len(data)
    starts = range(0, samples - (training.global_batch - 1 if training.drop_last else 0), training.global_batch)
    schedulers = training.schedulers(optimizers, len(starts))
    ema = AveragedModel(models[0], multi_avg_fn=get_ema_multi_avg_fn(0.9)) if training.ema else None
    step, scale = 0, FIRST_SCALE if training.precision == "fp16" else 1.0
    for epoch in range(training.epochs):
        measures = MetricMeans()
        for model in models:
            model.train()
        if training.begin is not None:
            training.begin(models, optimizers, data, epoch)
        generator = torch.Generator().manual_seed(seed_of(training.seed, "order", epoch))
        order = torch.randperm(samples, generator=generator) if training.shuffle else torch.arange(samples)
        for start in starts:
            if training.arrange is not None:
                training.arrange(models, optimizers, step)
            picks = order[start : start + training.global_batch].split(training.micro_batch)
            gradients = _gradients(training, models, optimizers, picks, (epoch, step), data, scale, measures, trained)
            if all(numbers_of(g).isfinite().all() for of_one in gradients.values() for g in of_one.values()):
                for number, of_one in gradients.items():
                    name = "grad_norm" if len(_groups(training, optimizers)) == 1 else f"grad_norm_{number}"
                    norm = _update(training, _groups(training, optimizers)[number], of_one)
                    if training.clip_norm is not None:
                        measures.add(name, norm, 1)
                for scheduler in schedulers if training.stepped != "epochs" else ():
                    scheduler.step()
            else:
                assert training.precision == "fp16", f"the gradient of step {step} is not finite"
                scale /= 2
            step += 1
            if training.after is not None:
                training.after(models, optimizers)
            if ema is not None:
                ema.update_parameters(models[0])
            trained.trail.append(look(models, optimizers))
            if training.held_out is not None and training.evaluates == "steps":
                _evaluated(training, models, trained)
        metrics = measures.means()
        if training.held_out is not None and training.evaluates == "epochs":
            metrics |= _evaluated(training, models, trained)
        trained.metrics.append(metrics)
        for scheduler in schedulers if training.stepped == "epochs" else ():
            scheduler.step()
        if training.end is not None:
            training.end(models, optimizers)
    trained.end = look(models, optimizers)
    trained.optimizers = [optimizer.state_dict()["state"] for optimizer in optimizers]
    trained.ema = None if ema is None else state_of(ema.module)
    return trained


def look(models: list[nn.Module], optimizers: list[torch.optim.Optimizer]) -> dict[str, Any]:
    """All that a step may have changed, but for the optimizers' states."""
    return {
        "lr": [float(group["lr"]) for optimizer in optimizers for group in optimizer.param_groups],
        "models": [state_of(model) for model in models],
    }


def state_of(model: nn.Module) -> dict[str, Tensor]:
    """Copies of all parameters and buffers, those that are not persistent, too."""
    return {n: t.detach().clone() for n, t in (*model.named_parameters(), *model.named_buffers())}


# ---- the rules -------------------------------------------------------------------------------------------------------


def seed_of(*key: int | str) -> int:
    digest = hashlib.blake2b("/".join(repr(part) for part in key).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") // 2


def seed_everything(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


def along_the_tree(values: list[Tensor]) -> Tensor:
    if len(values) == 1:
        return values[0]
    middle = len(values) // 2
    return along_the_tree(values[:middle]) + along_the_tree(values[middle:])


def buffers_of(models: list[nn.Module]) -> list[tuple[nn.Module, str, Tensor]]:
    """Whose each is, its name there, and what it holds: the forward pass may put another tensor in its place."""
    modules = dict.fromkeys(module for model in models for module in model.modules())
    return [(owner, name, held.clone()) for owner in modules for name, held in owner.named_buffers(recurse=False)]


def put_back(base: list[tuple[nn.Module, str, Tensor]]) -> None:
    for owner, name, before in base:
        setattr(owner, name, before.clone())


def numbers_of(tensor: Tensor) -> Tensor:
    return tensor.coalesce().values() if tensor.is_sparse else tensor


class MetricMeans:
    """Means weighted by what they are of."""

    def __init__(self) -> None:
        self._sums: dict[str, tuple[float, float]] = {}

    def add(self, name: str, total: float, count: float) -> None:
        before = self._sums.get(name, (0.0, 0.0))
        self._sums[name] = (before[0] + total, before[1] + count)

    def measure(self, measured: Mapping[str, object], samples: int) -> None:
        """One number per sample, or one for all."""
        for name, value in measured.items():
            numbers = torch.as_tensor(value).detach().double()
            count = numbers.numel() if numbers.dim() else samples
            self.add(name, float(numbers.mean()) * count, count)

    def means(self) -> dict[str, float]:
        return {name: total / count for name, (total, count) in self._sums.items()}


def _groups(training: Training, optimizers: list[torch.optim.Optimizer]) -> list[list[torch.optim.Optimizer]]:
    """Which optimizers share a loss."""
    return [optimizers] if training.together else [[optimizer] for optimizer in optimizers]


def _trainable(optimizers: list[torch.optim.Optimizer]) -> list[nn.Parameter]:
    return [p for o in optimizers for group in o.param_groups for p in group["params"] if p.requires_grad]


def _gradients(training, models, optimizers, picks, where, data, scale, measures, trained):
    """For each loss of the step the gradient of each parameter; the buffers are moved, too."""
    epoch, step = where
    base = buffers_of(models)
    groups = _groups(training, optimizers)
    moved, known = [], [[] for _ in groups]  # for each loss what every micro-batch found: its items, and gradients
    learn = training.learn if training.learn_at is None else training.learn_at(step)
    rows = []
    for index, indices in enumerate(picks):
        batch = _fetch(data, indices, seed_of(training.seed, "samples", epoch, int(indices[0])))
        put_back(base)
        seed_everything(seed_of(training.seed, "step", step, index))
        told = []
        with _forward(training):
            for place, part in enumerate(learn(models, batch)):
                number = place if part.optimizer is None else part.optimizer
                group, found = groups[number], known[number]
                items = len(indices) if part.items is None else int(part.items)
                # The weight comes before the backward pass where it is known, for half precision rounds within it.
                share = items / sum(map(len, picks)) if part.items is None else 1.0
                found.append((items, share, _backward(part.loss, _trainable(group), scale * share)))
                if items:
                    name = "loss" if len(groups) == 1 else f"loss_{number}"
                    measures.add(name, float(part.loss.detach()) * items, items)
                measures.measure(part.measured, len(indices))
                for name, (value, count) in part.means.items():
                    measures.add(name, float(torch.as_tensor(value).detach()) * count, count)
                told.append(part.told)
                rows.extend([] if part.rows is None else part.rows.detach())
        trained.told.append(told)
        moved.append([getattr(owner, name).clone() for owner, name, _ in base])
    trained.rows.extend([torch.stack(rows)] if rows else [])
    with torch.no_grad():
        _move_buffers(base, moved)
        return {number: _weighed(found, scale) for number, found in enumerate(known) if found}


def _backward(loss: Tensor, parameters: list[nn.Parameter], scale: float) -> dict[nn.Parameter, Tensor]:
    with torch.autocast("cpu", enabled=False):
        loss = loss.float() if loss.dtype in (torch.float16, torch.bfloat16) else loss
        found = torch.autograd.grad(loss * scale, parameters, retain_graph=True, allow_unused=True)
    return {p: g for p, g in zip(parameters, found, strict=True) if g is not None}


def _weighed(found: list[tuple[int, float, dict[nn.Parameter, Tensor]]], scale: float) -> dict[nn.Parameter, Tensor]:
    """The mean over the step's items; a micro-batch that did not use a parameter adds nothing to it."""
    total, all_items = {}, sum(items for items, _, _ in found)
    weights = [items / all_items / share / scale for items, share, _ in found]
    for parameter in dict.fromkeys(p for _, _, gradients in found for p in gradients):
        parts = [
            gradients[parameter] * weight if parameter in gradients else torch.zeros_like(parameter)
            for weight, (_, _, gradients) in zip(weights, found, strict=True)
        ]
        total[parameter] = along_the_tree([part.coalesce() if part.is_sparse else part for part in parts])
    return total


def _move_buffers(base, moved) -> None:
    for place, (owner, name, before) in enumerate(base):
        after = [of_one[place] for of_one in moved]
        if len(after) == 1:
            setattr(owner, name, after[0])
        elif before.is_floating_point() or before.is_complex():
            setattr(owner, name, before + along_the_tree([value - before for value in after]) / len(after))
        else:
            setattr(owner, name, torch.stack(after).amax(0))


def _update(
    training: Training, optimizers: list[torch.optim.Optimizer], gradients: dict[nn.Parameter, Tensor]
) -> float:
    """The norm of the gradient before it is clipped."""
    if training.hook is not None:
        changed = {p: training.hook(g) for p, g in gradients.items()}
        gradients = {p: g if changed[p] is None else changed[p] for p, g in gradients.items()}
    if training.clamp is not None:
        gradients = {p: g.clamp(-training.clamp, training.clamp) for p, g in gradients.items()}
    norm = math.sqrt(sum(float(numbers_of(g).abs().double().square().sum()) for g in gradients.values()))
    if training.clip_norm is not None:
        factor = min(1.0, training.clip_norm / (norm + 1e-6))
        gradients = {p: g * factor for p, g in gradients.items()}
    for parameter, gradient in gradients.items():
        parameter.grad = gradient
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    return norm


def _fetch(data: Any, indices: Tensor, seed: int) -> Any:
    if isinstance(data, tuple):
        return tuple(column[indices] for column in data)
    seed_everything(seed)
    return default_collate([data[int(i)] for i in indices])


def _forward(training: Training) -> contextlib.AbstractContextManager[Any]:
    kind = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(training.precision)
    return contextlib.nullcontext() if kind is None else torch.autocast("cpu", dtype=kind)


def _evaluated(training: Training, models: list[nn.Module], trained: Trained) -> dict[str, float]:
    data, measures, outputs = training.held_out(), MetricMeans(), []
    modes, base = {module: module.training for model in models for module in model.modules()}, buffers_of(models)
    for model in models:
        model.eval()
    steps = torch.arange(len(data[0])).split(training.global_batch)
    for indices in (part for step in steps for part in step.split(training.micro_batch)):
        put_back(base)
        with torch.no_grad(), _forward(training):
            seen = training.predict(models, _fetch(data, indices, 0))
        outputs.append(seen.outputs)
        measures.measure(seen.measured, len(indices))
    put_back(base)
    trained.predictions.append(torch.cat(outputs))
    for module, was in modes.items():
        module.training = was
    return measures.means()


# ---- comparing -------------------------------------------------------------------------------------------------------


def assert_near(found: Any, wanted: Any, where: str = "", *, tolerance: float = 2e-6) -> None:
    """The same but for rounding: up to ``tolerance`` of the largest number of each tensor."""
    if isinstance(wanted, Tensor):
        assert isinstance(found, Tensor), f"{where}: {found}"
        assert (found.shape, found.dtype) == (wanted.shape, wanted.dtype), f"{where}: another shape or type"
        within = tolerance if wanted.is_floating_point() or wanted.is_complex() else 0.0
        largest = float(wanted.abs().max()) if wanted.numel() else 0.0
        away = float((found - wanted).abs().max()) if wanted.numel() else 0.0
        assert away <= within * max(largest, 0.05), f"{where}: {away:.2g} away, of {largest:.2g}"
    elif isinstance(wanted, Mapping):
        assert found.keys() >= wanted.keys(), f"{where}: {sorted(found)} instead of {sorted(wanted)}"
        for key in wanted:
            assert_near(found[key], wanted[key], f"{where}[{key!r}]", tolerance=tolerance)
    elif isinstance(wanted, list | tuple):
        assert len(found) == len(wanted), f"{where}: {len(found)} of {len(wanted)}"
        for place, (mine, theirs) in enumerate(zip(found, wanted, strict=True)):
            assert_near(mine, theirs, f"{where}[{place}]", tolerance=tolerance)
    elif isinstance(wanted, float):
        assert math.isclose(found, wanted, rel_tol=tolerance, abs_tol=1e-9), f"{where}: {found} instead of {wanted}"
    else:
        assert found == wanted, f"{where}: {found} instead of {wanted}"
