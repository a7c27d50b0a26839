"""Registration of models, optimizers and schedulers, which refuses objects that depend on the number of ranks."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Final, Literal

import torch
from torch import nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from lockstep.checkpoint import checksum_of_first_rows, read_weights
from lockstep.collectives import StoredTensor
from lockstep.errors import UsageError
from lockstep.formatting import plural
from lockstep.run.checks.loop_checks import WITHOUT_DDP
from lockstep.run.loop.closures import check_closures, needs_closure, refuse_beside
from lockstep.run.metrics.early_stopping import EarlyStopping
from lockstep.run.setup.resume import TrainingStart
from lockstep.run.setup.run_context import RunContext
from lockstep.run.state.registered import State
from lockstep.run.state.registered_scheduler import RegisteredScheduler, check_scheduler
from lockstep.strategies import (
    LossStrategy,
    StageSequence,
    TensorPlan,
    give_values,
    is_on_meta,
    make_module,
    parameters_of,
    spans_gpus,
    synchronize_batchnorm,
)
from lockstep.torch_private import complete

GivenModel = nn.Module | Callable[[], nn.Module] | Sequence[nn.Module | Callable[[], nn.Module]]
"""The argument of `Run.model`: a model, a function that makes a model, or the stages of a model."""


class Registration:
    """Adds models, optimizers, schedulers and other objects of the script to the run's state, before the training."""

    def __init__(self, context: RunContext, start: TrainingStart) -> None:
        self._context: Final = context
        self._state: Final = context.state
        self._start: Final = start

    def model(
        self,
        given: GivenModel,
        *,
        weights: str | os.PathLike[str] | None,
        find_unused_parameters: bool,
        static_graph: bool,
        tensor_plan: TensorPlan | None,
    ) -> nn.Module:
        """Prepare the model ``given``, or made by ``given``, for this run; returns the module to train. Collective.

        Raises:
            UsageError: after training has begun, or for a model that cannot be trained beside the others.
            SettingError: if ``weights`` cannot be read.
            MismatchError: if ranks made different models, or would read different weights.
        """
        self._start.refuse_late("model")
        context = self._context
        stored = None
        if weights is not None:
            stored = read_weights(Path(weights))
            # Each rank may read other parts of the file, so no rank would notice a different file on another host.
            context.group.check_equal("what run.model(..., weights=...) reads", checksum_of_first_rows(stored))
        if isinstance(given, list | tuple):
            model, is_new = self._of_stages(given, stored)
        else:
            model, is_new = self._with_values(given, stored)
        check_model(model, self._state)
        moves_itself = isinstance(context.strategy, LossStrategy) or (is_new and context.strategy.divides_construction)
        if not (moves_itself or spans_gpus(model)):
            model = model.to(context.device)
        if context.settings.sync_batchnorm and context.group.size > 1:
            model = synchronize_batchnorm(model, context.group)
        context.strategy.plan_layers(tensor_plan)
        context.strategy.setup_model(model, find_unused_parameters=find_unused_parameters, static_graph=static_graph)
        self._state.add_model(model)
        if context.settings.compile:
            # Dynamo uses kernels of dynamic shapes after a second shape, and ranks meet shapes in different orders.
            fixed = context.device.type == "cuda" and context.settings.reduction == "exact"
            model.compile(dynamic=False if fixed else None)
        return model

    def _of_stages(
        self, stages: Sequence[nn.Module | Callable[[], nn.Module]], weights: Mapping[str, StoredTensor] | None
    ) -> tuple[nn.Module, bool]:
        """As `_with_values`, for a model of these ``stages``. Collective."""
        modules = [stage for stage in stages if isinstance(stage, nn.Module)]
        if modules and len(modules) == len(stages):
            return self._with_values(StageSequence(modules), weights)
        if modules or not stages or not all(map(callable, stages)):
            raise UsageError(
                f"run.model([{', '.join(type(stage).__name__ for stage in stages)}]): give stages that are modules, or "
                "one function for each, which makes it"
            )
        makers = [partial(make_module, stage) for stage in stages if not isinstance(stage, nn.Module)]
        if (model := self._context.strategy.make_stages(makers, weights)) is not None:
            return model, True
        # Each stage gets its values before the next stage is made, as where ranks make one stage at a time.
        return self._with_values(lambda: StageSequence([give_values(make()) for make in makers]), weights)

    def _with_values(self, given: GivenModel, weights: Mapping[str, StoredTensor] | None) -> tuple[nn.Module, bool]:
        """The model, and whether the model was made or initialised by this call. Collective."""
        if isinstance(given, nn.Module):
            check_model(given, self._state)
            if weights is None and not is_on_meta(given):
                return given, False
            known = given
            make: Callable[[], nn.Module] = lambda: known  # noqa: E731 - a function would need a name that says this
        elif callable(given):
            make = given
        else:
            raise UsageError(
                f"run.model({type(given).__name__}): give a torch.nn.Module, or a function that makes one, as in "
                "run.model(lambda: Net())"
            )
        return self._context.strategy.construct(lambda: give_values(make_module(make), weights)), True

    def optimizer(self, optimizer: torch.optim.Optimizer, *, closure: bool | None) -> None:
        """Register ``optimizer``, which holds parameters of this run's models; ``closure`` as in `Run.optimizer`.

        Raises:
            UsageError: after training has begun, or for an optimizer that the strategy cannot step.
        """
        self._start.refuse_late("optimizer")
        complete(optimizer)
        check_optimizer(optimizer, self._state)
        if needs_closure(optimizer) if closure is None else closure:
            check_closures(self._context, optimizer)
            self._state.with_closure = True
        elif self._state.with_closure:
            refuse_beside(self._state, type(optimizer).__name__)
        self._context.strategy.check_optimizer(optimizer)
        self._state.optimizers.append(optimizer)

    def scheduler(self, scheduler: object) -> None:
        """Register ``scheduler``, which steps once with each step of its optimizer.

        Raises:
            UsageError: after training has begun, or if its optimizer is not registered.
        """
        self._start.refuse_late("scheduler")
        check_scheduler(scheduler)
        optimizer = getattr(scheduler, "optimizer", None)
        if not any(optimizer is o for o in self._state.optimizers):
            raise UsageError(
                f"{type(scheduler).__name__} belongs to no optimizer of this run; "
                "call run.optimizer(optimizer) first, and make the scheduler from what it returns"
            )
        self._state.schedulers.append(RegisteredScheduler(scheduler))

    def early_stopping(
        self, metric: str, patience: int, mode: Literal["min", "max"], min_delta: float
    ) -> EarlyStopping:
        """Make the early stopping by ``metric``, whose state is saved in checkpoints.

        Raises:
            UsageError: after training has begun, or for a metric with an early stopping already.
        """
        self._start.refuse_late("early_stopping")
        if metric in self._state.early_stopping:
            raise UsageError(f"run.early_stopping({metric!r}) a second time: one for each metric")
        stopping = EarlyStopping(
            self._context.position, lambda: self._start.resumes_within_turn, metric, patience, mode, min_delta
        )
        self._state.early_stopping[metric] = stopping
        return stopping

    def keep(self, objects: Mapping[str, object]) -> None:
        """Save and restore ``objects`` with the checkpoints, under their names.

        Raises:
            UsageError: after training has begun, or for a name or value that cannot be kept.
        """
        self._start.refuse_late("keep")
        for name, value in objects.items():
            self._state.keep(name, value, sys._getframe())


def check_model(model: nn.Module, state: State) -> None:
    """Check that ``model`` can be trained beside the models of ``state``.

    Raises:
        UsageError: for a model that was given before, shares parameters with another model, is not initialised, or has
            a parameter or buffer that no value can be copied into.
    """
    if any(model is known for known in state.models):
        raise UsageError(
            f"run.model({type(model).__name__}) a second time: one call for each model, and what it returned is called "
            "from then on"
        )
    for path, module in model.named_modules():
        _check_module(path, module)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if isinstance(tensor, UninitializedParameter | UninitializedBuffer):
            raise UsageError(
                f"{name} of {type(model).__name__} is lazy and has no shape yet: pass a batch through the model before "
                "run.model(model), as in model(torch.zeros(1, 3, 32, 32)), or give the sizes when you make the module"
            )
        if tensor.is_conj():
            raise UsageError(
                f"{name} of {type(model).__name__} is a conjugated view of what lies in memory, as after conj(), and "
                "what moves it between ranks would take it for what lies there; use .conj().resolve_conj()"
            )
        if _overlaps_itself(tensor):
            raise UsageError(
                f"{name} of shape {tuple(tensor.shape)} has strides {tensor.stride()}: several of its elements are one "
                "place in memory, as after expand(), and neither an optimizer nor a checkpoint can fill them; use "
                ".clone() or .contiguous()"
            )
    for name, parameter in model.named_parameters():
        if parameter in state.known_parameters:
            raise UsageError(
                f"{name} of {type(model).__name__} belongs to another model of this run, too, where it is "
                f"{state.name_of(parameter)}: give run.model(...) one module that holds both, such as nn.ModuleDict"
            )


def _check_module(path: str, module: nn.Module) -> None:
    """Refuse a `DistributedDataParallel` module, and an embedding whose forward pass changes its parameter."""
    if isinstance(module, nn.parallel.DistributedDataParallel):
        raise UsageError(WITHOUT_DDP)
    if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None:
        weight = f"model.{path}.weight" if path else "model.weight"
        raise UsageError(
            f"{path or type(module).__name__} has max_norm={module.max_norm}: its forward pass scales the rows that a "
            "micro-batch looks up, and ranks look up different ones. Leave max_norm out, and where run.step(loss) has "
            "returned True, write `with torch.no_grad(): "
            f"{weight}.renorm_({module.norm_type:g}, 0, {module.max_norm:g})`, which scales all that are too long"
        )


def check_optimizer(optimizer: torch.optim.Optimizer, state: State) -> None:
    """Check that a run can step ``optimizer``.

    Raises:
        UsageError: for an optimizer that is registered already, or holds parameters of no model of the run.
    """
    if any(optimizer is known for known in state.optimizers):
        raise UsageError(f"run.optimizer({type(optimizer).__name__}) a second time: one call for each optimizer")
    _refuse_sparse_momentum(optimizer, state)
    parameters = parameters_of(optimizer)
    strangers = [p for p in parameters if p not in state.known_parameters]
    if strangers:
        raise UsageError(
            f"{type(optimizer).__name__} holds {len(strangers)} of {plural(len(parameters), 'parameter')} that belong "
            "to no model of this run; make it after `model = run.model(model)`, from model.parameters(). A parameter "
            "outside of a model, such as a temperature, becomes one: run.model(nn.ParameterList([temperature]))"
        )
    _refuse_hidden_state(optimizer)


def _refuse_hidden_state(optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer around another optimizer, as in SAM, whose `state_dict` lacks the inner optimizer's state."""
    if type(optimizer).state_dict is not torch.optim.Optimizer.state_dict:
        return
    for name, inner in vars(optimizer).items():
        if isinstance(inner, torch.optim.Optimizer) and inner.state is not optimizer.state:
            kind, within = type(optimizer).__name__, type(inner).__name__
            raise UsageError(
                f"{kind} steps by another optimizer, {kind}.{name} ({within}), whose state (momentum, moments) is not "
                f"in {kind}.state_dict(): no checkpoint would hold it, and a resumed run would begin it again. Let "
                f"both have one state: write `self.{name}.state = self.state` at the end of {kind}.__init__ and of "
                f"{kind}.load_state_dict"
            )


def _refuse_sparse_momentum(optimizer: torch.optim.Optimizer, state: State) -> None:
    for group in optimizer.param_groups:
        sparse = [p for p in group["params"] if p in state.sparse]
        if sparse and group.get("momentum") and not isinstance(optimizer, torch.optim.SparseAdam):
            raise UsageError(
                f"{type(optimizer).__name__}(momentum={group['momentum']}) would remember sparse tensors of "
                f"{state.name_of(sparse[0])}, which has sparse=True, and no checkpoint holds those: use SparseAdam, "
                "momentum=0, or leave sparse=True out"
            )


def _overlaps_itself(tensor: torch.Tensor) -> bool:
    return any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True))
