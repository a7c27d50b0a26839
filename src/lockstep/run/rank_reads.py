"""Where a script computes a hyperparameter from the number of ranks, or seeds by rank, as scripts for DDP do.

A rank's number is read for much that changes no result: to print, to compare, to name a file. So the line that reads it
is looked at, in the source: what is computed there, and under which name it is given away.
"""

from __future__ import annotations

import ast
import functools
import linecache
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Final

_HYPERPARAMETER: Final = re.compile(
    r"(^|_)lr(_|$)|learning_?rate|batch|decay|momentum|warm_?up|steps|epochs|T_max", re.IGNORECASE
)
_ARITHMETIC: Final = (ast.Add, ast.Sub, ast.Mult, ast.Div, ast.FloorDiv, ast.Pow)


class RankReads:
    """Says of each line once what it computes from ``run.rank`` or ``run.world_size``.

    Args:
        say: tells the user.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say: Final = say
        self._seen: Final[set[tuple[str, int, str]]] = set()

    def look(self, frame: FrameType, name: str) -> None:
        """The line of ``frame`` reads ``run.NAME``; of little cost from the second time on."""
        file, line = frame.f_code.co_filename, frame.f_lineno
        if (file, line, name) in self._seen:
            return
        self._seen.add((file, line, name))
        for what in dict.fromkeys(computed_from("".join(linecache.getlines(file)), line, name)):
            self._say(
                f"{Path(file).name}:{line}: {what} depends on run.{name}, and the result with it. Nothing needs to be "
                "scaled by ranks, or seeded by rank: a step holds global_batch samples on any number of them, and each "
                "micro-batch draws its own random numbers"
            )


def computed_from(source: str, line: int, name: str) -> Iterator[str]:
    """The hyperparameters, and the functions that seed, which get what ``line`` computes from an attribute ``name``."""
    for parents in _reads(source).get((line, name), ()):
        computes = any(isinstance(node, ast.BinOp) and isinstance(node.op, _ARITHMETIC) for node in parents)
        for target in _targets(parents):
            if "seed" in target.lower() or (computes and _HYPERPARAMETER.search(target)):
                yield target
                break


@functools.lru_cache(maxsize=8)
def _reads(source: str) -> dict[tuple[int, str], list[list[ast.AST]]]:
    """By line and name, the nodes around each read of an attribute, from the inside to its statement."""
    found: dict[tuple[int, str], list[list[ast.AST]]] = {}

    def visit(node: ast.AST, parents: list[ast.AST]) -> None:
        if isinstance(node, ast.Attribute):
            found.setdefault((node.lineno, node.attr), []).append(parents[::-1])
        inner: list[ast.AST] = [node] if isinstance(node, ast.stmt) else [*parents, node]
        for child in ast.iter_child_nodes(node):
            visit(child, inner)

    try:
        visit(ast.parse(source), [])
    except (SyntaxError, ValueError, RecursionError):
        return {}
    return found


def _targets(parents: list[ast.AST]) -> Iterator[str]:
    """The names under which the value of an expression is given away."""
    for node in parents:
        match node:
            case ast.Compare() | ast.IfExp() | ast.Lambda() | ast.Subscript() | ast.JoinedStr():
                return  # another value
            case ast.keyword(arg=str(name)):
                yield name
            case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name)):
                yield name
                if name not in ("int", "float", "max", "min", "round"):
                    return  # what it returns is another value
            case ast.Assign(targets=[ast.Name(id=name) | ast.Attribute(attr=name)]):
                yield name
            case _:
                pass
