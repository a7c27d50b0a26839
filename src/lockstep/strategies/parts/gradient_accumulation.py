"""Gradients of single micro-batches, summed along the tree while a rank computes its run of micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeGuard, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from lockstep.batch import MicroBatchPosition
from lockstep.collectives import Group, TreeAccumulator, local_part
from lockstep.errors import UsageError
from lockstep.strategies.parts.sparse_gradients import dense_rows, no_rows, sparse_again
from lockstep.torch_private import foreach_add_, foreach_copy_, foreach_mul_

_ALIGNMENT: Final = 64  #: bytes

Tensors = list[torch.Tensor]

_ACROSS_ELEMENTS: Final = ("Adafactor", "LBFGS", "Muon")


@dataclass(frozen=True, slots=True, eq=False)
class LossCall:
    """The computation of a micro-batch's loss, for strategies that make this computation themselves, as pipelines."""

    model: nn.Module
    loss: Callable[..., torch.Tensor]  #: of the model's outputs and the targets
    inputs: tuple[Any, ...]  #: the model's positional arguments
    targets: tuple[Any, ...]  #: the loss's, after the outputs
    scale: Callable[[torch.Tensor], torch.Tensor]  #: from the loss to the scaled loss that is differentiated, in fp16

    def __call__(self) -> torch.Tensor:
        """The loss, not scaled."""
        return self.loss(self.model(*self.inputs), *self.targets)


@dataclass(frozen=True, slots=True, eq=False)
class ParameterSet:
    """The parameters whose gradients one backward pass computes, in a fixed order."""

    parameters: tuple[nn.Parameter, ...]
    everything: bool  #: whether these are all parameters of all backward passes
    sparse: frozenset[nn.Parameter] = frozenset()  #: parameters whose gradients are sparse
    candidates: tuple[nn.Parameter, ...] = ()  #: parameters that may be trained, also frozen ones
    learn: list[bool] = field(default_factory=list)  #: for each candidate, whether it is trainable
    held: int = 0  #: how many parameters its optimizers hold
    places: dict[int, int] = field(init=False, repr=False)  #: the place of each parameter in `parameters`, by its id

    def __post_init__(self) -> None:
        object.__setattr__(self, "places", {id(p): i for i, p in enumerate(self.parameters)})

    @property
    def dense(self) -> list[nn.Parameter]:
        """The parameters whose gradients are dense, in order."""
        return [p for p in self.parameters if p not in self.sparse] if self.sparse else list(self.parameters)

    @property
    def whole(self) -> list[nn.Parameter]:
        """The parameters that are not divided among ranks, in order."""
        return [p for p in self.parameters if not isinstance(p, DTensor)]

    @property
    def alike(self) -> list[list[nn.Parameter]]:
        """The parameters in lists that torch can compute with at once: divided and whole parameters apart."""
        kinds: dict[bool, list[nn.Parameter]] = {}
        for parameter in self.parameters:
            kinds.setdefault(isinstance(parameter, DTensor), []).append(parameter)
        return list(kinds.values())

    def backward(self, loss: torch.Tensor, weight: torch.Tensor | None) -> None:
        """Add the gradients of ``weight * loss`` (None: of ``loss``) to ``.grad`` of only these parameters."""
        loss.backward(weight, inputs=None if self.everything else self.parameters)


class TreeGradientAccumulator:
    """The gradients of a target's parameters in this step, summed micro-batch by micro-batch.

    Adding into ``.grad`` as autograd does would sum from the left, and the bits would depend on how many micro-batches
    this rank computes. So each gradient is taken out of ``.grad`` and added along the tree.
    """

    def __init__(self, target: ParameterSet, micro_batches: int) -> None:
        self._parameters: Final = target.parameters
        self._sparse: Final = target.sparse
        #: the sums of the parameters' gradients, for each node
        self.tree: Final = TreeAccumulator[Tensors](micro_batches, add_into_left)
        self._micro_batches: Final = micro_batches
        self._places: Final = target.places
        self.used: Final[set[int]] = set()  #: places of the parameters that had a part in some loss

    def accumulate(self, position: MicroBatchPosition) -> None:
        """Add the gradients of the micro-batch at ``position`` and leave ``.grad`` empty."""
        self.tree.push((position.index, position.index + 1), pop_gradients(self._parameters, self.used, self._sparse))

    def write_gradients(self) -> None:
        """Put the sum over the whole step into ``.grad``, on a rank that computed the whole step.

        A parameter that had no part in any loss gets no gradient, so optimizers skip it, as on a single device.
        """
        (total,) = self.tree.sums
        for place, (parameter, gradient) in enumerate(zip(self._parameters, total, strict=True)):
            if place not in self.used:
                parameter.grad = None
            else:
                parameter.grad = sparse_again(gradient, parameter) if parameter in self._sparse else gradient

    def fill_missing(self, parameters: Iterable[nn.Parameter]) -> None:
        """Give zero gradients to parameters used only in an earlier micro-batch, before the last backward pass."""
        for parameter in parameters:
            if parameter.grad is None and self._places.get(id(parameter)) in self.used:
                parameter.grad = negative_zeros_like(parameter)

    def partials(
        self, position: MicroBatchPosition, parameters: Sequence[torch.Tensor], gradients: Tensors, flat: torch.Tensor
    ) -> list[torch.Tensor]:
        """This rank's sums for some of its parameters, once the gradients of its last micro-batch are computed.

        Args:
            position: of this rank's last micro-batch.
            parameters: some of the target's.
            gradients: of the last micro-batch, views of ``flat``, each with the strides of its parameter; complex
                gradients as pairs of reals.
            flat: one-dimensional; becomes the last of the sums.

        Returns:
            One tensor laid out like ``flat`` for each of the rank's nodes.
        """
        unused = [g for p, g in zip(parameters, gradients, strict=True) if p.grad is None]
        if unused:
            foreach_copy_(unused, [negative_zeros_like(g) for g in unused])
        if not self.tree.nodes:
            return [flat]
        places = [self._places[id(p)] for p in parameters]
        tree = TreeAccumulator[Tensors](self._micro_batches, _add_into_right)
        tree.nodes = list(self.tree.nodes)
        tree.sums = [[as_real(sums[i]) for i in places] for sums in self.tree.sums]
        tree.push((position.index, position.index + 1), gradients)
        return [*(_laid_out(sums, gradients, flat) for sums in tree.sums[:-1]), flat]

    def rows(self, position: MicroBatchPosition, parameter: nn.Parameter) -> list[torch.Tensor]:
        """This rank's sums for one parameter with sparse gradients, whose ``.grad`` is that of the last micro-batch.

        Returns:
            One dense tensor of one dimension for each of the rank's nodes; `sparse_again` takes it, viewed as rows.
        """
        tree = TreeAccumulator[torch.Tensor](self._micro_batches, lambda left, right: left.add_(right))
        tree.nodes = list(self.tree.nodes)
        tree.sums = [sums[self._places[id(parameter)]] for sums in self.tree.sums]
        if not position.is_padding:
            tree.push((position.index, position.index + 1), rows_of(parameter))
        return [sums.view(-1) for sums in tree.sums]


def is_loss(value: object) -> TypeGuard[torch.Tensor]:
    """Whether a backward pass can begin at ``value``: a tensor of no dimension that requires a gradient."""
    return isinstance(value, torch.Tensor) and not value.dim() and value.requires_grad


def describe_loss(value: object) -> str:
    """A description of ``value``, which is no loss, equal on all ranks."""
    if isinstance(value, torch.Tensor):
        return f"tensor of shape {tuple(value.shape)}, requires_grad={value.requires_grad}"
    return f"{type(value).__name__}"


def parameters_of(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    """All parameters that ``optimizer`` steps, in the order of their numbers in its state."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def gradient_like(parameter: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """A gradient with ``values`` on the device and in the memory format of ``parameter``, as on one rank.

    Optimizers round differently where a gradient has other strides.
    """
    shaped = values.view(parameter.shape)
    if parameter.is_contiguous():
        return shaped.to(parameter.device)
    return torch.empty_like(parameter, requires_grad=False).copy_(shaped)


def align_gradients(parameters: Iterable[torch.Tensor]) -> None:
    """Copy gradients that do not begin at a multiple of `_ALIGNMENT` bytes, so that all begin as without buckets.

    On a GPU, additions in a sum or norm of a tensor are grouped by the tensor's address, so an optimizer that takes
    norms would have other bits than on one rank. Such gradients are copied by one kernel; most models have none, since
    the sizes of their parameters are multiples of 16.
    """
    moved = [p for p in parameters if p.grad is not None and p.grad.storage_offset() * p.grad.itemsize % _ALIGNMENT]
    if moved:
        aligned = [torch.empty_like(cast(torch.Tensor, p.grad)) for p in moved]
        foreach_copy_(aligned, [cast(torch.Tensor, p.grad) for p in moved])
        for parameter, gradient in zip(moved, aligned, strict=True):
            parameter.grad = gradient


def steps_across_elements(optimizer: torch.optim.Optimizer) -> str:
    """The torch class of ``optimizer`` if its step of an element depends on other elements of the tensor, else "".

    Known classes are `_ACROSS_ELEMENTS`.
    """
    return next((kind.__name__ for kind in type(optimizer).__mro__ if kind.__name__ in _ACROSS_ELEMENTS), "")


def pop_gradients(parameters: Iterable[torch.Tensor], used: set[int], sparse: Collection[torch.Tensor] = ()) -> Tensors:
    """The gradients of ``parameters``, whose ``.grad`` is left empty; negative zeros for a missing gradient.

    Args:
        parameters: in a fixed order.
        used: the places of parameters with a gradient, which had a part in the loss, are added to this set.
        sparse: parameters whose gradients are sparse, and are returned as dense rows.

    Raises:
        UsageError: for a sparse gradient of any other parameter.
    """
    gradients = []
    for place, parameter in enumerate(parameters):
        gradient = parameter.grad
        if gradient is not None:
            used.add(place)
        if sparse and parameter in sparse:
            gradient = rows_of(parameter)
        elif gradient is None:
            gradient = negative_zeros_like(parameter)
        elif gradient.layout is not torch.strided:
            raise UsageError(
                f"the gradient of a parameter of shape {tuple(parameter.shape)} is sparse, and it belongs to no "
                "nn.Embedding(sparse=True): use that module, or a loss that gives dense gradients"
            )
        parameter.grad = None
        gradients.append(gradient.resolve_conj())  # a conjugated view cannot be added to
    return gradients


def as_real(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` itself; a complex tensor as a view with a last dimension for the two parts of each number."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def has_gradient(parameter: nn.Parameter) -> torch.Tensor | None:
    """This rank's part of the gradient of ``parameter``: its rows, or the values of a sparse gradient; or None."""
    gradient = parameter.grad
    if gradient is None or (type(gradient) is torch.Tensor and not gradient.is_sparse):
        return gradient
    gradient = local_part(gradient)
    return gradient.coalesce().values() if gradient.is_sparse else gradient


def rows_of(parameter: torch.Tensor) -> torch.Tensor:
    """The sparse gradient of ``parameter`` as dense rows, see `dense_rows`; without a gradient, see `no_rows`."""
    return no_rows(parameter) if parameter.grad is None else dense_rows(parameter.grad)


def divide_by_counts(target: ParameterSet, samples: int, counted: int) -> None:
    """Turn gradients from a sum of items per sample into the mean over the ``counted`` items of the step's ``samples``.

    Raises:
        UsageError: if there are none.
    """
    require_items(counted)
    for parameters in target.alike:
        gradients = [p.grad for p in parameters if p.grad is not None]
        if gradients:  # a rank may hold no gradient, as where its stage trains nothing
            foreach_mul_(gradients, samples / counted)


def require_items(counted: int) -> None:
    """Check that the micro-batches of a step hold items.

    Raises:
        UsageError: if not.
    """
    if counted <= 0:
        raise UsageError(
            f"step(count=...): the counts of all micro-batches of the step add up to {counted}, and a mean of nothing "
            "is no number. Leave samples without items out of the data set, or by run.loader(..., order=...), "
            "or give larger steps (global_batch), so that each step has items"
        )


def begin_total(group: Group, counted: int) -> Callable[[], int]:
    """Begin the sum of every rank's count of items; the returned function waits for the sum. Collective."""
    finish = group.begin_sum([counted], "the sum of counts")
    return lambda: finish()[0]


def negative_zeros_like(tensor: torch.Tensor) -> torch.Tensor:
    """Zeros to which any number can be added without changing a bit: -0.0 + -0.0 is -0.0, while 0.0 + -0.0 is 0.0."""
    return torch.full_like(tensor, -0.0)


def _laid_out(sums: Tensors, views: Tensors, flat: torch.Tensor) -> torch.Tensor:
    """``sums`` in one new tensor, each with the offset and strides of its counterpart of ``views`` in ``flat``."""
    out = torch.zeros_like(flat)
    start = flat.storage_offset()
    slots = [out.as_strided(v.size(), v.stride(), v.storage_offset() - start) for v in views]
    foreach_copy_(slots, sums)
    return out


def add_into_left(left: Tensors, right: Tensors) -> Tensors:
    """``left``, to each tensor of which its counterpart of ``right`` was added; both may be empty."""
    if left:
        foreach_add_(left, right)
    return left


def _add_into_right(left: Tensors, right: Tensors) -> Tensors:
    foreach_add_(right, left)
    return right


def views_of(flat: torch.Tensor, parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The gradients of ``parameters`` in the bucket ``flat``, complex gradients as pairs of reals.

    `GradBucket.gradients` gives them the strides of dense rows, though the memory has another layout; ``.grad`` has the
    parameter's strides.
    """
    pieces = flat.split([2 * p.numel() if p.is_complex() else p.numel() for p in parameters])
    return [
        piece.view(as_real(p.detach()).shape) if p.grad is None else as_real(p.grad)
        for p, piece in zip(parameters, pieces, strict=True)
    ]
