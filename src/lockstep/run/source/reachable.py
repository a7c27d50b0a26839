"""The values that a script's objects hold, seen without running their code, and the changes between two looks.

look({"model": model, "callback": callback})    {"model.tau": ..., "callback.calls": ..., "callback.seen[3]": ...}
...                                             the script does something
changed(before, now)                            ["callback.calls", "model.tau", ...]

A change of one of these is no fault by itself: loop variables and lists of losses change in every script. The names
are for a message about a difference that was found otherwise, and for what must not change.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import inspect
import io
import itertools
import operator
import os
import random
import sys
import traceback
import warnings
import zlib
from argparse import Namespace
from array import array
from collections import UserDict, UserList, deque
from collections.abc import Callable, Collection, Iterator, Mapping
from contextvars import ContextVar
from datetime import date, time, timedelta
from decimal import Decimal
from enum import Enum
from fractions import Fraction
from multiprocessing.sharedctypes import Synchronized
from pathlib import PurePath
from types import (
    BuiltinFunctionType,
    CellType,
    CodeType,
    FrameType,
    FunctionType,
    GeneratorType,
    MemberDescriptorType,
    MethodType,
    MethodWrapperType,
    ModuleType,
    SimpleNamespace,
)
from typing import Any, Final, NamedTuple
from uuid import UUID
from weakref import WeakKeyDictionary, WeakValueDictionary

import numpy as np
import torch
from torch.utils.data.dataloader import _BaseDataLoaderIter

from lockstep.heartbeat import own_lines
from lockstep.run.checks.divergence import checksum
from lockstep.run.source.script_modules import dict_of, file_of
from lockstep.torch_private import batches_yielded, version_of

_MOST_ITEMS: Final = 500  # of one list or dict
_VISITS: Final = 5  # objects that are looked at for each mark
SMALL: Final = 1 << 20  #: elements of a tensor or an array that are read
NUMBERS: Final = (bool, int, float, complex, str, bytes, type(None))  #: and texts, and None
GENERATORS: Final = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
#: The methods of Python's own objects, such as `itertools.count().__next__`.
BUILTIN_METHODS: Final = (BuiltinFunctionType, MethodWrapperType)
_NO_STATE: Final = (ModuleType, type, CodeType, FrameType, BuiltinFunctionType)
#: Packages whose functions and objects lead to all of the process, or are no state of a script; but for these of them.
#: The last three lead to all tests of a suite, if one of them trains.
_FOREIGN: Final = sys.stdlib_module_names | {"lockstep", "numpy", "tqdm", "pytest", "_pytest", "pluggy"}
_FOREIGN_TORCH: Final = (
    "torch._",
    "torch.autograd",
    "torch.distributed",
    "torch.fx",
    "torch.jit",
    "torch.utils.data.dataloader",
)
_HOLDERS: Final = (
    dict,
    list,
    tuple,
    set,
    deque,
    MethodType,
    GeneratorType,
    functools.partial,
    SimpleNamespace,
    Namespace,
    UserDict,
    UserList,
    WeakKeyDictionary,
    WeakValueDictionary,
    type(os.environ),
)
#: Where `torch.nn.Module` has its parts, which users know by the names within.
MODULE_PARTS: Final = ("_parameters", "_buffers", "_modules")
#: Iterators of Python's own, which tell how far they are and what they go over, but not by attributes.
ITERATORS: Final[tuple[type, ...]] = (
    *(kind for kind in vars(itertools).values() if isinstance(kind, type)),
    *(enumerate, filter, map, reversed, zip, type(iter(int, 0))),
    *(type(iter([])), type(iter(())), type(iter(range(0))), type(iter(range(1 << 64))), type(reversed([]))),
    *(type(iter({})), type(iter({}.values())), type(iter({}.items())), type(reversed({})), type(iter(set()))),
    *(type(iter("")), type(iter(b"")), type(iter(deque()))),
)


TENSOR_RANK: Final = 2  #: the `Mark.rank` of one
_LISTS: Final = {"list", "tuple"}  # whose marks are their lengths
#: The `Mark.kind` of what may be a cache, which each rank fills by its own samples, and which grows.
CACHES: Final = {"dict", "set", "OrderedDict", "defaultdict"}


class Mark(NamedTuple):
    """Summary of one value; equal for equal values."""

    rank: int  #: how little a change tells: 0 for a random generator, 1 a number or text, 2 a tensor, 3 a length
    kind: str  #: the value's type
    seen: object


def look(
    roots: Mapping[str, object],
    *,
    skip: Collection[int] = (),
    but: tuple[type, ...] = (),
    depth: int = 8,
    limit: int = 20_000,
) -> dict[str, Mark]:
    """A mark of each number, text, tensor, array, generator and container within reach of ``roots``, by its path.

    Seen are attributes, items, counters, and the variables that functions have from outside. A value that several paths
    reach has the shortest path. No code of the objects is run, and nothing is raised. Takes some microseconds for each
    value, and a pass over each small tensor of the CPU; waits for no GPU.

    Args:
        roots: objects by the names that paths begin with.
        skip: the `id` of each object that is left out, with its contents.
        but: kinds of objects that are left out, with their contents.
        depth: how many steps from a root.
        limit: number of marks, of the values nearest to the roots.
    """
    marks: dict[str, Mark] = {}
    seen = set(skip)
    waiting = deque((name, value, depth) for name, value in roots.items())
    for _ in range(_VISITS * limit):  # an object may make new ones whenever it is looked at
        if not waiting or len(marks) >= limit:
            break
        path, value, left = waiting.popleft()
        is_number = type(value) in NUMBERS  # of which one object may be the value of many variables
        if not is_number and (id(value) in seen or issubclass(type(value), but)):
            continue
        if (mark := mark_of(value)) is not None:
            marks[path] = mark
        if not is_number:
            seen.add(id(value))
            waiting.extend((path + step, part, left - 1) for step, part in (parts_of(value) if left else ()))
    return marks


def find(
    roots: Mapping[str, object],
    kind: type | tuple[type, ...],
    *,
    skip: Collection[int] = (),
    depth: int = 4,
    limit: int = 3000,
) -> dict[str, object]:
    """The objects of a ``kind`` within reach of ``roots``, by the shortest path to each; without objects in these.

    See `look`; ``limit`` is the number of objects that are looked at.
    """
    found: dict[str, object] = {}
    seen = set(skip)
    waiting = deque((name, value, depth) for name, value in roots.items())
    while waiting and len(seen) < limit:
        path, value, left = waiting.popleft()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if issubclass(type(value), kind):
            found[path] = value
        elif left and type(value) not in NUMBERS:
            waiting.extend((path + step, part, left - 1) for step, part in parts_of(value))
    return found


def changed(before: Mapping[str, Mark], after: Mapping[str, Mark]) -> list[str]:
    """The paths whose marks differ, the most telling ones first: random generators, numbers, tensors, lengths.

    Then the paths that only one of the two has, but for items of lists that both have: an object that had another path
    is no other object.
    """
    both = [path for path in after if before.get(path, after[path]) != after[path]]
    both.sort(key=lambda path: (min(before[path].rank, after[path].rank), path.count(".") + path.count("[")))
    there = {path for path in after if path in before and before[path] == after[path] and after[path].kind in _LISTS}
    apart = (*(path for path in after if path not in before), *(path for path in before if path not in after))
    return [*both, *(path for path in apart if there.isdisjoint(_holders(path)))]


def _holders(path: str) -> Iterator[str]:
    """The paths of containers in which the object at ``path`` lies, as ``a.b`` and ``a.b[0]`` of ``a.b[0][1].c``."""
    return (path[:place] for place, sign in enumerate(path) if sign == "[")


def script_roots(frame: FrameType | None) -> dict[str, object]:
    """The variables of the script's functions that are running, from ``frame`` outward, by name.

    And the globals that the code of the innermost one names, in modules of the script, too; modules and classes
    themselves are left out. Of two variables with one name, the outer one is called ``function.name``, also before the
    inner one is set.
    """
    roots: dict[str, object] = {}
    inner: set[str] = set()
    for number, script in enumerate(script_frames(frame)):
        variables = variables_of(script)
        if number == 0:
            names = script.f_code.co_names
            used = (name for name in names if name in script.f_globals)
            variables |= {name: script.f_globals[name] for name in used if name not in variables}
            for name, module in [*variables.items()]:
                held = vars(module) if issubclass(type(module), ModuleType) and file_of(module) else {}
                variables |= {f"{name}.{attribute}": held[attribute] for attribute in names if attribute in held}
        for name, value in variables.items():
            if name.startswith("__") or issubclass(type(value), _NO_STATE):
                continue
            known = roots[name] is value if name in roots else name not in inner
            roots.setdefault(name if known else f"{script.f_code.co_name}.{name}", value)
        inner.update(script.f_code.co_varnames, script.f_code.co_cellvars)
    return roots


def root_of(owner: object, name: str, roots: Mapping[str, object]) -> str:
    """The name that ``roots`` of `script_roots` have for a variable of a function that is running, or of a module."""
    if isinstance(owner, FrameType):
        value, code = variables_of(owner).get(name), owner.f_code.co_name
    else:
        value, code = owner.get(name) if type(owner) is dict else None, "<module>"
    return name if name in roots and roots[name] is value else f"{code}.{name}"


def script_frames(frame: FrameType | None) -> list[FrameType]:
    """The frames of the script's functions that are running, from ``frame`` outward."""
    frames = [] if frame is None else [each for each, _ in traceback.walk_stack(frame)]
    own = own_lines([each.f_code.co_filename for each in reversed(frames)])
    scripts = [frames[-1 - index] for index in reversed(own)]
    # What runs the script is not the script.
    ends = next((n for n, script in enumerate(scripts) if script.f_code.co_name == "<module>"), len(scripts))
    return scripts[: ends + 1]


def variables_of(frame: FrameType) -> dict[str, Any]:
    """The variables of the function that runs in ``frame``, by name."""
    held = frame.f_locals
    variables = dict(held)
    forget_snapshot(frame, held)
    return variables


def set_variables(frame: FrameType, values: Mapping[str, object]) -> None:
    """Set variables of the function that runs in ``frame``."""
    held = frame.f_locals
    for name, value in values.items():
        held[name] = value
    # Before Python 3.13 that was a snapshot of the function's variables.
    ctypes.pythonapi.PyFrame_LocalsToFast(ctypes.py_object(frame), ctypes.c_int(0))
    forget_snapshot(frame, held)


def forget_snapshot(frame: FrameType, held: dict[str, object]) -> None:
    """Empty the dict of ``frame.f_locals``: before Python 3.13 the frame would keep all objects in the dict alive."""
    if sys.version_info < (3, 13) and frame.f_code.co_flags & inspect.CO_OPTIMIZED:
        held.clear()


def mark_of(value: object) -> Mark | None:
    """The mark of ``value`` without its contents; None for an object without a value to compare. Raises nothing."""
    kind = type(value)
    try:
        for kinds, rank, see in _SEEN:
            # Not `isinstance`, which asks the object itself: it may stand for another one, far away or gone.
            if issubclass(kind, kinds):
                return Mark(rank, kind.__qualname__, see(value))
    except Exception:  # noqa: BLE001 - of a kind that nobody thought of, such as a tensor without storage
        pass
    return None


def size_of(mark: Mark) -> str:
    """The shape of a tensor, in words, if its ``mark`` tells."""
    if not (tells_values(mark) and isinstance(mark.seen, tuple)):
        return ""
    return f" of shape {tuple(mark.seen[1])}"


def tells_values(mark: Mark) -> bool:
    """Whether the mark of a tensor is of its values; that of a large tensor, or of one on a GPU, is of the object."""
    return mark.rank == TENSOR_RANK and isinstance(mark.seen, tuple) and not isinstance(mark.seen[1], int)


def _seen_of(value: object) -> object:
    return None if (mark := mark_of(value)) is None else mark.seen


def is_plain(value: torch.Tensor) -> bool:
    """Whether a tensor holds all of its values itself, on this rank."""
    return value.layout is torch.strided and not (value.is_nested or value.is_meta or hasattr(value, "to_local"))


def is_told_by_values(value: torch.Tensor) -> bool:
    """Whether the mark of a tensor is of its values, see `tells_values`; without computing the mark."""
    return is_plain(value) and value.device.type == "cpu" and value.numel() <= SMALL


def _seen_of_tensor(value: torch.Tensor) -> object:
    if is_told_by_values(value):
        return value.dtype, value.shape, int(checksum(value))
    return value.dtype, id(value), None if value.is_inference() else version_of(value)


def _seen_of_array(value: np.ndarray[Any, Any]) -> object:
    if value.dtype.hasobject:  # its bytes are addresses
        return value.shape, [repr(mark_of(item)) for item in value.reshape(-1)[:_MOST_ITEMS].tolist()]
    return value.dtype.str, value.shape, _checksum(value.reshape(-1)[:: -(-value.size // SMALL) or 1].tobytes())


def _seen_of_set(value: Any) -> object:
    return len(value), sorted(repr(item) for item in itertools.islice(value, _MOST_ITEMS) if type(item) in NUMBERS)


def _steps_of(value: Any) -> object:
    """The position of an iterator of Python's own, as far as visible without a step; the parts show the rest."""
    if issubclass(type(value), itertools.count):
        return repr(value)
    if hasattr(type(value), "__length_hint__"):
        return operator.length_hint(value)
    return [_numbers_in(item) for item in reversed(_inside(value))]  # the state first, and then what it goes over


def _inside(iterator: Any) -> tuple[object, ...]:
    """The parts of an iterator of Python's own, and its state."""
    try:
        with warnings.catch_warnings():  # those of `itertools` warn in Python 3.12 and 3.13
            warnings.simplefilter("ignore", DeprecationWarning)
            found: tuple[object, ...] = iterator.__reduce__()[1:]
    except TypeError:  # and have none from 3.14 on. Tuples that are their own may have holes: to read those is to crash
        found = tuple(part for part in gc.get_referents(iterator) if type(part) is not tuple)
    return found


def _numbers_in(value: object) -> object:
    """The numbers in nested tuples, and the positions of iterators, each in its place."""
    if isinstance(value, tuple):
        return [_numbers_in(item) for item in value[:_MOST_ITEMS]]
    if hasattr(type(value), "__length_hint__") and isinstance(value, ITERATORS):
        return operator.length_hint(value)
    return value if type(value) in NUMBERS else None


def _checksum(value: object) -> int:
    return zlib.crc32(value if isinstance(value, bytes) else repr(value).encode())


_SEEN: Final[tuple[tuple[Any, int, Callable[[Any], object]], ...]] = (
    ((str, bytes), 1, lambda value: value),
    ((bool, int, float, complex, type(None)), 1, repr),  # which is exact, and nan is itself
    (np.generic, 1, lambda value: value.tobytes()),
    ((Decimal, Fraction, date, time, timedelta, UUID, PurePath), 1, repr),
    (Enum, 1, lambda value: value.name),
    (ITERATORS, 1, _steps_of),
    (BUILTIN_METHODS, 1, lambda value: _seen_of(value.__self__)),  # such as of `itertools.count`
    (Synchronized, 1, lambda value: repr(value.value)),
    (ContextVar, 1, lambda value: _seen_of(value.get(None))),
    (_BaseDataLoaderIter, 1, batches_yielded),
    (GeneratorType, 1, lambda value: value.gi_frame and value.gi_frame.f_lasti),
    (torch.Generator, 0, lambda value: int(checksum(value.get_state()))),
    (np.random.Generator, 0, lambda value: _checksum(value.bit_generator.state)),
    (np.random.RandomState, 0, lambda value: _checksum(value.get_state(legacy=False))),
    (random.Random, 0, lambda value: _checksum(value.getstate())),
    (torch.Tensor, TENSOR_RANK, _seen_of_tensor),
    (np.ndarray, TENSOR_RANK, _seen_of_array),
    ((bytearray, memoryview, array), TENSOR_RANK, zlib.crc32),
    (io.BytesIO, TENSOR_RANK, lambda value: zlib.crc32(value.getbuffer())),
    (io.StringIO, TENSOR_RANK, lambda value: _checksum(value.getvalue().encode())),
    ((set, frozenset), 3, _seen_of_set),
    ((dict, list, tuple, deque), 3, len),
)


def parts_of(value: object) -> list[tuple[str, object]]:
    """The objects one step from ``value``, each with the text of the step."""
    try:
        return list(_walk(value, type(value)))
    except Exception:  # noqa: BLE001 - such as a dict that another thread changes
        return []


def _walk(value: Any, kind: type) -> Iterator[tuple[str, object]]:
    if issubclass(kind, (torch.Tensor, np.ndarray, *_NO_STATE)):
        return
    if issubclass(kind, dict):
        for number, (key, item) in enumerate(_first(dict.items(value))):
            yield f"[{key!r}]" if type(key) in NUMBERS else f".values[{number}]", item
    elif issubclass(kind, list | tuple | deque):
        names = getattr(kind, "_fields", ()) if issubclass(kind, tuple) else ()
        for index, item in enumerate(_first(value)):
            yield f".{names[index]}" if index < len(names) else f"[{index}]", item
    elif issubclass(kind, MethodType):
        yield from ((".__self__", value.__self__), (".__func__", value.__func__))
    elif issubclass(kind, GeneratorType) and value.gi_frame is not None:
        yield from ((f".{name}", item) for name, item in dict(value.gi_frame.f_locals).items())
        yield ".gi_yieldfrom", value.gi_yieldfrom
    elif issubclass(kind, functools.partial):
        yield from ((".func", value.func), (".args", value.args), (".keywords", value.keywords))
    elif issubclass(kind, ITERATORS):
        if not hasattr(kind, "__length_hint__"):
            yield from ((f".parts[{number}]", part) for number, part in enumerate(_inside(value)))
    elif issubclass(kind, FunctionType):
        yield from _variables_of(value)
    if not is_foreign(kind):
        yield from _attributes_of(value, kind)


def _first(items: Any) -> Iterator[Any]:
    return itertools.islice(items, _MOST_ITEMS)


def _variables_of(function: FunctionType) -> Iterator[tuple[str, object]]:
    """The attributes of a ``function``, and its variables from the functions around it and from its module."""
    if _is_foreign(function.__module__ or ""):
        return
    yield from ((f".{name}", item) for name, item in vars(function).items())
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
        if cell != CellType():  # which is not set yet
            yield f".{name}", cell.cell_contents
    for name in function.__code__.co_names:
        if name in function.__globals__ and not issubclass(type(function.__globals__[name]), _NO_STATE):
            yield f".{name}", function.__globals__[name]


def _attributes_of(value: object, kind: type) -> Iterator[tuple[str, object]]:
    found: dict[str, object] = {}
    for each, is_torchs in _classes_with_parts(kind):
        for name, item in vars(each).items():
            if type(item) is MemberDescriptorType and not name.startswith("__"):  # of `__slots__`
                with contextlib.suppress(AttributeError):  # not set
                    found[name] = item.__get__(value)
            elif not is_torchs and not name.startswith("__") and _is_variable(item):
                found[name] = item
    for name, item in (dict_of(value) or {}).items():
        found |= item if name in MODULE_PARTS and type(item) is dict else {name: item}
    yield from ((f".{name}", item) for name, item in found.items())


@functools.lru_cache(maxsize=1024)
def _classes_with_parts(kind: type) -> tuple[tuple[type, bool], ...]:
    """The classes behind ``kind`` whose variables and slots are looked at, and whether a class is torch's."""
    named = ((each, each.__module__.startswith("torch")) for each in reversed(kind.__mro__))
    return tuple(
        (each, is_torchs)
        for each, is_torchs in named
        if each.__module__ != "builtins" and ("__slots__" in vars(each) or not is_torchs)
    )


def _is_variable(item: object) -> bool:
    kind = type(item)
    return kind in NUMBERS or issubclass(kind, (torch.Tensor, np.ndarray, np.generic, dict, list, set, deque))


def is_foreign(kind: type) -> bool:
    """Whether a class leads to all of the process, or its objects are no state of a script: of Python's own, say."""
    return _is_foreign(kind.__module__) and not issubclass(kind, _HOLDERS)


@functools.lru_cache(maxsize=1024)
def _is_foreign(module: str) -> bool:
    return module.partition(".")[0] in _FOREIGN or module.startswith(_FOREIGN_TORCH)
