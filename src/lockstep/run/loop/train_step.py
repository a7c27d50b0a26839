"""From the losses of a step's micro-batches to one update: the order of events within a step.

micro-batch 0 .. n-1   backward                    gradients are folded along the tree
                       buffers                     once every optimizer had its loss, or the body is over
micro-batch n          backward, reduction         .grad holds the sum over all ranks' micro-batches
                       [division by the counts]
                       [hooks of the script]       see `gradient_hooks`
                       [buffers]                   under ddp, fsdp, hsdp; of all before the first optimizer steps:
                       unscale, [agree], clip      fp16: by the loss scale; an overflow on one rank counts on all
                       before_optimizer_step       the strategy drops gradients whose optimizer state is on another rank
                       optimizer.step              each optimizer, once every one had its loss, or the body is over
                       buffers, schedulers         once all optimizers have stepped: the step is done
                       the rest of the body        such as an average of the weights; then the step ends, and is saved

Optimizers step together, at the end: were a GAN's discriminator updated before the generator's loss is computed, the
losses of each rank's last micro-batch would see other parameters than those before it, and the sum would depend on the
number of ranks.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from enum import Enum, auto
from typing import Final, Literal

import torch
from torch import nn

from lockstep.batch import MicroBatchPosition
from lockstep.errors import UsageError
from lockstep.run.checks.batch_losses import BatchLosses
from lockstep.run.checks.buffer_moves import BufferMoves
from lockstep.run.checks.loop_checks import LoopChecks
from lockstep.run.checks.loss_items import LossItems
from lockstep.run.checks.nonfinite import NonFiniteChecks
from lockstep.run.checks.update_checks import UpdateChecks
from lockstep.run.loop.closures import ClosureSteps, HeldMicroBatch
from lockstep.run.loop.gradient_hooks import GradientHooks
from lockstep.run.loop.parameter_sets import Optimizers, ParameterSets
from lockstep.run.loop.step_losses import StepLosses
from lockstep.run.metrics.metric_means import as_it_is
from lockstep.run.proofs.audit import Audit
from lockstep.run.proofs.replay import Replays
from lockstep.run.proofs.transcript_writer import TranscriptWriter
from lockstep.run.recovery.resume_point import ResumePoint
from lockstep.run.setup.run_context import RunContext
from lockstep.strategies import LossCall, LossStrategy, ParameterSet, ServerStrategy, describe_loss, is_loss
from lockstep.torch_private import step_hooks

_AS_USUAL: Final = nullcontext()
#: Loss weights that are kept as tensors: that of full micro-batches, and a few for the ends of epochs.
_WEIGHTS: Final = 16

Items = int | torch.Tensor
Count = Items | None
Loss = torch.Tensor | Callable[..., torch.Tensor]
LossKind = Literal["mean", "sum"]


class Turn(Enum):
    """How far the turn of one micro-batch is."""

    LOSSES = auto()  #: losses are to come
    UPDATE = auto()  #: every optimizer had its loss; an error, or a dispute about gradients, leaves the turn here
    DONE = auto()  #: the gradients are folded; of the last micro-batch, the optimizers have stepped


class CurrentMicroBatch:
    """The micro-batch in the loop's body, and its state: losses computed, updates due."""

    __slots__ = ("due", "ended", "position", "reached", "turn", "with_loss")

    def __init__(self, position: MicroBatchPosition) -> None:
        self.position: Final = position
        self.reached: set[ParameterSet] = set()  #: parameters with a backward pass of this micro-batch
        self.with_loss: set[torch.optim.Optimizer] = set()  #: the optimizers of the parameters in `reached`
        #: The optimizers that step after this micro-batch, if it is the step's last one, by their parameters.
        self.due: dict[ParameterSet, tuple[torch.optim.Optimizer, ...]] = {}
        self.turn = Turn.LOSSES
        self.ended = False  #: the loop's body is over

    @property
    def complete(self) -> bool:
        """Whether this was the last micro-batch of a step, and the step is done."""
        return self.turn is Turn.DONE and self.position.last


class TrainStep:
    """Turns losses into updates, for every optimizer of a run."""

    def __init__(
        self,
        context: RunContext,
        finite: NonFiniteChecks,
        point: ResumePoint,
        transcript: TranscriptWriter | None = None,
    ) -> None:
        group, strategy, state = context.group, context.strategy, context.state
        self._group: Final = group
        self._strategy: Final = strategy
        self._strategy_name: Final = context.settings.strategy
        self._computes_loss: Final = strategy if isinstance(strategy, LossStrategy) else None
        self._precision: Final = context.precision
        self._kernels: Final = context.kernels
        self._warnings: Final = context.warnings
        self._state: Final = state
        self._clip_norm: Final = context.settings.clip_norm
        self._finite: Final = finite
        # In fp16 a gradient that is not finite is a loss scale that is too large.
        self._locates: Final = finite.locates and not context.precision.scales
        self._carried: Final = context.carried
        self.transcript: Final = transcript
        self.replays: Final = Replays(group, state, context.inputs, notes_all=transcript is not None)
        self.audit: Final = Audit(context)
        self.checks: Final = LoopChecks(state)
        self.updates: Final = UpdateChecks(context)
        self._loss_items: Final = LossItems(state, context.warnings)
        # Where ranks hold parts of the model, they would have to come to a backward pass together.
        part = strategy.state_part
        looks = not (strategy.forward_is_collective or (part is not None and part.divides_models))
        self._batch_losses: Final = BatchLosses(state, context.warnings) if looks else None
        self._brings_together = False  # whether the script's loop brings together what ranks have
        self._buffer_moves: Final = BufferMoves(state, context.warnings)
        self._marker: Final = context.marker
        self._metrics: Final = context.metrics
        self._position: Final = context.position
        self._emergency: Final = context.emergency
        self._leaves: Final = context.leaves
        self._point: Final = point
        self.parameter_sets: Final = ParameterSets(group, strategy, state, context.settings.strategy)
        self._losses: Final = StepLosses(group, strategy, state, self.parameter_sets, self.checks)
        self._weights: Final[dict[tuple[float, torch.dtype, torch.device], torch.Tensor]] = {}
        # The type of weights of losses that are not computed yet; rounded later, these are equal to other weights.
        self._widest: Final = torch.empty((), dtype=torch.float64, device=group.device)
        self._step = 0
        self.current: CurrentMicroBatch | None = None
        self._thread: int | None = None  # the thread in which micro-batches are handed out
        self._hooks: Final = GradientHooks(context)
        self._closures: Final = ClosureSteps(context, self._hooks)

    def begin(self, position: MicroBatchPosition, step: int) -> CurrentMicroBatch:
        """Begin the micro-batch at ``position``, about to be handed to the user, after ``step`` steps."""
        if self.transcript is not None:
            self.transcript.begins(step)
        self.current = current = CurrentMicroBatch(position)
        self._thread = threading.get_ident()
        self._step = step
        self.say_put_back(self._kernels.pin_threads())
        self._strategy.begin_micro_batch(current.position)
        self.checks.begin_body(compare=position.is_checked)
        self._buffer_moves.begin(position, step)
        self.replays.begin(position)
        if self.transcript is not None and not position.is_replay:
            self.transcript.hand_out(position, self.replays.play)
        self.checks.run_steps = False
        return current

    def say_put_back(self, changed: str) -> None:
        """Warn of a setting that `Kernels` found ``changed`` and put back; "" for none."""
        if changed:
            self._warnings.add(f"{changed} was put back: kernels would give other bits")

    def backward(
        self, loss: Loss, data: tuple[object, ...], count: Count, loss_is: LossKind, optimizer: Optimizers
    ) -> None:
        """See `Run.backward`. Losses that have become known by the backward pass are measured."""
        current = self._in_loop("run.step(...) or run.backward(...)")
        position = current.position
        items = position.samples if count is None else count
        if loss_is != "mean":
            loss = _mean_of(loss, loss_is, items)
        optimizers = self.parameter_sets.named(optimizer)
        target = self.parameter_sets.current(optimizers, self._losses.has_counts, self._step)
        if current.turn is not Turn.LOSSES or any(
            not target.places.keys().isdisjoint(other.places) for other in current.reached
        ):
            raise UsageError(
                "a second run.step(loss) for the same parameters in one micro-batch: add the losses up and call it once"
            )
        self._losses.begin(target, position, self._step, counts=count is not None)
        task = self._task(loss, data, target) if callable(loss) else None
        pipeline = None if task is None else self._computes_loss
        if task is None and self._state.with_closure:
            raise UsageError(
                f"{type(self._state.optimizers[0]).__name__} computes the loss several times in a step, so give "
                "run.step(...) what computes it: run.step(F.cross_entropy, images, labels), for "
                "F.cross_entropy(model(images), labels), in place of its value"
            )
        random_state = self._closures.random_state() if self._state.with_closure else []
        replayed = position.is_replay
        counts = not position.is_padding and not replayed
        if self.replays.play is not None:
            self.replays.play.note_loss(count)
            if self.transcript is not None:
                self.transcript.note_draws(self.replays.play)
        value = None if pipeline is not None else self._value_of(loss, task, position, items)
        if value is not None and position.is_checked and count is None and loss_is == "mean":
            self._loss_items.look_at(value, target, position)
        if value is not None and replayed and self._batch_losses is not None and not self._brings_together:
            self._batch_losses.look_at(value, target, position)
        current.reached.add(target)
        current.with_loss.update(optimizers)
        if position.last and not replayed:
            self._leaves.enter(self._step + 1)
        self._marker.set_phase("reduction" if position.last and self._group.size > 1 else "backward")
        if count is not None and counts:
            self._losses.add_count(target, count)
        if position.last:
            self._losses.begin_total(target)
        # The loss is a mean over the micro-batch's items, the gradient a mean over the step's: the weight is the share
        # of items.
        share = (items.double() if isinstance(items, torch.Tensor) else items) / position.step_samples
        weighs = count is not None or position.of > 1
        if value is not None:
            if counts:
                self._measure(value, items, position.index, target)
            if position.last:
                self._emergency.note(self._step + 1)
            self._kernels.examine(value, is_checked=self.replays.play is not None)
            with self._precision.backward(), self._kernels.backward():
                scaled = self._precision.scale(value)
                weight = self._weight(share, scaled) if weighs else None
                compute = self._strategy.replay if replayed else self._strategy.backward
                with (
                    self._hooks.off(target.parameters),
                    _AS_USUAL if self.replays.play is None else self.replays.watching(scaled),
                    self._locating(target, position.index, position.of) if self._locates else _AS_USUAL,
                ):
                    compute(scaled, weight, target, position)
            if task is not None and self._state.with_closure and not replayed:
                self._closures.hold(HeldMicroBatch(position, task, random_state, items, weight, value.detach()))
        elif pipeline is not None and task is not None:
            self.replays.note_given((task.inputs, task.targets))
            if not replayed:
                self._losses.items[position.index] = items
                weight = self._weight(share, self._widest) if weighs else None
                with (
                    self._hooks.off(target.parameters),
                    self._kernels.backward(),
                    self._locating(target, None, position.of) if self._locates else _AS_USUAL,
                ):
                    losses = pipeline.compute(task, weight, target, position)
                self._take_losses(losses, position.of, target)
        if position.last:
            self._losses.items.clear()
            self._losses.divide_by_counts(target, position.step_samples)
            if not replayed:
                self._hooks.call(target.parameters)
        if len(self._state.optimizers) > 1:
            self._marker.set_phase("forward")  # of the next loss

    def _locating(self, target: ParameterSet, index: int | None, of: int) -> AbstractContextManager[None]:
        """See `NonFiniteChecks.locating`."""
        micro_batches = f"one of its {of} micro-batches" if index is None else f"micro-batch {index} of {of}"
        return self._finite.locating(target.whole, self._state.name_of, self._step, micro_batches)

    def _value_of(self, loss: Loss, task: LossCall | None, position: MicroBatchPosition, items: Items) -> torch.Tensor:
        """The loss of this micro-batch: ``loss`` as given by the script, or computed by ``task``.

        Raises:
            UsageError: if no backward pass can begin at the loss.
            NonFiniteError: if the loss is not finite, `Settings.on_nan` says so, and no loss scale may be the reason.
        """
        if task is not None:
            with self._precision.forward():
                loss = task()
        if not is_loss(loss):
            raise UsageError(
                f"step({describe_loss(loss)}): the loss must be a tensor of no dimension that depends on the model's "
                "parameters; reduce it with .mean(), and do not detach it"
            )
        if not self._precision.scales and not position.is_padding and not position.is_replay:
            self._finite.loss(loss, self._step, position.index, position.of, items)
        return loss

    def _take_losses(self, losses: Sequence[tuple[int, torch.Tensor]], of: int, target: ParameterSet) -> None:
        """Check and measure the losses of a pipeline, each with the index of its micro-batch in this step."""
        for index, value in () if self._precision.scales else losses:
            self._finite.loss(value, self._step, index, of, self._losses.items[index])
        for index, value in losses:
            self._measure(value, self._losses.items[index], index, target)

    def _measure(self, loss: torch.Tensor, items: int | torch.Tensor, index: int, target: ParameterSet) -> None:
        """Measure the ``loss`` of a micro-batch, a mean over ``items``."""
        self._position.loss = as_it_is(loss)
        number = as_it_is(items) if isinstance(items, torch.Tensor) else items
        self._metrics.add_loss(self.parameter_sets.name_of_loss(target), index, self._position.loss, number)

    def require_all_ranks(self, method: str) -> None:
        """Check that every rank comes to a call of ``run.method`` at this place of the script, and as often.

        Raises:
            UsageError: in a body of a loop over micro-batches, of which ranks have different numbers, unless the step
                is done there; and anywhere in such a loop if some ranks serve the others.
        """
        position, inside = self._metrics.position, self._metrics.inside
        if position is None:
            return
        if isinstance(self._strategy, ServerStrategy):
            raise UsageError(
                f"run.{method}(...) in a loop over micro-batches: under strategy {self._strategy_name} there are ranks "
                "that serve the others, and go through no body of such a loop. Call it before or after the loop, or "
                "use another strategy, such as ddp or zero"
            )
        if inside == "evaluate":
            where, once = "the body of run.evaluate(...)", "after the loop"
        elif self.current is not None and not self.current.complete:
            where = "the middle of a step"
            once = f"where the step is done, `if run.step(loss): run.{method}(...)`, or after the loop"
        else:
            self._brings_together = True
            return
        raise UsageError(
            f"run.{method}(...) in {where}: ranks have different micro-batches there, and different numbers of them. "
            f"Add up or collect what this rank finds, and call it once for all, {once}"
        )

    def serve(self, current: CurrentMicroBatch) -> bool:
        """Serve a whole step of the other ranks; whether these made a step, see `ServerStrategy.serve`."""
        optimizers = self.parameter_sets.named(tuple(self._state.optimizers) or None)
        target = self.parameter_sets.current(optimizers, self._losses.has_counts, self._step)
        self._marker.set_phase("reduction")
        assert isinstance(self._strategy, ServerStrategy)
        served = self._strategy.serve(target, current.position)
        if served:
            current.reached.add(target)
            current.due[target] = optimizers
        return served

    def end_loop(self, *, whole: bool) -> bool:
        """End the loop over micro-batches; server ranks learn how it ended, see `ServerStrategy.end_loop`."""
        return self._strategy.end_loop(complete=whole) if isinstance(self._strategy, ServerStrategy) else whole

    def update(self, optimizer: Optimizers) -> bool:
        """See `Run.update`; returns whether the step is done."""
        current = self._in_loop("run.update(...)")
        if current.turn is not Turn.LOSSES:
            raise UsageError("a second run.update() in one micro-batch: call it once for each run.backward(loss)")
        if not current.reached:
            raise UsageError("run.update() before run.backward(loss): there is no gradient yet")
        optimizers = self.parameter_sets.named(optimizer)
        target = self.parameter_sets.known(optimizers)
        if target is None or target not in self._losses.has_counts:
            target = self.parameter_sets.current(optimizers, self._losses.has_counts, self._step)
        current.due[target] = optimizers
        due = {id(optimizer) for optimizers in current.due.values() for optimizer in optimizers}
        if len(due) == len(self._state.optimizers):
            self._finish(current)
        return current.complete

    def end(self, current: CurrentMicroBatch) -> bool:
        """End the micro-batch, with which the user is done; returns whether a step was done with it."""
        current.ended = True
        if current.turn is Turn.LOSSES:
            if not current.reached and not current.position.is_replay:
                raise UsageError(
                    "a micro-batch went by without run.step(loss), which takes the place of loss.backward(), "
                    "optimizer.step() and optimizer.zero_grad(): call it once for each. Where there is nothing to "
                    "learn, run.step(0 * model(x).sum()) with an x for which that is finite, as of torch.zeros_like(x)"
                    ". A prefetcher, which takes the next micro-batch before the step of this one, is to be left out: "
                    "run.loader(...) reads ahead"
                )
            if not current.due and current.position.last:
                raise UsageError("a step ended without run.update(): call it where run.backward(loss) returned True")
            self._finish(current)
        self._kernels.require_threads(f"the loop's body in step {self._step + 1}")
        self.checks.require_buffers_unchanged()
        if not current.position.last:
            self.checks.end_body(current.position.index, current.position.of)
        if self.replays.play is not None:
            play = self.replays.end(current.position, self._step, self._carried.current)
            if self.transcript is not None and play is not None and not current.position.is_replay:
                self.transcript.ended(current.position, play)
        return current.complete

    def _finish(self, current: CurrentMicroBatch) -> None:
        """All losses of the micro-batch are there; after the last one of a step, so is the step."""
        current.turn = Turn.UPDATE
        self.checks.body_steps()
        self._buffer_moves.end(current.position)
        if self._computes_loss is None:  # else forward passes are still to come
            self.replays.note_buffers()
        if current.position.audited and (played := self.replays.take(current.position, self._step)) is not None:
            self.audit.note(played)
        self.checks.require_parameters_unchanged(current.position.index, current.position.of)
        if current.position.is_replay:
            self._strategy.end_replay()
        else:
            self._losses.end_micro_batch(current.reached, current.position, self._step)
            if not current.position.last:
                self._strategy.end_micro_batch(current.position)
            elif not current.position.audited or self.audit.agrees():
                self._complete(current)
        self.checks.note_buffers()
        if not self.audit.disputed:
            current.turn = Turn.DONE

    def _complete(self, current: CurrentMicroBatch) -> None:
        if current.due.keys() != current.reached:
            _refuse_forgotten(current)
        self._marker.set_phase("update")
        self.checks.run_steps = True
        for target, optimizers in current.due.items():
            for optimizer in optimizers:
                self.updates.require_apart(optimizer, target.sparse)
        self.audit.require_stored(between=False)
        if current.position.is_checked or current.position.audited:
            self.updates.compare_ranks(self._step)
        for target in () if self._precision.scales else current.due:  # all gradients, before any optimizer steps
            self._finite.gradients(target.parameters, self._state.name_of, self._step)
        if not self._state.with_closure:
            self._strategy.before_update(current.position)
        for target, optimizers in current.due.items():
            self._prepare_gradients(optimizers, target)
        if (changed := self.checks.changed_since_point()) is not None:
            self._point.refuse(changed)
        self._point.lose()
        if any(_may_draw(optimizer) for optimizers in current.due.values() for optimizer in optimizers):
            self._position.seed_script("update")  # alike on all ranks
        for target, optimizers in current.due.items():
            self._step_optimizers(optimizers, target)
        self._strategy.end_micro_batch(current.position)
        self._precision.forget_casts()
        if not self._precision.update_scale():
            self._finite.loss_scale(self._precision.loss_scale, self._step)
        elif self._state.schedulers:
            stepped = {id(optimizer) for optimizers in current.due.values() for optimizer in optimizers}
            for scheduler in self._state.schedulers:
                if id(scheduler.optimizer) in stepped:
                    scheduler.step()
        self.checks.run_steps = False
        self.checks.end_step(self._strategy)
        self._losses.clear()

    def _prepare_gradients(self, optimizers: tuple[torch.optim.Optimizer, ...], target: ParameterSet) -> None:
        """Unscale and clip gradients, the last work before the update that may ask other ranks. Collective.

        A rank may be lost until here: nothing but gradients has changed.
        """
        layout = self._strategy.state_layout
        for optimizer in optimizers if self._precision.scales else ():
            self._precision.unscale(optimizer, layout.any)
        if self._clip_norm is not None:
            norm = layout.norm(target.parameters)
            self._metrics.add_norm(self._state.numbered("grad_norm", optimizers), norm)
            for parameters in target.alike:
                nn.utils.clip_grads_with_norm_(parameters, self._clip_norm, norm)
        self._strategy.before_optimizer_step(target)

    def _step_optimizers(self, optimizers: tuple[torch.optim.Optimizer, ...], target: ParameterSet) -> None:
        for optimizer in optimizers:
            if self._state.with_closure:
                self._closures.step(optimizer, target, counted=self._losses.has_counts[target])
                continue
            # Without any gradient, optimizers only count the step, or fail.
            with suppress(Exception) if not self.updates.share.steps else _AS_USUAL:
                if not self._precision.skips(optimizer):
                    optimizer.step()
        for parameter in target.parameters:
            parameter.grad = None

    def close(self) -> None:
        """End all watching of the script, since the run ends, perhaps within a body: optimizers may step again."""
        self.current = None
        self.checks.close()
        self.replays.leave()

    def leave(self) -> None:
        """Leave the loop over micro-batches; a step that is not done is discarded."""
        current, self.current = self.current, None
        self.checks.run_steps = True
        self.checks.forget_point()
        self.replays.leave()
        self.audit.forget()
        if current is not None and not current.complete:
            self.discard_step()

    def discard_step(self) -> None:
        """Discard the current step: gradients are dropped, and buffers have their values from before the step."""
        self._losses.clear()
        self._closures.discard()
        self._strategy.discard_step()
        for model in self._state.models:
            model.zero_grad(set_to_none=True)

    def _weight(self, share: float | torch.Tensor, loss: torch.Tensor) -> torch.Tensor:
        """The first gradient of the backward pass of ``loss``: cheaper than multiplying the loss by ``share``."""
        if isinstance(share, torch.Tensor) and not share.is_cpu:
            return share.to(loss)
        key = (float(share), loss.dtype, loss.device)
        weight = self._weights.get(key)
        if weight is None:
            # By a kernel of the device: a copy of the number would wait for the kernels queued there.
            weight = torch.full((), key[0], dtype=loss.dtype, device=loss.device)
            if len(self._weights) < _WEIGHTS:  # counts may vary without end
                self._weights[key] = weight
        return weight

    def _in_loop(self, what: str) -> CurrentMicroBatch:
        if self._thread not in (None, threading.get_ident()):
            raise UsageError(
                f"{what} in another thread than the one that iterates over run.train(...), as a BackgroundGenerator or "
                "another prefetcher does: it takes micro-batches before the one that is there has its loss, and their "
                "random numbers with them. Write the loop over run.train(loader) itself: it reads ahead by itself, in "
                "run.loader(..., workers=n) processes"
            )
        if self.current is None:
            raise UsageError(
                f"{what} outside of `for batch in run.train(loader)`: there is no micro-batch; write the loop over "
                "run.train(loader), not over the loader itself"
            )
        if self.current.ended:
            raise UsageError(f"{what} after the step was done: call run.step(loss) once for each micro-batch")
        return self.current

    def new_pass(self) -> None:
        """Prepare the first micro-batch of a pass, since modules may have been replaced or added before."""
        self.parameter_sets.new_pass()

    def _task(self, loss: Callable[..., torch.Tensor], data: tuple[object, ...], target: ParameterSet) -> LossCall:
        """The computation of the loss in the user's place: ``loss(model(inputs), targets)``."""
        if len(data) != 2:
            name = getattr(loss, "__name__", type(loss).__name__)
            raise UsageError(
                f"step({name}{', ...' * len(data)}): give the loss, a tensor; or a function of outputs and "
                "targets, with inputs and targets, as in run.step(F.cross_entropy, images, labels), which is "
                "F.cross_entropy(model(images), labels)"
            )
        places = target.places
        known = zip(self._state.parameters, self._state.models, strict=True)
        models = [model for parameters, model in known if any(id(p) in places for p in parameters)]
        if len(models) != 1:
            raise UsageError(
                f"step(loss function, inputs, targets): the run has {len(models)} models that it may be of; "
                "compute the loss yourself and give the tensor"
            )
        inputs, targets = (part if isinstance(part, tuple) else (part,) for part in data)
        return LossCall(models[0], loss, inputs, targets, self._precision.scale)


def _mean_of(loss: Loss, loss_is: LossKind, items: int | torch.Tensor) -> Loss:
    """The mean of ``loss``, a sum over ``items``; the sum over a micro-batch without items is 0."""
    if loss_is != "sum":
        raise UsageError(f"step(loss_is={loss_is!r}): give 'mean', or 'sum' over the count, or the samples without one")
    divisor = items.clamp(min=1) if isinstance(items, torch.Tensor) else max(1, items)
    if isinstance(loss, torch.Tensor):
        return loss / divisor
    whole = loss
    return lambda *data: whole(*data) / divisor


def _may_draw(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the step of ``optimizer`` may draw random numbers: torch's own do not, unless hooks do."""
    hooks = step_hooks(optimizer)
    return any(hooks) or not type(optimizer).__module__.startswith("torch.optim")


def _refuse_forgotten(current: CurrentMicroBatch) -> None:
    """Refuse a gradient without an update, which the next step would count again, once for each rank."""
    stepped = {id(p) for target in current.due for p in target.parameters}
    if not all(any(id(p) in stepped for p in target.parameters) for target in current.reached):
        raise UsageError(
            "run.backward(loss, optimizer=...) without run.update(...) in the same step: call both in the steps where "
            "the optimizer is to step, and neither in the others; for more samples per step raise global_batch"
        )
