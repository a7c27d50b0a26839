"""What a model becomes on a rank that holds some of its stages."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, Final, TypeVar

import torch
from torch import nn

from lockstep.errors import UsageError
from lockstep.strategies.not_whole.absent_parameters import draw_alike
from lockstep.strategies.not_whole.partial_models import mark_absent, refuse_copies
from lockstep.strategies.pipelined.stage import Stage
from lockstep.torch_private import own_buffers, own_parameters, set_call

T = TypeVar("T")

USE_RUN_STEP = (
    "strategy=pipeline computes the loss itself, where the last stage is: write run.step(loss_function, inputs, "
    "targets) instead of run.step(loss_function(model(inputs), targets)), and call the model in evaluations only"
)


class PipelinedCall:
    """What is called when a model is called of which each rank holds its stages.

    The model's parameters are the whole one's, in their order; those of other ranks' stages are on the device ``meta``.
    """

    def __init__(self, model: nn.Module, evaluate: Callable[[tuple[Any, ...]], Any]) -> None:
        self._model: Final = model
        self._evaluate: Final = evaluate

    def __call__(self, *inputs: object) -> object:
        """The model's output, without gradients, on every rank of the replica; all of them must call it alike.

        Raises:
            UsageError: in training.
        """
        if self._model.training and torch.is_grad_enabled():
            raise UsageError(USE_RUN_STEP)
        return self._evaluate(inputs)


def prepare_in_place(
    model: nn.Module,
    evaluate: Callable[[tuple[Any, ...]], Any],
    stages: Sequence[Stage],
    absent: Collection[str],
    device: torch.device,
) -> None:
    """``model(...)`` goes through all stages from now on, and what takes this rank's part for the whole is refused.

    Args:
        model: of which this rank holds ``stages``.
        evaluate: gives its output.
        stages: of this rank.
        absent: names of the tensors that are not here.
        device: of those that are.
    """

    def compile_stages(*args: object, **kwargs: object) -> None:
        """Compile each stage of this rank, as `torch.compile` does; what is sent between them is not compiled."""
        if any(stage.splits_backward for stage in stages):
            raise UsageError(
                "strategy=pipeline: torch's zero-bubble schedules cannot split the backward pass of what is compiled; "
                "leave compile out, or use schedule=1f1b or interleaved"
            )
        for stage in stages:
            stage.in_training.compile(*args, **kwargs)
            stage.in_evaluation.compile(*args, **kwargs)

    # Torch keeps here what `nn.Module.compile` makes, for calls alone: no file has it.
    set_call(model, PipelinedCall(model, evaluate))
    model.compile = compile_stages  # type: ignore[method-assign]
    refuse_copies(model, "pipeline")
    for module_name, module in model.named_modules():
        prefix = f"{module_name}." if module_name else ""
        own = [name for name in (*own_parameters(module), *own_buffers(module)) if prefix + name in absent]
        if own:
            mark_absent(module, own, "pipeline")
            for parameter in (own_parameters(module).get(name) for name in own):
                if parameter is not None:
                    draw_alike(parameter, device)


def in_mode(model: nn.Module, training: bool, do: Callable[[], T]) -> T:
    """Call ``do`` while all of ``model`` is in training mode, or in evaluation mode; what it returned."""
    was = [(module, module.training) for module in model.modules()]
    model.train(training)
    try:
        return do()
    finally:
        for module, before in was:
            module.training = before


def keep_own_tensors(
    model: nn.Module,
    names: set[str],
    device: torch.device,
    restore: Callable[[nn.Parameter], object] = lambda _parameter: None,
) -> None:
    """Move the parameters and buffers of these names to ``device``.

    The others keep their shapes and take no memory; shared tensors stay shared.

    Args:
        model: of which the rest is on other ranks.
        names: of what stays here.
        device: where it is computed.
        restore: gives a parameter its values; called for one after the other, in the same order on all ranks.
    """
    instead: dict[int, torch.Tensor] = {}
    for module_name, module in model.named_modules():
        prefix = f"{module_name}." if module_name else ""
        for name, parameter in own_parameters(module).items():
            if parameter is None:
                continue
            restore(parameter)
            if prefix + name in names:
                parameter.data = parameter.data.to(device)
                continue
            if id(parameter) not in instead:
                instead[id(parameter)] = nn.Parameter(
                    torch.empty_like(parameter, device="meta"), parameter.requires_grad
                )
            own_parameters(module)[name] = instead[id(parameter)]
        for name, buffer in own_buffers(module).items():
            if buffer is not None:
                own_buffers(module)[name] = instead.setdefault(
                    id(buffer), buffer.to(device) if prefix + name in names else torch.empty_like(buffer, device="meta")
                )
