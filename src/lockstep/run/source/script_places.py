"""Places of a script where values are that outlive a body: variables, and attributes of objects that they hold.

    Place(frame, "self", ("pool", "images"))        self.pool.images, whatever it is when it is asked for

No code of the objects is run.
"""

from __future__ import annotations

import ast
import functools
import operator
import os
import sys
from collections import deque, namedtuple
from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import islice
from types import CellType, FrameType, MemberDescriptorType, MethodType
from typing import Any, Final, NamedTuple

from torch import nn

from lockstep.run.source.reachable import CACHES, MODULE_PARTS, TENSOR_RANK, Mark, look, variables_of
from lockstep.run.source.script_modules import dict_of, file_of
from lockstep.run.source.source_paths import is_key

NOTHING: Final = object()  #: where there is no value
_DEPTH: Final = 5
_MOST_ITEMS: Final = 500  # of a container
_MOST_MARKS: Final = 500
_CONTAINERS: Final = {"dict", "list", "tuple", "deque", "set"}
_FIELD: Final = type(namedtuple("_", "field").field)  # type: ignore[attr-defined]


class Place(NamedTuple):
    """A variable of the script, or an attribute of the variable's value."""

    owner: object  #: a frame, a dict of globals, a cell, or an object itself
    name: str
    attributes: tuple[str, ...]
    text: str  #: as the script writes it

    @property
    def key(self) -> tuple[int, str, tuple[str, ...]]:
        """Equal for the same place."""
        return id(self.owner), self.name, self.attributes

    @property
    def slot(self) -> tuple[int, str]:
        """Equal for the same variable or attribute, whichever path leads to the place now."""
        if not self.attributes:
            return id(self.owner), self.name
        return id(self._replace(attributes=self.attributes[:-1]).value(None)), self.attributes[-1]

    def value(self, variables: Mapping[str, object] | None) -> object:
        """The value there now, or `NOTHING`; ``variables`` are those of the frame that owns the place."""
        value = variable_at(self.owner, self.name) if variables is None else variables.get(self.name, NOTHING)
        for name in self.attributes:
            value = attribute_of(value, name)
        return value


Held = Mapping[str, tuple[Mark, str]]
"""By path, what is there, and what of the training is computed from it."""


def held(
    places: Iterable[tuple[Place, str]], skip: Collection[int], but: tuple[type, ...], read: Collection[str]
) -> Held:
    """The values now at ``places``, each with the text of what is computed from the place. See `look`.

    Of objects of the script's own classes in a container only attributes are looked at that are ``read`` somewhere: one
    callback in a list may count for itself while another one has what the training is computed from.
    """
    found: dict[str, tuple[Mark, str]] = {}
    for place, what, value in values_at(places):
        objects = ((key, one) for key, one in _objects_in(value) if id(one) not in skip and not isinstance(one, but))
        apart = {f"{place.text}{key}": one for key, one in objects}
        attributes = ((f"{at}.{name}", name, part) for at, one in apart.items() for name, part in dict_of(one).items())
        parts = {path: part for path, name, part in attributes if name in read}
        without = {*skip, *map(id, apart.values())}
        marks = look({place.text: value, **parts}, skip=without, but=but, depth=_DEPTH, limit=_MOST_MARKS)
        found |= {name: (mark, what) for name, mark in marks.items()}
    return found


def _objects_in(value: object) -> Iterator[tuple[str, object]]:
    """The objects of the script's own classes in a container, each with its key."""
    items: Iterable[tuple[object, object]] = ()
    if type(value) in (list, tuple, deque):
        items = enumerate(value)  # type: ignore[arg-type]
    elif isinstance(value, dict):
        items = value.items()
    for key, one in islice(items, _MOST_ITEMS):
        if dict_of(one) is not None and file_of(sys.modules.get(type(one).__module__)):
            yield f"[{key!r}]", one


def values_at(places: Iterable[tuple[Place, str]]) -> Iterator[tuple[Place, str, object]]:
    """Those of the ``places`` that have a value now, with the value."""
    of_frames: dict[int, dict[str, Any]] = {}
    for place, what in places:
        if isinstance(place.owner, FrameType) and id(place.owner) not in of_frames:
            of_frames[id(place.owner)] = variables_of(place.owner)
        value = place.value(of_frames.get(id(place.owner)))
        if value is not NOTHING:
            yield place, what, value


def changed_by(first: Held, before: Held, after: Held) -> str:
    """The first input of the training that a body changes, in words; "" for none.

    Args:
        first: the inputs after the first of two equal bodies.
        before: the inputs before the second body.
        after: the inputs after the second body.
    """
    for name, (mark, what) in after.items():
        others = [each[name][0] for each in (first, before) if name in each]
        if len(others) == 2 and all(_differs(other, mark) for other in others):
            values = f" ({before[name][0].seen}, then {mark.seen})" if mark.rank == 1 else ""
            is_length = mark.kind in _CONTAINERS
            return f"{'the length of ' if is_length else ''}{name}, which {what} is computed from, differed{values}"
    return ""


def changed_since(before: Held, now: Held, how: str) -> str:
    """The first place of both whose values differ, in words that end with ``how``; "" for none.

    A dict and a set may grow, as caches do.
    """
    for name, (mark, what) in now.items():
        if mark.kind not in CACHES and name in before and _differs(before[name][0], mark):
            return f"{name}, which {what} is computed from, {how}"
    return ""


def _differs(one: Mark, other: Mark) -> bool:
    """Whether two marks of a place are of other values, as far as they tell: some tensors are known by their `id`."""
    these, those = one.seen, other.seen
    if one.rank == TENSOR_RANK and isinstance(these, tuple) and isinstance(those, tuple):
        return these != those and (these[1] == those[1] or not isinstance(these[1], int))
    return one != other


def variable_at(owner: object, name: str) -> object:
    """The variable of a frame, a global variable, or a cell's content; for any other owner, the owner itself."""
    if isinstance(owner, FrameType):
        return variables_of(owner).get(name, NOTHING)
    if isinstance(owner, CellType):
        return owner.cell_contents if owner != CellType() else NOTHING
    return owner.get(name, NOTHING) if name and isinstance(owner, dict) else owner


def attributes_of(value: object) -> dict[str, object]:
    """The attributes that an object has itself, not from its class."""
    found: dict[str, Any] | None = dict_of(value)
    if found is None:
        return {}
    if not issubclass(type(value), nn.Module):
        return found
    return functools.reduce(operator.or_, _parts_of_module(found), found)


def _parts_of_module(own: Mapping[str, object]) -> list[dict[str, Any]]:
    return [part for name in MODULE_PARTS if isinstance(part := own.get(name), dict)]  # TorchScript has others


def attribute_of(value: object, name: str) -> object:
    """An attribute of an object, or the item under a key, without running code of the object."""
    if value is NOTHING:
        return NOTHING
    if is_key(name):
        return _item_of(value, ast.literal_eval(name[1:-1]))
    is_class = issubclass(type(value), type)
    own = {} if is_class else dict_of(value) or {}
    if name in own:
        return own[name]
    if issubclass(type(value), nn.Module):
        for part in _parts_of_module(own):
            if name in part:
                return part[name]
    kinds: Iterable[type] = value.__mro__ if is_class else type(value).__mro__  # type: ignore[attr-defined]
    for kind in kinds:
        found = vars(kind).get(name, NOTHING)
        if found is NOTHING:
            continue
        if isinstance(found, functools.cached_property):
            return None  # not made yet
        if isinstance(found, staticmethod):
            return found.__func__
        if isinstance(found, classmethod):
            return MethodType(found.__func__, value if is_class else type(value))
        if isinstance(found, (MemberDescriptorType, _FIELD)):
            try:
                return found.__get__(value)
            except AttributeError:  # not set
                return NOTHING
        return found
    return NOTHING


def is_static(value: object, name: str) -> bool:
    """Whether an attribute of an object is a static method of its class."""
    return any(isinstance(vars(kind).get(name), staticmethod) for kind in type(value).__mro__)


def _item_of(value: Any, key: object) -> object:
    kind = type(value)
    if value is os.environ:
        return os.environ.get(str(key), NOTHING)
    if issubclass(kind, dict):
        return dict.get(value, key, NOTHING)
    if issubclass(kind, nn.Sequential | nn.ModuleList | nn.ModuleDict):
        parts = vars(value)["_modules"]
        names = list(parts)
        if isinstance(key, int):
            return parts[names[key]] if -len(names) <= key < len(names) else NOTHING
        return parts.get(key, NOTHING)
    is_there = issubclass(kind, list | tuple | deque) and isinstance(key, int) and key < len(value)
    return value[key] if is_there and kind in (list, tuple, deque) else NOTHING
