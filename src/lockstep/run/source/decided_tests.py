"""Tests of a script that are decided for the whole run: the lines under such a test run never, or always.

if args.use_memory:            args.use_memory is set once, when the script begins
loss = loss + memory(x)
"""

from __future__ import annotations

import ast
import contextlib
import functools
import linecache
import operator
from collections.abc import Callable, Collection, Container, Iterable
from typing import Any, Final

from lockstep.loop_variables import stored
from lockstep.run.source.script_modules import script_files
from lockstep.run.source.source_paths import Path, all_of, path_of
from lockstep.run.source.source_reads import GROWS, TAKES_AWAY, nodes_of

UNKNOWN: Final = object()
#: Methods that set items of a dict, a list or a set.
_CHANGES_ITEMS: Final = {*GROWS, *TAKES_AWAY, "add", "remove", "setdefault", "update"}
_COMPARES: Final[dict[type[ast.cmpop], Callable[[Any, Any], bool]]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.In: lambda one, several: one in several,
    ast.NotIn: lambda one, several: one not in several,
}


class ChangedNames(Container[str]):
    """The variables, attributes and keys that functions of the script's files set, but for those of constructors.

    Only files in which a name stands are parsed when the name is asked for: 20 ms for each 300 lines.

    Args:
        others: names that count as well.
    """

    def __init__(self, others: Iterable[str] = ()) -> None:
        self._others: Final = frozenset(others)
        self._known: Final[dict[object, bool]] = {}

    @functools.cached_property
    def _files(self) -> frozenset[str]:
        return frozenset(script_files().values())

    def __contains__(self, name: object) -> bool:
        if name not in self._known:
            of_a_file = (_is_changed_in(file, str(name)) for file in self._files)
            self._known[name] = name in self._others or any(of_a_file)
        return self._known[name]


@functools.cache
def _is_changed_in(file: str, name: str) -> bool:
    return any(name in line for line in linecache.getlines(file)) and name in _changed_in_file(file)


@functools.cache
def _changed_in_file(file: str) -> frozenset[str]:
    found: set[str] = set()
    for (name, _), function in nodes_of(file).items():
        if isinstance(function, ast.Module | ast.Lambda) or name in ("__init__", "__post_init__", "__new__"):
            continue
        nodes = list(ast.walk(function))
        outer = {name for node in nodes if isinstance(node, ast.Global | ast.Nonlocal) for name in node.names}
        own = {node.arg for node in nodes if isinstance(node, ast.arg)} | stored(function.body)
        for node in nodes:
            found.update(_set_by(node, own - outer))
    return frozenset(found)


def _set_by(node: ast.AST, own: Collection[str]) -> Iterable[str]:
    """The names that a node sets, as they stand in a `Path`; of a key that is computed, the name of its holder.

    Not the function's ``own`` variables: another function's test asks for other ones.
    """
    match node:
        case ast.Global(names=names) | ast.Nonlocal(names=names):
            return names
        case ast.Attribute(ctx=ast.Store()) | ast.Subscript(ctx=ast.Store()):
            path = path_of(node) or (path_of(node.value) if isinstance(node, ast.Subscript) else None)
            return _last(path, own) if path is not None or isinstance(node, ast.Subscript) else (node.attr,)
        case ast.Call(func=ast.Attribute(value=holder, attr=method)) if method in _CHANGES_ITEMS:
            return _last(path_of(holder), own)
        case ast.Call():
            return _last(all_of(node), own)
    return ()


def _last(path: Path | None, own: Collection[str]) -> tuple[str, ...]:
    return () if path is None or (not path.attributes and path.root in own) else (path.root, *path.attributes)[-1:]


def value_of_test(test: ast.expr, value_of: Callable[[Path], object]) -> object:
    """The value of a test, if known from the values of paths; else `UNKNOWN`.

    Args:
        test: of comparisons, ``not``, ``and`` and ``or``; the value of any other test is not known.
        value_of: gives the value of a path; `UNKNOWN` if the value may change.
    """
    match test:
        case ast.Constant(value=constant):
            return constant
        case ast.Name() | ast.Attribute() | ast.Subscript():
            return value_of(path) if (path := path_of(test)) is not None else UNKNOWN
        case ast.Tuple(elts=parts) | ast.List(elts=parts) | ast.Set(elts=parts):
            values = [value_of_test(part, value_of) for part in parts]
            return UNKNOWN if UNKNOWN in values else tuple(values)
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            value = value_of_test(operand, value_of)
            return value if value is UNKNOWN else not value
        case ast.BoolOp(op=op, values=parts):
            decides = isinstance(op, ast.Or)
            values = [value_of_test(part, value_of) for part in parts]
            if any(value is not UNKNOWN and bool(value) is decides for value in values):
                return decides
            return UNKNOWN if any(value is UNKNOWN for value in values) else not decides
        case ast.Compare(left=left, ops=[op], comparators=[right]) if type(op) in _COMPARES:
            values = [value_of_test(part, value_of) for part in (left, right)]
            with contextlib.suppress(TypeError):
                return UNKNOWN if any(value is UNKNOWN for value in values) else _COMPARES[type(op)](*values)
    return UNKNOWN
