"""Whether the script has changed a data set between two passes, of which loader processes hold copies."""

from __future__ import annotations

from collections.abc import Iterator
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any, Final

from torch import Tensor

from lockstep.data.sampling import UserDataset

_DEEPEST: Final = 8  # such as a data set, its parts, one of them, its transforms, and those in a list among these
_MOST: Final = 2000  # attributes and items that are looked at
_SHORT: Final = 32  # a list or dict of settings; longer ones hold samples
_NUMBERS: Final = (bool, int, float, complex, type(None))
_TEXTS: Final = (str, bytes)
_OPAQUE: Final = (Tensor, ModuleType, FunctionType, BuiltinFunctionType, type)


class DatasetMarks:
    """What can be seen of a data set in some microseconds, to be compared with what is seen later.

    Seen are attributes, of the data set and of what it holds, and the items of short lists and dicts: another object,
    number or text, another length, a tensor that was written to. Not seen are arrays and long lists that were changed
    in place.
    """

    def __init__(self, dataset: UserDataset) -> None:
        # Objects themselves are kept, as a number that stands for one may stand for a later one.
        self._found = list(_marks_of(dataset))

    def differ_from(self, earlier: DatasetMarks) -> bool:
        """Whether anything was changed since ``earlier`` ones were taken."""
        return len(self._found) != len(earlier._found) or any(
            now is not before or mark != mark_before
            for (now, mark), (before, mark_before) in zip(self._found, earlier._found, strict=True)
        )


def _marks_of(dataset: UserDataset) -> Iterator[tuple[object, object]]:
    seen: set[int] = set()
    waiting: list[tuple[Any, int]] = [(dataset, 0)]
    for value, depth in waiting:  # which grows
        kind = type(value)
        if kind in _NUMBERS:
            yield None, (kind, repr(value))  # nan is itself
            continue
        if kind in _TEXTS:
            yield None, value
            continue
        yield value, _mark_of(value)
        # Not `isinstance`, which asks the object itself: it may stand for another one, far away or gone.
        if id(value) in seen or depth == _DEEPEST or issubclass(kind, _OPAQUE):
            continue
        seen.add(id(value))
        parts = [*_items_of(value), *_attributes_of(value)]
        waiting += [(part, depth + 1) for part in parts[: _MOST - len(waiting)]]


def _mark_of(value: Any) -> object:
    if issubclass(type(value), Tensor):
        # Those made in inference mode do not count what is written to them, and nested ones have no shape.
        return None if value.is_inference() else value._version, value.numel()
    if issubclass(type(value), list | tuple | dict | set | bytearray):
        return len(value)
    return None


def _attributes_of(value: Any) -> list[Any]:
    try:
        return list(object.__getattribute__(value, "__dict__").values())  # asks no `__getattr__` of the user's
    except AttributeError:
        return []


def _items_of(value: Any) -> list[Any]:
    if type(value) not in (list, tuple, dict) or len(value) > _SHORT:
        return []
    return [part for pair in value.items() for part in pair] if type(value) is dict else list(value)
