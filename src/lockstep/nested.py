"""Lists, tuples and mappings within each other: what lies in them, and the same with other leaves.

    {"a": [1, (2,)], "b": 3}          leaves: ("a.0", 1), ("a.1.0", 2), ("b", 3)
              │
        map_leaves(negative)
              ▼
    {"a": [-1, (-2,)], "b": -3}

What torch has for this, `torch.utils._pytree`, takes each mapping that it was not told of for a leaf. It is for what
torch itself gives: the arguments of its operations, the states of optimizers.
"""

from __future__ import annotations

import copy
from collections import Counter, OrderedDict, UserDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

#: Mappings that are made anew in their own type; in the place of another one comes a dict.
_KEPT_TYPES = (dict, OrderedDict, Counter)


def leaves(value: object, path: str = "") -> Iterator[tuple[str, Any]]:
    """What is no list, tuple or mapping within ``value``, each with the way to it, such as ``models.0.weight``."""
    if isinstance(value, Mapping):
        items: Iterable[tuple[object, object]] = value.items()
    elif isinstance(value, list | tuple):
        items = enumerate(value)
    else:
        yield path, value
        return
    for key, inner in items:
        yield from leaves(inner, f"{path}.{key}" if path else str(key))


def map_leaves(
    function: Callable[[Any], Any], value: object, is_leaf: Callable[[Any], bool] = lambda value: False
) -> Any:
    """``value`` with ``function`` of each of its leaves, in new lists, tuples and mappings.

    What ``is_leaf`` is true of is a leaf, too. A `UserDict`, such as a tokenizer's, is copied with all it is and has.
    """
    if is_leaf(value):
        return function(value)
    if isinstance(value, UserDict):
        changed = copy.copy(value)
        changed.data = map_leaves(function, value.data, is_leaf)
        return changed
    if isinstance(value, Mapping):
        kind: Any = type(value) if type(value) in _KEPT_TYPES else dict
        return kind({key: map_leaves(function, inner, is_leaf) for key, inner in value.items()})
    if isinstance(value, list | tuple):
        return like_row(value, [map_leaves(function, inner, is_leaf) for inner in value])
    return function(value)


def like_row(row: Any, items: list[Any]) -> object:
    """``items`` in a list or tuple of the type of ``row``, be it a named one."""
    return getattr(type(row), "_make", type(row))(items)
