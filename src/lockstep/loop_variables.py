"""Which variables a loop's body sets before it reads them, in each turn anew; and which are not read any more.

for x, y in batches:
    out = model(x)              out      set anew
    total += loss(out, y)       total    is read first: what it was before matters
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

_READ_ALL: Final = {"locals", "globals", "eval", "exec"}
_OWN: Final = {"vars", "dir"}  # without arguments
_SCOPES: Final = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)
#: What reads variables of the function around it whenever it is called or gone through.
LATER: Final = (*_SCOPES, ast.GeneratorExp)


def fresh_variables(node: ast.For | ast.AsyncFor | ast.While) -> frozenset[str]:
    """The variables that each turn of a loop sets before it reads them."""
    targets = stored([node.target]) if not isinstance(node, ast.While) else set()
    exposed, _ = _exposed(node.body, targets)
    return frozenset((stored(node.body) | targets) - exposed)


def dead_at(function: ast.AST, line: int) -> frozenset[str]:
    """The variables of a function or module that no line reads any more before it sets them, from ``line`` on.

    for epoch in epochs:
        guess = model(x)                guess    a statement of the turn sets it, and all that names it
        labels.copy_(guess)                      stands between that and the line
        for x, y in batches:            line

    Others may be dead, too: nothing is concluded from the ways on which statements run, and nothing where ``locals()``
    or the like may read all variables.
    """
    if reads_all(function):
        return frozenset()
    named = _named([function])
    dead: set[str] = set()
    block: Sequence[ast.stmt] = getattr(function, "body", ())
    of_loop = False
    while place := next((n for n, node in enumerate(block, 1) if _holds([node], line)), 0):
        for number, node in enumerate(block[: place - 1] if of_loop else (), 1):
            if isinstance(node, ast.Assign) and all(isinstance(each, ast.Name | ast.Tuple) for each in node.targets):
                between = block[number : place - 1]
                here = _named([*node.targets, *between])
                later = _named(part for each in between for part in ast.walk(each) if isinstance(part, LATER))
                dead.update(v for v in stored(node.targets) if named[v] == here[v] and v not in later)
        node = block[place - 1]
        block = next((inner for inner in _blocks(node) if _holds(inner, line)), ())
        of_loop = isinstance(node, ast.For | ast.AsyncFor | ast.While) and block is node.body
    return frozenset(dead)


def reads_all(function: ast.AST) -> bool:
    """Whether a function or module may read every variable by its name, as by ``locals()`` or ``vars()``."""
    return any(
        (isinstance(part, ast.Name) and part.id in _READ_ALL)
        or (isinstance(part, ast.Call) and not part.args and isinstance(part.func, ast.Name) and part.func.id in _OWN)
        for part in ast.walk(function)
    )


def free_names(node: ast.AST) -> set[str]:
    """The names in a ``node`` that are not variables of functions and comprehensions within, nor their own."""
    names: set[str] = set()
    for child in ast.iter_child_nodes(node):
        names |= {child.id} if isinstance(child, ast.Name) else free_names(child)
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
        shared = {n for part in ast.walk(node) if isinstance(part, ast.Global | ast.Nonlocal) for n in part.names}
        own = stored(node.body if isinstance(node.body, list) else [node.body])
        names -= (own | {part.arg for part in ast.walk(node.args) if isinstance(part, ast.arg)}) - shared
        names |= shared | free_names(node.args)
    elif isinstance(node, ast.GeneratorExp):
        names -= stored(part.target for part in node.generators)
    return names


def _named(nodes: Iterable[ast.AST]) -> Counter[str]:
    """How often nodes name each variable, in whatever way: also as a text of its own, such as of an `except`."""
    parts = (part for node in nodes for part in ast.walk(node))
    fields = (field for part in parts for _, value in ast.iter_fields(part) for field in _listed(value))
    return Counter(field for field in fields if isinstance(field, str))


def _listed(value: object) -> Sequence[object]:
    return value if isinstance(value, list) else (value,)


def _blocks(node: ast.stmt) -> Iterator[Sequence[ast.stmt]]:
    """The blocks of statements within a statement."""
    parts = (node, *getattr(node, "handlers", ()), *getattr(node, "cases", ()))
    return (getattr(part, name, ()) for part in parts for name in ("body", "orelse", "finalbody"))


def _holds(block: Sequence[ast.stmt], line: int) -> bool:
    return bool(block) and block[0].lineno <= line <= (block[-1].end_lineno or 0)


def stored(nodes: Iterable[ast.AST]) -> set[str]:
    """The variables that are set anywhere in these, but for those of functions, classes and comprehensions in them."""
    found: set[str] = set()
    for node in nodes:
        match node:
            case ast.Name(id=name, ctx=ast.Store()):
                found.add(name)
            case ast.comprehension(iter=items, ifs=tests):
                found |= stored([items, *tests])
            case _ if not isinstance(node, _SCOPES):
                found |= stored(ast.iter_child_nodes(node))
    return found


def _surely_stored(node: ast.AST) -> set[str]:
    """The variables that a statement without blocks sets, but for those that an expression sets sometimes."""
    inner = (part for part in ast.walk(node) if isinstance(part, ast.BoolOp | ast.IfExp | ast.comprehension))
    walrus = (part for each in inner for part in ast.walk(each) if isinstance(part, ast.NamedExpr))
    return stored([node]) - stored(part.target for part in walrus)


def _loaded(nodes: Iterable[ast.AST | None]) -> set[str]:
    found: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Name):
            found |= set() if isinstance(node.ctx, ast.Store) else {node.id}
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            found |= free_names(node)
        elif node is not None:
            parts = getattr(node, "generators", ())  # of a comprehension, whose variables are its own
            found |= _loaded(ast.iter_child_nodes(node)) - stored(part.target for part in parts)
            found |= _loaded(part.iter for part in parts[:1])
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
        before = set(done)
        match node:
            case ast.Assign(value=value) | ast.AnnAssign(value=value):
                exposed |= _loaded([node]) - done
                done |= _surely_stored(node) if value is not None else set()
            case ast.AugAssign(target=target):
                exposed |= (_loaded([node]) | stored([target])) - done
                done |= stored([target])
            case ast.If(test=test, body=body, orelse=orelse):
                exposed |= _loaded([test]) - done
                blocks = [body, orelse]
            case ast.Match(subject=subject, cases=cases):
                exposed |= _loaded([subject, *(part for case in cases for part in (case.pattern, case.guard))]) - done
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
                is_all = not any("suppress" in ast.unparse(one.context_expr) for one in managers)
                exposed, done = exposed | inner, done | ((after or set()) if is_all else set())
            case ast.Try() | ast.TryStar():
                blocks = [[*node.body, *node.orelse], *(handler.body for handler in node.handlers)]
            case ast.Break() | ast.Continue() | ast.Return() | ast.Raise():
                return exposed | (_loaded([node]) - done), None
            case _:
                exposed |= _loaded([node]) - done
                done |= _surely_stored(node)
        ways = [_exposed(block, done) for block in blocks]
        exposed |= {name for inner, _ in ways for name in inner}
        ends = [after for _, after in ways if after is not None]
        if ends:
            done = set.intersection(*ends)
        if isinstance(node, ast.Try | ast.TryStar):
            exposed |= _exposed(node.finalbody, before)[0]
    return exposed, done
