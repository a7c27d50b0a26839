"""Optimizers that compute the loss several times in a step, through a closure, such as LBFGS and SAM.

the step's micro-batches     each is computed once, as for any optimizer, and held with its random state
optimizer.step(closure)      .grad holds the global batch's gradient; each call computes all micro-batches
                             again: the same data, the same random numbers, reduced over ranks along the same tree

So the closure gives the same bits on any number of ranks, as a closure over the whole global batch would.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn

from lockstep.batch import MicroBatchPosition
from lockstep.errors import UsageError
from lockstep.run.loop.gradient_hooks import GradientHooks
from lockstep.run.metrics.metric_means import MetricMeans
from lockstep.run.setup.run_context import RunContext
from lockstep.run.state.registered import State
from lockstep.strategies import LossCall, ParameterSet
from lockstep.torch_private import version_of


def needs_closure(optimizer: torch.optim.Optimizer) -> bool:
    """Whether ``step`` cannot be called without a closure, as far as its signature says."""
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    is_required = closure is not None and closure.default is inspect.Parameter.empty
    return isinstance(optimizer, torch.optim.LBFGS) or is_required


def check_closures(context: RunContext, optimizer: torch.optim.Optimizer) -> None:
    """Check that the run can step ``optimizer`` with a closure.

    Raises:
        UsageError: if it cannot, with what to use instead.
    """
    name = type(optimizer).__name__
    if not context.strategy.repeats_step:
        raise UsageError(
            f"{name} computes the loss several times in a step, through a closure, which strategy "
            f"{context.settings.strategy} does not support: use --strategy ddp, or an optimizer that steps once, such "
            "as torch.optim.AdamW or SGD"
        )
    if context.precision.scales:
        raise UsageError(
            f"{name} computes the loss several times in a step, through a closure, and precision='fp16' scales "
            "losses, which does not work with such an optimizer: use precision='bf16'"
        )
    refuse_beside(context.state, name)


def refuse_beside(state: State, name: str) -> None:
    """Check that the run has no optimizer yet, or that neither has a closure.

    Raises:
        UsageError: if the optimizer ``name`` would be the second one, and one of the two has a closure.
    """
    if state.optimizers:
        raise UsageError(
            f"run.optimizer({name}) beside {type(state.optimizers[0]).__name__}: an optimizer that computes the loss "
            "several times in a step, through a closure, must be the run's only one"
        )


@dataclass(frozen=True, slots=True)
class HeldMicroBatch:
    """The function and the data that compute the loss of a micro-batch again."""

    position: MicroBatchPosition
    task: LossCall
    random_state: list[torch.Tensor]  #: before the loss was computed first
    items: int | torch.Tensor  #: number that the loss is the mean over
    weight: torch.Tensor | None  #: factor of the loss in the backward pass
    loss: torch.Tensor  #: of the first computation


class ClosureSteps:
    """Holds the micro-batches of a step, and steps an optimizer with a closure over these micro-batches."""

    def __init__(self, context: RunContext, hooks: GradientHooks) -> None:
        self._context: Final = context
        self._hooks: Final = hooks
        self._held: list[HeldMicroBatch] = []

    def random_state(self) -> list[torch.Tensor]:
        """The state of torch's random generators of the CPU and of the device."""
        device = self._context.device
        on_device = [torch.cuda.get_rng_state(device)] if device.type == "cuda" else []
        return [torch.get_rng_state(), *on_device]

    def hold(self, held: HeldMicroBatch) -> None:
        """Add a micro-batch to the step."""
        self._held.append(held)

    def discard(self) -> None:
        """The step will not be made."""
        self._held = []

    def step(self, optimizer: torch.optim.Optimizer, target: ParameterSet, *, counted: bool) -> None:
        """``optimizer.step(closure)``; ``.grad`` holds the step's gradient. Collective.

        Args:
            optimizer: the run's only one.
            target: its parameters.
            counted: whether losses came with a count.
        """
        held, self._held = self._held, []
        first = _Evaluation(self._mean([(one.loss, one) for one in held]), target)

        def closure() -> torch.Tensor:
            # Most optimizers begin by computing the loss and gradient that are there already.
            return first.loss if first.holds() else self._evaluate(held, target, counted=counted)

        closed: Any = torch.enable_grad()(closure)
        optimizer.step(closed)

    def _evaluate(self, held: list[HeldMicroBatch], target: ParameterSet, *, counted: bool) -> torch.Tensor:
        """The loss of the global batch; its gradient is in ``.grad``. Collective."""
        strategy, precision = self._context.strategy, self._context.precision
        strategy.end_micro_batch(held[-1].position)  # of the evaluation before this one
        precision.forget_casts()
        for parameter in target.parameters:
            parameter.grad = None
        own = sum(int(one.items) for one in held if counted and not one.position.is_padding)
        total = strategy.begin_count(own) if counted else None
        losses = []
        for one in held:
            strategy.begin_micro_batch(one.position)
            self._set_random_state(one.random_state)
            with precision.forward():
                loss = one.task()
            with self._hooks.off(target.parameters), precision.backward(), self._context.kernels.backward():
                strategy.backward(precision.scale(loss), one.weight, target, one.position)
            losses.append((loss.detach(), one))
            if not one.position.last:
                strategy.end_micro_batch(one.position)
        if total is not None:
            strategy.normalize_by_count(target, held[-1].position.step_samples, total())
        self._hooks.call(target.parameters)
        clip_norm = self._context.settings.clip_norm
        if clip_norm is not None:
            norm = strategy.state_layout.norm(target.parameters)
            nn.utils.clip_grads_with_norm_(target.parameters, clip_norm, norm)
        own_gradients(target)
        return self._mean(losses)

    def _mean(self, losses: list[tuple[torch.Tensor, HeldMicroBatch]]) -> torch.Tensor:
        """The mean loss over the global batch, the same bits on every rank and for any number of ranks. Collective."""
        means = MetricMeans()
        for loss, one in losses:
            if not one.position.is_padding:
                means.add("loss", loss, one.items, one.items)
        mean = means.reduce(self._context.group)["loss"]
        return losses[0][0].new_tensor(mean)

    def _set_random_state(self, state: list[torch.Tensor]) -> None:
        torch.set_rng_state(state[0])
        if len(state) > 1:
            torch.cuda.set_rng_state(state[1], self._context.device)


def own_gradients(target: ParameterSet) -> None:
    """Move gradients out of buckets: an optimizer may keep a gradient, and the next evaluation overwrites buckets."""
    for parameter in target.parameters:
        if parameter.grad is not None:
            parameter.grad = parameter.grad.clone()


class _Evaluation:
    """The loss and gradient computed before the optimizer's step, valid until a parameter or gradient changes."""

    def __init__(self, loss: torch.Tensor, target: ParameterSet) -> None:
        own_gradients(target)
        self.loss: Final = loss
        self._target: Final = target
        self._gradients: Final = [p.grad for p in target.parameters]
        self._versions: Final = self._now()

    def holds(self) -> bool:
        """Whether parameters and gradients are unchanged since the loss was computed."""
        is_there = all(p.grad is g for p, g in zip(self._target.parameters, self._gradients, strict=True))
        return is_there and self._versions == self._now()

    def _now(self) -> list[int]:
        return [version_of(t) for p in self._target.parameters for t in (p, p.grad) if t is not None]
