"""Steps that each rank makes separately: the strategy ``none`` on the micro-batches of one rank.

step of 5 micro-batches     0 1 | 2 3 4
rank 0                      0 1             of 2, gradient of their mean, its own optimizer step
rank 1                          0 1 2       of 3, likewise
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Final

import torch
from torch import nn

from lockstep.batch import MicroBatchPosition
from lockstep.collectives import single_rank_group
from lockstep.errors import SettingError
from lockstep.strategies.local.averaging import RankAverager
from lockstep.strategies.local.model_averaging import AveragedLayout, DivergedReplicas
from lockstep.strategies.parts.batchnorm import normalises_over_ranks
from lockstep.strategies.parts.gradient_accumulation import ParameterSet, divide_by_counts
from lockstep.strategies.replicated.single_process import SingleProcess
from lockstep.strategies.strategy import ReplicaAssignment, Strategy, StrategyContext

NO_FP16_REASON: Final = "ranks step by themselves, so each would skip other steps and have a loss scale of its own"


class LocalSteps:
    """The computation of gradients from only the rank's own micro-batches."""

    def __init__(self, context: StrategyContext) -> None:
        self._rank: Final = context.group.rank
        self._ranks: Final = context.group.size
        self._runs: Final = context.runs
        group = single_rank_group(context.group.device)
        self._single_process: Final = SingleProcess(
            group, lambda _, micro_batches: range(micro_batches), exact=context.exact
        )
        self._samples = 0  # samples of this rank so far in the step
        self._expected = 1  # samples of this rank in the step, as expected from its first micro-batch

    def setup_model(self, model: nn.Module) -> None:
        """Keep the buffers of ``model`` at the mean over each step's micro-batches of this rank.

        Raises:
            SettingError: for layers that normalise over all ranks, since forward passes are not collective.
        """
        if normalises_over_ranks(model):
            raise SettingError(
                "sync_batchnorm needs all ranks in each forward pass, and under this strategy each rank makes its own "
                "steps: leave it out (running statistics are averaged with the parameters), or use strategy='ddp'"
            )
        self._single_process.setup_model(model, find_unused_parameters=False)

    def begin_micro_batch(self, position: MicroBatchPosition) -> None:
        """Count the samples that this rank computes in the step."""
        if position.is_padding:
            return
        if not self._samples:
            self._expected = max(1, position.samples_in(self._runs(self._rank, position.of)))
        if not position.is_replay:
            self._samples += position.samples

    def backward(
        self, loss: torch.Tensor, weight: torch.Tensor | None, target: ParameterSet, position: MicroBatchPosition
    ) -> None:
        """Compute gradients; after the rank's last micro-batch, ``.grad`` is the mean over its samples, or None.

        ``.grad`` is None for a rank without samples, whose optimizers then leave parameters and moments unchanged.
        """
        if position.is_padding:
            _clear_gradients(target)
            return
        if weight is None:
            self._expected = position.step_samples
        weight = self._own_weight(weight, position)
        self._single_process.backward(loss, weight, target, self._local_position(position))
        if position.last and self._samples != self._expected:
            divide_by_counts(target, self._expected, self._samples)

    def normalize_by_count(self, target: ParameterSet, samples: int, counted: int) -> None:
        """Turn ``.grad`` into the mean over the rank's own items; None, if it has none, so that it makes no step."""
        if self._samples and (counted or self._ranks == 1):
            self._single_process.normalize_by_count(target, self._samples, counted)
        else:
            _clear_gradients(target)

    def end_micro_batch(self, position: MicroBatchPosition) -> None:
        """Restore buffers; after the last micro-batch, move buffers by the mean over the rank's own micro-batches."""
        if position.is_padding:
            self._single_process.discard_step()
        else:
            self._single_process.end_micro_batch(self._local_position(position))
        if position.last:
            self._samples = 0

    def replay(
        self, loss: torch.Tensor, weight: torch.Tensor | None, target: ParameterSet, position: MicroBatchPosition
    ) -> None:
        """Compute and drop gradients."""
        if not position.is_padding:
            self._single_process.replay(loss, self._own_weight(weight, position), target, position)

    def end_replay(self) -> None:
        """Restore buffers."""
        self._single_process.end_replay()

    def discard_step(self) -> None:
        """Drop gradients, and restore buffers."""
        self._samples = 0
        self._single_process.discard_step()

    def resync(self) -> None:
        """Start from the buffers that models hold."""
        self._single_process.resync()

    def _own_weight(self, weight: torch.Tensor | None, position: MicroBatchPosition) -> torch.Tensor | None:
        """The micro-batch's share of this rank's samples, from its share of the whole step.

        The factor is in the loss, since multiplying the gradients would take one more pass over them.
        """
        if weight is None or self._expected == position.step_samples:
            return weight
        return weight * (position.step_samples / self._expected)

    def _local_position(self, position: MicroBatchPosition) -> MicroBatchPosition:
        """The micro-batch's position in a step of only this rank's micro-batches."""
        run = self._runs(self._rank, position.of)
        return MicroBatchPosition(
            position.index - run.start, len(run), position.last, False, position.samples, position.step_samples
        )


class LocalStrategy(Strategy):
    """A strategy under which each rank steps separately between two averages."""

    def __init__(self, context: StrategyContext) -> None:
        group = context.group
        self.assignment = ReplicaAssignment(group.rank, group.size, in_step=group.size == 1)
        self._say: Final = context.say
        self._local: Final = LocalSteps(context)
        self._averager: Final = RankAverager(group, context.bucket_mb)
        self._replicas: Final = DivergedReplicas(self._averager)
        self._layout: Final = AveragedLayout(self._replicas)
        self.state_layout = self._layout
        self._steps = 0  # steps made with this strategy

    @property
    def _computing(self) -> LocalSteps | Strategy:
        """The computation of the current step's gradients."""
        return self._local

    def setup_model(self, model: nn.Module, *, find_unused_parameters: bool, static_graph: bool = False) -> nn.Module:
        """``model`` itself. Collective."""
        self._replicas.setup_model(model)
        self._local.setup_model(model)
        return model

    def begin_micro_batch(self, position: MicroBatchPosition) -> None:
        """Prepare the forward pass of a micro-batch."""
        self._computing.begin_micro_batch(position)

    def backward(
        self, loss: torch.Tensor, weight: torch.Tensor | None, target: ParameterSet, position: MicroBatchPosition
    ) -> None:
        """Compute gradients; after the rank's last micro-batch, ``.grad`` is the mean over its samples, or None."""
        self._computing.backward(loss, weight, target, position)

    def replay(
        self, loss: torch.Tensor, weight: torch.Tensor | None, target: ParameterSet, position: MicroBatchPosition
    ) -> None:
        """Compute and drop gradients."""
        self._computing.replay(loss, weight, target, position)

    def end_replay(self) -> None:
        """Restore buffers."""
        self._computing.end_replay()

    def normalize_by_count(self, target: ParameterSet, samples: int, counted: int) -> None:
        """Turn ``.grad`` into the mean over this rank's own items."""
        self._computing.normalize_by_count(target, samples, counted)

    def evaluating(self) -> AbstractContextManager[None]:
        """A context in which every rank holds the mean, and its own values again afterwards. Collective."""
        return self._replicas.averaged_models()

    def discard_step(self) -> None:
        """Drop gradients, and restore buffers."""
        self._computing.discard_step()

    def resync(self) -> None:
        """Start from the models' present values."""
        self._local.resync()
        self._replicas.resync()

    def close(self) -> None:
        """End the threads and connections of averages."""
        self._averager.close()


def _clear_gradients(target: ParameterSet) -> None:
    for parameter in target.parameters:
        parameter.grad = None
