"""Which functions of the script run, when an object is called, or when a sample is made."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Final

from torch import nn
from torch.autograd import Function
from torch.optim import Optimizer
from torch.utils.data import Dataset

from lockstep.run.source.decided_tests import is_script
from lockstep.run.source.dynamic_calls import objects_called
from lockstep.run.source.line_calls import MEMO
from lockstep.run.source.script_functions import Argument, Callee, Context, is_of
from lockstep.run.source.script_places import NOTHING, attribute_of, attributes_of
from lockstep.run.source.source_reads import ITEMS, Call, Lines, Path
from lockstep.torch_private import forward_hooks, step_hooks

_OF_WITH: Final = {"__enter__", "__exit__", "__aenter__", "__aexit__"}
_MOST_WRAPPERS: Final = 8


def of_script(function: object, bound: Argument | None) -> list[Callee]:
    """A ``function`` that is the script's, with its first argument; nothing for another one."""
    for _ in range(_MOST_WRAPPERS):  # such as `functools.lru_cache` and `torch.no_grad` make
        if isinstance(function, FunctionType) and is_script(function.__code__.co_filename):
            return [Callee(function, bound)]
        function = attribute_of(function, "__wrapped__")
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
    while is_of(value, functools.partial, MEMO):
        value = value.func if isinstance(value, functools.partial) else attribute_of(value, "__wrapped__")
    return value


def is_memo(value: object) -> bool:
    """Whether a function remembers what it has returned, by `functools.lru_cache`."""
    return is_of(value, MEMO)


def computing(module: nn.Module, text: str) -> Iterator[Callee]:
    """What a call of ``module`` runs, but for its parts: its forward pass, and hooks that may return another value."""
    yield from of_script(type(module).forward, Argument((), module, text))
    for hook in forward_hooks(module):
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


def updating(optimizer: Optimizer) -> Iterator[Callee]:
    """The functions of the script that run when an optimizer steps: its own, and hooks."""
    yield from of_script(type(optimizer).step, Argument((), optimizer, type(optimizer).__name__))
    for hook in (hook for hooks in step_hooks(optimizer) for hook in hooks.values()):
        for function, bound, _ in called_by(hook, "a hook of the optimizer"):
            names = function.__code__.co_varnames
            known = {names[0]: optimizer} if bound is None else dict(zip(names, (bound.value, optimizer), strict=False))
            yield Callee(function, None, known)


def scheduling(scheduler: object) -> Iterator[Callee]:
    """The functions of the script by which a scheduler finds a learning rate."""
    name = type(scheduler).__name__
    yield from of_script(getattr(type(scheduler), "get_lr", None), Argument((), scheduler, name))
    for part in attributes_of(scheduler).values():
        for each in _items_in(part):
            yield from called_by(each, type(each).__name__)


def _items_in(part: object) -> Iterable[object]:
    return part if isinstance(part, list | tuple) else (part,)


def callees_of(context: Context, call: Call) -> list[Callee]:
    """The functions of the script that a call runs, or may run: those that its objects name, and others of its line."""
    named = _named_by(context, call)
    return [*named, *ran_by(context, Lines(call.line, call.line))] if call.line else named


def ran_by(context: Context, lines: Lines) -> list[Callee]:
    """The functions of the script that lines of a function were seen to run, beside those that calls in them name.

    Without those that run still, and without what a `with` runs, which gives no value.
    """
    if not (ran := context.calls.ran_by(context.code.co_filename, lines)):
        return []
    calls = [use.read for use in context.reads.uses if use.read and lines.first <= use.line <= lines.last]
    named = {callee.function.__code__ for call in calls for callee in _named_by(context, call)}
    known = named.union(frame.f_code for frame in context.running)
    return [
        Callee(one.function, None, one.arguments)
        for one in ran
        if one.function.__code__ not in known and one.function.__name__ not in _OF_WITH
    ]


def _named_by(context: Context, call: Call) -> list[Callee]:
    if several := objects_called(context, call):
        running = [frame.f_code for frame in context.running]  # which are read with what they have
        callees = [callee for value in several for callee in _called(value, type(value).__name__)]
        return [callee for callee in callees if callee.function.__code__ not in running]
    if len(call.function) != 1 or not isinstance(path := call.function[0], Path):
        return []
    value = unwrapped(context.value_of(path))
    owner = context.value_of(path.owner) if path.attributes else NOTHING
    if path.attributes[-1:] == ("apply",) and isinstance(owner, type) and issubclass(owner, Function):
        return [c for name in ("forward", "backward") for c in of_script(attribute_of(owner, name), None)]
    if isinstance(value, FunctionType):
        if not path.attributes:
            return of_script(value, None)
        is_method = not is_of(owner, ModuleType, type) and path.attributes[-1] not in attributes_of(owner)
        return of_script(value, Argument((path.owner,), owner) if is_method else None)
    return _called(value, path.text)


def _called(value: object, text: str) -> list[Callee]:
    """The functions of the script that a call of ``value`` runs, which the script calls ``text``."""
    if isinstance(value, nn.Module):
        named = [(f"{text}.{name}" if name else text, one) for name, one in value.named_modules()]
        return [callee for name, one in named for callee in computing(one, name)]
    if isinstance(value, type):
        return of_script(getattr(value, "__init__", None), Argument((), NOTHING))
    return called_by(value, type(value.__self__).__name__ if isinstance(value, MethodType) else text)


def is_of_script(module: object) -> bool:
    """Whether a module is the script itself, or a file beside it."""
    return is_script(attributes_of(module).get("__file__") or "<frozen")
