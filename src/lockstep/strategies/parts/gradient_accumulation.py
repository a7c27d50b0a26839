"""Gradients of single micro-batches, folded along the tree while a rank works through its run."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeGuard

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from lockstep.batch import MicroBatchPosition
from lockstep.collectives import Group, TreeAccumulator, local_part
from lockstep.errors import UsageError
from lockstep.strategies.parts.sparse_gradients import dense_rows, no_rows, sparse_again
from lockstep.torch_private import foreach_add_, foreach_copy_, foreach_mul_

Tensors = list[torch.Tensor]

_ACROSS_ELEMENTS: Final = ("Adafactor", "LBFGS", "Muon")


@dataclass(frozen=True, slots=True, eq=False)
class LossCall:
    """What computes the loss of a micro-batch: for strategies that do it themselves, such as pipelines."""

    model: nn.Module
    loss: Callable[..., torch.Tensor]  #: of the model's outputs and the targets
    inputs: tuple[Any, ...]  #: the model's positional arguments
    targets: tuple[Any, ...]  #: the loss's, after the outputs
    scale: Callable[[torch.Tensor], torch.Tensor]  #: from the loss to what is differentiated: fp16's loss scale

    def __call__(self) -> torch.Tensor:
        """The loss, not scaled."""
        return self.loss(self.model(*self.inputs), *self.targets)


@dataclass(frozen=True, slots=True, eq=False)
class ParameterSet:
    """The parameters whose gradients one backward pass computes, in a fixed order."""

    parameters: tuple[nn.Parameter, ...]
    everything: bool  #: whether these are all that any backward pass is for
    sparse: frozenset[nn.Parameter] = frozenset()  #: those whose gradients are sparse
    candidates: tuple[nn.Parameter, ...] = ()  #: those that may learn, also those that are frozen now
    learn: list[bool] = field(default_factory=list)  #: of the candidates, which of them learn
    held: int = 0  #: how many parameters its optimizers hold
    places: dict[int, int] = field(init=False, repr=False)  #: where in `parameters` each one is, by its id

    def __post_init__(self) -> None:
        object.__setattr__(self, "places", {id(p): i for i, p in enumerate(self.parameters)})

    @property
    def dense(self) -> list[nn.Parameter]:
        """Those whose gradients are dense, in order."""
        return [p for p in self.parameters if p not in self.sparse] if self.sparse else list(self.parameters)

    @property
    def whole(self) -> list[nn.Parameter]:
        """The parameters that are not divided among ranks, in order."""
        return [p for p in self.parameters if not isinstance(p, DTensor)]

    @property
    def alike(self) -> list[list[nn.Parameter]]:
        """The parameters in lists that torch can compute with at once: divided and whole ones apart."""
        kinds: dict[bool, list[nn.Parameter]] = {}
        for parameter in self.parameters:
            kinds.setdefault(isinstance(parameter, DTensor), []).append(parameter)
        return list(kinds.values())

    def backward(self, loss: torch.Tensor, weight: torch.Tensor | None) -> None:
        """Add the gradients of ``weight * loss``, or of ``loss``, to ``.grad`` of the parameters, and of no others."""
        loss.backward(weight, inputs=None if self.everything else self.parameters)


class TreeGradientAccumulator:
    """The gradients of a target's parameters in this step, summed micro-batch by micro-batch.

    Adding into ``.grad`` as autograd does would fold from the left, and the bits of the sum would tell how many
    micro-batches this rank computes. So each gradient is taken out of ``.grad`` and folded along the tree.
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
        """Fold in the gradients of ``position`` and leave ``.grad`` empty."""
        self.tree.push((position.index, position.index + 1), pop_gradients(self._parameters, self.used, self._sparse))

    def write_gradients(self) -> None:
        """Put the sum over the whole step into ``.grad``; for a rank that computed all of it.

        A parameter that had no part in any loss keeps none, so optimizers leave it alone, as on a single device.
        """
        (total,) = self.tree.sums
        for place, (parameter, gradient) in enumerate(zip(self._parameters, total, strict=True)):
            if place not in self.used:
                parameter.grad = None
            else:
                parameter.grad = sparse_again(gradient, parameter) if parameter in self._sparse else gradient

    def fill_missing(self, parameters: Iterable[nn.Parameter]) -> None:
        """Before the last backward pass: give zeros to parameters that had a part in an earlier micro-batch only."""
        for parameter in parameters:
            if parameter.grad is None and self._places.get(id(parameter)) in self.used:
                parameter.grad = negative_zeros_like(parameter)

    def partials(
        self, position: MicroBatchPosition, parameters: Sequence[torch.Tensor], gradients: Tensors, flat: torch.Tensor
    ) -> list[torch.Tensor]:
        """This rank's sums for some of its parameters, once the gradients of its last micro-batch are there.

        Args:
            position: of this rank's last micro-batch.
            parameters: some of the target's.
            gradients: those of the last micro-batch, views of ``flat``, each with the strides of its parameter;
                complex ones as pairs of reals.
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
        """This rank's sums for one parameter with sparse gradients; its ``.grad`` is that of the last micro-batch.

        Returns:
            One dense tensor of one dimension for each of the rank's nodes; what `sparse_again` takes, as rows.
        """
        tree = TreeAccumulator[torch.Tensor](self._micro_batches, lambda left, right: left.add_(right))
        tree.nodes = list(self.tree.nodes)
        tree.sums = [sums[self._places[id(parameter)]] for sums in self.tree.sums]
        if not position.is_padding:
            tree.push((position.index, position.index + 1), rows_of(parameter))
        return [sums.view(-1) for sums in tree.sums]


def is_loss(value: object) -> TypeGuard[torch.Tensor]:
    """Whether a backward pass can begin at ``value``: a tensor of no dimension that depends on what is trained."""
    return isinstance(value, torch.Tensor) and not value.dim() and value.requires_grad


def describe_loss(value: object) -> str:
    """What ``value`` is, which is no loss, in words that are the same on all ranks."""
    if isinstance(value, torch.Tensor):
        return f"tensor of shape {tuple(value.shape)}, requires_grad={value.requires_grad}"
    return f"{type(value).__name__}"


def parameters_of(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    """All parameters that ``optimizer`` steps, in the order of the numbers that they have in its state."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def steps_across_elements(optimizer: torch.optim.Optimizer) -> str:
    """The name of a class of torch's that ``optimizer`` is, whose step of one element depends on others of its tensor.

    "" if it is none of those.
    """
    return next((kind.__name__ for kind in type(optimizer).__mro__ if kind.__name__ in _ACROSS_ELEMENTS), "")


def pop_gradients(parameters: Iterable[torch.Tensor], used: set[int], sparse: Collection[torch.Tensor] = ()) -> Tensors:
    """The gradients of ``parameters``, whose ``.grad`` is left empty; nothing for those that have none.

    Args:
        parameters: in a fixed order.
        used: the places of those that have a gradient are added to it: they had a part in the loss.
        sparse: those whose gradients are sparse, and are given as dense rows.

    Raises:
        UsageError: for a sparse gradient of another one.
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
        gradients.append(gradient.resolve_conj())  # of what was conjugated on the way, which cannot be added to
    return gradients


def as_real(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` itself, or a view of a complex one with a last dimension for the two parts of each number."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def has_gradient(parameter: nn.Parameter) -> torch.Tensor | None:
    """What this rank holds of the gradient of ``parameter``: its rows, or the values of a sparse one."""
    gradient = parameter.grad
    if gradient is None or (type(gradient) is torch.Tensor and not gradient.is_sparse):
        return gradient
    gradient = local_part(gradient)
    return gradient.coalesce().values() if gradient.is_sparse else gradient


def rows_of(parameter: torch.Tensor) -> torch.Tensor:
    """The sparse gradient of ``parameter`` as dense rows, see `dense_rows`; without a row, if it has none."""
    return no_rows(parameter) if parameter.grad is None else dense_rows(parameter.grad)


def divide_by_counts(target: ParameterSet, samples: int, counted: int) -> None:
    """From a sum of items per sample to the mean over ``counted`` items, all those of the step's ``samples``.

    Raises:
        UsageError: if there are none.
    """
    require_items(counted)
    for parameters in target.alike:
        gradients = [p.grad for p in parameters if p.grad is not None]
        if gradients:  # a rank may hold none, such as one whose stage trains nothing
            foreach_mul_(gradients, samples / counted)


def require_items(counted: int) -> None:
    """Check that the micro-batches of a step hold something.

    Raises:
        UsageError: if they do not.
    """
    if counted <= 0:
        raise UsageError(f"step(count=...): the counts of all micro-batches of the step add up to {counted}")


def begin_total(group: Group, counted: int) -> Callable[[], int]:
    """Begin the sum of every rank's count of items; what it returns waits for it. Collective."""
    finish = group.begin_sum([counted], "the sum of counts")
    return lambda: finish()[0]


def negative_zeros_like(tensor: torch.Tensor) -> torch.Tensor:
    """Zeros to which any number can be added without changing a bit: -0.0 + -0.0 is -0.0, while 0.0 + -0.0 is 0.0."""
    return torch.full_like(tensor, -0.0)


def _laid_out(sums: Tensors, views: Tensors, flat: torch.Tensor) -> torch.Tensor:
    """``sums`` in one new tensor, each where its namesake of ``views`` lies in ``flat``, strides included."""
    out = torch.zeros_like(flat)
    start = flat.storage_offset()
    slots = [out.as_strided(v.size(), v.stride(), v.storage_offset() - start) for v in views]
    foreach_copy_(slots, sums)
    return out


def add_into_left(left: Tensors, right: Tensors) -> Tensors:
    """``left``, to each of which its counterpart was added; there may be none."""
    if left:
        foreach_add_(left, right)
    return left


def _add_into_right(left: Tensors, right: Tensors) -> Tensors:
    foreach_add_(right, left)
    return right


def views_of(flat: torch.Tensor, parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The gradients of ``parameters`` in the bucket ``flat``, complex ones as pairs of reals, as a bucket has them.

    `GradBucket.gradients` tells them with the strides of dense rows, whatever lies there; ``.grad`` has the
    parameter's.
    """
    pieces = flat.split([2 * p.numel() if p.is_complex() else p.numel() for p in parameters])
    return [
        piece.view(as_real(p.detach()).shape) if p.grad is None else as_real(p.grad)
        for p, piece in zip(parameters, pieces, strict=True)
    ]
