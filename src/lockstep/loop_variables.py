"""Which variables a loop's body sets before it reads them, in each turn anew.

for x, y in batches:
    out = model(x)              out      set anew
    total += loss(out, y)       total    is read first: what it was before matters
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Sequence


def fresh_variables(node: ast.For | ast.AsyncFor | ast.While) -> frozenset[str]:
    """The variables that each turn of a loop sets before it reads them."""
    targets = stored([node.target]) if not isinstance(node, ast.While) else set()
    exposed, _ = _exposed(node.body, targets)
    return frozenset((stored(node.body) | targets) - exposed)


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
