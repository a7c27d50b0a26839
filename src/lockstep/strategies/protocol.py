"""What a run requires of a strategy; `abilities` holds what a strategy may offer beyond that.

A step, in the order of the calls; what is in brackets is optional::

    each micro-batch       [begin_micro_batch]  the user's forward pass  [begin_count, of the last one]  backward
    the last one           ... ``.grad`` is complete: normalize_by_count (if items are counted),
                           [before_optimizer_step], the optimizers' steps
    each micro-batch       end_micro_batch
    one that is replayed   [begin_micro_batch]  the user's forward pass  replay  end_replay

`Strategy` holds the verbs that every strategy needs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from lockstep.batch import MicroBatchPosition
from lockstep.collectives import Group, Runs
from lockstep.errors import SettingError
from lockstep.strategies.gradient_accumulation import ParameterSet

StateDict = dict[str, Any]
"""What `torch.nn.Module.state_dict` and its like give: nested values with tensors in them."""


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


class Strategy(Protocol):
    """How replicas are kept in step: what every strategy does, in the order in which the training loop asks for it."""

    assignment: ReplicaAssignment  #: whose data this rank computes
    state_layout: StateLayout  #: where parameters and states lie

    def setup_model(self, model: nn.Module, *, find_unused_parameters: bool, static_graph: bool = False) -> nn.Module:
        """``model`` itself, prepared in place; its values are rank 0's on every rank from now on. Collective.

        Its class, methods, and names of parameters stay the user's; only `fully_shard` puts a class below.
        """
        ...

    def resync(self) -> None:
        """Take what models hold now as the start of the next step, as after a checkpoint was loaded."""
        ...

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
        ...

    def normalize_by_count(self, target: ParameterSet, samples: int, counted: int) -> None:
        """After the last `backward`: turn a sum of items per sample into the mean over all items of the step.

        Args:
            target: whose gradient it is.
            samples: of the step, over all ranks.
            counted: items of the step, as `abilities.begin_count` gives them.

        Raises:
            UsageError: if there are none.
        """
        ...

    def end_micro_batch(self, position: MicroBatchPosition) -> None:
        """Bring parameters and buffers in step after a rank's last micro-batch; restore buffers after any other one.

        Called after the backward passes of the micro-batch, and after the optimizers' steps if it is the last one.
        Collective for the last one.
        """
        ...

    #: Whether a micro-batch that is computed again from the same values must give the same bits.
    repeats_bits: bool = True
    #: Whether each rank gets the same bits of a micro-batch, whichever it is.
    repeats_other_ranks: bool = False

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

    def end_replay(self) -> None:
        """Put buffers back to what the replayed micro-batch began with. Asks no other rank."""
        ...

    def discard_step(self) -> None:
        """Drop the gradients of the step that is under way, and undo what it did to buffers."""
        ...

    def close(self) -> None:
        """Release threads, connections and hooks; nothing is asked of the strategy afterwards."""
        ...
