"""The interface of strategies: a few methods that each strategy implements, and others that have a default.

A step, in the order of the calls; a strategy need not implement the methods in brackets::

    each micro-batch       [begin_micro_batch]  the user's forward pass  [begin_count, of the last one]  backward
    the last one           ... ``.grad`` is complete: normalize_by_count (if items are counted),
                           [before_optimizer_step], the optimizers' steps
    each micro-batch       end_micro_batch
    one that is replayed   [begin_micro_batch]  the user's forward pass  replay  end_replay

Two kinds of strategies change the loop itself, and have classes of their own: under `ServerStrategy` some ranks serve
others, and a `LossStrategy` computes losses in the user's place.
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
"""The result of `torch.nn.Module.state_dict` and similar methods: nested values with tensors in them."""

TensorPlan = Mapping[str, object]
"""The division of layers, by patterns of their names: words such as ``colwise``, or torch's `ParallelStyle`."""


@dataclass(frozen=True, slots=True)
class StrategyContext:
    """The conditions under which a strategy works."""

    group: Group
    runs: Runs  #: the micro-batches of each replica
    exact: bool = True  #: whether sums follow the fixed tree
    bucket_mb: float | None = None  #: MiB of gradients that are summed at once; None: chosen by the strategy
    dtype: torch.dtype | None = None  #: of forward passes under autocast; None: no autocast, forward passes are fp32
    rehearse: bool = False  #: whether CPU threads may stand in for GPUs
    free_bytes: Callable[[], int] = lambda: 1 << 50  #: the bytes of memory that this rank may still use
    #: shows the user one line; every rank may call it, only the leader's line is shown
    say: Callable[[str], None] = lambda _text: None

    def refuse_fp16(self, name: str, why: str) -> None:
        """Check that losses are not scaled, which the strategy ``name`` cannot support, because of ``why``.

        Raises:
            SettingError: if the precision is fp16.
        """
        if self.dtype is torch.float16:
            raise SettingError(f"strategy {name} with precision='fp16': {why}; use precision='bf16', which needs none")


@dataclass(frozen=True, slots=True)
class ReplicaAssignment:
    """The part of the data that a rank computes. A replica is one copy of the model, on one rank or on several."""

    replica: int | None  #: whose micro-batches this rank computes; None: this rank is a server, which computes none
    replicas: int  #: number of replicas
    counts: bool = True  #: whether values measured on this rank count; true on one rank of each replica
    in_step: bool = True  #: whether replicas are equal, bit for bit, after each step
    in_turn: int = 1  #: number of neighbouring replicas that take micro-batches in turn, see `BatchPlan`


class StateLayout(Protocol):
    """The part of models' and optimizers' tensors that lies on this rank."""

    def norm(self, parameters: Sequence[nn.Parameter]) -> torch.Tensor:
        """The 2-norm of all gradients of ``parameters``: equal bits on every rank and for every layout. Collective."""

    def any(self, found: torch.Tensor) -> torch.Tensor:
        """1.0 if ``found``, of one element, is not zero on some rank that holds a part, else 0.0. Collective."""

    def model_state(self, model: nn.Module) -> StateDict:
        """The state of the whole model by its own names; a `TensorShard` for a divided tensor. Collective."""

    def load_model(self, model: nn.Module, state: StateDict) -> None:
        """Load a state of `model_state`, in which every tensor is whole, or a `StoredTensor` in a file. Collective.

        A rank reads only the tensors that it holds from a file, and needs memory for no more than one tensor beside
        these.
        """

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> StateDict:
        """``optimizer.state_dict()`` as a single rank has it; a `TensorShard` for a divided tensor. Collective."""

    def load_optimizer(self, optimizer: torch.optim.Optimizer, state: StateDict) -> None:
        """Load a state of `optimizer_state`, in which every tensor is whole, or a `StoredTensor`. Collective."""


@dataclass(frozen=True, slots=True)
class StatePart:
    """The part of the state that lies on this rank after each step: everything but data that the next steps need."""

    number: int  #: ranks with the same number hold the same part
    of: int  #: number of parts; 1: each rank holds the whole state
    layout: StateLayout  #: its `model_state` and `optimizer_state` give this rank's part, and ask no other rank
    divides_models: bool = False  #: whether models are divided, too, not only the states of optimizers


@dataclass(frozen=True, slots=True)
class UpdateShare:
    """The gradients and parameters of a rank that a script may look at before and while optimizers step.

    ddp, fsdp          every rank has all gradients, or its rows of each, and steps what it has
    zero               every rank has all gradients, and steps some of the parameters
    parameter-server   servers have the gradients, and step; workers have copies of the parameters
    pipeline, hybrid   a rank has the gradients of some parameters, and steps those
    """

    steps: bool = True  #: whether this rank steps parameters
    has_gradients: bool = False  #: whether this rank has ``.grad`` of every parameter until optimizers step
    is_whole: bool = False  #: whether a rank that steps parameters steps all of them


class Strategy(ABC):
    """A way to keep replicas in step; the methods stand in the order in which the training loop calls them."""

    assignment: ReplicaAssignment  #: whose data this rank computes
    state_layout: StateLayout  #: which ranks hold which parameters and states
    #: This rank's part of the state; None: the part is not known without asking other ranks. If not None, `state_dict`
    #: asks no other rank either.
    state_part: StatePart | None = None
    #: This rank's share of each update; all fields but ``steps`` are equal on all ranks.
    update_share: UpdateShare = UpdateShare(has_gradients=True, is_whole=True)
    #: Whether `construct` may return models that are not on the device, and of which each rank has a part.
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
    #: Whether each rank computes the same bits from a micro-batch, its own or another rank's.
    repeats_other_ranks: bool = False

    # ---- before the loop

    def construct(self, make: Callable[[], nn.Module]) -> nn.Module:
        """The model that ``make`` returns, with the values that it would have on a single rank. Collective.

        With divided construction, each rank may hold only a part of the parameters, until `setup_model`.
        """
        return make()

    def make_stages(
        self, makers: Sequence[Callable[[], nn.Module]], weights: Mapping[str, StoredTensor] | None
    ) -> StageSequence | None:
        """The model of the stages that ``makers`` make; stages of other ranks take no memory on this rank. Collective.

        All values are those that rank 0 draws as it makes one stage after the other, or those of ``weights``.

        Args:
            makers: functions that make a stage each.
            weights: of the model, by the names of its ``state_dict()``; None: as initialised.

        Returns:
            None if a rank holds all stages, or the strategy does not divide a model into stages.

        Raises:
            SettingError: for a stage that shares a tensor with an earlier stage.
            UsageError: if ``weights`` are of another model.
        """
        return None

    def plan_layers(self, plan: TensorPlan | None) -> None:  # noqa: B027 - most strategies divide no layers
        """Divide the layers of the model that is set up next by ``plan``; None: by a plan that the model brings."""

    @abstractmethod
    def setup_model(self, model: nn.Module, *, find_unused_parameters: bool, static_graph: bool = False) -> nn.Module:
        """``model`` itself, prepared in place, with rank 0's values on every rank. Collective.

        Its class, methods, and names of parameters stay the user's; only `fully_shard` puts a class below.
        """

    def check_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Check that ``optimizer`` can step.

        Raises:
            UsageError: if the optimizer cannot step, with a replacement.
        """
        if self.state_part is not None and self.state_part.of > 1 and not self.state_part.divides_models:
            refuse_evaluated_weights(optimizer)

    def update_trainable(self, target: ParameterSet) -> None:
        """Train the parameters of ``target`` from now on, and no others of its models.

        Called before a step's first backward pass for ``target``, if `can_update_trainable`. Collective; new parameters
        hold the same values on every rank.

        Raises:
            UsageError: if a buffer was added, which cannot be included within a step.
        """
        raise NotImplementedError

    @abstractmethod
    def resync(self) -> None:
        """Start the next step from the values that models hold now, as after a checkpoint was loaded."""

    # ---- a step

    def begin_micro_batch(self, position: MicroBatchPosition) -> None:  # noqa: B027 - most have nothing to prepare
        """Prepare the forward pass of one micro-batch."""

    def begin_count(self, counted: int) -> Callable[[], int]:
        """Begin to add up the items of all ranks over which a step's loss is a mean; returns a function that waits.

        Collective with several ranks. The last backward pass between this call and that of the function hides the time
        of the sum.

        Args:
            counted: items of this rank's micro-batches.
        """
        return lambda: counted

    @abstractmethod
    def backward(
        self, loss: torch.Tensor, weight: torch.Tensor | None, target: ParameterSet, position: MicroBatchPosition
    ) -> None:
        """Compute the gradients of a micro-batch; after a rank's last micro-batch, ``.grad`` holds the step's sum.

        Before the last micro-batch, ``.grad`` may hold anything. The call for the last micro-batch is collective.

        Args:
            loss: of the micro-batch, of no dimension.
            weight: factor of the loss, of no dimension; None: 1.
            target: whose gradients are computed.
            position: of the micro-batch.
        """

    @abstractmethod
    def normalize_by_count(self, target: ParameterSet, samples: int, counted: int) -> None:
        """Turn a sum of items per sample into the mean over all items of the step, after the last `backward`.

        Args:
            target: the parameters of the gradient.
            samples: of the step, over all ranks.
            counted: items of the step, as `begin_count` gives them.

        Raises:
            UsageError: if the step has no items.
        """

    def before_update(self, position: MicroBatchPosition) -> None:  # noqa: B027 - most make no such calls
        """Make the collective calls of the step that can be made before optimizers step. Collective.

        So the death of a rank cannot let an optimizer step on one rank and not on another.

        Args:
            position: of this rank's last micro-batch, which `end_micro_batch` is given afterwards.
        """

    def before_optimizer_step(self, target: ParameterSet) -> None:  # noqa: B027 - on most every rank steps all
        """Drop the gradients of parameters that this rank's optimizer must not step."""

    @abstractmethod
    def end_micro_batch(self, position: MicroBatchPosition) -> None:
        """Synchronise parameters and buffers after a rank's last micro-batch; restore buffers after any other.

        Called after the backward passes of the micro-batch, and after the optimizers' steps if the micro-batch is the
        last. Collective for the last.
        """

    def replay(
        self, loss: torch.Tensor, weight: torch.Tensor | None, target: ParameterSet, position: MicroBatchPosition
    ) -> None:
        """Compute and drop the gradients of a micro-batch that the step computes a second time.

        The step's own results do not change. Collective if forward passes are.
        """
        held = [parameter.grad for parameter in target.parameters]
        for parameter in target.parameters:
            parameter.grad = None
        target.backward(loss, weight)
        for parameter, gradient in zip(target.parameters, held, strict=True):
            parameter.grad = gradient

    @abstractmethod
    def end_replay(self) -> None:
        """Restore buffers to the values with which the replayed micro-batch began. Asks no other rank."""

    @abstractmethod
    def discard_step(self) -> None:
        """Drop the gradients of the current step, and undo its changes of buffers."""

    # ---- beside steps

    def evaluating(self) -> AbstractContextManager[None]:
        """A context in which models have the values that a checkpoint would hold, on every rank. Collective."""
        return nullcontext()

    def finish_training(self) -> None:  # noqa: B027 - most have given every rank the model already
        """Give every rank the trained model, or the rank's part of the model. Collective."""

    def state_dict(self) -> StateDict:
        """The strategy's own state, which the next steps need; a `TensorShard` for a divided tensor. Collective."""
        return {}

    def load_state_dict(self, state: StateDict) -> None:  # noqa: B027 - most have no state
        """Load a ``state`` of `state_dict`, after models and optimizers; empty: another strategy saved. Collective."""

    def explain(self, error: Exception, method: str) -> str:
        """Advice about ``error`` where torch's own words give none; "" where the strategy has no part in the error.

        Args:
            error: that ended the run.
            method: of a model, which raised the error outside of the model's forward pass; "" otherwise.
        """
        return ""

    @abstractmethod
    def close(self) -> None:
        """Release threads, connections and hooks; no method is called afterwards."""


def refuse_evaluated_weights(optimizer: torch.optim.Optimizer) -> None:
    """Check that evaluated weights do not depend on the optimizer's state, where ranks lack a part of this state.

    Raises:
        UsageError: if the optimizer computes the weights for evaluation from its state.
    """
    if callable(getattr(type(optimizer), "eval", None)):
        kind = type(optimizer).__name__
        raise UsageError(
            f"{kind}.eval() computes the weights to be evaluated from the optimizer's state, and under this strategy "
            "ranks hold the weights of parameters whose state lies on another rank: use ddp or fsdp"
        )


class LossStrategy(Strategy):
    """A strategy that computes forward and backward passes itself, from a description of the loss's computation.

    The strategy also moves models to the device itself: a model need not fit there as a whole.
    """

    @abstractmethod
    def compute(
        self, task: LossCall, weight: torch.Tensor | None, target: ParameterSet, position: MicroBatchPosition
    ) -> Sequence[tuple[int, torch.Tensor]]:
        """Compute the forward and backward passes of a micro-batch, in place of the user and of `Strategy.backward`.

        Args:
            task: the computation of the loss.
            weight: factor of the loss, in float64, since the loss's type is not known yet; None: 1.
            target: whose gradients are computed.
            position: of the micro-batch.

        Returns:
            The losses that this rank now knows, each with the index of its micro-batch; none on most ranks.
        """


class ServerStrategy(Strategy):
    """A strategy under which some ranks compute no micro-batch, but serve the ranks that compute."""

    def check_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Check that ``optimizer`` can step on some ranks only.

        Raises:
            UsageError: if the weights to be evaluated depend on the optimizer's state.
        """
        refuse_evaluated_weights(optimizer)

    @abstractmethod
    def serve(self, target: ParameterSet, position: MicroBatchPosition) -> bool:
        """Serve a step of the other ranks; then parameters owned by this rank have the step's gradient in ``.grad``.

        Returns:
            Whether the other ranks made the step; if not, these have left their loop over micro-batches, and `end_loop`
            is next.
        """

    @abstractmethod
    def goes_on(self) -> bool:
        """Whether ranks that compute go on after the last step of an epoch of the data. Collective.

        A loop over several epochs may be left by ``break`` at such a place, which serving ranks would not see.

        Returns:
            True on ranks that compute, which go on; on a serving rank, False if ranks that compute have left their loop
            over micro-batches, and `end_loop` is next.

        Raises:
            PeerLost: where this rank serves, if the others did not leave the loop after the same step.
        """

    @abstractmethod
    def end_loop(self, *, complete: bool) -> bool:
        """End the loop over micro-batches. Collective; ranks that compute do not wait for the others.

        Args:
            complete: whether the loop came to its end on this rank, if it computes, and was not left by ``break``.

        Returns:
            Whether the loop came to its end, the same on all ranks.

        Raises:
            PeerLost: where this rank serves, if the others did not leave the loop after the same step.
        """
