"""What a run asks of a strategy.

each micro-batch      begin, the user's forward pass, backward
the last one          ... then .grad is ready;  divide (if items are counted), own, the optimizers' steps
each micro-batch      end
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn

from lockstep.collectives import Group, Runs
from lockstep.errors import SettingError, UsageError
from lockstep.strategies.gradient_accumulation import LossCall, MicroBatchPosition, ParameterSet


@dataclass(frozen=True, slots=True)
class StrategyContext:
    """Under which conditions a strategy works."""

    group: Group
    runs: Runs  #: the micro-batches of each replica
    exact: bool = True  #: whether sums follow the fixed tree
    bucket_mb: float | None = None  #: MiB of gradients exchanged at once; None: chosen
    dtype: torch.dtype | None = None  #: of forward passes under autocast; None: none, they are fp32
    rehearse: bool = False  #: whether CPU threads may stand in for GPUs
    free_bytes: Callable[[], int] = lambda: 1 << 50  #: of memory that this rank may still use
    #: tells the user one line; all ranks may call it, the leader is heard
    say: Callable[[str], None] = lambda _text: None

    def refuse_fp16(self, name: str, why: str) -> None:
        """For the strategy ``name``, which cannot scale losses, and ``why``.

        Raises:
            SettingError: if losses are to be scaled.
        """
        if self.dtype is torch.float16:
            raise SettingError(f"strategy {name} with precision='fp16': {why}; use precision='bf16', which needs none")


@dataclass(frozen=True, slots=True)
class ReplicaAssignment:
    """Which part of the data a rank computes. A replica is one copy of the model, on one rank or on several."""

    replica: int | None  #: whose micro-batches this rank goes through; None: of none, it serves the others
    replicas: int  #: how many there are
    counts: bool = True  #: whether what is measured here counts; on one rank of each replica
    in_step: bool = True  #: whether replicas are equal, bit for bit, after each step


class StateLayout(Protocol):
    """Which part of models' and optimizers' tensors lies on this rank."""

    def norm(self, parameters: Sequence[nn.Parameter]) -> torch.Tensor:
        """The 2-norm of all their gradients, the same bits on every rank and for every division. Collective."""
        ...

    def any(self, found: torch.Tensor) -> torch.Tensor:
        """Whether ``found``, of one element, is not zero on some rank that holds a part, as 0.0 or 1.0. Collective."""
        ...

    def model_state(self, model: nn.Module) -> dict[str, Any]:
        """The state of the whole model by its own names; `TensorShard` for tensors that are divided. Collective."""
        ...

    def load_model(self, model: nn.Module, state: Mapping[str, Any]) -> None:
        """Put back `model_state`, in which every tensor is whole. Collective."""
        ...

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """As ``optimizer.state_dict()`` on one rank alone; `TensorShard` for tensors that are divided. Collective."""
        ...

    def load_optimizer(self, optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
        """Put back `optimizer_state`, in which every tensor is whole. Collective."""
        ...


class Strategy(Protocol):
    """What the loop asks of a strategy, in the order in which it asks."""

    @property
    def assignment(self) -> ReplicaAssignment:
        """Whose data this rank computes."""
        ...

    @property
    def state_layout(self) -> StateLayout:
        """Where the state lies."""
        ...

    @property
    def meets_in_forward(self) -> bool:
        """Whether forward passes are collective, so that every rank must make equally many, also in evaluations."""
        ...

    def setup_model(self, model: nn.Module, *, find_unused_parameters: bool, static_graph: bool = False) -> nn.Module:
        """The module to call instead of ``model``; equal on all ranks from now on. Collective."""
        ...

    def begin_micro_batch(self, position: MicroBatchPosition) -> None:
        """Before the forward pass of one micro-batch."""
        ...

    def backward(
        self, loss: torch.Tensor, weight: torch.Tensor | None, target: ParameterSet, position: MicroBatchPosition
    ) -> None:
        """After a rank's last turn of a step, ``.grad`` holds the sum over the step's micro-batches, on each rank.

        Each counts as ``weight * loss``, both of no dimension; None weighs 1.

        All ranks, on their last turns; before that, ``.grad`` may hold anything.
        """
        ...

    def normalize_by_count(self, target: ParameterSet, samples: int, counted: int) -> None:
        """After the last `backward`, from a sum of items per sample to the mean over all items of the step.

        Args:
            target: whose gradient it is.
            samples: of the step.
            counted: items of this rank's micro-batches.

        Collective.
        """
        ...

    def before_optimizer_step(self, target: ParameterSet) -> None:
        """Just before the optimizers step: ``.grad`` stays only where this rank makes the step."""
        ...

    def end_micro_batch(self, position: MicroBatchPosition) -> None:
        """After the backward passes of one micro-batch; after the last turn, the optimizers have stepped.

        Then parameters and buffers are in step, too. Collective.
        """
        ...

    def evaluating(self) -> AbstractContextManager[None]:
        """Around an evaluation: models are what a checkpoint would hold, on every rank. Collective."""
        ...

    def finish_training(self) -> None:
        """Training is over: every rank holds the trained model, or its part of it. Collective."""
        ...

    def discard_step(self) -> None:
        """The step in work is given up: its gradients and what it did to buffers are forgotten."""
        ...

    def resync(self) -> None:
        """What models hold now is what the next step starts from, as after a checkpoint was loaded."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """What the next steps depend on beside models and optimizers. Empty for most; `TensorShard` where divided.

        Collective.
        """
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Put back `state`; empty if another strategy saved. After models and optimizers. Collective."""
        ...

    def close(self) -> None:
        """Nothing more is asked."""
        ...


@runtime_checkable
class ComputesLoss(Protocol):
    """A strategy that computes forward and backward passes itself, from what the user would compute.

    It brings models to the device itself, too: they need not fit there whole.
    """

    def compute(
        self, task: LossCall, weight: torch.Tensor | None, target: ParameterSet, position: MicroBatchPosition
    ) -> Sequence[tuple[int, torch.Tensor]]:
        """In place of the user's forward pass and `Strategy.backward`.

        Args:
            task: what to compute.
            weight: of its loss, in float64, for its format is not known yet; None weighs 1.
            target: whose gradients.
            position: of the micro-batch.

        Returns:
            The losses that have become known here, each with the index of its micro-batch; none on most ranks.
        """
        ...


@runtime_checkable
class HasServerRanks(Protocol):
    """A strategy of which some ranks compute no micro-batch, but wait on those that do."""

    def serve(self, target: ParameterSet, position: MicroBatchPosition) -> bool:
        """One step of the others; then ``.grad`` holds its gradient where this rank holds the parameter.

        Returns:
            Whether they made it; if not, they have left their loop over micro-batches, and `part` is next.
        """
        ...

    def part(self, *, whole: bool) -> bool:
        """The loop over micro-batches is over. All ranks; those that compute do not wait for it.

        Args:
            whole: whether it came to its end, where this rank computes; it may have been left by ``break``.

        Returns:
            Whether it came to its end, on all ranks.

        Raises:
            PeerLost: where this rank serves, if the others did not leave the loop after the same step.
        """
        ...


@runtime_checkable
class UpdatesTrainable(Protocol):
    """A strategy under which other parameters may learn than those which did when it saw the model."""

    @property
    def can_update_trainable(self) -> bool:
        """Whether it is so for these models."""
        ...

    def update_trainable(self, target: ParameterSet) -> None:
        """Before a step's first backward pass for ``target``: its parameters learn now, and no others of its models.

        All ranks, with equal values in the parameters that are new.

        Raises:
            UsageError: if something was added that cannot be taken up within a step.
        """
        ...


@runtime_checkable
class ChecksOptimizers(Protocol):
    """A strategy under which some optimizers cannot step."""

    def check_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Nothing, if it can.

        Raises:
            UsageError: if it cannot, with what to use instead.
        """
        ...


def can_update_trainable(strategy: Strategy) -> bool:
    """Whether `update_trainable` may succeed; then a model's own parameters are what learns."""
    return isinstance(strategy, UpdatesTrainable) and strategy.can_update_trainable


def update_trainable(strategy: Strategy, target: ParameterSet) -> None:
    """`UpdatesTrainable.update_trainable`, if ``strategy`` can.

    Raises:
        UsageError: if it cannot.
    """
    if not (isinstance(strategy, UpdatesTrainable) and strategy.can_update_trainable):
        raise UsageError(
            f"other parameters learn than when run.model(...) was called, and {type(strategy).__name__} divides a "
            "model as it is then: freeze, unfreeze and add parameters before run.model(...), or use ddp or zero"
        )
    strategy.update_trainable(target)
