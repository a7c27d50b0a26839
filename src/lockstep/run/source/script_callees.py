"""The functions of the script that run when an object is called, or when a sample is made.

Also where the script finds its function only when it runs: callbacks, events, hooks.

    for callback in self.callbacks:            the callback of each item
        callback.after_step(loss)
    self.handlers[event](loss)                 the handler under the key, if that is known; else each of them
    getattr(callback, f"on_{event}")(loss)     the method of that name, if it is known
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Iterable, Iterator
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Final

from torch import nn
from torch.autograd import Function
from torch.optim import Optimizer
from torch.utils.data import Dataset

from lockstep.run.source.line_calls import MEMO
from lockstep.run.source.script_functions import Argument, Callee, Context, is_of
from lockstep.run.source.script_modules import is_script
from lockstep.run.source.script_places import NOTHING, attribute_of, attributes_of, is_static
from lockstep.run.source.source_paths import Path
from lockstep.run.source.source_reads import ITEMS, Call, Choice, Counted, Lines, Read, Text
from lockstep.torch_private import forward_hooks, step_hooks

_OF_WITH: Final = {"__enter__", "__exit__", "__aenter__", "__aexit__"}
_MOST_WRAPPERS: Final = 8
_DEEPEST: Final = 4  # of containers within each other, and of names for other names
_MOST: Final = 64
#: Methods of containers, and functions of Python, of which the value has, or is, an item of what they are given.
_GIVE_ITEMS: Final = {ITEMS, "values", "items", "get", "pop", "popleft", "copy"}
_HAND_ON: Final = {"list", "tuple", "set", "dict", "sorted", "reversed", "zip", "enumerate", "filter", "iter", "next"}
_SEQUENCES: Final = (list, tuple, set, frozenset, deque)


def of_script(function: object, bound: Argument | None) -> list[Callee]:
    """``function`` with its first argument, if the function is the script's."""
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
    """The function inside `functools.partial` and `functools.lru_cache`."""
    while is_of(value, functools.partial, MEMO):
        value = value.func if isinstance(value, functools.partial) else attribute_of(value, "__wrapped__")
    return value


def is_memo(value: object) -> bool:
    """Whether a function remembers its results, by `functools.lru_cache`."""
    return is_of(value, MEMO)


def computing(module: nn.Module, text: str) -> Iterator[Callee]:
    """The functions that a call of ``module`` itself runs: its forward pass, and hooks that may change the result."""
    yield from of_script(type(module).forward, Argument((), module, text))
    for hook in forward_hooks(module):
        if isinstance(hook, MethodType):
            yield from of_script(hook.__func__, Argument((), hook.__self__, f"{text}'s hook"))
        else:
            yield from of_script(hook, None)


def is_torchs_change(context: Context, call: Call) -> bool:
    """Whether a called function of torch changes its arguments, such as `clip_grad_norm_`."""
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
    """The functions of the script that run when an optimizer steps: its methods and hooks."""
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
    """The functions of the script that a call may run: by the names in the call, and others of the call's line."""
    named = _named_by(context, call)
    return [*named, *ran_by(context, Lines(call.line, call.line))] if call.line else named


def ran_by(context: Context, lines: Lines) -> list[Callee]:
    """The functions of the script that ``lines`` were seen to run, beside functions that calls in the lines name.

    Without functions that are still running, and without methods that a `with` runs, which give no value.
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
    """The functions of the script that ``call`` names, found once for each function that is followed."""
    if id(call) not in context.callees:
        context.callees[id(call)] = call, _find_named(context, call)
    return context.callees[id(call)][1]


def _find_named(context: Context, call: Call) -> list[Callee]:
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
        is_method = is_method and not is_static(owner, path.attributes[-1])
        return of_script(value, Argument((path.owner,), owner) if is_method else None)
    return _called(value, path.text)


def _called(value: object, text: str) -> list[Callee]:
    """The functions of the script that a call of ``value`` runs, which the script calls ``text``."""
    if isinstance(value, nn.Module):
        named = [(f"{text}.{name}" if name else text, one) for name, one in value.named_modules()]
        return [callee for name, one in named for callee in computing(one, name)]
    if isinstance(value, type):
        return of_script(getattr(value, "__init__", None), Argument((), NOTHING))
    return called_by(value, _owner_of(value) if isinstance(value, MethodType) else text)


def _owner_of(method: MethodType) -> str:
    own = method.__self__
    return own.__name__ if isinstance(own, type) else type(own).__name__


def objects_called(context: Context, call: Call) -> list[object]:
    """The objects that ``call`` may call; none where the called function is known by its name."""
    match call.function:
        case (Path(root=root) as path,) if not context.is_loop_variable(root) and (
            path.attributes or context.value_of(path) is not NOTHING
        ):
            return []
    return list(_items(_objects(context, call.function, _DEEPEST), _keys(context, call.function)))[:_MOST]


def _objects(context: Context, reads: Iterable[Read], depth: int) -> Iterator[object]:
    """The objects that a value computed from ``reads`` may be, or may be an item of."""
    if not depth:
        return
    for read in reads:
        match read:
            case Path(root=root, attributes=attributes):
                known = NOTHING if context.is_loop_variable(root) else context.value_of(Path(root))
                roots = [known]
                if known is NOTHING:
                    bound = context.reads.bound_to.get(root, [])
                    parts = (_items(_objects(context, part, depth - 1), _keys(context, part)) for part in bound)
                    roots = [one for part in parts for one in part]
                yield from (value for one in roots if (value := _method(one, attributes)) is not NOTHING)
            case Call(function=(Path(root="getattr", attributes=()),), arguments=(owners, names, *_)):
                texts = [text for text in _keys(context, names) if isinstance(text, str)]
                for owner in _items(_objects(context, owners, depth - 1), ()):
                    yield from (value for text in texts if (value := _method(owner, (text,))) is not NOTHING)
            case Call(function=(Path(attributes=(*_, method)) as path,)) if method in _GIVE_ITEMS:
                yield from _objects(context, (path.owner,), depth)
            case Call(function=(Path(root=root, attributes=()),)) if root in _HAND_ON:
                yield from _objects(context, read.every, depth)
            case Choice(reads=inner) | Counted(items=inner):
                yield from _objects(context, inner, depth)


def _method(owner: object, attributes: Iterable[str]) -> object:
    """The attribute of an object under these names; a function of the class as a method."""
    value = owner
    for name in attributes:
        owner, value = value, attribute_of(value, name)
        if is_of(value, FunctionType) and name not in attributes_of(owner) and not isinstance(owner, type):
            value = MethodType(value, owner)  # type: ignore[arg-type]  # as just asked
    return value


def _items(values: Iterable[object], keys: Iterable[object], depth: int = _DEEPEST) -> Iterator[object]:
    """The objects in containers, or under ``keys`` where a dict has these; any other object itself."""
    for value in values:
        if is_of(value, dict):
            held: dict[object, object] = value  # type: ignore[assignment]  # as just asked
            named = [dict.__getitem__(held, key) for key in keys if dict.__contains__(held, key)]
            inner: Iterable[object] = named or list(dict.values(held))
        elif type(value) in _SEQUENCES:
            inner = list(value)  # type: ignore[call-overload]  # as just asked
        elif is_of(value, nn.ModuleList, nn.ModuleDict):
            inner = list(attributes_of(value).values())
        else:
            yield value
            continue
        if depth:
            yield from _items(inner, (), depth - 1)


def _keys(context: Context, reads: Iterable[Read]) -> list[object]:
    """The numbers and texts among the values of ``reads``, which may be keys."""
    texts = [context.text_of(read) for read in reads if isinstance(read, Text)]
    values = [context.value_of(read) for read in reads if isinstance(read, Path)]
    return [one for one in (*texts, *values) if type(one) in (str, int)]
