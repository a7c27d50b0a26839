"""From the losses of a step's micro-batches to one update: the order of events within a step.

micro-batch 0 .. n-1   backward                    gradients are folded along the tree
                       buffers                     once every optimizer had its loss, or the body is over
micro-batch n          backward, reduction         .grad holds the sum over all ranks' micro-batches
                       [division by the counts]
                       unscale, clip, update       each optimizer, once every one had its loss, or the body is over
                       buffers, schedulers         once all optimizers have stepped: the step is done
                       the rest of the body        such as an average of the weights; then the step ends, and is saved

Optimizers step together, at the end: were a GAN's discriminator updated before the generator's loss is computed, the
losses of each rank's last micro-batch would see other parameters than those before it, and the sum would tell how many
ranks there are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch import nn

from lockstep.collectives import Group
from lockstep.data import MicroBatch
from lockstep.errors import MismatchError, UsageError
from lockstep.heartbeat import progress_marker
from lockstep.run.divergence import checksum
from lockstep.run.loop_checks import LoopChecks
from lockstep.run.nonfinite import NonFiniteChecks
from lockstep.run.precision import Precision
from lockstep.run.state import State
from lockstep.strategies import (
    ComputesLoss,
    HasServerRanks,
    LossCall,
    MicroBatchPosition,
    ParameterSet,
    Strategy,
    can_update_trainable,
    is_loss,
    parameters_of,
    update_trainable,
)

Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None
Count = int | torch.Tensor | None
Loss = torch.Tensor | Callable[..., torch.Tensor]
Known = list[tuple[torch.Tensor, int | torch.Tensor]]
"""Losses that have become known, each with the number of items that it is the mean of: none for padding."""


class CurrentMicroBatch:
    """The micro-batch in the user's hands."""

    __slots__ = ("due", "ended", "failed", "finished", "micro", "reached", "turn")

    def __init__(self, micro: MicroBatch) -> None:
        self.micro: Final = micro
        self.turn: Final = MicroBatchPosition(
            micro.index, micro.of, micro.last, micro.is_padding, micro.samples, micro.step_samples
        )
        self.reached: set[ParameterSet] = set()  # by backward passes since it was handed out
        self.due: dict[ParameterSet, tuple[torch.optim.Optimizer, ...]] = {}  # who steps at its end
        self.finished = False  # all that is to learn from it was learnt
        self.failed = False  # ... or an error came in between
        self.ended = False  # ... and the user is done with it

    @property
    def complete(self) -> bool:
        """Whether the step that it is the last one of is done."""
        return self.finished and self.turn.last and not self.failed


class TrainStep:
    """Turns losses into updates, for every optimizer of a run."""

    def __init__(
        self,
        group: Group,
        strategy: Strategy,
        precision: Precision,
        state: State,
        clip_norm: float | None,
        finite: NonFiniteChecks,
    ) -> None:
        self._group: Final = group
        self._strategy: Final = strategy
        self._precision: Final = precision
        self._state: Final = state
        self._clip_norm: Final = clip_norm
        self._finite: Final = finite
        self.checks: Final = LoopChecks(state, whole=lambda: can_update_trainable(strategy))
        self._marker: Final = progress_marker()
        self._targets: Final[dict[tuple[int, ...], ParameterSet]] = {}
        self._counts: Final[dict[ParameterSet, int | torch.Tensor]] = {}
        self._begun: Final[dict[ParameterSet, bool]] = {}  # targets with a loss in this step, and whether it has counts
        self._suspect: set[tuple[int, ...]] = set()  # targets to be made anew, by their keys
        self._items: Final[dict[int, int | torch.Tensor]] = {}  # of micro-batches whose loss is not known yet
        self._weights: Final[dict[tuple[float, torch.dtype, torch.device], torch.Tensor]] = {}
        # Like the weights of losses that are not known yet; rounded later, they are what the others are.
        self._widest: Final = torch.empty((), dtype=torch.float64, device=group.device)
        self._step = 0
        self.work: CurrentMicroBatch | None = None

    def begin(self, micro: MicroBatch, step: int, *, compare: bool) -> CurrentMicroBatch:
        """``micro`` is handed to the user, after ``step`` steps; with ``compare``, what costs more is checked, too."""
        self.work = work = CurrentMicroBatch(micro)
        self._step = step
        self._strategy.begin_micro_batch(work.turn)
        self.checks.body_begins(compare=compare)
        self.checks.run_steps = False
        return work

    def backward(self, loss: Loss, data: tuple[Any, ...], count: Count, optimizer: Optimizers) -> Known:
        """See `Run.backward`. The losses that have become known by it."""
        work = self._at_work("backward")
        micro = work.micro
        target = self._target(optimizer)
        if work.finished or any(not target.places.keys().isdisjoint(other.places) for other in work.reached):
            raise UsageError(
                "a second run.step(loss) for the same parameters in one micro-batch: add the losses up and call it once"
            )
        self._check_first(target, work, counts=count is not None)
        task = self._task(loss, data, target) if callable(loss) else None
        pipelines = self._strategy if task is not None and isinstance(self._strategy, ComputesLoss) else None
        if task is not None and pipelines is None:
            with self._precision.forward():
                loss = task()
        if pipelines is None and not is_loss(loss):
            raise UsageError(
                f"step({_told(loss)}): the loss must be a tensor of no dimension that depends on the model's "
                "parameters; reduce it with .mean(), and do not detach it"
            )
        if isinstance(loss, torch.Tensor) and not self._precision.scales and not micro.is_padding:
            self._finite.loss(loss, self._step, micro.index, micro.of)
        work.reached.add(target)
        self._marker.set_phase("reduction" if work.turn.last and self._group.size > 1 else "backward")
        if count is not None and not micro.is_padding:
            self._counts[target] = self._counts.get(target, 0) + count
        # The loss is a mean over the micro-batch's items, the gradient one over the step's: each weighs what it holds.
        items = micro.samples if count is None else count
        share = (items.double() if isinstance(items, torch.Tensor) else items) / micro.step_samples
        weighs = count is not None or micro.of > 1
        if pipelines is not None and task is not None:
            self._items[micro.index] = items
            weight = self._weight(share, self._widest) if weighs else None
            losses = pipelines.compute(task, weight, target, work.turn)
            for index, value in () if self._precision.scales else losses:
                self._finite.loss(value, self._step, index, micro.of)
            known = [(value, self._items[m]) for m, value in losses]
        else:
            assert isinstance(loss, torch.Tensor)
            with self._precision.backward():
                scaled = self._precision.scale(loss)
                weight = self._weight(share, scaled) if weighs else None
                self._strategy.backward(scaled, weight, target, work.turn)
            known = [] if micro.is_padding else [(loss, items)]
        if work.turn.last:
            self._items.clear()
            if self._begun[target]:
                self._divide_by_counts(target, micro.step_samples)
        return [(value.detach(), items) for value, items in known]

    def serve(self, work: CurrentMicroBatch) -> bool:
        """The whole step of the ranks that this one serves; whether there was one, see `HasServerRanks.serve`."""
        everything = tuple(self._state.optimizers) or None
        target = self._target(everything)
        self._marker.set_phase("reduction")
        assert isinstance(self._strategy, HasServerRanks)
        served = self._strategy.serve(target, work.turn)
        if served:
            work.reached.add(target)
            work.due[target] = self._named(everything)
        return served

    def part(self, *, whole: bool) -> bool:
        """The loop over micro-batches is over; those who serve learn from the others how, see `HasServerRanks.part`."""
        return self._strategy.part(whole=whole) if isinstance(self._strategy, HasServerRanks) else whole

    def update(self, optimizer: Optimizers) -> bool:
        """See `Run.update`. Whether the step is done by it."""
        work = self._at_work("update")
        if work.finished:
            raise UsageError("a second run.update() in one micro-batch: call it once for each run.backward(loss)")
        if not work.reached:
            raise UsageError("run.update() before run.backward(loss): there is no gradient yet")
        optimizers = self._named(optimizer)
        target = self._targets.get(tuple(map(id, optimizers)))
        work.due[self._target(optimizer) if target not in self._begun else target] = optimizers
        due = {id(optimizer) for optimizers in work.due.values() for optimizer in optimizers}
        if len(due) == len(self._state.optimizers):
            self._finish(work)
        return work.complete

    def end(self, work: CurrentMicroBatch) -> bool:
        """The user is done with the micro-batch. Whether a step was done with it."""
        work.ended = True
        if not work.finished:
            if not work.reached:
                raise UsageError(
                    "a micro-batch went by without run.step(loss), which takes the place of loss.backward(), "
                    "optimizer.step() and optimizer.zero_grad(); call it once for each, also where there is nothing to "
                    "learn (a loss of zero times the model's output will do)"
                )
            if not work.due and work.turn.last:
                raise UsageError("a step ended without run.update(): call it where run.backward(loss) returned True")
            self._finish(work)
        self.checks.buffers_stayed()
        if not work.turn.last:
            self.checks.body_ended(work.turn.index, work.turn.of)
        return work.complete

    def _finish(self, work: CurrentMicroBatch) -> None:
        """All losses of the micro-batch are there; after the last one of a step, so is the step."""
        work.finished = work.failed = True
        self.checks.parameters_stayed(work.turn.index, work.turn.of)
        if work.turn.last:
            self._complete(work)
        else:
            self._strategy.end_micro_batch(work.turn)
        self.checks.forward_is_over()
        work.failed = False

    def _complete(self, work: CurrentMicroBatch) -> None:
        if work.due.keys() != work.reached:
            _refuse_forgotten(work)
        self._marker.set_phase("update")
        self.checks.run_steps = True
        for target in () if self._precision.scales else work.due:  # all of them, before one takes a step
            self._finite.gradients(target.parameters, self._state.name_of, self._step)
        for target, optimizers in work.due.items():
            self._precision.step(optimizers, target, self._strategy, self._clip_norm)
            for parameter in target.parameters:
                parameter.grad = None
        self._strategy.end_micro_batch(work.turn)
        if not self._precision.stepped():
            self._finite.loss_scale(self._precision.loss_scale, self._step)
        else:
            stepped = {id(optimizer) for optimizers in work.due.values() for optimizer in optimizers}
            for scheduler in self._state.schedulers:
                if id(scheduler.optimizer) in stepped:
                    scheduler.step()
        self.checks.run_steps = False
        self.checks.step_is_due()
        self._begun.clear()

    def leave(self) -> None:
        """The loop over micro-batches is left; a step that is not done is forgotten."""
        work, self.work = self.work, None
        self.checks.run_steps = True
        if work is not None and not work.complete:
            self._counts.clear()
            self._items.clear()
            self._begun.clear()
            self._strategy.discard_step()
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

    def _at_work(self, what: str) -> CurrentMicroBatch:
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

    def new_pass(self) -> None:
        """Before the first micro-batch: modules may have been replaced or added since the last one."""
        if can_update_trainable(self._strategy):
            self._state.rescan()
            self._suspect = set(self._targets)

    def _target(self, optimizer: Optimizers) -> ParameterSet:
        """The parameters that ``optimizer`` holds and that learn now."""
        optimizers = self._named(optimizer)
        key = tuple(map(id, optimizers))
        target = self._targets.get(key)
        if target is not None and key not in self._suspect and _is_current(target, optimizers):
            return target
        self._suspect.discard(key)
        found = self._make_target(optimizers)
        before = self._state.learning if target is None else frozenset(target.parameters)
        if before.intersection(found.candidates) != set(found.parameters):
            if target in self._begun:
                raise UsageError(
                    "which parameters learn has changed between two micro-batches of a step, so ranks would differ: "
                    "freeze, unfreeze and add parameters alike in each micro-batch of a step, or where run.step(loss) "
                    "has returned True"
                )
            self._take_up(found, before)
        self._targets[key] = found
        return found

    def _take_up(self, now: ParameterSet, before: frozenset[nn.Parameter]) -> None:
        """Other parameters learn from this step on than did ``before``. All ranks, at the same step."""
        if not can_update_trainable(self._strategy):
            update_trainable(
                self._strategy, now
            )  # refuses it, on this rank by itself: others may serve, and have no body
        mine = [
            (self._state.name_of(p), tuple(p.shape), None if p in before else int(checksum(p))) for p in now.parameters
        ]
        for rank, theirs in enumerate(self._group.gather_objects(mine, "which parameters learn")):
            odd = sorted({name for name, *_ in set(mine) ^ set(theirs)})
            if odd:
                raise MismatchError(
                    f"from step {self._step + 1} on other parameters learn, and not the same on all ranks: {odd[0]}"
                    f"{f' and {len(odd) - 1} more' if len(odd) > 1 else ''} is another one on rank {rank} than on rank "
                    f"{self._group.rank}. Freeze, unfreeze and add alike on all ranks, and make new parameters outside "
                    "of the loop over micro-batches, where all ranks draw the same random numbers"
                )
        update_trainable(self._strategy, now)

    def _make_target(self, optimizers: tuple[torch.optim.Optimizer, ...]) -> ParameterSet:
        """What ``optimizers`` may learn, and of that what learns now."""
        held = [p for optimizer in optimizers for p in parameters_of(optimizer)]
        everything = len(optimizers) == len(self._state.optimizers)
        if can_update_trainable(self._strategy) and not self._state.known_parameters.issuperset(held):
            self._state.rescan()
        models = self._state.parameters
        strangers = [p for p in held if p.requires_grad and p not in self._state.known_parameters]
        if strangers:
            raise UsageError(
                f"{len(strangers)} of {len(held)} parameters that are to learn belong to no model of this run, the "
                f"first of shape {tuple(strangers[0].shape)}: make them part of what run.model(...) was given"
            )
        inside = dict.fromkeys(p for parameters in models for p in parameters)
        candidates = [*inside] if everything else [p for p in held if p in inside]
        if not everything:
            mine = set(held)
            for model, parameters in zip(self._state.models, models, strict=True):
                its = [p in mine for p in parameters if p.requires_grad]
                if any(its) and not all(its):
                    raise UsageError(
                        f"{type(model).__name__} is shared by optimizers that step apart; give each a model of its "
                        "own, or let them share the backward pass: run.step(loss, optimizer=[first, second])"
                    )
        learn = [p.requires_grad for p in candidates]
        learning = tuple(p for p, learns in zip(candidates, learn, strict=True) if learns)
        return ParameterSet(
            learning,
            everything=everything,
            sparse=frozenset(p for p in learning if p in self._state.sparse),
            candidates=tuple(candidates),
            learn=learn,
            held=len(held),
        )

    def _check_first(self, target: ParameterSet, work: CurrentMicroBatch, *, counts: bool) -> None:
        """Before a backward pass for ``target``."""
        if not self._begun:
            self.checks.first_backward()
        else:
            self.checks.same_options(self._step)
        if target not in self._begun:
            there = [self._state.name_of(p) for p in target.parameters if p.grad is not None]
            if there:
                raise UsageError(
                    f"{len(there)} parameters had a gradient before the step's first run.step(loss), such as "
                    f"{', '.join(there[:3])}: run.step(loss) takes the place of loss.backward(); clear what was there "
                    "before training with optimizer.zero_grad()"
                )
            self._begun[target] = counts
        elif self._begun[target] != counts and not work.turn.is_padding:
            raise UsageError(
                "run.step(loss, count=...) for some micro-batches of a step and run.step(loss) for others, so there is "
                "no one mean: give the count for each, a 0 where a micro-batch holds no item"
            )

    def _divide_by_counts(self, target: ParameterSet, step_samples: int) -> None:
        """From the sum over the items per sample to the mean over all items of the step."""
        counted = float(self._counts.pop(target, 0))
        if not counted.is_integer():
            raise UsageError(
                f"step(count=...): the counts of this rank's micro-batches add up to {counted:g}; give whole numbers "
                "(weights that are fractions: scaled up and rounded)"
            )
        self._strategy.normalize_by_count(target, step_samples, int(counted))

    def _task(self, loss: Callable[..., torch.Tensor], data: tuple[Any, ...], target: ParameterSet) -> LossCall:
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
        return LossCall(models[0], loss, inputs, targets, self._precision.scale)


def _is_current(target: ParameterSet, optimizers: tuple[torch.optim.Optimizer, ...]) -> bool:
    """Whether ``target`` is what ``optimizers`` hold and what of it learns now."""
    held = sum(len(group["params"]) for optimizer in optimizers for group in optimizer.param_groups)
    return held == target.held and target.learn == [p.requires_grad for p in target.candidates]


def _told(loss: object) -> str:
    if isinstance(loss, torch.Tensor):
        return f"tensor of shape {tuple(loss.shape)}, requires_grad={loss.requires_grad}"
    return f"{loss!r:.60}"


def _refuse_forgotten(work: CurrentMicroBatch) -> None:
    """A gradient that stayed would be counted again in the next step, once for each rank."""
    stepped = {id(p) for target in work.due for p in target.parameters}
    if not all(any(id(p) in stepped for p in target.parameters) for target in work.reached):
        raise UsageError(
            "run.backward(loss, optimizer=...) without run.update(...) in the same step: call both in the steps where "
            "the optimizer is to step, and neither in the others; for more samples per step raise global_batch"
        )
