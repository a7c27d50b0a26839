"""One process that divides each micro-batch among all local GPUs: torch's DataParallel.

                 ┌── rows 0..7 ──►  model on GPU 0  ──┐
    batch of 16 ─┤                                    ├─► outputs of 16, on GPU 0 ──► loss
                 └── rows 8..15 ─►  copy on GPU 1   ──┘

The gradient is that of the whole micro-batch. Copies are made in each forward pass, and their buffers are dropped: only
the buffers of the first device are kept, such as the running statistics of its rows. To rehearse without GPUs, CPU
threads take the place of GPUs; the order in which threads draw random numbers is left to chance.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, NoReturn

import torch
from torch import nn
from torch.nn.parallel import data_parallel

from lockstep.errors import SettingError, UsageError
from lockstep.nested import leaves, like_row, map_leaves
from lockstep.strategies.replicated.single_process import SingleProcess
from lockstep.strategies.strategy import Strategy, StrategyContext
from lockstep.strategy_kinds import DpOptions
from lockstep.torch_private import plain_call, set_call


def open_strategy(context: StrategyContext, options: DpOptions) -> Strategy:
    """The strategy ``dp``.

    Raises:
        SettingError: for several ranks, too few GPUs, or no GPU without ``rehearse``.
    """
    ranks, gpus = context.group.size, torch.cuda.device_count()
    if ranks > 1:
        raise SettingError(
            f"strategy dp is one process for all GPUs, and there are {ranks} ranks; use ddp, or start one rank, which "
            "uses them all: --nproc-per-node 1"
        )
    if context.group.device.type == "cuda":
        if options.devices > gpus:
            raise SettingError(
                f"strategy dp: devices={options.devices}, and there are {gpus} GPUs; give at most {gpus}"
            )
        first = context.group.device.index or 0
        others = [gpu for gpu in range(gpus) if gpu != first]
        devices = [first, *others][: options.devices or gpus]
        return SingleProcess(
            context.group,
            context.runs,
            exact=context.exact,
            prepare=lambda model: _call_instead(model, GpuDataParallel(model, devices)),
            repeats_bits=False,
        )
    if not context.rehearse:
        raise SettingError(
            "strategy dp divides batches among GPUs, and there is none here; use ddp, or let CPU threads stand in for "
            "them with --rehearse, which is Run(rehearse=True)"
        )
    return SingleProcess(
        context.group,
        context.runs,
        exact=context.exact,
        prepare=lambda model: _call_instead(model, CpuDataParallel(model, options.devices or 2)),
        repeats_bits=False,
    )


def _call_instead(model: nn.Module, call: Callable[..., Any]) -> None:
    """Let ``model(...)`` call ``call(...)`` from now on; copies of the model are called as usual.

    ``call`` is stored in the place of the result of `nn.Module.compile`, which torch neither copies nor saves.
    """
    set_call(model, call)
    model.compile = _refuse_compile  # type: ignore[method-assign]


def _refuse_compile(*args: object, **kwargs: object) -> NoReturn:
    raise SettingError("strategy dp: a compiled model would not be divided among devices; use ddp, or compile=False")


class GpuDataParallel:
    """``module``, computed on several GPUs, each for some rows of the inputs."""

    def __init__(self, module: nn.Module, devices: Sequence[int]) -> None:
        self._module: Final = module
        self._devices: Final = devices

    def __call__(self, *inputs: object, **more: object) -> object:
        """The outputs of ``module``, as torch's DataParallel computes them."""
        # A copy that shares all tensors, and is called without division.
        twin = copy.copy(self._module)
        return data_parallel(twin, inputs, self._devices, module_kwargs=more or None)


class CpuDataParallel:
    """``module``, computed in several threads, each for some rows of the inputs."""

    def __init__(self, module: nn.Module, threads: int) -> None:
        self._module: Final = module
        self._threads: Final = threads

    def __call__(self, *inputs: object, **more: object) -> object:
        """The outputs of ``module``; input tensors are divided, and outputs joined, along their first dimension."""
        parts = _divided((inputs, more), self._threads)
        if len(parts) < 2:
            return plain_call(self._module)(*inputs, **more)
        # Copies share the parameters, so all gradients arrive at the same parameters; all other tensors are copied.
        shared = {id(parameter): parameter for parameter in self._module.parameters()}
        modules = [plain_call(self._module), *(copy.deepcopy(self._module, dict(shared)) for _ in parts[1:])]
        # A new thread does not inherit the modes of the calling thread.
        gradients, dtype = torch.is_grad_enabled(), torch.get_autocast_dtype("cpu")
        formats = torch.is_autocast_enabled("cpu")

        def compute(module: Callable[..., Any], part: Any) -> object:
            with torch.set_grad_enabled(gradients), torch.autocast("cpu", dtype=dtype, enabled=formats):
                return module(*part[0], **part[1])

        with ThreadPoolExecutor(len(parts), thread_name_prefix="lockstep-dp") as pool:
            return _joined(list(pool.map(compute, modules, parts)))


def _divided(value: object, into: int) -> list[Any]:
    """The part of ``value`` for each thread, with some rows of each tensor, also within lists, tuples and dicts."""

    def of_thread(number: int) -> Any:
        return map_leaves(lambda leaf: leaf.chunk(into)[number] if _has_rows(leaf) else leaf, value)

    count = min((len(leaf.chunk(into)) for _, leaf in leaves(value) if _has_rows(leaf)), default=into)
    return [of_thread(number) for number in range(count)]


def _has_rows(leaf: object) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.dim() > 0


def _joined(parts: Sequence[Any]) -> object:
    first = parts[0]
    if isinstance(first, torch.Tensor):
        return torch.cat(list(parts)) if first.dim() else torch.stack(list(parts))
    if isinstance(first, Mapping):
        return {key: _joined([part[key] for part in parts]) for key in first}
    if isinstance(first, list | tuple):
        return like_row(first, [_joined(each) for each in zip(*parts, strict=True)])
    raise UsageError(
        f"strategy dp: the model returns a {type(first).__name__}, and outputs of several devices can be joined only "
        "if they are tensors, or lists, tuples and dicts of tensors: return these"
    )
