"""Checks that a model can be divided by rows, for what torch would refuse later, or compute in another way."""

from __future__ import annotations

from collections.abc import Callable, Container
from typing import Final

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.batchnorm import _BatchNorm

from lockstep.errors import UsageError
from lockstep.strategies.not_whole.divided_parameters import refuse_gradient_hook
from lockstep.strategies.parts.gradient_accumulation import parameters_of, steps_across_elements
from lockstep.torch_private import gradient_hooks, pytree

SECOND_ORDER: Final = (
    "the loss depends on gradients that were computed before, as with torch.autograd.grad(..., create_graph=True) for "
    "a gradient penalty, and after those, fully_shard has let go of the whole parameters, which the second backward "
    "pass needs: use ddp or zero"
)


NOT_GATHERED: Final = (
    "the backward pass needs the parameters of a block that torch has not gathered again: the block returns tensors "
    "where torch does not find them, such as in an object of its own class, or a view that is changed in place "
    "afterwards. Return them by themselves or in a tuple, a list or a dict, and write out = out + y for out += y; or "
    "say run.model(model, find_unused_parameters=True), which gathers the whole model at once"
)


def refuse_second_order(module: nn.Module) -> None:
    """Refuse a backward pass with ``create_graph=True`` through the outputs of ``module``, in the pass itself.

    The second backward pass would read freed memory, which has ended processes by SIGSEGV.
    """

    def check(_gradient: torch.Tensor) -> None:
        if torch.is_grad_enabled():  # as in a backward pass with create_graph=True only
            raise UsageError(SECOND_ORDER)

    def watch(_module: nn.Module, _args: object, output: object) -> None:
        for tensor in pytree.tree_leaves(output):
            if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                tensor.register_hook(check)

    module.register_forward_hook(watch)


def check_divisible(model: nn.Module, strategy: str, ignored: Container[nn.Parameter]) -> None:
    """Check that each parameter has elements, in contiguous rows, except ``ignored`` parameters.

    Raises:
        UsageError: for a parameter that cannot be divided.
    """
    for name, parameter in model.named_parameters():
        if parameter in ignored:
            continue
        if not parameter.dim():
            raise UsageError(
                f"the parameter {name} has no dimension, and {strategy} divides rows; make it of shape (1,), as with "
                f"nn.Parameter(torch.ones(1)){_or_ignored(strategy)}, or use ddp"
            )
        if not parameter.numel() and parameter.requires_grad:
            raise UsageError(
                f"the parameter {name} of shape {tuple(parameter.shape)} has no elements, and torch's fully_shard "
                f"divides no gradient of none; freeze it{_or_ignored(strategy)}, or use ddp"
            )
        if not parameter.is_contiguous():
            raise UsageError(
                f"the parameter {name} of shape {tuple(parameter.shape)} has strides {parameter.stride()}, and "
                f"{strategy} divides contiguous rows; leave out .to(memory_format=...){_or_ignored(strategy)}, or use "
                "ddp"
            )


def _or_ignored(strategy: str) -> str:
    """The option that leaves a parameter whole, which ``zero:stage=2`` has not."""
    return "" if strategy.startswith("zero") else ", name its module in ignored_modules=..."


def check_stateless(model: nn.Module, mixed: str) -> None:
    """Check that no module has running statistics, which torch would compute in the lower type.

    Raises:
        UsageError: for a module or parameter that fails the check.
    """
    for name, module in model.named_modules():
        if isinstance(module, _BatchNorm) and module.running_mean is not None:
            raise UsageError(
                f"mixed={mixed} with {name or 'the model'}, a {type(module).__name__}: its statistics are fp32, and "
                f"torch computes it in one type; use precision='{mixed}' without mixed={mixed}, or another "
                "normalisation"
            )


def check_one_type(block: nn.Module, model: nn.Module, divided: Container[nn.Parameter]) -> None:
    """Check that a block has parameters of one type; torch would refuse several types in the first forward pass.

    Raises:
        UsageError: for several types.
    """
    types: dict[torch.dtype, nn.Parameter] = {}
    for parameter in block.parameters():
        if parameter.requires_grad and parameter not in divided:
            types.setdefault(parameter.dtype, parameter)
    if len(types) > 1:
        names = {p: name for name, p in model.named_parameters()}
        raise UsageError(
            f"{type(block).__name__} is gathered as one, and its parameters have several types: "
            f"{', '.join(f'{names[p]} {dtype}' for dtype, p in types.items())}; "
            "let wrap=... name a block of each type, or use one"
        )


def check_without_hooks(model: nn.Module, ignored: Container[nn.Parameter]) -> None:
    """Check that no divided parameter has a hook for its gradient: `fully_shard` computes with other tensors.

    Raises:
        UsageError: for one that has.
    """
    for name, parameter in model.named_parameters():
        if parameter not in ignored and any(gradient_hooks(parameter)):
            refuse_gradient_hook(f"the parameter {name}")


def check_fused_kernel(optimizer: torch.optim.Optimizer, is_divided: Callable[[nn.Parameter], bool]) -> None:
    """Check that ``optimizer`` steps rows on a GPU as it steps the whole parameter.

    Args:
        optimizer: of the script.
        is_divided: whether a rank holds rows of a parameter.

    Raises:
        UsageError: for `torch.optim.Adam`, fused and with a weight decay that is added to the gradient: on an H100 with
            torch 2.11, of all fused kernels only this one rounded tensors of other sizes differently.
    """
    for group in optimizer.param_groups:
        decay = group.get("weight_decay")
        is_added = isinstance(optimizer, torch.optim.Adam) and not group.get("decoupled_weight_decay")
        if group.get("fused") and decay and is_added and any(map(is_divided, group["params"])):
            raise UsageError(
                f"Adam(fused=True, weight_decay={decay}): torch's kernel rounds the same numbers differently in "
                "tensors of other sizes, and a rank holds rows of a parameter, so bits would depend on the number of "
                "ranks. Leave fused=True out, take AdamW, or use ddp or zero"
            )


def check_optimizer(optimizer: torch.optim.Optimizer, device: torch.device, ignored_modules: str) -> None:
    """Check that ``optimizer`` can step tensors that are divided.

    Raises:
        UsageError: for a fused optimizer on CPUs, an optimizer that steps divided and whole parameters at once, or a
            torch optimizer that looks at several elements of a divided parameter at once.
    """
    divided = [p for p in parameters_of(optimizer) if isinstance(p, DTensor)]
    known = steps_across_elements(optimizer)
    if known and divided:
        raise UsageError(
            f"{known} looks at several elements of a parameter at once, and a rank holds some of its rows: what it "
            "computes would depend on how many ranks there are. Use zero, under which a rank steps whole parameters, "
            "or an optimizer that treats each element alike, such as AdamW"
        )
    fused = any(group.get("fused") for group in optimizer.param_groups)
    if fused and device.type == "cpu":
        raise UsageError(
            f"{type(optimizer).__name__}(fused=True): torch's fused kernels on CPUs know no divided tensors; leave "
            "fused=True out, or use ddp or zero"
        )
    for group in optimizer.param_groups:
        kinds = {isinstance(p, DTensor) for p in group["params"]}
        by_default = group.get("foreach", False) is None and device.type != "cpu"
        if (group.get("foreach") or group.get("fused") or by_default) and len(kinds) > 1:
            raise UsageError(
                f"{type(optimizer).__name__} with foreach or fused steps parameters that are divided and those of "
                f"ignored_modules={ignored_modules} at once, which torch cannot: give it a parameter "
                "group for each, or foreach=False"
            )
