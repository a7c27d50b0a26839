"""The forward passes of layers of which each rank of a tensor group holds a part.

             whole input                    input divided in the last dimension
colwise      x ──► x W_rᵀ + b_r  ──────►    rowwise   h_r ──► h_r W_rᵀ ── sum over ranks ── + b ──► whole output
                                 in between, each rank has its own part of the activations

The computation of a layer is written anew, since a bias is added once, after the sum; it replaces the layer's
``forward``, so that hooks and `fully_shard` see the same calls as without a plan.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from torch import nn
from torch.nn import functional as F

from lockstep.strategies.parts.random_state import random_state, set_random_state
from lockstep.strategies.tensor_parallel import tensor_plan
from lockstep.strategies.tensor_parallel.divided_output import DividedOutput
from lockstep.strategies.tensor_parallel.tensor_group import TensorGroup
from lockstep.strategies.tensor_parallel.tensor_plan import TensorDivision
from lockstep.torch_private import own_parameters, set_parameters


class DividedRegion:
    """The region between a ``colwise`` layer and the next ``rowwise`` layer, where each rank draws its own numbers.

    Outside, ranks of a group draw equal numbers, since they compute equal values; inside, dropout must not drop the
    same elements of every rank's part. Both follow from the seed of the micro-batch, so that a forward pass that is
    computed again (as for checkpointed activations) draws the same numbers, by the generators' states alone.

    Args:
        rank: in the tensor group.
        device: whose generators are seeded, beside those of the CPU.
    """

    def __init__(self, rank: int, device: torch.device) -> None:
        self._rank: Final = rank
        self._device: Final = device
        # States of the generators outside, by their seed inside; of this micro-batch.
        self._outside: Final[dict[int, torch.Tensor]] = {}
        self._input: tuple[torch.Tensor, torch.Tensor] | None = None

    def shared_input(self, value: torch.Tensor, group: TensorGroup) -> torch.Tensor:
        """`TensorGroup.to_each_rank` of ``value``; layers with the same input, as for queries and keys, get one tensor.

        So the input's gradient is summed over ranks once.
        """
        if self._input is None or self._input[0] is not value or self._input[1].requires_grad != _records(value):
            self._input = (value, group.to_each_rank(value))
        return self._input[1]

    def enter(self) -> None:
        """Enter the region, in which activations are divided; does nothing within the region."""
        if torch.initial_seed() in self._outside:
            return
        drawn = int(torch.randint(1 << 48, (), device="cpu"))  # the same on all ranks of the group
        outside = random_state(self._device)
        seed = (drawn << 12) + self._rank + 1
        torch.manual_seed(seed)
        self._outside[seed] = outside

    def leave(self) -> None:
        """Activations are whole from now on."""
        self._input = None
        outside = self._outside.get(torch.initial_seed())
        if outside is not None:
            set_random_state(outside, self._device)

    def forget(self) -> None:
        """Forget the micro-batch's input and generator states, as another begins, or the last is over."""
        self._input = None
        self._outside.clear()


class _Colwise:
    """The forward pass in which each rank computes some of the outputs."""

    def __init__(self, name: str, layer: nn.Linear, group: TensorGroup, region: DividedRegion) -> None:
        self._name, self._layer, self._group, self._region = name, layer, group, region

    def __call__(self, value: torch.Tensor) -> torch.Tensor:
        shared = self._region.shared_input(value, self._group)
        out = F.linear(shared, self._layer.weight, self._layer.bias)
        if self._layer.training:
            self._region.enter()
        return DividedOutput.of(out, self._name)


class _ColwiseGathered:
    """The forward pass in which each rank computes some of the outputs, and gets all."""

    def __init__(self, layer: nn.Linear, group: TensorGroup) -> None:
        self._layer, self._group = layer, group

    def __call__(self, value: torch.Tensor) -> torch.Tensor:
        shared = self._group.to_each_rank(value)
        return self._group.gathered(F.linear(shared, self._layer.weight, self._layer.bias))


class _Rowwise:
    """The forward pass in which each rank computes all outputs from some of the inputs, and gets the sum."""

    def __init__(self, layer: nn.Linear, group: TensorGroup, region: DividedRegion, *, splits: bool) -> None:
        self._layer, self._group, self._region, self._splits = layer, group, region, splits

    def __call__(self, value: torch.Tensor) -> torch.Tensor:
        part = self._group.own_part(value) if self._splits else value
        out = self._group.sum_of_ranks(F.linear(part, self._layer.weight))
        self._region.leave()
        bias: torch.Tensor | None = self._layer.bias
        return out if bias is None else out + bias.to(out.dtype)  # as autocast would: the output has one type


class _EmbeddingRowwise:
    """The look-up in which each rank looks up the rows that it holds; other rows are zeros in the sum."""

    def __init__(self, layer: nn.Embedding, group: TensorGroup, rows: TensorDivision) -> None:
        self._layer, self._group = layer, group
        self._first, self._rows, self._all_rows = rows.start, rows.length, rows.shape[0]
        padding = layer.padding_idx
        here = padding is not None and rows.start <= padding < rows.start + rows.length
        self._padding: Final = padding - rows.start if padding is not None and here else None

    def __call__(self, value: torch.Tensor) -> torch.Tensor:
        own = value - self._first
        # An id that no rank has stays unchanged, and the look-up refuses it, as on one rank.
        elsewhere = ((own < 0) & (value >= 0)) | ((own >= self._rows) & (value < self._all_rows))
        rows = F.embedding(own.masked_fill(elsewhere, 0), self._layer.weight, self._padding)
        return self._group.sum_of_ranks(rows.masked_fill(elsewhere.unsqueeze(-1), 0))


class _EmbeddingColwise:
    """The look-up in which each rank looks up some columns of every row, and gets all columns."""

    def __init__(self, layer: nn.Embedding, group: TensorGroup) -> None:
        self._layer, self._group = layer, group

    def __call__(self, value: torch.Tensor) -> torch.Tensor:
        return self._group.gathered(F.embedding(value, self._layer.weight, self._layer.padding_idx))


class _Summed:
    """A module that each rank holds whole, and calls with its part of the activations: gradients are summed."""

    def __init__(self, module: nn.Module, group: TensorGroup) -> None:
        self._module, self._group, self._forward = module, group, module.forward

    def __call__(self, *args: object, **kwargs: object) -> object:
        held = own_parameters(self._module)
        # In place of each parameter, for this call: a tensor whose gradient is summed over ranks before it reaches the
        # parameter.
        divided = {
            name: None if parameter is None else self._group.to_each_rank(parameter) for name, parameter in held.items()
        }
        set_parameters(self._module, divided)
        try:
            return self._forward(*args, **kwargs)
        finally:
            set_parameters(self._module, held)


def compute_in_parallel(
    model: nn.Module,
    styles: Mapping[str, str],
    divisions: Mapping[str, TensorDivision],
    group: TensorGroup,
    region: DividedRegion,
) -> None:
    """Let each layer of ``model`` that ``styles`` names compute with this rank's part of its parameters.

    Args:
        model: prepared in place; its parameters are this rank's parts already.
        styles: of layers, by their names.
        divisions: of tensors, by their names.
        group: of the ranks that compute together.
        region: shared by all layers of the model.
    """
    for name, style in styles.items():
        forward = _forward_of(style, name, model.get_submodule(name), divisions.get(f"{name}.weight"), group, region)
        model.get_submodule(name).forward = forward


def _forward_of(
    style: str, name: str, layer: Any, weight: TensorDivision | None, group: TensorGroup, region: DividedRegion
) -> Callable[..., Any]:
    match style:
        case tensor_plan.COLWISE:
            return _Colwise(name, layer, group, region)
        case tensor_plan.COLWISE_GATHERED:
            return _ColwiseGathered(layer, group)
        case tensor_plan.ROWWISE | tensor_plan.ROWWISE_SPLIT:
            return _Rowwise(layer, group, region, splits=style == tensor_plan.ROWWISE_SPLIT)
        case tensor_plan.EMBEDDING_ROWWISE:
            assert weight is not None
            return _EmbeddingRowwise(layer, group, weight)
        case tensor_plan.EMBEDDING_COLWISE:
            return _EmbeddingColwise(layer, group)
    return _Summed(layer, group)


def _records(value: torch.Tensor) -> bool:
    """Whether a result computed from ``value`` now has a gradient."""
    return value.requires_grad and torch.is_grad_enabled()
