"""Gradients of the blocks of `fully_shard`: exchanged in each turn, and added along the tree.

turn 0            backward: block 2, 1, 0     each gives its gradient, whole and flat; each rank gets its rows of those
                                              of all ranks, which are neighbours in the tree, and folds them
turn 1            backward: block 2, 1, 0     ... and folds them, and what it has
the last one      backward: block 2           ... until one sum is left: `.grad`
                            block 1, 0        likewise
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Protocol

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from lockstep.batch import MicroBatchPosition
from lockstep.collectives import Group, ReduceScatter, ScatteredSum, translating_peer_errors
from lockstep.errors import UsageError
from lockstep.formatting import plural
from lockstep.strategies.not_whole.divided_parameters import DividedParameter
from lockstep.strategies.parts.gradient_accumulation import ParameterSet, negative_zeros_like
from lockstep.strategies.sharded.whole_gradients import WholeGradients


class FsdpUnit:
    """Sums the gradients of one block of `fully_shard`, in place of torch's reduce-scatter.

    Args:
        parameters: of the block, without those of inner blocks, divided into rows.
        ranks: that hold a copy.
        reduce_scatter: sums over ranks.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], ranks: int, reduce_scatter: ReduceScatter) -> None:
        self.parameters: Final = parameters
        self.incomplete = False  #: whether a gradient came in parts, or without some parameters
        self._ranks: Final = ranks
        self._reduce_scatter: Final = reduce_scatter
        self._sum: ScatteredSum | None = None  # of this step
        self._position: MicroBatchPosition | None = None  # None: no backward pass for this block
        self._received = False

    def expect(self, position: MicroBatchPosition | None) -> None:
        """Expect the backward pass of ``position``; None: the next backward pass is not for this block."""
        self._position, self._received, self.incomplete = position, False, False

    def forget(self) -> None:
        """Drop the sum of this step."""
        self._sum = None

    # What torch calls, with its names.

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Allocate memory for flat gradients: first for whole gradients, then for this rank's rows of the sum."""
        if self._position is None or self._received or size[0] != self._length():
            return torch.empty(*size, dtype=dtype, device=device)
        return self._begun(self._position).allocate(size[0], dtype)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: object = None,
        op: object = None,
        async_op: bool = False,
    ) -> None:
        """Add the flat gradient of a micro-batch; after the last, write this rank's rows of the sum. Collective."""
        position = self._position
        if position is None:
            output_tensor.copy_(negative_zeros_like(output_tensor))  # added to a gradient that may exist already
            return
        self.incomplete = self.incomplete or self._received or input_tensor.numel() != self._length()
        if self.incomplete:
            return
        self._received = True
        if input_tensor.is_cuda:
            input_tensor.record_stream(torch.cuda.current_stream(input_tensor.device))
        total = self._begun(position)
        total.add(input_tensor, None if position.is_padding else position.index)
        if position.last:
            total.finish(output_tensor)
            self._sum = None

    def _begun(self, position: MicroBatchPosition) -> ScatteredSum:
        if self._sum is None:
            self._sum = self._reduce_scatter.begin(position.of)
        return self._sum

    def _length(self) -> int:
        """The length of a whole gradient, whose rows are padded to equal numbers on all ranks."""
        padded = 0
        for parameter in self.parameters:
            if parameter.requires_grad:
                rows = len(parameter)
                padded += -(-rows // self._ranks) * self._ranks * (parameter.numel() // max(rows, 1))
        return padded


class Gradients(Protocol):
    """Computes the gradient of a step, from the losses of its micro-batches."""

    def backward(
        self, loss: torch.Tensor, weight: torch.Tensor | None, target: ParameterSet, position: MicroBatchPosition
    ) -> None:
        """Compute the gradients of a micro-batch; after the last, ``.grad`` holds this rank's rows of the sum.

        Collective.
        """

    def replay(
        self, loss: torch.Tensor, weight: torch.Tensor | None, target: ParameterSet, position: MicroBatchPosition
    ) -> None:
        """Compute and drop the gradients of a replayed micro-batch. Collective, as the gathering of blocks is."""

    def discard_step(self) -> None:
        """Drop the gradients of the step."""


class ParameterUse:
    """Which parameters have a part in the losses of a step: here all, so that none is tracked."""

    def before(self) -> None:
        """Called between the forward pass of a micro-batch and its backward pass."""

    def after(self, position: MicroBatchPosition) -> None:
        """After the backward pass; after the last one, ``.grad`` of unused parameters is None. Collective then."""


class TrackedUse(ParameterUse):
    """Tracks the parameters of a model that is gathered as one block; unused ones meanwhile get a gradient of zeros."""

    def __init__(self, model: nn.Module, group: Group) -> None:
        self._model: Final = model
        self._group: Final = group
        self._divided: Final = list(model.parameters())
        self._known: Final[set[int]] = set()  # gathered parameters that have a hook
        self._used_now: set[int] = set()  # indices of parameters with a part in the loss of this micro-batch
        self._used: Final[set[int]] = set()  # ... of some micro-batch of this step

    def before(self) -> None:
        """Give every parameter a gradient of zeros, and track parameters to which the backward pass adds."""
        for index, gathered in enumerate(self._model.parameters()):
            if gathered.requires_grad and not isinstance(gathered, DTensor):
                if id(gathered) not in self._known:  # torch makes gathered parameters once
                    self._known.add(id(gathered))
                    gathered.register_post_accumulate_grad_hook(lambda _, index=index: self._used_now.add(index))
                gathered.grad = negative_zeros_like(gathered)
        self._used_now.clear()

    def after(self, position: MicroBatchPosition) -> None:
        """Note the used parameters; after the last micro-batch, exchange them with all ranks. Collective then."""
        if not position.is_padding:
            self._used.update(self._used_now)
        if position.last:
            used = set().union(*self._group.gather_objects(sorted(self._used), "which parameters are used"))
            self._used.clear()
            for index, parameter in enumerate(self._divided):
                if index not in used:
                    parameter.grad = None


class FsdpModel:
    """A model whose gradients are summed block by block, by units, and separately for ``whole`` parameters."""

    def __init__(
        self, model: nn.Module, units: Sequence[FsdpUnit], whole: Sequence[WholeGradients], uses: ParameterUse
    ) -> None:
        self.parameters: Final = {p: name for name, p in model.named_parameters() if p.requires_grad}  #: with names
        self.units: Final = units
        self.whole: Final = whole
        self.uses: Final = uses

    def is_in(self, target: ParameterSet) -> bool:
        """Whether ``target`` has parameters of this model."""
        return any(id(p) in target.places for p in self.parameters)

    def check_whole(self) -> None:
        """Check that all parameters have got a gradient, in one piece for each block.

        Raises:
            UsageError: naming parameters without a gradient, or of a block whose gradient came in parts.
        """
        unused = [name for p, name in self.parameters.items() if p.grad is None]
        if unused:
            raise UsageError(
                f"{len(unused)} of {plural(len(self.parameters), 'parameter')} had no part in the loss: "
                f"{', '.join(unused[:5])}. Use them in forward(), freeze them with requires_grad_(False), or say "
                "run.model(model, find_unused_parameters=True), which gathers the whole model at once"
            )
        incomplete = [
            self.parameters[p] for u in self.units if u.incomplete for p in u.parameters if p in self.parameters
        ]
        if incomplete:
            raise UsageError(
                f"the gradient of the block with {', '.join(incomplete[:5])} came in parts, as when forward() calls "
                "the block several times, and some modules inside it only once; let wrap=... name smaller blocks, or "
                "say wrap=whole"
            )


class FsdpBackward(Gradients):
    """Computes the gradients of models that `fully_shard` has divided."""

    def __init__(self) -> None:
        self._models: Final[list[FsdpModel]] = []

    def add(self, fsdp_model: FsdpModel) -> None:
        """Include a model in the backward passes."""
        self._models.append(fsdp_model)

    def backward(
        self, loss: torch.Tensor, weight: torch.Tensor | None, target: ParameterSet, position: MicroBatchPosition
    ) -> None:
        """Let the units sum the gradients of their blocks. Collective."""
        reached = [fsdp_model for fsdp_model in self._models if fsdp_model.is_in(target)]
        unreached = [fsdp_model for fsdp_model in self._models if not fsdp_model.is_in(target)]
        for fsdp_model in reached:
            for unit in fsdp_model.units:
                unit.expect(position)
            for parameter in fsdp_model.parameters:
                parameter.grad = None
            fsdp_model.uses.before()
        for fsdp_model in unreached:
            for unit in fsdp_model.units:
                unit.expect(None)
        # The backward pass reaches all parameters: torch's hooks are on gathered parameters, which are not in the
        # target.
        empty = [p for fsdp_model in unreached for p in fsdp_model.parameters if p.grad is None]
        with translating_peer_errors("the reduction of gradients"):
            loss.backward(weight)
            for parameter in empty:
                parameter.grad = None
            for fsdp_model in reached:
                fsdp_model.check_whole()
                for whole in fsdp_model.whole:
                    whole.add(position)
                fsdp_model.uses.after(position)
                for unit in fsdp_model.units:
                    unit.expect(None)
        for fsdp_model in reached:
            for parameter in fsdp_model.parameters:
                if not position.last:
                    parameter.grad = None
                elif isinstance(parameter.grad, DTensor):
                    parameter.grad.__class__ = DividedParameter

    def replay(
        self, loss: torch.Tensor, weight: torch.Tensor | None, target: ParameterSet, position: MicroBatchPosition
    ) -> None:
        """Let no unit sum the gradients of its block. Collective, as blocks are gathered."""
        for fsdp_model in self._models:
            for unit in fsdp_model.units:
                unit.expect(None)
        held = {p: p.grad for fsdp_model in self._models for p in fsdp_model.parameters}
        for parameter in held:
            parameter.grad = None
        loss.backward(weight)
        for parameter, gradient in held.items():
            parameter.grad = gradient

    def discard_step(self) -> None:
        """Drop the sums of all units."""
        for fsdp_model in self._models:
            for unit in fsdp_model.units:
                unit.forget()
            for whole in fsdp_model.whole:
                whole.forget()
