"""What a run asks of a strategy, in one class: a few verbs are each strategy's own, the others have a usual answer.

A step, in the order of the calls; a strategy that has nothing to do at those in brackets leaves them out::

    each micro-batch       [begin_micro_batch]  the user's forward pass  [begin_count, of the last one]  backward
    the last one           ... ``.grad`` is complete: normalize_by_count (if items are counted),
                           [before_optimizer_step], the optimizers' steps
    each micro-batch       end_micro_batch
    one that is replayed   [begin_micro_batch]  the user's forward pass  replay  end_replay

Two kinds of strategies change the loop itself, and are classes of their own: under `ServerStrategy` some ranks serve
others, and `LossStrategy` computes losses in the user's place.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from lockstep.batch import MicroBatchPosition
from lockstep.collectives import Group, Runs, StoredTensor
from lockstep.errors import SettingError, UsageError
from lockstep.strategies.parts.gradient_accumulation import LossCall, ParameterSet
from lockstep.strategies.parts.stage_sequence import StageSequence

StateDict = dict[str, Any]
"""What `torch.nn.Module.state_dict` and its like give: nested values with tensors in them."""

TensorPlan = Mapping[str, object]
"""How layers are divided, by patterns of their names: words such as ``colwise``, or torch's `ParallelStyle`."""


@dataclass(frozen=True, slots=True)
class StrategyContext:
    """The conditions under which a strategy works."""

    group: Group
    runs: Runs  #: the micro-batches of each replica
    exact: bool = True  #: whether sums follow the fixed tree
    bucket_mb: float | None = None  #: MiB of gradients that are summed at once; None: chosen by the strategy
    dtype: torch.dtype | None = None  #: of forward passes under autocast; None: no autocast, they are fp32
    rehearse: bool = False  #: whether CPU threads may stand in for GPUs
    free_bytes: Callable[[], int] = lambda: 1 << 50  #: of memory that this rank may still use
    #: shows the user one line; every rank may call it, only the leader's line is shown
    say: Callable[[str], None] = lambda _text: None

    def refuse_fp16(self, name: str, why: str) -> None:
        """Check that losses are not scaled: the strategy ``name`` cannot do that, because of ``why``.

        Raises:
            SettingError: if the precision is fp16.
        """
        if self.dtype is torch.float16:
            raise SettingError(f"strategy {name} with precision='fp16': {why}; use precision='bf16', which needs none")


@dataclass(frozen=True, slots=True)
class ReplicaAssignment:
    """Which part of the data a rank computes. A replica is one copy of the model, on one rank or on several."""

    replica: int | None  #: whose micro-batches this rank computes; None: of none, it is a server of the others
    replicas: int  #: how many there are
    counts: bool = True  #: whether what is measured here counts; true on one rank of each replica
    in_step: bool = True  #: whether replicas are equal, bit for bit, after each step
    in_turn: int = 1  #: so many neighbouring replicas take micro-batches in turn, see `BatchPlan`


class StateLayout(Protocol):
    """Which part of models' and optimizers' tensors lies on this rank."""

    def norm(self, parameters: Sequence[nn.Parameter]) -> torch.Tensor:
        """The 2-norm of all their gradients: the same bits on every rank and for every layout. Collective."""
        ...

    def any(self, found: torch.Tensor) -> torch.Tensor:
        """1.0 if ``found``, of one element, is not zero on some rank that holds a part, else 0.0. Collective."""
        ...

    def model_state(self, model: nn.Module) -> StateDict:
        """The state of the whole model by its own names; a `TensorShard` for a divided tensor. Collective."""
        ...

    def load_model(self, model: nn.Module, state: StateDict) -> None:
        """Load what `model_state` gave, in which every tensor is whole, or a `StoredTensor` in a file. Collective.

        Of those in a file, a rank reads what it holds, and has no more than one tensor in memory beside that.
        """
        ...

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> StateDict:
        """``optimizer.state_dict()`` as a single rank has it; a `TensorShard` for a divided tensor. Collective."""
        ...

    def load_optimizer(self, optimizer: torch.optim.Optimizer, state: StateDict) -> None:
        """Load what `optimizer_state` gave, in which every tensor is whole, or in a file likewise. Collective."""
        ...


@dataclass(frozen=True, slots=True)
class StatePart:
    """The part of the state that lies on this rank after each step: everything but data that the next steps need."""

    number: int  #: ranks with the same number hold the same part
    of: int  #: how many there are; 1: each rank holds everything
    layout: StateLayout  #: its `model_state` and `optimizer_state` give what lies here, and ask no other rank
    divides_models: bool = False  #: whether models are divided, too, and not only the states of optimizers


@dataclass(frozen=True, slots=True)
class UpdateShare:
    """What a rank has of the gradients and parameters that a script may look at before and while optimizers step.

    ddp, fsdp          every rank has all gradients, or its rows of each, and steps what it has
    zero               every rank has all gradients, and steps some of the parameters
    parameter-server   servers have the gradients, and step; workers have copies of the parameters
    pipeline, hybrid   a rank has the gradients of some parameters, and steps those
    """

    steps: bool = True  #: whether this rank steps parameters
    has_gradients: bool = False  #: whether ``.grad`` of every parameter is here until optimizers step
    is_whole: bool = False  #: whether a rank that steps parameters steps all of them


class Strategy(ABC):
    """How replicas are kept in step: the verbs stand in the order in which the training loop asks for them."""

    assignment: ReplicaAssignment  #: whose data this rank computes
    state_layout: StateLayout  #: where parameters and states lie
    #: This rank's part of the state; None: it cannot be told without asking other ranks. Where there is one,
    #: `state_dict` asks no other rank either.
    state_part: StatePart | None = None
    #: What this rank has of each update; all but ``steps`` is the same on all ranks.
    update_share: UpdateShare = UpdateShare(has_gradients=True, is_whole=True)
    #: Whether `construct` may give models that are not on the device, and of which each rank has a part.
    divides_construction: bool = False
    #: Whether `update_trainable` is possible; then every trainable parameter of a model is trained.
    can_update_trainable: bool = False
    #: Whether every rank must make equally many forward passes, also in evaluations.
    forward_is_collective: bool = False
    #: Whether the passes of a step can be made again before the step ends, by an optimizer's closure: after
    #: `end_micro_batch` of the last micro-batch the first one may begin again, with other parameters.
    repeats_step: bool = False
    #: Whether a micro-batch that is computed again from the same values must give the same bits.
    repeats_bits: bool = True
    #: Whether each rank gets the same bits of a micro-batch, whichever it is.
    repeats_other_ranks: bool = False

    # ---- before the loop

    def construct(self, make: Callable[[], nn.Module]) -> nn.Module:
        """What ``make`` gives, with the values that one rank would give it. Collective.

        Where construction is divided, each rank may hold a part only of its parameters, until `setup_model`.
        """
        return make()

    def make_stages(
        self, makers: Sequence[Callable[[], nn.Module]], weights: Mapping[str, StoredTensor] | None
    ) -> StageSequence | None:
        """The model of the stages that ``makers`` make; those of other ranks take no memory here. Collective.

        All values are those that rank 0 draws as it makes one stage after the other, or reads.

        Args:
            makers: of a stage each.
            weights: of the model, by the names of its ``state_dict()``; None: as initialised.

        Returns:
            None where a rank holds all stages, or a model is not divided into them.

        Raises:
            SettingError: for a stage that shares a tensor with one that was made before it.
            UsageError: if ``weights`` are of another model.
        """
        return None

    def plan_layers(self, plan: TensorPlan | None) -> None:  # noqa: B027 - most strategies divide no layers
        """Divide the layers of the model that is set up next by ``plan``; None: by a plan that the model brings."""

    @abstractmethod
    def setup_model(self, model: nn.Module, *, find_unused_parameters: bool, static_graph: bool = False) -> nn.Module:
        """``model`` itself, prepared in place; its values are rank 0's on every rank from now on. Collective.

        Its class, methods, and names of parameters stay the user's; only `fully_shard` puts a class below.
        """

    def check_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Check that ``optimizer`` can step.

        Raises:
            UsageError: if it cannot, with what to use instead.
        """
        if self.state_part is not None and self.state_part.of > 1 and not self.state_part.divides_models:
            refuse_evaluated_weights(optimizer)

    def update_trainable(self, target: ParameterSet) -> None:
        """Train the parameters of ``target`` from now on, and no others of its models.

        Called before a step's first backward pass for ``target``, where `can_update_trainable`. Collective; the
        parameters that are new hold the same values on every rank.

        Raises:
            UsageError: if something was added that cannot be included within a step.
        """
        raise NotImplementedError

    @abstractmethod
    def resync(self) -> None:
        """Take what models hold now as the start of the next step, as after a checkpoint was loaded."""

    # ---- a step

    def begin_micro_batch(self, position: MicroBatchPosition) -> None:  # noqa: B027 - most have nothing to prepare
        """Prepare the forward pass of one micro-batch."""

    def begin_count(self, counted: int) -> Callable[[], int]:
        """Begin to add up the items of all ranks over which a step's loss is a mean; what it returns waits for the sum.

        Collective where that is more than this rank. Between the two the last backward pass hides the time it takes.

        Args:
            counted: items of this rank's micro-batches.
        """
        return lambda: counted

    @abstractmethod
    def backward(
        self, loss: torch.Tensor, weight: torch.Tensor | None, target: ParameterSet, position: MicroBatchPosition
    ) -> None:
        """Compute the gradients of one micro-batch; after a rank's last one, ``.grad`` holds the sum over the step.

        Before the last one, ``.grad`` may hold anything. The call for the last one is collective.

        Args:
            loss: of the micro-batch, of no dimension.
            weight: what the loss is multiplied by, of no dimension; None: 1.
            target: whose gradients are computed.
            position: of the micro-batch.
        """

    @abstractmethod
    def normalize_by_count(self, target: ParameterSet, samples: int, counted: int) -> None:
        """After the last `backward`: turn a sum of items per sample into the mean over all items of the step.

        Args:
            target: whose gradient it is.
            samples: of the step, over all ranks.
            counted: items of the step, as `begin_count` gives them.

        Raises:
            UsageError: if there are none.
        """

    def before_update(self, position: MicroBatchPosition) -> None:  # noqa: B027 - most make no such calls
        """Make what collective calls of the step can be made before optimizers step. Collective.

        Then no optimizer steps on one rank and not on another because a third one died.

        Args:
            position: of this rank's last micro-batch, which `end_micro_batch` is given afterwards.
        """

    def before_optimizer_step(self, target: ParameterSet) -> None:  # noqa: B027 - on most every rank steps all
        """Leave gradients only where this rank makes the optimizer step."""

    @abstractmethod
    def end_micro_batch(self, position: MicroBatchPosition) -> None:
        """Bring parameters and buffers in step after a rank's last micro-batch; restore buffers after any other one.

        Called after the backward passes of the micro-batch, and after the optimizers' steps if it is the last one.
        Collective for the last one.
        """

    def replay(
        self, loss: torch.Tensor, weight: torch.Tensor | None, target: ParameterSet, position: MicroBatchPosition
    ) -> None:
        """Compute the gradients of a micro-batch that the step has computed already, or will, and drop them.

        Nothing of the step changes. Collective, where forward passes are.
        """
        held = [parameter.grad for parameter in target.parameters]
        for parameter in target.parameters:
            parameter.grad = None
        target.backward(loss, weight)
        for parameter, gradient in zip(target.parameters, held, strict=True):
            parameter.grad = gradient

    @abstractmethod
    def end_replay(self) -> None:
        """Put buffers back to what the replayed micro-batch began with. Asks no other rank."""

    @abstractmethod
    def discard_step(self) -> None:
        """Drop the gradients of the step that is under way, and undo what it did to buffers."""

    # ---- beside steps

    def evaluating(self) -> AbstractContextManager[None]:
        """A context in which models are what a checkpoint would hold, on every rank. Collective."""
        return nullcontext()

    def finish_training(self) -> None:  # noqa: B027 - most have given every rank the model already
        """Give every rank the trained model, or its part of it. Collective."""

    def state_dict(self) -> StateDict:
        """What the next steps need beside models and optimizers; a `TensorShard` for a divided tensor. Collective."""
        return {}

    def load_state_dict(self, state: StateDict) -> None:  # noqa: B027 - most have no state
        """Load what `state_dict` gave, after models and optimizers; empty: another strategy saved. Collective."""

    def explain(self, error: Exception, method: str) -> str:
        """What to do about ``error`` where torch's own words do not tell; "" where the strategy has no part in it.

        Args:
            error: what ended the run.
            method: of a model, in which it was raised without the model's forward pass; "" otherwise.
        """
        return ""

    @abstractmethod
    def close(self) -> None:
        """Release threads, connections and hooks; nothing is asked of the strategy afterwards."""


def refuse_evaluated_weights(optimizer: torch.optim.Optimizer) -> None:
    """Check that weights do not depend on the state of an optimizer, where ranks hold weights without their state.

    Raises:
        UsageError: if they do, while the model is evaluated.
    """
    if callable(getattr(type(optimizer), "eval", None)):
        kind = type(optimizer).__name__
        raise UsageError(
            f"{kind}.eval() computes the weights to be evaluated from the optimizer's state, and under this strategy "
            "ranks hold the weights of parameters whose state lies on another rank: use ddp or fsdp"
        )


class LossStrategy(Strategy):
    """A strategy that computes forward and backward passes itself, from a description of what the user would compute.

    It also moves models to the device itself: they need not fit there as a whole.
    """

    @abstractmethod
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


class ServerStrategy(Strategy):
    """A strategy under which some ranks compute no micro-batch, but serve those that do."""

    def check_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Check that ``optimizer`` can step on some ranks only.

        Raises:
            UsageError: if the weights to be evaluated depend on its state.
        """
        refuse_evaluated_weights(optimizer)

    @abstractmethod
    def serve(self, target: ParameterSet, position: MicroBatchPosition) -> bool:
        """Serve one step of the other ranks; then ``.grad`` holds its gradient where this rank owns the parameter.

        Returns:
            Whether they made the step; if not, they have left their loop over micro-batches, and `end_loop` is next.
        """

    @abstractmethod
    def goes_on(self) -> bool:
        """Whether ranks that compute go on after the last step of an epoch of the data. Collective.

        A loop that goes through several epochs may be left by ``break`` there, which serving ranks would not see.

        Returns:
            True on ranks that compute, which go on; where this rank serves, False if they have left their loop over
            micro-batches, and `end_loop` is next.

        Raises:
            PeerLost: where this rank serves, if the others did not leave the loop after the same step.
        """

    @abstractmethod
    def end_loop(self, *, complete: bool) -> bool:
        """End the loop over micro-batches. Collective; ranks that compute do not wait for the others.

        Args:
            complete: whether the loop came to its end on this rank, if it computes; ``break`` may have left it earlier.

        Returns:
            Whether it came to its end, the same on all ranks.

        Raises:
            PeerLost: where this rank serves, if the others did not leave the loop after the same step.
        """
