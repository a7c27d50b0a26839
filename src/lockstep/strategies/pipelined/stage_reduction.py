"""The gradients of a step's stages, summed over the replicas of the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import torch
from torch import nn

from lockstep.batch import MicroBatchPosition
from lockstep.collectives import AllReduce, Group, NativeAllReduce
from lockstep.errors import UsageError
from lockstep.formatting import plural
from lockstep.strategies.parts.gradient_accumulation import Tensors, align_gradients, gradient_like, negative_zeros_like
from lockstep.strategies.pipelined.stage import Stage


class StageReduction:
    """Sums the gradients of the stages that this rank holds.

    Args:
        group: the ranks that hold the same stages, one in each replica.
        all_reduce: along the tree over micro-batches, among them.
        exact: whether gradients are summed along that tree.
    """

    def __init__(self, group: Group, all_reduce: AllReduce, *, exact: bool) -> None:
        self._group: Final = group
        self._all_reduce: Final = all_reduce
        self._native: Final = NativeAllReduce(group)
        self._exact: Final = exact

    def finish(
        self,
        stages: Sequence[Stage],
        position: MicroBatchPosition,
        names: Mapping[nn.Parameter, str],
        *,
        find_unused: bool,
    ) -> None:
        """Set ``.grad`` of the parameters of ``stages`` to the sum over the step. Collective.

        Args:
            stages: of this rank.
            position: of the rank's last micro-batch of the step.
            names: of the model's parameters.
            find_unused: whether forward passes may leave out parameters.

        Raises:
            UsageError: with the names of parameters that had no part in the loss, without ``find_unused``.
        """
        for stage in stages:
            trained = stage.trained
            if not trained:
                continue
            if self._exact:
                sums = [] if position.is_padding else stage.sums.finish(position.index + 1)
                used = set() if position.is_padding else stage.sums.used
            else:
                sums = [[negative_zeros_like(p) if p.grad is None else p.grad for p in trained]]
                used = {index for index, p in enumerate(trained) if p.grad is not None}
            if self._group.size > 1:
                if find_unused:
                    used = self._used_anywhere(used)
                else:
                    if not position.is_padding:
                        _check_all_used(stage, used, names)
                    used = set(range(len(trained)))
                total = self._sum_over_replicas(trained, sums, position)
            else:
                (total,) = sums
            for index, (parameter, gradient) in enumerate(zip(trained, total, strict=True)):
                parameter.grad = gradient if index in used else None
            align_gradients(parameter for parameter in trained if parameter.is_cuda)

    def _sum_over_replicas(
        self, parameters: Sequence[nn.Parameter], sums: Sequence[Tensors], position: MicroBatchPosition
    ) -> Tensors:
        """Add up, over all replicas, what each has summed for its nodes of the tree."""
        total: dict[int, torch.Tensor] = {}
        for dtype in dict.fromkeys(p.dtype for p in parameters):
            indices = [i for i, p in enumerate(parameters) if p.dtype == dtype]
            lengths = [parameters[i].numel() for i in indices]
            flats = [torch.cat([each[i].reshape(-1) for i in indices]) for each in sums]
            out = flats[-1] if flats else parameters[indices[0]].new_empty(sum(lengths))
            if self._exact:
                self._all_reduce.begin(out, flats, position.of)
                self._all_reduce.finish()
            else:
                self._native.begin(out)
                self._native.finish()
            pieces = zip(indices, out.split(lengths), strict=True)
            total |= {index: gradient_like(parameters[index], piece) for index, piece in pieces}
        return [total[index] for index in range(len(parameters))]

    def _used_anywhere(self, used: set[int]) -> set[int]:
        """The indices of the parameters that had a part in some loss on any rank. Collective."""
        return set().union(*self._group.gather_objects(used, "parameters that had a part in the loss"))


def _check_all_used(stage: Stage, used: set[int], names: Mapping[nn.Parameter, str]) -> None:
    """Check that every trained parameter of ``stage`` had a part in a loss of this rank.

    Raises:
        UsageError: with the names of those that had none.
    """
    unused = [names[p] for index, p in enumerate(stage.trained) if index not in used]
    if unused:
        raise UsageError(
            f"{len(unused)} of {plural(len(stage.trained), 'parameter')} of stage {stage.number} had no part in the "
            f"loss: {', '.join(unused[:5])}. Use them in forward(), freeze them with requires_grad_(False), or say "
            "run.model(model, find_unused_parameters=True), which costs a little in each step"
        )
