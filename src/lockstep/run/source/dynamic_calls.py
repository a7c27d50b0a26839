"""Which objects a call may run where the script finds its function only when it runs: callbacks, events, hooks.

for callback in self.callbacks:            the callback of each item
    callback.after_step(loss)
self.handlers[event](loss)                 the handler under the key, if that is known; else each of them
getattr(callback, f"on_{event}")(loss)     the method of that name, if it is known
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from types import FunctionType, MethodType
from typing import Final

from torch import nn

from lockstep.run.source.script_functions import Context, is_of
from lockstep.run.source.script_places import NOTHING, attribute_of, attributes_of
from lockstep.run.source.source_reads import ITEMS, Call, Choice, Counted, Path, Read, Text

_DEEPEST: Final = 4  # of containers within each other, and of names for other names
_MOST: Final = 64
#: Methods of containers, and functions of Python, of which the value has, or is, an item of what they are given.
_GIVE_ITEMS: Final = {ITEMS, "values", "items", "get", "pop", "popleft", "copy"}
_HAND_ON: Final = {"list", "tuple", "set", "dict", "sorted", "reversed", "zip", "enumerate", "filter", "iter", "next"}
_SEQUENCES: Final = (list, tuple, set, frozenset, deque)


def objects_called(context: Context, call: Call) -> list[object]:
    """The objects that ``call`` may call; nothing where it calls a function that is known by its name."""
    match call.function:
        case (Path(root=root) as path,) if not context.is_loop_variable(root) and (
            path.attributes or context.value_of(path) is not NOTHING
        ):
            return []
    return list(_items(_objects(context, call.function, _DEEPEST), _keys(context, call.function)))[:_MOST]


def _objects(context: Context, reads: Iterable[Read], depth: int) -> Iterator[object]:
    """The objects that a value may be, or may be an item of, which is computed from these."""
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
    """What an object has under these names; a function of its class as its method."""
    value = owner
    for name in attributes:
        owner, value = value, attribute_of(value, name)
        if is_of(value, FunctionType) and name not in attributes_of(owner) and not isinstance(owner, type):
            value = MethodType(value, owner)  # type: ignore[arg-type]  # as just asked
    return value


def _items(values: Iterable[object], keys: Iterable[object], depth: int = _DEEPEST) -> Iterator[object]:
    """The objects in containers, or those under ``keys`` where a dict has these; others are themselves."""
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
    """The numbers and texts among the values that something is computed from, which may be keys."""
    texts = [context.text_of(read) for read in reads if isinstance(read, Text)]
    values = [context.value_of(read) for read in reads if isinstance(read, Path)]
    return [one for one in (*texts, *values) if type(one) in (str, int)]
