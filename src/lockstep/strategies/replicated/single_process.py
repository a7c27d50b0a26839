"""The strategy ``none``: one replica on one rank. Every other strategy must give the bits of this strategy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch
from torch import nn

from lockstep.batch import MicroBatchPosition
from lockstep.collectives import Group, Runs, open_all_reduce
from lockstep.errors import SettingError
from lockstep.strategies.parts.buffers import Buffers
from lockstep.strategies.parts.gradient_accumulation import (
    ParameterSet,
    TreeGradientAccumulator,
    align_gradients,
    divide_by_counts,
)
from lockstep.strategies.parts.state_layout import ReplicatedLayout
from lockstep.strategies.strategy import ReplicaAssignment, StatePart, Strategy, StrategyContext
from lockstep.strategy_kinds import NoOptions


def open_strategy(context: StrategyContext, options: NoOptions) -> SingleProcess:
    """The strategy ``none``.

    Raises:
        SettingError: if there are several ranks.
    """
    ranks = context.group.size
    if ranks > 1:
        raise SettingError(f"strategy='none' is for one rank, and there are {ranks}; use 'ddp' or start one rank")
    return SingleProcess(context.group, context.runs, exact=context.exact)


class SingleProcess(Strategy):
    """The strategy ``none``.

    Args:
        group: of one rank.
        runs: the micro-batches of each rank.
        exact: whether gradients are folded along the tree.
        prepare: is called with each model in `setup_model`.
        repeats_bits: whether a prepared model gives the same bits each time.
    """

    assignment = ReplicaAssignment(0, 1)
    can_update_trainable = True
    repeats_step = True

    def __init__(
        self,
        group: Group,
        runs: Runs,
        *,
        exact: bool,
        prepare: Callable[[nn.Module], None] = lambda _model: None,
        repeats_bits: bool = True,
    ) -> None:
        self._prepare: Final = prepare
        self.repeats_bits = repeats_bits
        self.state_layout = ReplicatedLayout()
        self.state_part = StatePart(0, 1, self.state_layout)
        self._exact: Final = exact
        self._buffers: Final = Buffers(open_all_reduce(group, runs), group)
        self._accumulators: dict[ParameterSet, TreeGradientAccumulator] = {}

    def setup_model(self, model: nn.Module, *, find_unused_parameters: bool, static_graph: bool = False) -> nn.Module:
        """``model`` itself."""
        self._buffers.setup_model(model)
        self._prepare(model)
        return model

    def update_trainable(self, target: ParameterSet) -> None:
        """Check that the models still have the same buffers; gradients are computed for any parameters."""
        self._buffers.check_known()

    def resync(self) -> None:
        """Start from the buffers that models hold."""
        self._buffers.resync()

    def backward(
        self, loss: torch.Tensor, weight: torch.Tensor | None, target: ParameterSet, position: MicroBatchPosition
    ) -> None:
        """Compute the gradients; after the last micro-batch, ``.grad`` holds their sum along the tree, if exact."""
        target.backward(loss, weight)
        if self._exact and position.of > 1:
            if target not in self._accumulators:
                self._accumulators[target] = TreeGradientAccumulator(target, position.of)
            self._accumulators[target].accumulate(position)
            if position.last:
                self._accumulators.pop(target).write_gradients()
        else:
            for parameter in target.sparse:
                if parameter.grad is not None:
                    # Coalesced like a sum over ranks: clipping before two entries of a row are added would round
                    # differently.
                    parameter.grad = parameter.grad.coalesce()
        if self._exact and position.last:
            # Gradients of parameters that a model concatenates are parts of one tensor.
            align_gradients(parameter for parameter in target.dense if parameter.is_cuda)

    def normalize_by_count(self, target: ParameterSet, samples: int, counted: int) -> None:
        """Divide by the number of items of the step."""
        divide_by_counts(target, samples, counted)

    def end_micro_batch(self, position: MicroBatchPosition) -> None:
        """Restore buffers; after the last micro-batch, move buffers by the mean over the step."""
        self._buffers.end_micro_batch(position)

    def end_replay(self) -> None:
        """Restore buffers."""
        self._buffers.restore(discards_step=False)

    def discard_step(self) -> None:
        """Drop gradients, and restore buffers."""
        self._accumulators.clear()
        self._buffers.restore()

    def close(self) -> None:
        """Nothing is held open."""
