"""The blocks of a model: modules that are gathered, computed and resharded as a whole."""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from lockstep.errors import SettingError
from lockstep.torch_private import own_buffers

#: Their forward pass reads the parameters of modules inside without calling those.
_INDIVISIBLE: Final = (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)
#: A member of a list is a block if it holds at least this share of the model.
_LEAST_SHARE: Final = 1e-3
_UNITS: Final = {"K": 10**3, "M": 10**6, "G": 10**9}


def blocks_of(model: nn.Module, wrap: str) -> list[nn.Module]:
    """The blocks of ``model``, inner blocks before outer ones; never ``model`` itself.

    A module that shares a parameter with modules outside of it is no block: the parameter is gathered by the module
    around all of them.

    Args:
        model: of which a block's ``forward`` is called whenever the parameters inside are used.
        wrap: ``auto``: the outermost members of ``nn.ModuleList``, ``nn.Sequential`` and ``nn.ModuleDict``, without the
            smallest ones; ``whole``: none; a number of parameters such as ``500K`` or ``1M``: the smallest modules that
            hold at least so many; ``package.module:function``: those for which that function returns true; else names
            of classes, joined by ``+``.

    Raises:
        SettingError: if no module is of such a class, or the function does not exist.
    """
    size = _number(wrap)
    if wrap == "whole":
        found: list[nn.Module] = []
    elif wrap == "auto":
        least = _LEAST_SHARE * _size(model)
        found = [member for member in _members(model) if _size(member) >= least]
    elif size is not None:
        found = _of_size(model, size)
    elif ":" in wrap:
        found = _chosen(model, wrap)
    else:
        found = _of_classes(model, wrap.split("+"))
    chains = _chains(model)
    return [m for m in found if all(m in chain for p in m.parameters() for chain in chains[p])]


def ignored_parameters(model: nn.Module, names: str) -> set[nn.Parameter]:
    """The parameters of the modules of ``model`` that ``names``, joined by ``+``, gives by class or by path.

    Raises:
        SettingError: if no such module exists, or it has no parameters.
    """
    ignored: set[nn.Parameter] = set()
    for name in filter(None, names.split("+")):
        found = {
            p
            for path, module in model.named_modules()
            if name in (path, type(module).__name__)
            for p in module.parameters()
        }
        if not found:
            raise SettingError(
                f"ignored_modules={names}: {type(model).__name__} has no module with parameters of class or name "
                f"{name!r}; it has {', '.join(path for path, _ in model.named_children())}, and what is in them"
            )
        ignored |= found
    return ignored


def recompute(block: nn.Module) -> None:
    """Let ``block`` keep only its inputs in the forward pass, and be computed again in the backward pass.

    The second computation uses the same random numbers, and does not change buffers.
    """
    block.forward = _Recomputed(block, block.forward)


class BlockCompiler:
    """What is called as the ``compile`` of a model: compiles each of its blocks, and nothing around them.

    Compiled whole, a model would be cut where its blocks are gathered: other kernels, and other bits, than on one rank.

    Args:
        model: compiled itself, if it has no blocks.
        blocks: of it.
        gathered: whether their parameters are gathered before a block's forward pass: that stays outside.
    """

    def __init__(self, model: nn.Module, blocks: Sequence[nn.Module], *, gathered: bool) -> None:
        self._blocks: Final = blocks or (model,)
        self._gathered: Final = gathered

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        """Compile each block, as `torch.compile` does."""
        for block in self._blocks:
            if self._gathered:
                block.forward = torch.compile(block.forward, *args, **kwargs)
            else:
                nn.Module.compile(block, *args, **kwargs)


class _Recomputed:
    """What is called as the ``forward`` of a block; a deep copy of the block gets one of its own."""

    def __init__(self, block: nn.Module, forward: Callable[..., Any]) -> None:
        self._block: Final = block
        self._forward: Final = forward
        functools.update_wrapper(self, forward)

    def __call__(self, *args: Any, **kwargs: Any) -> object:
        if not torch.is_grad_enabled():
            return self._forward(*args, **kwargs)
        contexts = lambda: (contextlib.nullcontext(), _buffers_aside(self._block))  # noqa: E731
        return checkpoint(self._forward, *args, use_reentrant=False, context_fn=contexts, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Recomputed:
        block = copy.deepcopy(self._block, memo)  # it is being copied: its copy is in `memo`
        method = getattr(self._forward, "__func__", None)  # a method is bound to the block that it was asked from
        return _Recomputed(block, self._forward if method is None else method.__get__(block))


@contextlib.contextmanager
def _buffers_aside(block: nn.Module) -> Iterator[None]:
    """A context in which copies of buffers are changed instead of the buffers."""
    held = [(m, name, b) for m in block.modules() for name, b in own_buffers(m).items() if b is not None]
    for module, name, buffer in held:
        own_buffers(module)[name] = buffer.clone()
    try:
        yield
    finally:
        for module, name, buffer in held:
            own_buffers(module)[name] = buffer


def _number(wrap: str) -> int | None:
    digits, unit = (wrap[:-1], wrap[-1:].upper()) if wrap[-1:].upper() in _UNITS else (wrap, "")
    try:
        return int(float(digits) * _UNITS.get(unit, 1))
    except ValueError:
        return None


def _size(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def _is_called(module: nn.Module) -> bool:
    """Whether it has a forward pass; lists of modules have none."""
    return type(module).forward is not nn.Module.forward


def _members(module: nn.Module) -> Iterator[nn.Module]:
    listed = isinstance(module, nn.ModuleList | nn.ModuleDict | nn.Sequential)
    for child in module.children():
        if listed and _is_called(child) and not isinstance(child, nn.Sequential):
            yield child
        elif not isinstance(child, _INDIVISIBLE):
            yield from _members(child)


def _of_size(model: nn.Module, least: int) -> list[nn.Module]:
    found: list[nn.Module] = []

    def left_in(module: nn.Module) -> int:
        """How many parameters of ``module`` are in no block."""
        left = sum(p.numel() for p in module.parameters(recurse=False))
        children = () if isinstance(module, _INDIVISIBLE) else module.children()
        left = _size(module) if isinstance(module, _INDIVISIBLE) else left + sum(map(left_in, children))
        if module is model or left < least or not _is_called(module):
            return left
        found.append(module)
        return 0

    left_in(model)
    return found


def _of_classes(model: nn.Module, names: list[str]) -> list[nn.Module]:
    inside = [module for module in model.modules() if module is not model and _is_called(module)]
    there = {type(module).__name__ for module in inside}
    for name in names:
        if name not in there:
            raise SettingError(
                f"wrap={'+'.join(names)}: {type(model).__name__} has no module of class {name!r}; it has "
                f"{', '.join(sorted(there)) or 'none'}. Name classes, joined by +, or say auto, whole, or a size as 1M"
            )
    found = [module for module in inside if type(module).__name__ in names and _size(module)]
    return found[::-1]  # parents came before their children


def _chosen(model: nn.Module, wrap: str) -> list[nn.Module]:
    name, _, function_name = wrap.partition(":")
    try:
        function = getattr(importlib.import_module(name), function_name)
    except (ImportError, AttributeError) as error:
        raise SettingError(
            f"wrap={wrap}: {error}; give MODULE:FUNCTION of a function that takes a module and says whether it is a "
            "block, such as __main__:is_block for one of the script"
        ) from None
    found = [module for module in model.modules() if module is not model and _is_called(module) and function(module)]
    return found[::-1]  # parents came before their children


def _chains(model: nn.Module) -> dict[nn.Parameter, list[set[nn.Module]]]:
    """For each parameter and each place where it is: the modules that it lies in there."""
    chains: dict[nn.Parameter, list[set[nn.Module]]] = {}
    for path, parameter in model.named_parameters(remove_duplicate=False):
        chain, module = {model}, model
        for name in path.split(".")[:-1]:
            module = getattr(module, name)
            chain.add(module)
        chains.setdefault(parameter, []).append(chain)
    return chains
