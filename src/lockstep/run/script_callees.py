"""Which functions of the script run, when an object is called, or when a sample is made."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Final

from torch import nn
from torch.utils.data import Dataset

from lockstep.heartbeat import is_users
from lockstep.run.script_functions import Argument, Callee, Context, is_of
from lockstep.run.script_places import attribute_of, attributes_of
from lockstep.run.source_reads import ITEMS, Call, Path

_Memo: Final = type(functools.lru_cache(int))
is_script: Final = functools.lru_cache(maxsize=1024)(is_users)


def of_script(function: object, bound: Argument | None) -> list[Callee]:
    """A ``function`` that is the script's, with its first argument; nothing for another one."""
    if not isinstance(function, FunctionType):  # such as `functools.lru_cache` makes
        function = attribute_of(function, "__wrapped__")
    if isinstance(function, FunctionType) and is_script(function.__code__.co_filename):
        return [Callee(function, bound)]
    return []


def called_by(value: object, text: str) -> list[Callee]:
    """The functions of the script that a call of ``value`` runs, which the script calls ``text``."""
    value = unwrapped(value)
    if isinstance(value, MethodType):
        return of_script(value.__func__, Argument((), value.__self__, text))
    if isinstance(value, FunctionType):
        return of_script(value, None)
    called = attribute_of(value, "__call__")
    return of_script(called, Argument((), value, text)) if isinstance(called, FunctionType) else []


def unwrapped(value: object) -> object:
    """The function within `functools.partial` and `functools.lru_cache` ones."""
    while is_of(value, functools.partial, _Memo):
        value = value.func if isinstance(value, functools.partial) else attribute_of(value, "__wrapped__")
    return value


def is_memo(value: object) -> bool:
    """Whether a function remembers what it has returned, by `functools.lru_cache`."""
    return is_of(value, _Memo)


def computing(module: nn.Module, text: str) -> Iterator[Callee]:
    """What a call of ``module`` runs, but for its parts: its forward pass, and hooks that may return another value."""
    yield from of_script(type(module).forward, Argument((), module, text))
    for hook in (*module._forward_pre_hooks.values(), *module._forward_hooks.values()):
        if isinstance(hook, MethodType):
            yield from of_script(hook.__func__, Argument((), hook.__self__, f"{text}'s hook"))
        else:
            yield from of_script(hook, None)


def is_torchs_change(context: Context, call: Call) -> bool:
    """Whether torch's function that is called changes what it is given, such as `clip_grad_norm_`."""
    function = context.value_of(call.function[0]) if call.function and isinstance(call.function[0], Path) else None
    if not isinstance(function, FunctionType | BuiltinFunctionType):
        return False
    name = function.__name__
    return str(function.__module__).startswith("torch") and (name.endswith("_") or name == "vector_to_parameters")


def sampling(source: object) -> Iterator[Callee]:
    """The functions of the script by which a data set, or a function given with it, makes a sample."""
    waiting, seen = [source], set[int]()
    while waiting:
        source = waiting.pop()
        if id(source) in seen:
            continue
        seen.add(id(source))
        name = type(source).__name__
        callees = called_by(source, name)
        for method in ("__getitem__", "__getitems__", ITEMS):
            callees += of_script(getattr(type(source), method, None), Argument((), source, name))
        yield from callees
        if not callees:  # of a package, which has others of the script, such as transforms
            parts = (each for part in attributes_of(source).values() for each in _items_in(part))
            waiting += (each for each in parts if is_of(each, Dataset) or called_by(each, ""))


def _items_in(part: object) -> Iterable[object]:
    return part if isinstance(part, list | tuple) else (part,)
