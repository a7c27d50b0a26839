"""The initial values of a model: drawn by its modules, or read from a file.

run.model(lambda: Net())                 what the constructor draws
run.model(net), made on the device meta  what `reset_parameters` of each module draws, inner modules first, as
                                         constructors do; then what `_init_weights(module)` of a model with one does
run.model(..., weights="model.safetensors")    what the file says, by the names of ``state_dict()``
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from lockstep.collectives import StoredTensor
from lockstep.errors import UsageError
from lockstep.strategies.not_whole.divided_construction import allocates, is_plain, without_values, written_by
from lockstep.torch_private import own_buffers, own_parameters, storage_key, without_torch_function

_RESETS: Final = ("reset_parameters", "_reset_parameters")


def is_on_meta(model: nn.Module) -> bool:
    """Whether some parameter or buffer of ``model`` is on the device ``meta``, without memory."""
    return any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))


def make_module(make: Callable[[], nn.Module]) -> nn.Module:
    """The module that ``make`` returns.

    Raises:
        UsageError: if the result is no module.
    """
    model = make()
    if not isinstance(model, nn.Module):
        raise UsageError(
            f"run.model(...) was given a function that returns a {type(model).__name__}: let it return the model"
        )
    return model


def give_values(model: nn.Module, weights: Mapping[str, StoredTensor] | None = None) -> nn.Module:
    """``model`` itself with all its values; tensors that were on the device ``meta`` are on the CPU.

    Args:
        model: made just now, or on ``meta``.
        weights: by the names of ``state_dict()``; None: as initialised.

    Raises:
        UsageError: if a tensor on ``meta`` gets no value, or if the names, shapes or types of ``weights`` are not those
            of the model.
    """
    was_on_meta = [name for name, t in (*model.named_parameters(), *model.named_buffers()) if t.is_meta]
    with _Written() as written:
        if was_on_meta:
            _leave_meta(model)
        if weights is not None:
            _read(model, weights)
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for name in was_on_meta:
        # A tensor that a strategy has put there knows itself whether it has values.
        if is_plain(tensors[name]) and tensors[name].numel() and not written.has(tensors[name]):
            raise UsageError(without_values(name, model))
    return model


def _leave_meta(model: nn.Module) -> None:
    """Give tensors on ``meta`` memory on the CPU, module by module, and let each module initialise its tensors.

    A module with a parameter that has its values already is not asked to initialise, since these values would be lost.
    """
    given = {m for m in model.modules() if not all(p.is_meta for p in m.parameters())}
    instead: dict[int, torch.Tensor] = {}
    for _, module in _inner_first(model):
        for name, value in vars(module).items():
            if isinstance(value, torch.Tensor) and value.is_meta:
                raise UsageError(
                    f"{type(module).__name__}.{name} is a tensor on the device meta, and neither a parameter nor a "
                    "buffer: nobody can give it values. Use run.model(lambda: Net()), without torch.device('meta')"
                )
        here = [(name, tensor) for name, tensor in _own_tensors(module) if tensor.is_meta]
        is_new = any(id(tensor) not in instead for _, tensor in here)
        for name, tensor in here:
            # Not into the module's dict: a strategy may register another object in the place of the parameter.
            setattr(module, name, instead[id(tensor)] if id(tensor) in instead else _on_cpu(tensor))
            instead[id(tensor)] = getattr(module, name)
        methods = (getattr(module, name, None) for name in _RESETS)
        reset: Callable[[], object] | None = next(filter(callable, methods), None)
        if reset is not None and module not in given and (is_new or not own_parameters(module)):
            reset()
    for _, owner in _inner_first(model):
        initialise: Callable[[nn.Module], object] | None = getattr(owner, "_init_weights", None)
        if callable(initialise):
            for _, module in _inner_first(owner):
                if module not in given:
                    initialise(module)


def _own_tensors(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """The parameters and buffers of ``module`` itself, by name."""
    return [(n, t) for n, t in (*own_parameters(module).items(), *own_buffers(module).items()) if t is not None]


def _on_cpu(tensor: torch.Tensor) -> torch.Tensor:
    """A CPU tensor for ``tensor``, which is on ``meta``, with the attributes that the script has set."""
    empty = torch.empty_like(tensor, device="cpu", requires_grad=False)
    if not isinstance(tensor, nn.Parameter):
        return empty
    parameter = nn.Parameter(empty, tensor.requires_grad)
    vars(parameter).update(vars(tensor))
    return parameter


def _inner_first(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """All modules, each once, in the order in which constructors end: inner modules before outer ones."""
    seen: set[nn.Module] = set()

    def visit(name: str, one: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        if one in seen:
            return
        seen.add(one)
        for inner_name, inner in one.named_children():
            yield from visit(f"{name}.{inner_name}" if name else inner_name, inner)
        yield name, one

    yield from visit("", module)


def _read(model: nn.Module, weights: Mapping[str, StoredTensor]) -> None:
    """Copy ``weights`` into ``model``, one after another."""
    kind = type(model).__name__
    tensors = {n: t for n, t in model.state_dict(keep_vars=True).items() if isinstance(t, torch.Tensor)}
    there = {id(tensors[name]) for name in weights if name in tensors}
    missing = [name for name, tensor in tensors.items() if id(tensor) not in there]
    check_names(kind, missing, [name for name in weights if name not in tensors])
    held = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
    first: dict[int, str] = {}  # the name under which a tensor was read
    with torch.no_grad():
        for name, stored in weights.items():
            tensor = tensors[name]
            _check_fits(name, stored, tensor, kind)
            if id(tensor) not in held:
                raise UsageError(
                    f"weights: {name} of {kind} is neither a parameter nor a buffer: its state_dict() computes it, and "
                    "what is copied there is lost; use model.load_state_dict(...) before run.model(model)"
                )
            known = first.setdefault(id(tensor), name)
            if known == name:
                tensor.copy_(stored)
            elif stored.dtype != weights[known].dtype or not torch.equal(stored, weights[known]):
                raise UsageError(
                    f"weights: {known} and {name} are one tensor of {kind}, and two there, of other values: leave one "
                    "of them out of the file, or do not share them in the model"
                )


def _check_fits(name: str, stored: StoredTensor, tensor: torch.Tensor, kind: str) -> None:
    """Check that ``stored`` can be copied into ``tensor``, of a model of this ``kind``, without loss.

    Raises:
        UsageError: for another shape, or for numbers that ``tensor`` cannot hold, such as fractions in an integer.
    """
    if tensor.shape != stored.shape:
        raise UsageError(f"weights: {name} has shape {tuple(stored.shape)} there, and {tuple(tensor.shape)} in {kind}")
    if not torch.can_cast(stored.dtype, tensor.dtype):
        raise UsageError(
            f"weights: {name} is {stored.dtype} there, and {tensor.dtype} in {kind}, which cannot hold its values; "
            "write the file from a model of this kind"
        )


def check_names(model: str, missing: Sequence[str], unknown: Sequence[str]) -> None:
    """Check that weights belong to ``model``: no tensor is ``missing``, and none is ``unknown`` to the model.

    Raises:
        UsageError: if the names differ.
    """
    found = ((missing, "of its tensors are not there"), (unknown, "are not its own"))
    if missing or unknown:
        raise UsageError(
            f"weights of another model than {model}: "
            + "; ".join(f"{len(names)} {what}, such as {', '.join(names[:3])}" for names, what in found if names)
            + ". The names must be those of model.state_dict()"
        )


class _Written(TorchDispatchMode):
    """Records which tensors are given values."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._storages: Final[set[int]] = set()

    def has(self, tensor: torch.Tensor) -> bool:
        """Whether some element of ``tensor`` was given a value while this mode was active."""
        return storage_key(tensor) in self._storages

    def __torch_dispatch__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> object:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        with without_torch_function(of_modes=True):
            self._storages.update(storage_key(t) for t in written_by(func, args, kwargs))
            if allocates(func) and is_plain(out):  # where another storage may have been before
                self._storages.discard(storage_key(out))
        return out
