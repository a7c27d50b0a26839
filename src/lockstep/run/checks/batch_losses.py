"""Whether the samples of a micro-batch meet in its loss: then the loss is no mean over samples, however it ends.

    parameters ─► outputs z, a row for each sample ─► loss           what lies between z and the loss is looked at

    a mean over samples of f(z[i], y[i])           d² loss / dz[i] dz[j] = 0 for any two samples i and j
    a contrastive loss, dice, the root of a mean   another value: how far z[j] is from its label changes the
                                                   gradient of z[i], so it matters which samples are in a micro-batch
    the hardest samples: losses.topk(k)            zero almost everywhere: the operation that chooses is looked for

The outputs are those of the last layers with parameters, and of normalizations over a batch, which the graph of the
backward pass shows. Half of the samples get a direction of their own, and the derivative of the gradient along this
direction, a second backward pass through the loss alone, must be zero for the other half.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, Final

import torch
from torch.autograd.graph import GradientEdge

from lockstep.batch import MicroBatchPosition
from lockstep.run.checks.loss_items import MOST_NODES, children_of, kind_of, shapes_of_parameters
from lockstep.run.metrics.progress_reporter import RankWarnings
from lockstep.run.state.registered import State
from lockstep.strategies import ParameterSet
from lockstep.torch_private import saved_by

#: What makes a layer's weight of a parameter without computing anything.
_HANDS_ON: Final = frozenset(("T", "Transpose", "Permute", "ToCopy", "View", "Unsqueeze", "Expand", "Clone"))
#: Parts of the names of layers: what else takes a parameter may be computed from parameters alone.
_LAYERS: Final = re.compile("mm|Conv|Embedding|(Batch|Layer|Group|Rms)Norm|Linear|Rnn|Lstm|Gru", re.IGNORECASE)
_CHOOSING: Final = frozenset(("Topk", "Sort", "Kthvalue"))
_MOST_ROWS: Final = 2  # of a sample, such as two views
_MOST_ELEMENTS: Final = 1 << 22  # of outputs that are looked at: what a large vocabulary gives would take much memory
_LOOKS: Final = 2
_LEAST: Final = 1e-4  # of the largest derivative


class BatchLosses:
    """Looks at losses in replays of a run's first checked micro-batches, on one rank.

    Args:
        state: what the run holds.
        warnings: tells the user.
    """

    def __init__(self, state: State, warnings: RankWarnings) -> None:
        self._state: Final = state
        self._warnings: Final = warnings
        self._looks: Final[Counter[ParameterSet]] = Counter()

    def look_at(self, loss: torch.Tensor, target: ParameterSet, position: MicroBatchPosition) -> None:
        """Tell the user if samples meet in the ``loss`` of a replay at ``position``; costs two backward passes of it.

        Nothing is told of outputs with more than four million elements, and of losses without second derivatives.
        """
        samples, step_samples = position.samples, position.step_samples
        if samples in (1, step_samples) or position.is_padding or self._looks[target] >= _LOOKS:
            return
        self._looks[target] += 1
        try:
            meet = samples_meet(loss, samples, shapes_of_parameters(self._state))
        except RuntimeError:  # no second derivative, or too little memory
            return
        if meet:
            self._warnings.add(
                "the loss is no mean over samples: samples of a micro-batch meet in it, as in a contrastive loss, a "
                f"ratio of sums or a root of a mean. On any number of ranks {samples} samples meet, and not the "
                f"{step_samples} of a step, and run.step(loss) takes the mean over micro-batches. micro_batch= of "
                f"run.loader(...) says how many meet; with micro_batch={step_samples} the loss is that of one GPU. In "
                "the contrastive loss of docs/recipes.md all samples of a step meet, however small micro-batches are",
                about="a loss in which samples meet",
            )


def samples_meet(loss: torch.Tensor, samples: int, shapes: Collection[torch.Size]) -> bool:
    """Whether any grouping of the rows of outputs into ``samples`` leaves second derivatives between samples.

    Args:
        loss: of a micro-batch, before its backward pass; its graph stays.
        samples: in the micro-batch.
        shapes: those of parameters: such tensors are no outputs.

    Raises:
        RuntimeError: if the loss has no second derivative, or memory is missing.
    """
    outputs: list[GradientEdge] = []
    chosen = 0
    for node, number, is_output in _nodes_of_loss(loss.grad_fn):
        if is_output:
            outputs.append(GradientEdge(node, number))
        elif _compares_all(node, samples):
            return True
        chosen += _chooses(node, samples)
    if 0 < chosen < samples:  # not in each turn of a loop over the samples
        return True
    if not outputs:
        return False
    first: Sequence[torch.Tensor | None] = torch.autograd.grad(loss, outputs, retain_graph=True, allow_unused=True)
    found = [(edge, gradient.shape) for edge, gradient in zip(outputs, first, strict=True) if gradient is not None]
    rows = [(edge, shape) for edge, shape in found if shape not in shapes and _has_samples(shape, samples)]
    outputs = [edge for edge, shape in rows if shape.numel() <= _MOST_ELEMENTS]
    # The layers of each turn of a loop over the samples have rows of their own; but two views of two are as many.
    is_loop = len(found) >= samples and not (len(found) == 2 and all(shape[0] == samples for _, shape in rows))
    if not outputs or is_loop:
        return False
    gradients = torch.autograd.grad(loss, outputs, create_graph=True)
    return all(_halves_meet(gradients, outputs, grouping, samples) for grouping in _GROUPINGS)


def _halves_meet(
    gradients: tuple[torch.Tensor, ...],
    outputs: list[GradientEdge],
    grouping: Callable[[torch.Size, int], torch.Tensor],
    samples: int,
) -> bool:
    """Whether the gradients of one half of the samples depend on the outputs of the other half."""
    halves = [grouping(gradient.shape, samples) for gradient in gradients]
    along = [
        (gradient * torch.arange(gradient.numel(), device=gradient.device).cos().view_as(gradient) * half.to(gradient))
        for gradient, half in zip(gradients, halves, strict=True)
        if gradient.requires_grad
    ]
    if not along:
        return False
    total = torch.stack([each.sum() for each in along]).sum()
    found: Sequence[torch.Tensor | None] = torch.autograd.grad(total, outputs, retain_graph=True, allow_unused=True)
    pairs = [(each.abs(), ~half.to(each.device)) for each, half in zip(found, halves, strict=True) if each is not None]
    most = max((float(each.max()) for each, _ in pairs), default=0.0)
    between = max((float((each * others).max()) for each, others in pairs), default=0.0)
    return between > _LEAST * most


def _has_samples(shape: torch.Size, samples: int) -> bool:
    """Whether each sample may have a row, or two: more may be the nodes of a graph, or times, by accident."""
    return bool(shape) and shape[0] in range(samples, _MOST_ROWS * samples + 1, samples)


def _one_after_another(shape: torch.Size, samples: int) -> torch.Tensor:
    """Ones for the first half of the samples, to be multiplied with a tensor of this shape; each has some rows."""
    rows = torch.arange(shape[0], device="cpu") // (shape[0] // samples)
    return (rows < samples // 2).view(-1, *[1] * (len(shape) - 1))


def _in_turn(shape: torch.Size, samples: int) -> torch.Tensor:
    """The same where the rows of several batches follow each other: ``torch.cat([first, second])``."""
    return (torch.arange(shape[0], device="cpu") % samples < samples // 2).view(-1, *[1] * (len(shape) - 1))


def _in_columns(shape: torch.Size, samples: int) -> torch.Tensor:
    """The same where samples are the second of three dimensions, after that of time."""
    if len(shape) < 3 or shape[1] != samples:
        return _one_after_another(shape, samples)
    return (torch.arange(samples, device="cpu") < samples // 2).view(1, -1, *[1] * (len(shape) - 2))


_GROUPINGS: Final = (_one_after_another, _in_turn, _in_columns)


def _nodes_of_loss(root: Any) -> Iterator[tuple[Any, int, bool]]:
    """The nodes of a loss, with the number of a result of each, and whether that is an output of a model.

    That is what the last layers with parameters give, as seen from the loss, and what a compiled function gives.
    """
    waiting = [(root, 0)]
    seen: set[tuple[Any, int]] = set()
    while waiting and len(seen) < MOST_NODES:
        node, number = waiting.pop()
        if (node, number) in seen or node is None:
            continue
        seen.add((node, number))
        inputs = [child is not None and _is_parameter(child) for child, _ in node.next_functions]
        is_layer = _LAYERS.search(kind_of(node)) is not None and any(inputs) and not all(inputs)
        is_of_python = isinstance(node, torch.autograd.function.BackwardCFunction)
        is_output = is_layer or is_of_python or "BatchNorm" in kind_of(node)
        yield node, number, is_output
        if not (is_output or _is_of_other_rows(node)):
            waiting += node.next_functions


def _is_of_other_rows(node: Any) -> bool:
    """Whether rows before a node are no samples: some of many are taken by number, or are added up, as in a graph."""
    if kind_of(node) in ("IndexAdd", "ScatterAdd", "ScatterReduce"):
        return True
    if kind_of(node) not in ("Index", "IndexSelect"):
        return False
    sizes, indices = saved_by(node, "self_sym_sizes"), saved_by(node, "indices") or [saved_by(node, "index")]
    by_number = [one for one in indices if isinstance(one, torch.Tensor) and one.dtype == torch.int64]
    return sizes is not None and len(indices) == len(by_number) == 1 and by_number[0].numel() != sizes[0]


def _chooses(node: Any, samples: int) -> bool:
    """Whether a node may choose among the samples: the largest elements of a vector."""
    sizes = saved_by(node, "self_sym_sizes") if kind_of(node) in _CHOOSING else None
    return sizes is not None and len(sizes) == 1 and sizes[0] % samples == 0


def _compares_all(node: Any, samples: int) -> bool:
    """Whether a node computes the distances of all pairs of rows, which has no second derivative."""
    one, other = (saved_by(node, name) if kind_of(node) == "Cdist" else None for name in ("x1", "x2"))
    if one is None or other is None or one.dim() > 2 or not _has_samples(one.shape, samples):
        return False
    return torch.equal(one, other)


def _is_parameter(node: Any) -> bool:
    """Whether a ``node`` hands on a parameter, and not a single number such as a temperature."""
    while kind_of(node) in _HANDS_ON and len(children_of(node)) == 1:
        (node,) = children_of(node)
    return hasattr(node, "variable") and node.variable.numel() > 1
