"""From the losses of a step's micro-batches to one update: the order of events within a step.

micro-batch 0 .. n-1   backward                    gradients are folded along the tree
micro-batch n          backward, reduction         .grad holds the sum over all ranks' micro-batches
                       [division by the counts]
                       unscale, clip, update       each optimizer, once the user is done with the micro-batch
                       buffers, schedulers         once all optimizers have stepped: the step is done

Optimizers step together, at the end: were a GAN's discriminator updated before the generator's loss is computed, the
losses of each rank's last micro-batch would see other parameters than those before it, and the sum would tell how many
ranks there are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import torch

from lockstep.collectives import Group
from lockstep.data import MicroBatch
from lockstep.errors import UsageError
from lockstep.run.precision import Precision
from lockstep.run.state import State
from lockstep.strategies import Pipelines, Serves, Strategy, Target, Task, Turn, is_loss, parameters_of
from lockstep.watch import pulse

Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None
Count = int | torch.Tensor | None
Loss = torch.Tensor | Callable[..., torch.Tensor]
Known = list[tuple[torch.Tensor, int | torch.Tensor]]
"""Losses that have become known, each with the number of items that it is the mean of; a shadow's is of none."""


class Work:
    """The micro-batch in the user's hands."""

    __slots__ = ("due", "ended", "micro", "reached", "turn")

    def __init__(self, micro: MicroBatch) -> None:
        self.micro: Final = micro
        self.turn: Final = Turn(micro.index, micro.of, micro.last, micro.shadow, micro.samples, micro.step_samples)
        self.reached: set[Target] = set()  # by backward passes since it was handed out
        self.due: dict[Target, tuple[torch.optim.Optimizer, ...]] = {}  # who steps at its end
        self.ended = False


class Stepper:
    """Turns losses into updates, for every optimizer of a run."""

    def __init__(
        self, group: Group, strategy: Strategy, precision: Precision, state: State, clip_norm: float | None
    ) -> None:
        self._group: Final = group
        self._strategy: Final = strategy
        self._precision: Final = precision
        self._state: Final = state
        self._clip_norm: Final = clip_norm
        self._pulse: Final = pulse()
        self._targets: Final[dict[tuple[int, ...], Target]] = {}
        self._counts: Final[dict[Target, int | torch.Tensor]] = {}
        self._items: Final[dict[int, int | torch.Tensor]] = {}  # of micro-batches whose loss is not known yet
        self._weights: Final[dict[tuple[float, torch.dtype, torch.device], torch.Tensor]] = {}
        # Like the weights of losses that are not known yet; rounded later, they are what the others are.
        self._widest: Final = torch.empty((), dtype=torch.float64, device=group.device)
        self.work: Work | None = None

    def begin(self, micro: MicroBatch) -> Work:
        """``micro`` is handed to the user."""
        self.work = work = Work(micro)
        self._strategy.begin(work.turn)
        return work

    def backward(self, loss: Loss, data: tuple[Any, ...], count: Count, optimizer: Optimizers) -> Known:
        """See `Run.backward`. The losses that have become known by it."""
        work = self._at_work("backward")
        target, micro = self._target(optimizer), work.micro
        if any(not target.places.keys().isdisjoint(other.places) for other in work.reached):
            raise UsageError(
                "a second run.step(loss) for the same parameters in one micro-batch: add the losses up and call it once"
            )
        task = self._task(loss, data, target) if callable(loss) else None
        pipelines = self._strategy if task is not None and isinstance(self._strategy, Pipelines) else None
        if task is not None and pipelines is None:
            with self._precision.forward():
                loss = task()
        if pipelines is None and not is_loss(loss):
            raise UsageError(
                f"step({loss!r:.60}): the loss must be a tensor of no dimension that depends on the model's "
                "parameters; reduce it with .mean(), and do not detach it"
            )
        work.reached.add(target)
        self._pulse.enter("reduction" if work.turn.last and self._group.size > 1 else "backward")
        if count is not None and not micro.shadow:
            self._counts[target] = self._counts.get(target, 0) + count
        # The loss is a mean over the micro-batch's items, the gradient one over the step's: each weighs what it holds.
        items = micro.samples if count is None else count
        share = (items.double() if isinstance(items, torch.Tensor) else items) / micro.step_samples
        weighs = count is not None or micro.of > 1
        if pipelines is not None and task is not None:
            self._items[micro.index] = items
            weight = self._weight(share, self._widest) if weighs else None
            known = [(value, self._items[m]) for m, value in pipelines.compute(task, weight, target, work.turn)]
        else:
            assert isinstance(loss, torch.Tensor)
            with self._precision.backward():
                scaled = self._precision.scale(loss)
                weight = self._weight(share, scaled) if weighs else None
                self._strategy.backward(scaled, weight, target, work.turn)
            known = [] if micro.shadow else [(loss, items)]
        if work.turn.last:
            self._items.clear()
            if count is not None:
                self._divide_by_counts(target, micro.step_samples)
        return [(value.detach(), items) for value, items in known]

    def serve(self, work: Work) -> bool:
        """The whole step of the ranks that this one serves; whether there was one, see `Serves.serve`."""
        everything = tuple(self._state.optimizers) or None
        target = self._target(everything)
        self._pulse.enter("reduction")
        assert isinstance(self._strategy, Serves)
        served = self._strategy.serve(target, work.turn)
        if served:
            work.reached.add(target)
            work.due[target] = self._named(everything)
        return served

    def part(self, *, whole: bool) -> bool:
        """The loop over micro-batches is over; those who serve learn from the others how, see `Serves.part`."""
        return self._strategy.part(whole=whole) if isinstance(self._strategy, Serves) else whole

    def update(self, optimizer: Optimizers) -> bool:
        """See `Run.update`. Whether no other optimizer of the run can follow in this step, so it may end."""
        work = self._at_work("update")
        if not work.turn.last:
            return False
        if not work.reached:
            raise UsageError("run.update() before run.backward(loss): there is no gradient yet")
        target = self._target(optimizer)
        work.due[target] = self._named(optimizer)
        return target.everything

    def end(self, work: Work) -> bool:
        """The user is done with the micro-batch. Whether the whole step is done; its schedulers have stepped, too."""
        if not work.reached:
            raise UsageError(
                "a micro-batch went by without run.step(loss); call it once for each, also where there is nothing to "
                "learn (a loss of zero times the model's output will do)"
            )
        work.ended = True
        if not work.turn.last:
            self._strategy.end(work.turn)
            return False
        if not work.due:
            raise UsageError("a step ended without run.update(): call it after each run.backward(loss)")
        if work.due.keys() != work.reached:
            _refuse_forgotten(work)
        self._pulse.enter("update")
        for target, optimizers in work.due.items():
            self._precision.step(optimizers, target, self._strategy, self._clip_norm)
            for parameter in target.parameters:
                parameter.grad = None
        self._strategy.end(work.turn)
        if self._precision.stepped():
            stepped = {id(optimizer) for optimizers in work.due.values() for optimizer in optimizers}
            for scheduler in self._state.schedulers:
                if id(scheduler.optimizer) in stepped:
                    scheduler.step()
        return True

    def leave(self) -> None:
        """The loop over micro-batches is left; a step that is not done is forgotten."""
        work, self.work = self.work, None
        if work is not None and not (work.ended and work.turn.last):
            self._counts.clear()
            self._items.clear()
            self._strategy.abandon()
            for model in self._state.models:
                model.zero_grad(set_to_none=True)

    def _weight(self, share: float | torch.Tensor, loss: torch.Tensor) -> torch.Tensor:
        """What the backward pass of ``loss`` begins with: cheaper than one more multiplication on the way."""
        if isinstance(share, torch.Tensor):
            return share.to(loss)
        key = (share, loss.dtype, loss.device)
        if key not in self._weights:
            # Shares repeat: one for full micro-batches, and a few for the ends of epochs.
            self._weights[key] = loss.new_tensor(share)
        return self._weights[key]

    def _at_work(self, what: str) -> Work:
        if self.work is None:
            raise UsageError(f"run.{what}(...) outside of `for batch in run.train(loader)`: there is no micro-batch")
        if self.work.ended:
            raise UsageError(f"run.{what}(...) after the step was done: call run.step(loss) once for each micro-batch")
        return self.work

    def _named(self, optimizer: Optimizers) -> tuple[torch.optim.Optimizer, ...]:
        known = self._state.optimizers
        if optimizer is None:
            if len(known) != 1:
                raise UsageError(
                    f"the run has {len(known)} optimizers; "
                    + ("say run.step(loss, optimizer=...)" if known else "call run.optimizer(optimizer) first")
                )
            return (known[0],)
        named = (optimizer,) if isinstance(optimizer, torch.optim.Optimizer) else tuple(optimizer)
        if not all(any(o is k for k in known) for o in named):
            raise UsageError("step(optimizer=...): give what run.optimizer(...) returned")
        return named

    def _target(self, optimizer: Optimizers) -> Target:
        optimizers = self._named(optimizer)
        key = tuple(map(id, optimizers))
        target = self._targets.get(key)
        if target is None:
            target = self._targets[key] = self._make_target(optimizers)
        return target

    def _make_target(self, optimizers: tuple[torch.optim.Optimizer, ...]) -> Target:
        if len(optimizers) == len(self._state.optimizers):
            trained = [p for parameters in self._state.parameters for p in parameters if p.requires_grad]
            return Target(tuple(dict.fromkeys(trained)), everything=True)
        mine = dict.fromkeys(p for o in optimizers for p in parameters_of(o) if p.requires_grad)
        for model, parameters in zip(self._state.models, self._state.parameters, strict=True):
            inside = [p in mine for p in parameters if p.requires_grad]
            if any(inside) and not all(inside):
                raise UsageError(
                    f"{type(model).__name__} is shared by optimizers that step apart; give each a model of its own, or "
                    "let them share the backward pass: run.step(loss, optimizer=[first, second])"
                )
        return Target(tuple(mine), everything=False)

    def _divide_by_counts(self, target: Target, step_samples: int) -> None:
        """From the sum over the items per sample to the mean over all items of the step."""
        counted = float(self._counts.pop(target, 0))
        if not counted.is_integer():
            raise UsageError(
                f"step(count=...): the counts of this rank's micro-batches add up to {counted:g}; give whole numbers "
                "(weights that are fractions: scaled up and rounded)"
            )
        self._strategy.divide(target, step_samples, int(counted))

    def _task(self, loss: Callable[..., torch.Tensor], data: tuple[Any, ...], target: Target) -> Task:
        """What the user would compute: ``loss(model(inputs), targets)``."""
        if len(data) != 2:
            raise UsageError(
                f"step({loss!r:.60}{', ...' * len(data)}): give the loss, a tensor; or a function and what it is of, "
                "as in run.step(F.cross_entropy, images, labels), which is F.cross_entropy(model(images), labels)"
            )
        places = target.places
        known = zip(self._state.parameters, self._state.adopted, strict=True)
        models = [adopted for parameters, adopted in known if any(id(p) in places for p in parameters)]
        if len(models) != 1:
            raise UsageError(
                f"step(loss function, inputs, targets): the run has {len(models)} models that it may be of; "
                "compute the loss yourself and give the tensor"
            )
        inputs, targets = (part if isinstance(part, tuple) else (part,) for part in data)
        return Task(models[0], loss, inputs, targets, self._precision.scale)


def _refuse_forgotten(work: Work) -> None:
    """A gradient that stayed would be counted again in the next step, once for each rank."""
    stepped = {id(p) for target in work.due for p in target.parameters}
    if not all(any(id(p) in stepped for p in target.parameters) for target in work.reached):
        raise UsageError(
            "run.backward(loss, optimizer=...) without run.update(...) in the same step: call both in the steps where "
            "the optimizer is to step, and neither in the others; for more samples per step raise global_batch"
        )
