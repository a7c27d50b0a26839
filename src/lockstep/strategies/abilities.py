"""What a strategy may offer beyond what a run requires of each.

Each optional ability is a protocol of its own, with a function beside it that uses the ability where a strategy has
it, and does the usual thing where it has not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import nn

from lockstep.batch import MicroBatchPosition
from lockstep.collectives import StoredTensor
from lockstep.errors import UsageError
from lockstep.strategies.delegation import delegation_chain, first_with, has_ability
from lockstep.strategies.gradient_accumulation import LossCall, ParameterSet
from lockstep.strategies.protocol import StateDict, StateLayout, Strategy
from lockstep.strategies.stage_sequence import StageSequence


@runtime_checkable
class DividesConstruction(Protocol):
    """A strategy under which no rank need hold the whole of a model while it is made.

    It also moves such models to the device itself.
    """

    def construct(self, make: Callable[[], nn.Module]) -> nn.Module:
        """What ``make`` gives, with the values that one rank would give it. Collective.

        Of its parameters each rank may hold a part only, until `Strategy.setup_model`.
        """
        ...


def divides_construction(strategy: Strategy) -> bool:
    """Whether `construct` may give models that are not on the device, and of which each rank has a part."""
    return first_with(DividesConstruction, strategy) is not None


def construct(strategy: Strategy, make: Callable[[], nn.Module]) -> nn.Module:
    """What ``make`` gives, divided where ``strategy`` can divide it while it is made. Collective."""
    divides = first_with(DividesConstruction, strategy)
    return make() if divides is None else divides.construct(make)


TensorPlan = Mapping[str, object]
"""How layers are divided, by patterns of their names: words such as ``colwise``, or torch's `ParallelStyle`."""


@runtime_checkable
class DividesLayers(Protocol):
    """A strategy under which several ranks compute each layer together, by a plan."""

    def plan_layers(self, plan: TensorPlan | None) -> None:
        """Divide the model that is set up next by ``plan``; None: by a plan that the model brings."""
        ...


def plan_layers(strategy: Strategy, plan: TensorPlan | None) -> None:
    """Divide the layers of the model that is set up next by ``plan``, where ``strategy`` divides layers."""
    divides: DividesLayers | None = first_with(DividesLayers, strategy)
    if divides is not None:
        divides.plan_layers(plan)


@runtime_checkable
class PreparesForward(Protocol):
    """A strategy with something to do before a forward pass."""

    def begin_micro_batch(self, position: MicroBatchPosition) -> None:
        """Prepare the forward pass of one micro-batch."""
        ...


def begin_micro_batch(strategy: Strategy, position: MicroBatchPosition) -> None:
    """Prepare the forward pass of one micro-batch; most strategies have nothing to prepare."""
    prepares: PreparesForward | None = first_with(PreparesForward, strategy)
    if prepares is not None:
        prepares.begin_micro_batch(position)


@runtime_checkable
class SumsCounts(Protocol):
    """A strategy under which a step's loss is a mean over the items of several ranks."""

    def begin_count(self, counted: int) -> Callable[[], int]:
        """See the function of this name. Collective."""
        ...


def begin_count(strategy: Strategy, counted: int) -> Callable[[], int]:
    """Begin to add up the items of all ranks over which a step's loss is a mean; what it returns waits for the sum.

    Collective where that is more than this rank. Between the two the last backward pass hides the time it takes.

    Args:
        strategy: knows which ranks these are.
        counted: items of this rank's micro-batches.
    """
    sums: SumsCounts | None = first_with(SumsCounts, strategy)
    return (lambda: counted) if sums is None else sums.begin_count(counted)


@runtime_checkable
class PreparesOptimizerStep(Protocol):
    """A strategy under which not every rank makes every optimizer step."""

    def before_optimizer_step(self, target: ParameterSet) -> None:
        """Drop the gradients of the parameters that other ranks update."""
        ...


def before_optimizer_step(strategy: Strategy, target: ParameterSet) -> None:
    """Leave gradients only where this rank makes the optimizer step; under most strategies every rank makes it."""
    prepares: PreparesOptimizerStep | None = first_with(PreparesOptimizerStep, strategy)
    if prepares is not None:
        prepares.before_optimizer_step(target)


@runtime_checkable
class PreparesUpdate(Protocol):
    """A strategy whose last collective calls of a step can come before the first optimizer steps."""

    def before_update(self, position: MicroBatchPosition) -> None:
        """Make them; then no optimizer steps on one rank and not on another because a third one died. Collective.

        Args:
            position: of this rank's last micro-batch, which `Strategy.end_micro_batch` is given afterwards.
        """
        ...


def before_update(strategy: Strategy, position: MicroBatchPosition) -> None:
    """Make what collective calls of the step can be made before optimizers step; most strategies have none."""
    if has_ability(type(strategy), PreparesUpdate):
        strategy.before_update(position)  # type: ignore[attr-defined]  # as just asked


@dataclass(frozen=True, slots=True)
class StatePart:
    """The part of the state that lies on this rank after each step: everything but data that the next steps need."""

    number: int  #: ranks with the same number hold the same part
    of: int  #: how many there are; 1: each rank holds everything
    layout: StateLayout  #: its `model_state` and `optimizer_state` give what lies here, and ask no other rank
    divides_models: bool = False  #: whether models are divided, too, and not only the states of optimizers


@runtime_checkable
class KnowsStatePart(Protocol):
    """A strategy under which a rank can tell its part of the state by itself."""

    state_part: StatePart | None  #: None: it cannot, with the options that it has


def state_part(strategy: Strategy) -> StatePart | None:
    """This rank's part of the state; None: it cannot be told without asking other ranks.

    Where there is one, `strategy_state` asks no other rank either.
    """
    return strategy.state_part if isinstance(strategy, KnowsStatePart) else None


@runtime_checkable
class PreparesEvaluation(Protocol):
    """A strategy under which models differ from what a checkpoint would hold while they train."""

    def evaluating(self) -> AbstractContextManager[None]:
        """A context in which models are what a checkpoint would hold, on every rank. Collective."""
        ...


def evaluating(strategy: Strategy) -> AbstractContextManager[None]:
    """A context in which models are what a checkpoint would hold, on every rank. Collective."""
    prepares: PreparesEvaluation | None = first_with(PreparesEvaluation, strategy)
    return nullcontext() if prepares is None else prepares.evaluating()


@runtime_checkable
class FinishesTraining(Protocol):
    """A strategy under which ranks do not hold the trained model, or their part of it, after the last step."""

    def finish_training(self) -> None:
        """Give every rank the trained model, or its part of it. Collective."""
        ...


def finish_training(strategy: Strategy) -> None:
    """Give every rank the trained model, or its part of it; most strategies have given it already. Collective."""
    finishes: FinishesTraining | None = first_with(FinishesTraining, strategy)
    if finishes is not None:
        finishes.finish_training()


@runtime_checkable
class HasState(Protocol):
    """A strategy whose next steps depend on more than models and optimizers."""

    def state_dict(self) -> StateDict:
        """What the next steps depend on; a `TensorShard` for a divided tensor. Collective."""
        ...

    def load_state_dict(self, state: StateDict) -> None:
        """Load what `state_dict` gave, after models and optimizers; empty: another strategy saved. Collective."""
        ...


def strategy_state(strategy: Strategy) -> StateDict:
    """What the next steps depend on beside models and optimizers; empty for most strategies. Collective."""
    has: HasState | None = first_with(HasState, strategy)
    return {} if has is None else has.state_dict()


def load_strategy_state(strategy: Strategy, state: StateDict) -> None:
    """Load what `strategy_state` gave; empty: another strategy saved. After models and optimizers. Collective."""
    has: HasState | None = first_with(HasState, strategy)
    if has is not None:
        has.load_state_dict(state)


@runtime_checkable
class UpdatesTrainable(Protocol):
    """A strategy under which the set of trainable parameters may change after `Strategy.setup_model`."""

    def update_trainable(self, target: ParameterSet) -> None:
        """Train the parameters of ``target`` from now on, and no others of its models.

        Called before a step's first backward pass for ``target``. Collective; the parameters that are new hold the same
        values on every rank.

        Raises:
            UsageError: if something was added that cannot be included within a step.
        """
        ...


def can_update_trainable(strategy: Strategy) -> bool:
    """Whether `update_trainable` is possible; then every trainable parameter of a model is trained."""
    return first_with(UpdatesTrainable, strategy) is not None


def update_trainable(strategy: Strategy, target: ParameterSet, name: str) -> None:
    """Train the parameters of ``target`` from now on, and no others of its models. Collective.

    Args:
        strategy: of the run.
        target: what learns now.
        name: of the strategy, as the user said it.

    Raises:
        UsageError: if ``strategy`` cannot do that.
    """
    updates: UpdatesTrainable | None = first_with(UpdatesTrainable, strategy)
    if updates is None:
        raise UsageError(
            f"other parameters learn than when run.model(...) was called, and strategy {name} divides a model as it "
            "is then: freeze, unfreeze and add parameters before run.model(...), or use ddp or zero"
        )
    updates.update_trainable(target)


@runtime_checkable
class ChecksOptimizers(Protocol):
    """A strategy under which some optimizers cannot step."""

    def check_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Check that ``optimizer`` can step.

        Raises:
            UsageError: if it cannot, with what to use instead.
        """
        ...


def check_can_step(strategy: Strategy, optimizer: torch.optim.Optimizer) -> None:
    """Check that ``optimizer`` can step under ``strategy``.

    Raises:
        UsageError: if it cannot, with what to use instead.
    """
    checks: ChecksOptimizers | None = first_with(ChecksOptimizers, strategy)
    if checks is not None:
        checks.check_optimizer(optimizer)
    part = state_part(strategy)
    lies_apart = isinstance(strategy, HasServerRanks) or (part is not None and part.of > 1 and not part.divides_models)
    if lies_apart and callable(getattr(type(optimizer), "eval", None)):
        kind = type(optimizer).__name__
        raise UsageError(
            f"{kind}.eval() computes the weights to be evaluated from the optimizer's state, and under this strategy "
            "ranks hold the weights of parameters whose state lies on another rank: use ddp or fsdp"
        )


@runtime_checkable
class RepeatsStep(Protocol):
    """A strategy under which the passes of a step can be made again before the step ends, by an optimizer's closure.

    After `Strategy.end_micro_batch` of the last micro-batch the first one may begin again, with other parameters.
    """

    repeats_step: bool  #: whether they can, with the options that it has


def can_repeat_step(strategy: Strategy) -> bool:
    """Whether optimizers may compute the loss of a step several times.

    Not asked of what ``strategy`` delegates to: the optimizer must see whole parameters and gradients.
    """
    return isinstance(strategy, RepeatsStep) and strategy.repeats_step


@runtime_checkable
class CommunicatesInForward(Protocol):
    """A strategy whose forward passes may be collective, so that every rank must make equally many of them."""

    forward_is_collective: bool  #: whether they are for this group, also in evaluations


def forward_is_collective(strategy: Strategy) -> bool:
    """Whether every rank must make equally many forward passes, also in evaluations."""
    for each in delegation_chain(strategy):
        if isinstance(each, CommunicatesInForward):
            return each.forward_is_collective
    return False


@runtime_checkable
class ComputesLoss(Protocol):
    """A strategy that computes forward and backward passes itself, from a description of what the user would compute.

    It also moves models to the device itself: they need not fit there as a whole.
    """

    def compute(
        self, task: LossCall, weight: torch.Tensor | None, target: ParameterSet, position: MicroBatchPosition
    ) -> Sequence[tuple[int, torch.Tensor]]:
        """Do what otherwise the user's forward pass and `Strategy.backward` do.

        Args:
            task: what to compute.
            weight: what the loss is multiplied by, in float64, since the loss's type is not known yet; None: 1.
            target: whose gradients are computed.
            position: of the micro-batch.

        Returns:
            The losses that have become known here, each with the index of its micro-batch; none on most ranks.
        """
        ...


@runtime_checkable
class MakesStages(Protocol):
    """A strategy under which a rank makes only those stages of a model that it will hold."""

    def make_stages(
        self, makers: Sequence[Callable[[], nn.Module]], weights: Mapping[str, StoredTensor] | None
    ) -> StageSequence:
        """The model of the stages that ``makers`` make; those of other ranks take no memory here. Collective.

        All values are those that rank 0 draws as it makes one stage after the other, or reads.

        Args:
            makers: of a stage each.
            weights: of the model, by the names of its ``state_dict()``; None: as initialised.

        Raises:
            SettingError: for a stage that shares a tensor with one that was made before it.
            UsageError: if ``weights`` are of another model.
        """
        ...


def make_stages(
    strategy: Strategy, makers: Sequence[Callable[[], nn.Module]], weights: Mapping[str, StoredTensor] | None
) -> StageSequence | None:
    """See `MakesStages`; None: a rank holds all stages, or ``strategy`` divides them otherwise. Collective."""
    makes: MakesStages | None = first_with(MakesStages, strategy)
    return None if makes is None else makes.make_stages(makers, weights)


@runtime_checkable
class ExplainsErrors(Protocol):
    """A strategy under which torch's own words for a mistake do not tell what to do."""

    def explain(self, error: Exception, method: str) -> str:
        """What to do about ``error``; "" where the strategy has no part in it.

        Args:
            error: what ended the run.
            method: of a model, in which it was raised without the model's forward pass; "" otherwise.
        """
        ...


def explain(strategy: Strategy, error: Exception, method: str) -> str:
    """What to do about ``error``, if it comes of how ``strategy`` holds models; else "". See `ExplainsErrors`."""
    texts = (each.explain(error, method) for each in delegation_chain(strategy) if isinstance(each, ExplainsErrors))
    return next(filter(None, texts), "")


@runtime_checkable
class HasServerRanks(Protocol):
    """A strategy under which some ranks compute no micro-batch, but serve those that do."""

    def serve(self, target: ParameterSet, position: MicroBatchPosition) -> bool:
        """Serve one step of the other ranks; then ``.grad`` holds its gradient where this rank owns the parameter.

        Returns:
            Whether they made the step; if not, they have left their loop over micro-batches, and `end_loop` is next.
        """
        ...

    def goes_on(self) -> bool:
        """Whether ranks that compute go on after the last step of an epoch of the data. Collective.

        A loop that goes through several epochs may be left by ``break`` there, which serving ranks would not see.

        Returns:
            True on ranks that compute, which go on; where this rank serves, False if they have left their loop over
            micro-batches, and `end_loop` is next.

        Raises:
            PeerLost: where this rank serves, if the others did not leave the loop after the same step.
        """
        ...

    def end_loop(self, *, complete: bool) -> bool:
        """End the loop over micro-batches. Collective; ranks that compute do not wait for the others.

        Args:
            complete: whether the loop came to its end on this rank, if it computes; ``break`` may have left it earlier.

        Returns:
            Whether it came to its end, the same on all ranks.

        Raises:
            PeerLost: where this rank serves, if the others did not leave the loop after the same step.
        """
        ...
