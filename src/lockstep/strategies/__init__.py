"""How replicas are kept in step: a file for each way, in a folder with its parts if it has some.

Such as ``ddp``, or with options::

    lockstep run --strategy ddp:compress=powersgd,rank=2 train.py
                            ^^^ ^^^^^^^^^^^^^^^^^^^^^^^^
                            name       its options
"""

from __future__ import annotations

import importlib
from types import ModuleType

from lockstep.settings import read_options
from lockstep.strategies.batchnorm import synchronize_batchnorm
from lockstep.strategies.buffers import same
from lockstep.strategies.gradient_accumulation import (
    LossCall,
    ParameterSet,
    as_real,
    describe_loss,
    has_gradient,
    is_loss,
    parameters_of,
)
from lockstep.strategies.initial_values import give_values, is_on_meta, make_module
from lockstep.strategies.multi_gpu import spans_gpus
from lockstep.strategies.sparse_gradients import sparse_parameters
from lockstep.strategies.stage_sequence import StageSequence
from lockstep.strategies.state_layout import ReplicatedLayout
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
from lockstep.strategy_words import split

__all__ = [
    "STRATEGIES",
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
    "UpdateShare",
    "as_real",
    "describe_loss",
    "give_values",
    "has_gradient",
    "import_strategy",
    "is_loss",
    "is_on_meta",
    "make_module",
    "open_strategy",
    "parameters_of",
    "same",
    "spans_gpus",
    "sparse_parameters",
    "split",
    "synchronize_batchnorm",
]

#: The words of `strategy_words`, each with its file. Loaded when asked for: some bring much of torch with them.
STRATEGIES = {
    "none": "single_process",
    "dp": "dp",
    "ddp": "ddp",
    "zero": "zero",
    "fsdp": "sharded.fully_sharded",
    "hsdp": "sharded.hybrid_sharded",
    "local-sgd": "local.local_sgd",
    "diloco": "local.diloco",
    "parameter-server": "parameter_server.parameter_server",
    "hybrid": "parameter_server.hybrid",
    "pipeline": "pipelined.pipeline",
    "auto": "auto",
}


def open_strategy(spec: str, context: StrategyContext) -> Strategy:
    """The strategy that ``spec`` names, such as ``ddp`` or ``ddp:compress=fp16``, for the ranks of ``context``.

    Collective.

    Raises:
        SettingError: if there is no such strategy or option, or it cannot keep these ranks in step.
    """
    name, options = split(spec)
    module = import_strategy(name)
    strategy: Strategy = module.open_strategy(context, read_options(f"strategy {name}", module.Options, options))
    return strategy


def import_strategy(spec: str) -> ModuleType:
    """The module of the strategy that ``spec`` names.

    Raises:
        SettingError: if there is no such strategy.
    """
    return importlib.import_module(f"lockstep.strategies.{STRATEGIES[split(spec)[0]]}")
