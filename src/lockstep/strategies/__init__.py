"""The strategies, which keep replicas in step: a file for each strategy, in a folder with its parts if any.

Such as ``ddp``, or with options::

    lockstep run --strategy ddp:compress=powersgd,rank=2 train.py
                            ^^^ ^^^^^^^^^^^^^^^^^^^^^^^^
                            name       its options

    strategy           what a strategy does, in the order of the loop; delegation: around another one
    parts/             what several strategies are made of: buffers, accumulation, layouts, norms
    replicated/        none, dp, ddp, zero, auto                local/             local-sgd, diloco
    sharded/           fsdp, hsdp                               parameter_server/  parameter-server, hybrid
    tensor_parallel/   layers divided among neighbours          pipelined/         pipeline
    not_whole/         parameters of which a rank holds a part or nothing

`strategy_kinds` defines names and options; a strategy of another package needs no entry in this package.
"""

from __future__ import annotations

import importlib

from lockstep.strategies.delegation import DelegatingStrategy
from lockstep.strategies.parts.batchnorm import synchronize_batchnorm
from lockstep.strategies.parts.buffers import Buffers, same
from lockstep.strategies.parts.gradient_accumulation import (
    LossCall,
    ParameterSet,
    TreeGradientAccumulator,
    as_real,
    begin_total,
    describe_loss,
    divide_by_counts,
    has_gradient,
    is_loss,
    parameters_of,
)
from lockstep.strategies.parts.initial_values import give_values, is_on_meta, make_module
from lockstep.strategies.parts.module_states import sync_module_states
from lockstep.strategies.parts.multi_gpu import spans_gpus
from lockstep.strategies.parts.sparse_gradients import refuse_sparse, sparse_parameters
from lockstep.strategies.parts.stage_sequence import StageSequence
from lockstep.strategies.parts.state_layout import ReplicatedLayout
from lockstep.strategies.strategy import (
    LossStrategy,
    ReplicaAssignment,
    ServerStrategy,
    StateLayout,
    StatePart,
    Strategy,
    StrategyContext,
    TensorPlan,
    UpdateShare,
)
from lockstep.strategy_kinds import read_strategy

__all__ = [
    "Buffers",
    "DelegatingStrategy",
    "LossCall",
    "LossStrategy",
    "ParameterSet",
    "ReplicaAssignment",
    "ReplicatedLayout",
    "ServerStrategy",
    "StageSequence",
    "StateLayout",
    "StatePart",
    "Strategy",
    "StrategyContext",
    "TensorPlan",
    "TreeGradientAccumulator",
    "UpdateShare",
    "as_real",
    "begin_total",
    "describe_loss",
    "divide_by_counts",
    "give_values",
    "has_gradient",
    "is_loss",
    "is_on_meta",
    "make_module",
    "open_strategy",
    "parameters_of",
    "refuse_sparse",
    "same",
    "spans_gpus",
    "sparse_parameters",
    "sync_module_states",
    "synchronize_batchnorm",
]


def open_strategy(spec: str, context: StrategyContext) -> Strategy:
    """The strategy that ``spec`` names, such as ``ddp`` or ``ddp:compress=fp16``, for the ranks of ``context``.

    Collective.

    Raises:
        SettingError: if no such strategy or option exists, or the strategy cannot keep these ranks in step.
    """
    kind, options = read_strategy(spec)
    strategy: Strategy = importlib.import_module(kind.module).open_strategy(context, options)
    return strategy
