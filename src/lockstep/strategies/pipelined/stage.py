"""What one rank of a pipeline computes: its stages, forward and backward, one micro-batch at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage

from lockstep.batch import MicroBatchPosition
from lockstep.collectives import TreeAccumulator
from lockstep.errors import UsageError
from lockstep.formatting import plural
from lockstep.nested import leaves
from lockstep.strategies.parts.buffers import Buffers
from lockstep.strategies.parts.gradient_accumulation import (
    LossCall,
    Tensors,
    add_into_left,
    describe_loss,
    is_loss,
    pop_gradients,
)
from lockstep.strategies.parts.random_state import random_state, set_random_state
from lockstep.strategies.pipelined.random_states import RandomStates
from lockstep.torch_private import is_view

Losses = list[tuple[int, torch.Tensor]]
TensorSpec = tuple[tuple[int, ...], torch.dtype, bool]
"""Shape and type of a tensor, and whether it needs a gradient."""


@dataclass(frozen=True, slots=True, eq=False)
class StageMicroBatch:
    """What a stage needs to know of a micro-batch."""

    task: LossCall
    weight: torch.Tensor | None
    position: MicroBatchPosition
    random: torch.Tensor  #: the generators' state when the model is called; see `random_state`


@dataclass(frozen=True, slots=True)
class StageInterface:
    """What one stage sends to the next."""

    specs: tuple[TensorSpec, ...]
    draws_random: bool  #: whether a stage so far draws random numbers, so that the generators' state goes along

    @classmethod
    def of(cls, tensors: Sequence[torch.Tensor], draws_random: bool) -> StageInterface:
        """The interface of ``tensors``."""
        return cls(tuple((tuple(t.shape), t.dtype, t.requires_grad) for t in tensors), draws_random)

    def examples(self) -> tuple[torch.Tensor, ...]:
        """Tensors without memory like those that are sent."""
        return tuple(torch.empty(s, dtype=d, device="meta", requires_grad=g) for s, d, g in self.specs)


@dataclass(frozen=True, slots=True)
class AutocastContext:
    """The device and the types in which stages compute."""

    device: torch.device
    transport_device: torch.device  #: from whose memory tensors are sent to other stages
    dtype: torch.dtype | None  #: of autocast; None: there is none

    def forward(self) -> AbstractContextManager[object]:
        """The context of forward passes."""
        return torch.autocast(self.device.type, dtype=self.dtype) if self.dtype else nullcontext()

    def backward(self) -> AbstractContextManager[object]:
        """The context of backward passes."""
        return torch.autocast(self.device.type, enabled=False) if self.dtype else nullcontext()


@dataclass(frozen=True, slots=True)
class StageModules:
    """What one stage computes: in training, and in evaluation."""

    training: nn.Module
    evaluation: nn.Module
    takes_inputs: bool  #: whether it is called with the model's inputs, before what the stage before it has sent


class StageSums:
    """The gradients of a stage's parameters, micro-batch by micro-batch, folded along the tree.

    The backward passes of a micro-batch leave its gradients in ``.grad``; they are taken out before those of another
    one come there.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters: Final = parameters
        self.used: set[int] = set()  #: places of the parameters that had a part in some loss
        self._fold = TreeAccumulator[Tensors](0, add_into_left)
        self._next = 0

    def begin(self, first: int, micro_batches: int) -> None:
        """Begin a step of ``micro_batches``, of which ``first`` is the first one here."""
        self._fold, self._next = TreeAccumulator[Tensors](micro_batches, add_into_left), first
        self.used = set()

    def accumulate_before(self, index: int) -> None:
        """Fold in the gradients of the micro-batches before ``index``; at most one has run since the last call."""
        while self._parameters and self._next < index:
            self._fold.push((self._next, self._next + 1), pop_gradients(self._parameters, self.used))
            self._next += 1

    def finish(self, index: int) -> list[Tensors]:
        """The sums of the nodes of the tree; the micro-batches before ``index`` have run."""
        self.accumulate_before(index)
        sums, self._fold = self._fold.sums, TreeAccumulator[Tensors](0, add_into_left)
        return sums


class Stage(nn.Module):
    """One stage of the model on this rank, in the form in which torch's schedules call it.

    Args:
        number: of the stage, from 0.
        of: how many there are.
        modules: what it computes.
        training: whether the model is in training mode.
        buffers: those of its modules.
        states: brings those of random generators from stage to stage.
        trained: the parameters that are trained.
        autocast: of its passes.
        exact: whether each micro-batch's gradient is taken by itself.
        splits_backward: whether gradients of inputs are computed in one pass, and those of weights in another.
    """

    def __init__(
        self,
        number: int,
        of: int,
        modules: StageModules,
        training: Callable[[], bool],
        buffers: Buffers,
        states: RandomStates,
        trained: Sequence[nn.Parameter],
        autocast: AutocastContext,
        *,
        exact: bool,
        splits_backward: bool = False,
    ) -> None:
        super().__init__()
        self.number: Final = number
        self.of: Final = of
        self.trained: Final = trained
        self.sums: Final = StageSums(trained)
        self.running_buffers: Final = buffers  #: such as running statistics
        self.in_training, self.in_evaluation = modules.training, modules.evaluation
        self._states: Final = states
        self._takes_inputs: Final = modules.takes_inputs
        self._training: Final = training
        self._autocast: Final = autocast
        self._exact: Final = exact
        self.splits_backward: Final = splits_backward
        self._reached: set[int] | None = None  # in a split pass of this kind: the places of the parameters behind it
        self._checked: set[object] = set()  # the interfaces around, and modes, of which that is compared
        # Modules that overwrite their inputs must not be given leaves of autograd.
        self._overwrites: Final = any(getattr(m, "inplace", False) for m in self.in_training.modules())
        self._micro_batches: Sequence[StageMicroBatch] = ()
        self._losses: Losses = []
        self._interfaces: tuple[StageInterface | None, StageInterface | None] = (None, None)

    @property
    def is_last(self) -> bool:
        """Whether this is the stage that computes the loss."""
        return self.number == self.of - 1

    def begin_step(self, stage_micro_batches: Sequence[StageMicroBatch], losses: Losses) -> None:
        """Begin a step; its losses will be appended to ``losses``."""
        self._losses = losses
        self.sums.begin(stage_micro_batches[0].position.index, stage_micro_batches[0].position.of)

    def set_schedule_run(
        self,
        stage_micro_batches: Sequence[StageMicroBatch],
        interfaces: tuple[StageInterface | None, StageInterface | None],
    ) -> None:
        """Set what the next schedule computes: its micro-batches, and the interfaces before and behind this stage."""
        self._micro_batches, self._interfaces = stage_micro_batches, interfaces

    def forward_once(
        self, inputs: Sequence[object], into: Sequence[torch.Tensor], random: torch.Tensor
    ) -> tuple[Any, torch.Tensor]:
        """The output of the stage for one micro-batch, and the state of the generators after it.

        Args:
            inputs: the model's.
            into: what the stage before has sent.
            random: the state of the generators after the stage before.
        """
        if self._overwrites:
            into = [t.clone() if t.requires_grad else t for t in into]
        module = self.in_training if self._training() else self.in_evaluation
        set_random_state(random, self._autocast.device)
        with self._autocast.forward():
            out = module(*(inputs if self._takes_inputs else ()), *into)
        if not self.is_last:
            out = tuple(self._checked_output(value) for value in (out if isinstance(out, tuple) else (out,)))
        return out, random_state(self._autocast.device)

    def forward(self, *received: torch.Tensor, index: torch.Tensor) -> Any:
        """The output for a micro-batch; on the last stage the loss, times its weight. Called by the schedule."""
        micro = self._micro_batches[int(index)]
        before, behind = self._interfaces
        random = micro.random
        if before and before.draws_random:
            random = self._states.receive(self.number, micro.position.index, like=random)
        into = [tensor.to(self._autocast.device) for tensor in received]
        self.running_buffers.use_copies()
        out, after = self.forward_once(micro.task.inputs, into, random)
        if behind is None:
            out = self._loss(micro, out)
            sent: tuple[torch.Tensor, ...] = (out,)
        else:
            found = StageInterface.of(out, behind.draws_random)
            if found != behind:
                raise UsageError(
                    f"strategy=pipeline: what stage {self.number} returns has shapes {[s for s, *_ in found.specs]}, "
                    f"and had {[s for s, *_ in behind.specs]} before, for inputs of the same shape; pad what varies"
                )
            if behind.draws_random:
                self._states.send(self.number, micro.position.index, after)
            sent = tuple(tensor.to(self._autocast.transport_device) for tensor in out)
        if not micro.position.last:
            self.running_buffers.end_micro_batch(micro.position)
        if self.splits_backward:
            self._note_reached(sent)
        return sent if behind else out

    def backward_done(self, chunk: int) -> None:
        """All gradients of the parameters by micro-batch number ``chunk`` of the schedule are in ``.grad``.

        Raises:
            UsageError: if some are not, since the pass for weights has not found them.
        """
        reached, self._reached = self._reached, None
        missing = [place for place in reached or () if self.trained[place].grad is None]
        if missing:
            raise UsageError(
                f"strategy=pipeline: {plural(len(missing), 'parameter')} of stage {self.number} have a part in the "
                "loss that does not go through what this stage is sent, and torch's zero-bubble schedules find no "
                "gradient for them; use schedule=1f1b, or let the stage before make that value"
            )
        if self._exact:
            self.sums.accumulate_before(self._micro_batches[chunk].position.index + 1)

    def _note_reached(self, sent: Sequence[torch.Tensor]) -> None:
        """Note which parameters a whole backward pass would find, in the first pass of each kind."""
        kind = (self._interfaces, self._training())
        if self._reached is None and kind not in self._checked:
            self._checked.add(kind)
            found = _leaves_behind(sent)
            self._reached = {place for place, parameter in enumerate(self.trained) if id(parameter) in found}

    def _loss(self, micro: StageMicroBatch, output: object) -> torch.Tensor:
        task = micro.task
        with self._autocast.forward():
            loss = task.loss(output, *task.targets)
        if not is_loss(loss):
            raise UsageError(
                f"step(loss function, ...): it gave a {describe_loss(loss)}; the loss must be a tensor of no dimension "
                "that depends on the model's parameters"
            )
        self._losses.append((micro.position.index, loss.detach().clone()))
        loss = task.scale(loss)
        return self._detachable(loss if micro.weight is None else loss * micro.weight.to(loss))

    def _checked_output(self, value: object) -> torch.Tensor:
        if not isinstance(value, torch.Tensor):
            raise UsageError(
                f"strategy=pipeline: stage {self.number} returns a {type(value).__name__}, and only a tensor or a "
                "tuple of tensors can be sent to the next stage; return these, or name another module with cut=..."
            )
        # A tensor that only passes through is a leaf, into which torch receives again: it is not what is sent.
        return self._detachable(value.view_as(value) if value.is_leaf and value.requires_grad else value.contiguous())

    def _detachable(self, value: torch.Tensor) -> torch.Tensor:
        """``value``, from which torch can detach its history in place, as split passes do: a view does not allow it."""
        return value.clone() if self.splits_backward and is_view(value) and value.requires_grad else value


def fold_passes(computed: PipelineStage, stage: Stage) -> None:
    """Let ``stage`` know of each backward pass of ``computed``, its form in torch's schedules, that is a last one."""
    backward, backward_of_weights = computed.backward_one_chunk, computed.backward_weight_one_chunk

    def one_chunk(chunk: int, loss: object = None, full_backward: bool = True, last_backward: object = False) -> None:
        backward(chunk, loss, full_backward, last_backward)
        if full_backward:
            stage.backward_done(chunk)

    def weights_of_one_chunk(chunk: int, last_backward: object = False) -> None:
        try:
            backward_of_weights(chunk, last_backward)
        except RuntimeError as error:
            if "backward through the graph a second time" not in str(error):
                raise
            raise UsageError(
                f"strategy=pipeline: stage {stage.number} uses some parameters several times in a forward pass, and "
                "torch's zero-bubble schedules cannot compute their gradients apart; use schedule=1f1b or interleaved"
            ) from None
        stage.backward_done(chunk)

    vars(computed).update(backward_one_chunk=one_chunk, backward_weight_one_chunk=weights_of_one_chunk)


def _leaves_behind(tensors: Sequence[torch.Tensor]) -> set[int]:
    """The ids of the leaves that a backward pass from ``tensors`` gives gradients."""
    todo: list[Any] = [tensor.grad_fn for tensor in tensors]
    seen, leaves = set[Any](), set[int]()
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if (variable := getattr(node, "variable", None)) is not None:
            leaves.add(id(variable))
        todo += [behind for behind, _ in node.next_functions]
    return leaves


def shapes_in(value: object) -> tuple[Any, ...]:
    """Shapes and types of the tensors in ``value``, also within lists, tuples and dicts."""
    found = ((path, leaf) for path, leaf in leaves(value) if isinstance(leaf, torch.Tensor))
    return tuple((path, tuple(tensor.shape), tensor.dtype) for path, tensor in found)
