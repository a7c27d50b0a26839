"""What a data set holds, of which loader processes have copies: marks of it show whether the script has changed it."""

from __future__ import annotations

import mmap
import sys
import zlib
from array import array
from collections import deque
from collections.abc import Iterator
from functools import partial
from itertools import islice
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, Final

import numpy as np
from torch import Tensor, device

from lockstep.data.indexed.sampling import UserDataset
from lockstep.torch_private import version_of

_DEEPEST: Final = 8  # such as a data set, its parts, one of them, its transforms, and those in a list among these
_MOST: Final = 2000  # attributes and items that are read
_SHORT: Final = 32  # a list or dict of settings; longer ones hold samples
_SMALL_BYTES: Final = 16 << 20  # of an array that is read as a whole
_LOOKED_AT: Final = 1024  # elements read of larger arrays and of long lists, evenly spread
_NUMBERS: Final = (bool, int, float, complex, type(None))
_TEXTS: Final = (str, bytes)
_OPAQUE: Final = (Tensor, ModuleType, BuiltinFunctionType)
#: Packages whose functions and classes hold no values that a script changes, and refer to the whole process.
_FOREIGN: Final = sys.stdlib_module_names | {"lockstep", "torch", "numpy"}


class DatasetMarks:
    """Marks of a data set that can be taken in some microseconds, to be compared with later marks.

    Marks cover attributes of the data set and of the objects that it holds, and the items of short lists and dicts:
    they show another object, number or text, another length, and a tensor or array that was written to. They also cover
    class attributes, and the variables that methods and functions read from outside: global variables, and those of an
    enclosing function. Of large arrays and long lists some elements are read; changes in place between these elements,
    in a mapped file, and in the variables of another module are not seen.
    """

    def __init__(self, dataset: UserDataset) -> None:
        # The objects are kept, since the id of a deleted object may be given to a later one.
        self._found = list(_marks_of(dataset))

    def differ_from(self, earlier: DatasetMarks) -> bool:
        """Whether the data set was changed since the ``earlier`` marks were taken."""
        return len(self._found) != len(earlier._found) or any(
            now is not before or mark != mark_before
            for (now, mark), (before, mark_before) in zip(self._found, earlier._found, strict=True)
        )


def hold_gpu(*holders: object) -> bool:
    """Whether one of ``holders`` has a tensor that is not on the CPU, or a device that is not the CPU.

    Looked at is what `DatasetMarks` looks at, and the first item of each long list. The run is left out: what reads a
    seed or a rank of it uses no GPU.
    """
    held = _held_by(*holders, of_long=1, but_for=("lockstep.run",))
    return any(
        each.type != "cpu" if type(each) is device else issubclass(type(each), Tensor) and each.device.type != "cpu"
        for each in held
    )


def _marks_of(dataset: UserDataset) -> Iterator[tuple[object, object]]:
    for value in _held_by(dataset):
        kind = type(value)
        if kind in _NUMBERS:
            yield None, (kind, repr(value))  # nan is unequal to itself, its text is not
        elif kind in _TEXTS:
            yield None, value
        else:
            yield value, _mark_of(value)


def _held_by(*holders: object, of_long: int = 0, but_for: tuple[str, ...] = ()) -> Iterator[Any]:
    """The ``holders`` and all that they hold or read, with ``of_long`` items of each long list.

    Objects of classes of the packages ``but_for`` are not looked into.
    """
    seen: set[int] = set()
    waiting: list[tuple[Any, int]] = [(holder, 0) for holder in holders]
    for value, depth in waiting:  # the list grows in the loop
        yield value
        kind = type(value)
        if kind in (*_NUMBERS, *_TEXTS):
            continue
        # Not `isinstance`, which asks the object itself: a proxy would ask another object, far away or gone.
        if id(value) in seen or depth == _DEEPEST or issubclass(kind, _OPAQUE) or _module_of(kind).startswith(but_for):
            continue
        seen.add(id(value))
        parts = [*_items_of(value, of_long), *_attributes_of(value), *_read_from_outside(value)]
        waiting += [(part, depth + 1) for part in parts[: _MOST - len(waiting)]]


def _mark_of(value: Any) -> object:
    if issubclass(type(value), Tensor):
        # Tensors made in inference mode have no version counter, and nested tensors have no shape.
        return None if value.is_inference() else version_of(value), value.numel()
    if type(value) is np.ndarray and not value.dtype.hasobject and not _is_mapped(value):
        flat = value.reshape(-1)
        spread = 1 if value.nbytes <= _SMALL_BYTES else -(-value.size // _LOOKED_AT)
        return value.dtype.str, value.shape, zlib.crc32(flat[::spread].tobytes())
    if issubclass(type(value), bytearray | array) and memoryview(value).nbytes <= _SMALL_BYTES:
        return len(value), zlib.crc32(value)
    if issubclass(type(value), list | tuple | deque) and len(value) > _SHORT:
        some = list(value)[:: -(-len(value) // _LOOKED_AT)]
        return len(value), [repr(one) if type(one) in (*_NUMBERS, *_TEXTS) else id(one) for one in some]
    if issubclass(type(value), list | tuple | dict | set | deque | bytearray | array):
        return len(value)
    return None


def _is_mapped(array: object) -> bool:
    """Whether the elements of ``array`` lie in a file, from which they would have to be read."""
    while isinstance(array, np.ndarray):
        if isinstance(array, np.memmap):
            return True
        array = array.base
    return isinstance(array, mmap.mmap)


def _attributes_of(value: object) -> list[object]:
    if issubclass(type(value), type | FunctionType):
        return []
    try:
        return list(object.__getattribute__(value, "__dict__").values())  # asks no `__getattr__` of the user's
    except AttributeError:
        return []


def _items_of(value: Any, of_long: int) -> list[object]:
    if type(value) not in (list, tuple, dict, deque):
        return []
    items = islice(value.items() if type(value) is dict else value, of_long if len(value) > _SHORT else None)
    return [part for pair in items for part in pair] if type(value) is dict else list(items)


def _read_from_outside(value: Any) -> list[object]:
    """The values that ``value`` reads by its class, or as a function, of which loader processes have copies."""
    kind = type(value)
    if issubclass(kind, FunctionType):
        return [] if _is_foreign(value) else [*_enclosed_in(value), *(value.__defaults__ or ()), *_globals_of(value)]
    if issubclass(kind, MethodType):
        return [value.__self__, value.__func__]
    if kind is partial:
        return [value.func, *value.args, *value.keywords.values()]
    if not issubclass(kind, type):
        return [] if _is_foreign(kind) else [kind]
    own = [vars(each) for each in value.__mro__ if not _is_foreign(each)]
    return [_function_of(item) for held in own for name, item in held.items() if _is_own(name, item)]


def _enclosed_in(function: FunctionType) -> list[object]:
    return [cell.cell_contents for cell in function.__closure__ or () if cell != CellType()]  # which is not set yet


def _globals_of(function: FunctionType) -> list[object]:
    return [function.__globals__[name] for name in _names_in(function.__code__) if name in function.__globals__]


def _names_in(code: CodeType) -> Iterator[str]:
    """The global names that ``code`` and the functions within it may read, and the names of attributes."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names_in(constant)


def _is_own(name: str, item: object) -> bool:
    """Whether the user, not Python, has given ``item`` to a class: methods, and attributes that are not special."""
    return not name.startswith("__") or issubclass(type(item), FunctionType)


def _function_of(item: object) -> object:
    """The function behind a static method, class method or property; any other ``item`` itself."""
    if isinstance(item, staticmethod | classmethod):
        return item.__func__
    return item.fget if isinstance(item, property) else item


def _is_foreign(value: object) -> bool:
    return _module_of(value).partition(".")[0] in _FOREIGN


def _module_of(value: object) -> str:
    return str(getattr(value, "__module__", ""))
