"""Over how many items the loss of a micro-batch is a mean, read from the graph of its backward pass.

    cross_entropy(x, y, ignore_index=0)      NllLoss           the weights of the labels that count, added up
    (losses * mask).sum() / mask.sum()       Div <- Sum        the divisor
    losses[mask].mean()                      Mean              the number of elements
    mse_loss(x, y) + kld.sum()               MseLoss, Sum      two terms: the second one is a sum

`Run.step` weighs each micro-batch by its samples. The gradient of a step is then that of the mean over all items of the
step only if equally many samples always hold equally many items. Otherwise the gradient depends on how samples are
divided into micro-batches. The loss is told to the user where two micro-batches with the same number of samples have
different numbers of items, and where a term is a sum. Terms that are computed in another way are left alone.
"""

from __future__ import annotations

from collections.abc import Container, Iterator
from dataclasses import dataclass
from math import isclose
from typing import Any, Final

import torch

from lockstep.batch import MicroBatchPosition
from lockstep.formatting import plural
from lockstep.run.metrics.progress_reporter import RankWarnings
from lockstep.run.state.registered import State
from lockstep.strategies import ParameterSet
from lockstep.torch_private import saved_by

#: What leaves a scalar as it is, adds scalars, or weighs them: the reductions lie behind.
_TRANSPARENT: Final = frozenset(
    ("Add", "Sub", "Rsub", "Neg", "Mul", "Div", "ToCopy", "Clone", "View", "Squeeze", "Unsqueeze", "Stack", "Cat")
)
MOST_NODES: Final = 500  #: of a graph that are looked at
_MEAN: Final = 1  # torch's numbers of reductions
_SUM: Final = 2


@dataclass(frozen=True)
class LossTerm:
    """One reduction of a loss: a mean over ``items``, which may be weights added up; of a sum None."""

    items: float | None
    count: str = "losses.numel()"  #: how a script computes the items
    is_quotient: bool = False  #: a sum that the script itself divides, by another number than that of its elements


class LossItems:
    """Looks at the losses of a run's checked steps, on one rank.

    Args:
        state: what the run holds.
        warnings: tells the user.
    """

    def __init__(self, state: State, warnings: RankWarnings) -> None:
        self._state: Final = state
        self._warnings: Final = warnings
        #: The terms of the first loss for each set of parameters and number of samples.
        self._first: Final[dict[tuple[ParameterSet, int], list[LossTerm]]] = {}

    def look_at(self, loss: torch.Tensor, target: ParameterSet, position: MicroBatchPosition) -> None:
        """Tell the user if ``loss``, which came without a count, is no mean over the samples at ``position``.

        On a GPU this waits for the divisor, if the script has computed one.
        """
        samples, step_samples = position.samples, position.step_samples
        if samples == step_samples or position.is_padding:
            return
        shapes = shapes_of_parameters(self._state)
        terms = list(terms_of(loss, samples, shapes))
        if _is_divided_by(loss, position.of):
            self._warnings.add(
                f"the loss is divided by {position.of}, the micro-batches of a step, as for gradient accumulation by "
                "hand: run.step(loss) takes the mean over them by itself, so the gradient is that many times too "
                "small. Leave the division out",
                about="a loss that is divided by the micro-batches of a step",
            )
        if samples > 1 and any(term.items is None for term in terms):
            self._tell_sum(samples, step_samples, is_mixed=any(term.items is not None for term in terms))
        elif any(term.is_quotient and term.items == step_samples for term in terms):
            self._warnings.add(
                f"the loss is divided by {step_samples}, the samples of a step, and a micro-batch holds {samples}: its "
                f"gradient is {step_samples / samples:g} times smaller than that of the mean over the step's samples. "
                "Divide by the micro-batch's own, len(labels), or give the sum: run.step(loss_sum, loss_is='sum')",
                about="a loss that is divided by the samples of a step",
            )
        first = self._first.setdefault((target, samples), terms)
        for one, other in zip(first, terms, strict=True) if len(first) == len(terms) else ():
            if one.items is not None and other.items is not None and not isclose(one.items, other.items, rel_tol=1e-4):
                self._tell_items(
                    one.items, other.items, samples, min(one, other, key=lambda term: term.items or 0).count
                )

    def _tell_items(self, one: float, other: float, samples: int, count: str) -> None:
        self._warnings.add(
            f"the loss is a mean over {one:g} items in one micro-batch of {plural(samples, 'sample')} and over "
            f"{other:g} in another, and run.step(loss) weighs both alike. For the mean over all items of a step give "
            f"their number, which must be whole, as in run.step(loss, count={count})",
            about="a loss that is no mean over samples",
        )

    def _tell_sum(self, samples: int, step_samples: int, *, is_mixed: bool) -> None:
        self._warnings.add(
            f"{'a term of the' if is_mixed else 'the'} loss is a sum over the {samples} samples of a micro-batch, and "
            f"run.step(loss) takes a mean: its gradient is {step_samples / samples:g} times smaller than that of the "
            + (
                f"sum over the step. Make the term a mean over samples, times {step_samples} for the sum's gradient"
                if is_mixed
                else f"sum over the step. run.step(loss, loss_is='sum') has the gradient of the mean over the step's "
                f"samples, and run.step({step_samples} * loss, loss_is='sum') that of the sum"
            ),
            about="a loss that is a sum",
        )


def terms_of(loss: torch.Tensor, samples: int, shapes: Container[torch.Size]) -> Iterator[LossTerm]:
    """The reductions that ``loss`` is made of, in the order of the graph. A GPU is waited for where a divisor is on it.

    Args:
        loss: of a micro-batch with ``samples`` samples, before its backward pass.
        samples: in the micro-batch.
        shapes: those of parameters: sums and means of such tensors are penalties on weights.
    """
    waiting: list[tuple[Any, float | None]] = [(loss.grad_fn, None)]  # with what divides the value further up
    for _ in range(MOST_NODES):
        if not waiting:
            return
        node, divisor = waiting.pop()
        kind = kind_of(node)
        children = children_of(node)
        if kind == "Div" and len(children) > 1:
            continue  # a ratio of what is computed, as in dice: no mean over items
        if kind in _TRANSPARENT:
            divisor = _divided(divisor, node, kind, samples)
        elif kind not in ("Sum", "Mean"):
            if (term := _term_of_loss(node, divisor, shapes)) is not None:
                yield term
            continue
        else:
            sizes = torch.Size(saved_by(node, "self_sym_sizes"))
            is_over_samples = sizes[:1] == (samples,)
            is_over_terms = any(child.name().startswith(("Stack", "Cat")) for child in children) and not is_over_samples
            if sizes in shapes:
                continue
            if kind == "Mean" and not is_over_terms:
                yield LossTerm(sizes.numel())
                continue
            if kind == "Sum" and (divisor is not None or is_over_samples):
                yield _sum(sizes.numel(), divisor)
                continue
        waiting += [(child, divisor) for child in reversed(children)]


def _is_divided_by(loss: torch.Tensor, number: int) -> bool:
    """Whether ``loss`` is a mean, and no sum of several, that is divided by ``number``, more than 1, besides."""
    node: Any = loss.grad_fn
    divisor: float | None = None
    while kind_of(node) in ("Div", "Mul"):
        children = children_of(node)
        if len(children) != 1:
            return False
        divisor = _divided(divisor, node, kind_of(node), number)
        (node,) = children
    is_mean = kind_of(node) == "Mean" or saved_by(node, "reduction") == _MEAN
    return number > 1 and is_mean and divisor is not None and isclose(divisor, number, rel_tol=1e-6)


def shapes_of_parameters(state: State) -> set[torch.Size]:
    """The shapes of all parameters: what a loss computes from such a tensor may be a penalty on weights."""
    return {parameter.shape for model in state.models for parameter in model.parameters()}


def children_of(node: Any) -> list[Any]:
    """The nodes that a ``node`` of the graph of a backward pass gives gradients to."""
    return [child for child, _ in node.next_functions if child is not None]


def kind_of(node: Any) -> str:
    """The operation that a ``node`` is of, such as ``Mul``."""
    return str(node.name()).rstrip("0123456789").removesuffix("Backward")


def _divided(divisor: float | None, node: Any, kind: str, samples: int) -> float | None:
    """What divides a value behind ``node`` if ``divisor`` divides the node's own; None for nothing.

    A product with 1 / n is a division if n is a multiple of ``samples``; other products weigh a term.
    """
    other = saved_by(node, "other") if kind in ("Div", "Mul") else None
    if isinstance(other, torch.Tensor):
        # A tensor of a class of its own may ask other ranks for its value.
        other = float(other.detach()) if type(other) is torch.Tensor and other.numel() == 1 else None
    if not other or (kind == "Mul" and round(1 / other, 6) % samples != 0):
        return divisor
    return (1.0 if divisor is None else divisor) * (other if kind == "Div" else 1 / other)


def _sum(elements: int, divisor: float | None) -> LossTerm:
    """The term of a sum of ``elements``, which is divided further up if there is a ``divisor``."""
    return LossTerm(divisor, "mask.sum()", is_quotient=divisor not in (None, elements))


def _term_of_loss(node: Any, divisor: float | None, shapes: Container[torch.Size]) -> LossTerm | None:
    """The term if ``node`` is one of torch's losses, and its input is no parameter."""
    reduction = saved_by(node, "reduction")
    if reduction not in (_MEAN, _SUM):  # before anything else is unpacked, perhaps from the host's memory
        return None
    inputs = saved_by(node, "self")
    if not isinstance(inputs, torch.Tensor) or inputs.shape in shapes:
        return None
    if reduction == _SUM:
        return _sum(inputs.numel(), divisor)
    total = saved_by(node, "total_weight")
    if total is None:
        return LossTerm(inputs.numel())
    if saved_by(node, "weight") is not None:
        return LossTerm(float(total), "(1000 * weight[labels].sum()).round()")
    labels = saved_by(node, "target")
    is_each = isinstance(labels, torch.Tensor) and labels.numel() == float(total)
    return LossTerm(
        float(total), "labels.numel()" if is_each else f"(labels != {saved_by(node, 'ignore_index')}).sum()"
    )
