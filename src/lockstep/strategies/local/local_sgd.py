"""The strategy ``local-sgd``: ranks step separately and are averaged at times (arXiv 1805.09767, 1808.07217).

    --strategy local-sgd:period=4

    rank 0   ● step step step step ┐      ┌ step step ...
    rank 1   ● step step step step ┼ mean ┼ step step ...
    rank 2   ● step step step step ┘      └ step step ...

A step is one optimizer step of each rank, on the mean gradient of its own micro-batches, clipped by its own norm. With
``warmup=N`` the first N steps are those of ``ddp`` (post-local SGD). With ``node_period=K`` the ranks of a node are
averaged every K steps, and all ranks every ``period``. The result depends on the number of ranks; an equal number gives
equal bits. For the contents and weights of a mean, see `lockstep.strategies.local.model_averaging`.

- Each rank changes its own running statistics of BatchNorm and other buffers; they are averaged with the parameters.
- Momentum and the like stay each rank's own (``moments=keep``), which costs nothing, or are averaged with the
  parameters (``moments=average``), as much traffic again for each moment.
- Evaluations and checkpoints see the mean over ranks of all state, including moments. A checkpoint also holds each
  rank's own, so the same number of ranks goes on exactly, also within a period; any other world and any other strategy
  starts from the mean. At the end of `Run.epochs` the mean stays.

Traffic of a rank, in bytes a step: 2 M (n - 1) / (n period), for M bytes of parameters on n ranks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Final

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from lockstep.batch import MicroBatchPosition
from lockstep.strategies.local.averaging import RankAverager
from lockstep.strategies.local.local_steps import NO_FP16_REASON, LocalSteps, LocalStrategy
from lockstep.strategies.parts.gradient_accumulation import parameters_of
from lockstep.strategies.replicated.ddp import Ddp
from lockstep.strategies.strategy import StateDict, Strategy, StrategyContext
from lockstep.strategy_kinds import LocalSgdOptions


def open_strategy(context: StrategyContext, options: LocalSgdOptions) -> LocalSgd:
    """The strategy ``local-sgd``. Collective.

    Raises:
        SettingError: with precision fp16.
    """
    context.refuse_fp16("local-sgd", NO_FP16_REASON)
    return LocalSgd(context, options)


class LocalSgd(LocalStrategy):
    """The strategy ``local-sgd``."""

    def __init__(self, context: StrategyContext, options: LocalSgdOptions) -> None:
        super().__init__(context)
        group = context.group
        self._options: Final = options
        same_node = [rank for rank, node in enumerate(group.nodes) if node == group.nodes[group.rank]]
        self._node_averager: Final = (
            RankAverager(group.subgroup(same_node), context.bucket_mb) if options.node_period else None
        )
        # A single rank steps like ddp without other ranks.
        self._warmup: Final = options.warmup if group.size > 1 else 0
        self._ddp: Final = (
            Ddp(group, context.runs, exact=context.exact, bucket_mb=context.bucket_mb) if self._warmup else None
        )
        self._stepping: Final[list[torch.optim.Optimizer]] = []  # optimizers whose moments are averaged
        self._hooks = contextlib.ExitStack()
        if options.moments == "average" and group.size > 1:
            self._hooks.callback(register_optimizer_step_post_hook(self._has_stepped).remove)

    def setup_model(self, model: nn.Module, *, find_unused_parameters: bool, static_graph: bool = False) -> nn.Module:
        """``model`` itself. Collective."""
        super().setup_model(model, find_unused_parameters=find_unused_parameters)
        if self._ddp is not None:
            self._ddp.setup_model(model, find_unused_parameters=find_unused_parameters, static_graph=static_graph)
        return model

    def begin_count(self, counted: int) -> Callable[[], int]:
        """The items of this rank; of all ranks while these step together to warm up. Collective then."""
        return (lambda: counted) if self._warming_up is None else self._warming_up.begin_count(counted)

    def end_micro_batch(self, position: MicroBatchPosition) -> None:
        """After the last micro-batch, average over ranks if an average is due. Collective then."""
        warming_up = self._warming_up
        self._computing.end_micro_batch(position)
        if not position.last:
            return
        self._steps += 1
        if warming_up is not None:
            if self._steps == self._warmup:
                self._leave_ddp()
            return
        self._replicas.mark_stepped()
        if self._steps % self._options.period == 0:
            self._replicas.average()
            if self._stepping:
                self._replicas.average_optimizers(self._stepping)
        elif self._node_averager is not None and self._steps % self._options.node_period == 0:
            self._replicas.average_within(self._node_averager)
        else:
            return
        self._local.resync()

    def finish_training(self) -> None:
        """Give every rank the mean, for good. Collective."""
        self._replicas.average()
        self._local.resync()

    def resync(self) -> None:
        """Start from the models' present values."""
        super().resync()
        if self._ddp is not None:
            self._ddp.resync()

    def state_dict(self) -> StateDict:
        """The position in the period, and each rank's own values. Collective.

        To be called after `AveragedLayout.optimizer_state` of each optimizer.
        """
        return {"steps": self._steps, "replicas": self._replicas.state_dict(self._layout.optimizers)}

    def load_state_dict(self, state: StateDict) -> None:
        """Load `state_dict`; ranks start from the mean, if another strategy or number of ranks saved. Collective."""
        self._steps = state["steps"] if state else 0
        self._replicas.load_state_dict(state.get("replicas"), self._layout.optimizers, self._say)
        if self._ddp is not None and self._steps >= self._warmup:
            self._leave_ddp()
        self.resync()

    def close(self) -> None:
        """End the threads and connections of averages."""
        self._hooks.close()
        super().close()
        if self._node_averager is not None:
            self._node_averager.close()
        if self._ddp is not None:
            self._ddp.close()

    @property
    def _computing(self) -> LocalSteps | Strategy:
        return self._warming_up or self._local

    @property
    def _warming_up(self) -> Ddp | None:
        return self._ddp if self._steps < self._warmup else None

    def _leave_ddp(self) -> None:
        """Let ranks step by themselves from now on."""
        self._replicas.mark_averaged()
        self._local.resync()

    def _has_stepped(self, optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
        if any(optimizer is known for known in self._stepping):
            return
        ours = {id(p) for p in self._replicas.trained}
        if any(id(p) in ours for p in parameters_of(optimizer)):
            self._stepping.append(optimizer)
