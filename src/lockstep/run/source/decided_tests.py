"""Tests of a script that are decided for the whole run: the lines under such a test run never, or always.

if args.use_memory:            args.use_memory is set once, when the script begins
loss = loss + memory(x)
"""

from __future__ import annotations

import ast
import contextlib
import functools
import operator
import sys
from collections.abc import Callable
from typing import Any, Final

from lockstep.heartbeat import is_users
from lockstep.run.source.script_places import attributes_of
from lockstep.run.source.source_paths import Path, path_of
from lockstep.run.source.source_reads import nodes_of

UNKNOWN: Final = object()
#: Whether a file is the script's own, or of a module beside it.
is_script: Final = functools.lru_cache(maxsize=8192)(is_users)
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


def changed_names() -> frozenset[str]:
    """The globals and attributes that functions of the script's files set, without attributes that constructors set."""
    # Not by `getattr`, which runs code of some of the thousands of modules.
    files = [attributes_of(module).get("__file__") for module in list(sys.modules.values())]
    return _changed_in(frozenset(file for file in files if type(file) is str and is_script(file)))


@functools.lru_cache(maxsize=8)
def _changed_in(files: frozenset[str]) -> frozenset[str]:
    return frozenset().union(*map(_changed_in_file, files))


@functools.cache
def _changed_in_file(file: str) -> frozenset[str]:
    found: set[str] = set()
    for (name, _), function in nodes_of(file).items():
        if isinstance(function, ast.Module | ast.Lambda) or name in ("__init__", "__post_init__", "__new__"):
            continue
        for node in ast.walk(function):
            if isinstance(node, ast.Global):
                found.update(node.names)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                found.add(node.attr)
    return frozenset(found)


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
