"""Which variables a loop's body sets before it reads them, in each turn anew; and which are not read any more.

for x, y in batches:
    out = model(x)              out      set anew
    total += loss(out, y)       total    is read first: what it was before matters
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

_READ_ALL: Final = {"locals", "globals", "vars", "dir", "eval", "exec"}
#: What reads variables of the function around it whenever it is called or gone through.
_LATER: Final = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef, ast.GeneratorExp)


def fresh_variables(node: ast.For | ast.AsyncFor | ast.While) -> frozenset[str]:
    """The variables that each turn of a loop sets before it reads them."""
    targets = stored([node.target]) if not isinstance(node, ast.While) else set()
    exposed, _ = _exposed(node.body, targets)
    return frozenset((stored(node.body) | targets) - exposed)


def dead_at(function: ast.AST, line: int) -> frozenset[str]:
    """The variables of a function or module that are set before they are read, whatever runs from ``line`` on.

    for epoch in epochs:
        guess = model(x)                guess    is set again before it is read
        labels.copy_(guess)
        for x, y in batches:            line     in a call here

    Variables that functions within it read are none of these, nor are any where ``locals()`` or the like may read all.
    A statement that holds the line counts as not begun.
    """
    if not _loaded([function]).isdisjoint(_READ_ALL):
        return frozenset()
    alive = _loaded(node for node in ast.walk(function) if node is not function and isinstance(node, _LATER))
    block: Sequence[ast.stmt] = getattr(function, "body", ())
    while block:
        place = next((n for n, node in enumerate(block) if _holds([node], line)), None)
        if place is None:
            return frozenset()
        node, after = block[place], block[place + 1 :]
        block = next((inner for inner in _blocks(node) if _holds(inner, line)), ())
        is_over = block and isinstance(node, ast.With | ast.AsyncWith | ast.If)  # but for what remains of the block
        alive |= _exposed(() if is_over else [node], set())[0] | _exposed(after, set())[0]
    return frozenset(stored([function]) - alive)


def _blocks(node: ast.stmt) -> Iterator[Sequence[ast.stmt]]:
    """The blocks of statements within a statement."""
    parts = (node, *getattr(node, "handlers", ()), *getattr(node, "cases", ()))
    return (getattr(part, name, ()) for part in parts for name in ("body", "orelse", "finalbody"))


def _holds(block: Sequence[ast.stmt], line: int) -> bool:
    return bool(block) and block[0].lineno <= line <= (block[-1].end_lineno or 0)


def stored(nodes: Iterable[ast.AST]) -> set[str]:
    """The variables that are set anywhere in these."""
    names = (name for node in nodes for name in ast.walk(node) if isinstance(name, ast.Name))
    return {name.id for name in names if isinstance(name.ctx, ast.Store)}


def _loaded(nodes: Iterable[ast.AST | None]) -> set[str]:
    found: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Name):
            found |= set() if isinstance(node.ctx, ast.Store) else {node.id}
        elif node is not None:
            parts = getattr(node, "generators", ())  # of a comprehension, whose variables are its own
            found |= _loaded(ast.iter_child_nodes(node)) - stored(part.target for part in parts)
    return found


def _exposed(statements: Sequence[ast.stmt], given: set[str]) -> tuple[set[str], set[str] | None]:
    """The variables that statements read before they set them, and those that are set after them.

    Args:
        statements: in their order.
        given: variables that are set before.

    Returns:
        Both; None for the second where the statements are always left by `continue` or the like.
    """
    exposed: set[str] = set()
    done = set(given)
    for node in statements:
        blocks: list[Sequence[ast.stmt]] = []  # of which one is gone through
        match node:
            case ast.Assign(value=value) | ast.AnnAssign(value=value):
                exposed |= _loaded([node]) - done
                done |= stored([node]) if value is not None else set()
            case ast.AugAssign(target=target):
                exposed |= (_loaded([node]) | stored([target])) - done
                done |= stored([target])
            case ast.If(test=test, body=body, orelse=orelse):
                exposed |= _loaded([test]) - done
                blocks = [body, orelse]
            case ast.Match(subject=subject, cases=cases):
                exposed |= _loaded([subject]) - done
                blocks = [*(case.body for case in cases), []]
            case ast.For(target=target, iter=items) | ast.AsyncFor(target=target, iter=items):
                exposed |= _loaded([items]) - done
                exposed |= _exposed(node.body, done | stored([target]))[0] | _exposed(node.orelse, done)[0]
            case ast.While(test=test, body=body, orelse=orelse):
                exposed |= (_loaded([test]) - done) | _exposed(body, done)[0] | _exposed(orelse, done)[0]
            case ast.With(items=managers, body=body) | ast.AsyncWith(items=managers, body=body):
                exposed |= _loaded(one.context_expr for one in managers) - done
                done |= stored(one.optional_vars for one in managers if one.optional_vars is not None)
                inner, after = _exposed(body, done)
                exposed, done = exposed | inner, done | (after or set())
            case ast.Try() | ast.TryStar():
                blocks = [[*node.body, *node.orelse], *(handler.body for handler in node.handlers)]
            case ast.Break() | ast.Continue() | ast.Return() | ast.Raise():
                return exposed | (_loaded([node]) - done), None
            case _:
                exposed |= _loaded([node]) - done
                done |= stored([node])
        ways = [_exposed(block, done) for block in blocks]
        exposed |= {name for inner, _ in ways for name in inner}
        ends = [after for _, after in ways if after is not None]
        if ends:
            done = set.intersection(*ends)
        if isinstance(node, ast.Try | ast.TryStar):
            exposed |= _exposed(node.finalbody, done)[0]
    return exposed, done
