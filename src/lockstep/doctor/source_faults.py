"""What the source of a script with DistributedDataParallel says that no run shows: a mean that is taken twice.

DistributedDataParallel leaves the mean of the ranks' gradients. A loss that is divided by their number before its
backward pass, or gradients that the script sums up itself, give a step that is too small by that number.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

_RANKS: Final = re.compile(
    r"(?i)\b(world_?size|n_?ranks|num_?ranks|num_?replicas|get_world_size\(\)|ngpus?|n_gpus?)\b|WORLD_SIZE"
)


@dataclass(frozen=True, slots=True)
class SourceFault:
    """A line."""

    file: str
    line: int
    what: str


def averaged_twice(file: str, source: str) -> list[SourceFault]:
    """The lines of ``source`` where a mean over ranks is taken that DistributedDataParallel takes, too."""
    if "DistributedDataParallel" not in source:
        return []
    tree = ast.parse(source)
    scopes = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.Module)]
    return sorted({fault for scope in scopes for fault in _in_scope(file, scope)}, key=lambda fault: fault.line)


def _in_scope(file: str, scope: ast.AST) -> Iterator[SourceFault]:
    own = list(_own_nodes(scope))
    assigned = sorted(_assignments(own), key=lambda each: each[1])
    for node in own:
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        if node.func.attr == "backward":
            for name in [part.id for part in ast.walk(node.func.value) if isinstance(part, ast.Name)]:
                before = [each for each in assigned if each[0] == name and each[1] < node.lineno]
                if before and before[-1][2]:
                    yield SourceFault(file, before[-1][1], "the loss is divided by the number of ranks")
            if _divides(node.func.value):
                yield SourceFault(file, node.lineno, "the loss is divided by the number of ranks")
        elif (
            node.func.attr == "all_reduce" and node.args and ast.unparse(node.args[0]).endswith((".grad", ".grad.data"))
        ):
            yield SourceFault(file, node.lineno, "gradients are summed over ranks")


def _own_nodes(scope: ast.AST) -> Iterator[ast.AST]:
    """The nodes of a scope, without those of functions in it."""
    for child in ast.iter_child_nodes(scope):
        if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield child
            yield from _own_nodes(child)


def _assignments(nodes: Sequence[ast.AST]) -> Iterator[tuple[str, int, bool]]:
    """Name, line, and whether it is divided by the number of ranks there."""
    for node in nodes:
        if isinstance(node, ast.Assign):
            for target in node.targets:
                if isinstance(target, ast.Name):
                    yield target.id, node.lineno, _divides(node.value)
        elif isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
            yield node.target.id, node.lineno, isinstance(node.op, ast.Div) and _is_ranks(node.value)


def _divides(value: ast.AST) -> bool:
    return any(
        isinstance(part, ast.BinOp) and isinstance(part.op, ast.Div) and _is_ranks(part.right)
        for part in ast.walk(value)
    )


def _is_ranks(value: ast.AST) -> bool:
    return _RANKS.search(ast.unparse(value)) is not None
