"""What a function of the script computes its values from, read in its source, without the order of its lines.

    ratio *= 0.995                         ratio    from ratio
    forced = random.random() < ratio       forced   from the call of random.random, and from ratio
    if forced:
        loss = loss_of(x, y)               loss     from the call of loss_of with x and y, and from forced
    total += loss.item()                   total    from total and loss
    run.step(loss)                         a call   of run.step, with loss

A value also depends on the conditions under which it is set, and on those under which a loop around it is left.
"""

from __future__ import annotations

import ast
import functools
import linecache
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from types import CodeType
from typing import Final, NamedTuple

from lockstep.loop_variables import fresh_variables, stored
from lockstep.run.source.source_paths import (
    OF_COMPREHENSION,
    Path,
    all_of,
    asks_for_several_ranks,
    is_of_comprehension,
    name_in_script,
    path_of,
    text_in_script,
    text_part,
    with_names,
    within,
)
from lockstep.run.source.variable_names import with_separate_names

_Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
ITEMS: Final = "__iter__"  #: the method that a loop over an object calls
GROWS: Final = {"append", "appendleft", "extend", "insert"}  # methods of lists and deques
_GIVES_NOTHING: Final = {*GROWS, "clear", "__setitem__"}  # these return None
TAKES_AWAY: Final = {"clear", "pop", "popitem", "popleft", "reverse", "sort"}  #: also without arguments
_EXITS: Final = (ast.Break, ast.Continue, ast.Return)


class Call(NamedTuple):
    """A call whose value is read."""

    function: tuple[Read, ...]  #: a `Path`, or what the function itself is computed from
    arguments: tuple[tuple[Read, ...], ...]
    keywords: tuple[tuple[str, tuple[Read, ...]], ...]  #: the name is "" for `**options`
    is_starred: bool  #: has `*arguments`
    line: int
    certain: int = 0  #: how many stand before the first `*arguments`
    attribute: str = ""  #: of the object that it makes, only this is read; "": all of it
    method: str = ""  #: the last name of the function, such as `add_`, whatever it is a method of

    @property
    def every(self) -> tuple[Read, ...]:
        """The reads that all arguments are computed from."""
        return self.without(())

    def without(self, keywords: Collection[str]) -> tuple[Read, ...]:
        """The same without the arguments of some ``keywords``."""
        named = (part for name, part in self.keywords if name not in keywords)
        return tuple(read for part in (*self.arguments, *named) for read in part)


class Guard(NamedTuple):
    """A test under which something is done."""

    test: ast.expr
    holds: bool  #: whether the test must, or must not


class Choice(NamedTuple):
    """Reads that happen only under some tests."""

    guards: tuple[Guard, ...]
    reads: tuple[Read, ...]


class Counted(NamedTuple):
    """A value that is new in each turn of a loop over ``items``: a count, or an item of another list in a `zip`."""

    items: tuple[Read, ...]


class ItemsOf(NamedTuple):
    """What a comprehension makes of the items that a call gives, such as a call of `Run.evaluate`."""

    call: Call


class Text(NamedTuple):
    """A text that is written where it is given to a function, as ``"end"`` or ``f"on_{event}"``."""

    parts: tuple[str | Path, ...]
    reads: tuple[Read, ...]


class Lines(NamedTuple):
    """The results of functions that these lines run without naming them: properties, operators, callbacks."""

    first: int
    last: int


def flat(reads: Iterable[Read]) -> Iterator[Read]:
    """``reads``, with the reads of a `Choice` in place of the choice."""
    for read in reads:
        if isinstance(read, Choice):
            yield from flat(read.reads)
        else:
            yield read


Read = Path | Call | Choice | Counted | ItemsOf | Text | Lines
WORLD_SIZE: Final = Path("WORLD_SIZE")  #: the variable of the environment, read by its name


class Use(NamedTuple):
    """A call, or a value that is written into an object, with what decides whether that happens."""

    read: Call | None
    target: Path | None  #: the object that is written to
    written: str  #: the text of the attribute or item of it, such as ``group['lr']``; "" for a call
    value: tuple[Read, ...]
    conditions: tuple[Read, ...]
    loops: tuple[int, ...]  #: those around it, as indices into `Reads.exits`; the first one is the function
    line: int
    sometimes: bool  #: not whenever the function runs
    guards: tuple[Guard, ...]


class Loop(NamedTuple):
    """The lines of a loop."""

    first: int
    last: int
    fresh: frozenset[str]  #: variables that each turn sets anew, before it reads them
    items: frozenset[str]  #: those that the loop itself sets


NO_LOOP: Final = Loop(0, -1, frozenset(), frozenset())


class Change(NamedTuple):
    """A variable or an attribute gets another value, or a list another item."""

    path: Path
    value: tuple[Read, ...]  #: what that is computed from
    conditions: tuple[Read, ...]
    line: int
    sometimes: bool  #: not whenever the function runs
    guards: tuple[Guard, ...]


class Statement(NamedTuple):
    """The lines of a statement; of a statement with blocks, the lines before the first block."""

    lines: Lines
    conditions: tuple[Read, ...]  #: under which it runs
    sometimes: bool  #: not whenever the function runs
    guards: tuple[Guard, ...]


@dataclass
class Reads:
    """The reads of one function, or of a module's own lines."""

    parameters: ast.arguments | None = None
    set_from: dict[str, list[Read]] = field(default_factory=dict)  #: by a variable, or a path of attributes
    bound_to: dict[str, list[tuple[Read, ...]]] = field(default_factory=dict)  #: the same of a variable, by assignments
    filled_from: dict[str, list[Read]] = field(default_factory=dict)  #: by a variable: what its methods are given
    returned: list[Read] = field(default_factory=list)
    yields: list[int] = field(default_factory=list)  #: lines at which a generator gives an item
    raises: list[Read] = field(default_factory=list)  #: the conditions under which it raises an exception
    uses: list[Use] = field(default_factory=list)
    exits: list[list[Read]] = field(default_factory=lambda: [[]])  #: by loop: the conditions under which it is left
    loops: list[Loop] = field(default_factory=list)
    changes: list[Change] = field(default_factory=list)
    items_set: list[Change] = field(default_factory=list)  #: by a key that is computed
    statements: list[Statement] = field(default_factory=list)
    outer: set[str] = field(default_factory=set)  #: variables that are declared global or nonlocal

    @functools.cached_property
    def methods(self) -> frozenset[str]:
        """The names of the methods that are called."""
        return frozenset(use.read.method for use in self.uses if use.read is not None)

    def statement_at(self, line: int) -> Statement | None:
        """The statement that has a ``line`` outside of the statement's blocks."""
        return next((one for one in self.statements if one.lines.first <= line <= one.lines.last), None)

    def loop_at(self, line: int) -> Loop:
        """The innermost loop around a ``line``."""
        around = [loop for loop in self.loops if loop.first <= line <= loop.last]
        return min(around, key=lambda loop: loop.last - loop.first, default=NO_LOOP)


@functools.lru_cache(maxsize=512)
def reads_of(code: CodeType) -> Reads | None:
    """The reads of the function with this ``code``; None if the source cannot be read."""
    node = node_of(code)
    if node is None:
        return None
    reader = _Reader(yields=any(isinstance(one, ast.Yield | ast.YieldFrom) for one in within(node)))
    if isinstance(node, ast.Lambda):
        reader.reads.parameters = node.args
        reader.reads.returned += reader.expression(node.body)
    else:
        if not isinstance(node, ast.Module):
            reader.reads.parameters = node.args
        reader.block(with_separate_names(node).body)
    return reader.reads


@functools.lru_cache(maxsize=64)
def nodes_of(file: str) -> dict[tuple[str, int], _Function | ast.Module]:
    """The functions of a source file, by what their code says of its name and first line."""
    try:
        module = ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError, RecursionError):
        return {}
    found: dict[tuple[str, int], _Function | ast.Module] = {("<module>", 1): module, ("<module>", 0): module}
    for node in ast.walk(module):
        if isinstance(node, ast.Lambda):
            found.setdefault(("<lambda>", node.lineno), node)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            found[node.name, first] = node
    return found


def node_of(code: CodeType) -> _Function | ast.Module | None:
    """The function of its source file that has the ``code``; None where the source is not known."""
    return nodes_of(code.co_filename).get((code.co_name, code.co_firstlineno))


class _Reader:
    """Goes through the statements of one function, but not through those of functions within."""

    def __init__(self, *, yields: bool) -> None:
        self._yields: Final = yields
        self.reads: Final = Reads()
        self._conditions: tuple[Read, ...] = ()
        self._loops: tuple[int, ...] = (0,)
        self._tests = 0  # around
        self._guards: tuple[Guard, ...] = ()

    def block(self, statements: Sequence[ast.stmt]) -> None:
        for statement in statements:
            self._statement(statement)

    def _statement(self, node: ast.stmt) -> None:
        blocks = getattr(node, "body", None) or getattr(node, "cases", None)
        end = blocks[0].lineno - 1 if blocks and hasattr(blocks[0], "lineno") else node.end_lineno
        lines = Lines(node.lineno, max(node.lineno, end or 0))
        self.reads.statements.append(Statement(lines, self._conditions, self._sometimes, self._guards))
        match node:
            case ast.Assign(targets=targets, value=value):
                for target in targets:
                    self._assign(target, value)
            case ast.AnnAssign(target=target, value=ast.expr() as value):
                self._assign(target, value)
            case ast.AugAssign(target=target, value=value):
                read = self.expression(value)
                self._bind(target, [*self.expression(target), *read])
                if (path := path_of(target)) is not None:  # a tensor is changed in place
                    self._use(None, path, read, target)
            case (
                ast.For(target=target, iter=items, body=body, orelse=orelse)
                | ast.AsyncFor(target=target, iter=items, body=body, orelse=orelse)
            ):
                self._enter_loop(node, body, self._bind_items(target, items))
                self.block(orelse)
            case ast.While(test=test, body=body, orelse=orelse):
                self._enter_loop(node, body, [*self.expression(test), _lines_of(test)])
                self.block(orelse)
            case ast.If(test=test, body=body, orelse=orelse):
                read = [] if asks_for_several_ranks(test) else [*self.expression(test), _lines_of(test)]
                if any(isinstance(inner, _EXITS) for inner in within(node)):
                    self.reads.exits[self._loops[-1]] += self._guarded((*self._conditions, *read))
                for block, holds in ((body, True), (orelse, False)):
                    self._guards = (*self._guards, Guard(test, holds))
                    self._under(read, block, is_test=True)
                    self._guards = self._guards[:-1]
            case ast.Match(subject=subject, cases=cases):
                read = self.expression(subject)
                for case in cases:
                    for name in (n.name for n in ast.walk(case.pattern) if isinstance(n, ast.MatchAs | ast.MatchStar)):
                        self._set(name or "_", read)
                    self._under([*read, *(self.expression(case.guard) if case.guard else ())], case.body, is_test=True)
            case ast.Try() | ast.TryStar():
                before = len(self.reads.uses)
                self.block(node.body)
                calls = [use.read for use in self.reads.uses[before:] if use.read is not None]
                for handler in node.handlers:
                    self._under(calls, handler.body, is_test=True)
                self.block([*node.orelse, *node.finalbody])
            case ast.With(items=managers, body=body) | ast.AsyncWith(items=managers, body=body):
                for item in managers:
                    read = self.expression(item.context_expr)
                    if item.optional_vars is not None:
                        self._bind(item.optional_vars, read)
                self.block(body)
            case ast.Return() if self._yields:
                pass  # what a generator returns its loop does not get
            case ast.Return(value=ast.expr() as value):
                self.reads.returned += self._guarded((*self.expression(value), _lines_of(value), *self._conditions))
            case ast.Raise():
                self.reads.raises += self._guarded(self._conditions)
            case ast.Global(names=names) | ast.Nonlocal(names=names):
                self.reads.outer.update(names)
            case ast.Expr(value=value):
                self.expression(value)
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                pass  # the object says more, once there is one
            case _:
                for child in ast.iter_child_nodes(node):
                    if isinstance(child, ast.expr):
                        self.expression(child)

    def _under(self, conditions: Iterable[Read], body: Sequence[ast.stmt], *, is_test: bool = False) -> None:
        before, self._conditions = self._conditions, (*self._conditions, *conditions)
        self._tests += is_test
        self.block(body)
        self._tests -= is_test
        self._conditions = before

    @property
    def _sometimes(self) -> bool:
        return bool(self._tests) or any(self.reads.exits[loop] for loop in self._loops)

    def _use(self, call: Call | None, target: Path | None, value: Sequence[Read], node: ast.expr) -> None:
        around = (self._conditions, self._loops, node.lineno, self._sometimes, self._guards)
        written = "" if target is None else text_in_script(node)
        self.reads.uses.append(Use(call, target, written, tuple(value), *around))

    def _change(self, path: Path, value: Iterable[Read], line: int) -> None:
        self.reads.changes.append(self._changed(path, value, line))

    def _changed(self, path: Path, value: Iterable[Read], line: int) -> Change:
        return Change(path, tuple(value), self._conditions, line, self._sometimes, self._guards)

    def _enter_loop(self, node: ast.For | ast.AsyncFor | ast.While, body: Sequence[ast.stmt], read: list[Read]) -> None:
        before, self._loops = self._loops, (*self._loops, len(self.reads.exits))
        self.reads.exits.append([])
        items = frozenset() if isinstance(node, ast.While) else frozenset(stored([node.target]))
        self.reads.loops.append(Loop(node.lineno, node.end_lineno or node.lineno, fresh_variables(node), items))
        self._under(read, body)
        self._loops = before

    # ---- what is set -------------------------------------------------------------------------------------------

    def _assign(self, target: ast.expr, value: ast.expr) -> None:
        match target, value:
            case ((ast.Tuple(elts=targets) | ast.List(elts=targets)), ast.Tuple(elts=values)) if len(targets) == len(
                values
            ) and not any(isinstance(one, ast.Starred) for one in (*targets, *values)):
                for one, its_value in zip(targets, values, strict=True):
                    self._assign(one, its_value)
            case _:
                self._bind(target, self.expression(value))

    def _bind(self, target: ast.expr, read: list[Read]) -> None:
        match target:
            case ast.Name(id=name):
                self._set(name, read)
                self.reads.bound_to.setdefault(name, []).append(tuple(read))
                if not is_of_comprehension(name):
                    self._change(Path(name_in_script(name)), read, target.lineno)
            case ast.Tuple(elts=targets) | ast.List(elts=targets):
                for one in targets:
                    self._bind(one, read)
            case ast.Starred(value=one):
                self._bind(one, read)
            case ast.Attribute(value=owner):
                if (path := path_of(target)) is not None:
                    self._set(path.text, read)
                    self._change(path, read, target.lineno)
                self._write(owner, read, target)
            case ast.Subscript(value=owner, slice=place):
                read = [*read, *self.expression(place)]
                if (path := path_of(owner)) is not None:
                    self._set(path.text, read)
                if (path := path_of(target)) is not None:
                    self._change(path, read, target.lineno)
                elif (path := path_of(owner)) is not None:
                    self.reads.items_set.append(self._changed(path, read, target.lineno))
                self._write(owner, read, target)

    def _set(self, name: str, read: Iterable[Read]) -> None:
        lines = [one.lines for one in self.reads.statements[-1:]]  # a lambda has none
        self.reads.set_from.setdefault(name, []).extend(self._guarded((*read, *lines, *self._conditions)))

    def _guarded(self, reads: tuple[Read, ...]) -> tuple[Read, ...]:
        return (Choice(self._guards, reads),) if self._guards and reads else reads

    def _write(self, owner: ast.expr, read: Sequence[Read], target: ast.expr) -> None:
        while isinstance(owner, ast.Subscript):
            owner = owner.value
        if (path := path_of(owner)) is not None:
            self._use(None, path, read, target)

    # ---- what is read ------------------------------------------------------------------------------------------

    def expression(self, node: ast.expr) -> list[Read]:
        """The reads that the value of an expression is computed from."""
        is_test = isinstance(node, ast.IfExp | ast.BoolOp)
        self._tests += is_test
        read = self._read(node)
        self._tests -= is_test
        return read

    def _read(self, node: ast.expr) -> list[Read]:
        match node:
            case ast.Name(id=name):
                return [Path(name)]
            case ast.Constant(value="WORLD_SIZE"):
                return [WORLD_SIZE]
            case ast.Attribute(value=owner):
                path = path_of(node)
                return [path] if path is not None else self.expression(owner)
            case ast.Subscript() if (path := path_of(node)) is not None:
                return [path, *([WORLD_SIZE] if path.attributes[-1:] == ("['WORLD_SIZE']",) else ())]
            case ast.Call(func=ast.Attribute(value=owner, attr="get"), args=[ast.Constant(value=str(key)), *others]):
                call, path = self._call(node), path_of(owner)
                if path is None or key == "WORLD_SIZE":
                    return [call]
                rest = [read for other in others for read in self.expression(other)]
                return [Path(path.root, (*path.attributes, f"[{key!r}]")), *rest]
            case ast.Call(func=ast.Name(id="getattr"), args=[_, _, *others]) if (path := path_of(node)) is not None:
                return [path, *(read for other in others for read in self.expression(other))]
            case ast.Call(func=ast.Attribute(attr=method)) if method in _GIVES_NOTHING:
                self._call(node)
                return []
            case ast.Call():
                return [self._call(node)]
            case ast.NamedExpr(target=target, value=value):
                read = self.expression(value)
                self._bind(target, read)
                return read
            case ast.IfExp(test=test, body=then, orelse=otherwise):
                sides = ((then, True), (otherwise, False))
                choices = (Choice((Guard(test, holds),), tuple(self.expression(side))) for side, holds in sides)
                return [*self.expression(test), *choices]
            case ast.Lambda(args=parameters, body=body):
                own = {one.arg for one in (*parameters.posonlyargs, *parameters.args, *parameters.kwonlyargs)}
                return [one for one in self.expression(body) if not (isinstance(one, Path) and one.root in own)]
            case ast.ListComp() | ast.SetComp() | ast.GeneratorExp() | ast.DictComp():
                return self._comprehension(node)
            case ast.Yield(value=ast.expr() as value) | ast.YieldFrom(value=value):
                read = self.expression(value)
                self.reads.returned += self._guarded((*read, *self._conditions))
                self.reads.yields.append(node.lineno)
                return read
            case _:
                return [read for child in ast.iter_child_nodes(node) for read in self._child(child)]

    def _bind_items(self, target: ast.expr, items: ast.expr) -> list[Read]:
        """Set the variables of a loop; returns the reads that its items are computed from."""
        match items, target:
            case (
                ast.Call(func=ast.Name(id="zip"), args=parts),
                ast.Tuple(elts=targets),
            ) if len(parts) == len(targets) and not any(isinstance(one, ast.Starred) for one in (*parts, *targets)):
                reads = [self._items_of(part) for part in parts]
                for number, (one, part) in enumerate(zip(targets, parts, strict=True)):
                    others = (read for index, each in enumerate(reads) if index != number for read in each)
                    self._bind_items(one, part)
                    count = [Counted(tuple(others))]
                    for name in stored([one]):
                        self._set(name, count)
                return [self._call(items)]
            case ast.Call(func=ast.Name(id="enumerate"), args=[part, *_]), ast.Tuple(elts=[count, one]):
                self._bind(count, [Counted(tuple(self.expression(part)))])
                return self._bind_items(one, part)
        read = self._items_of(items)
        self._bind(target, read)
        return read

    def _items_of(self, node: ast.expr) -> list[Read]:
        """The reads that the items of a loop are computed from: of an object, the result of its `__iter__`."""
        path = path_of(node)
        if path is None:
            return self.expression(node)
        return [Call((Path(path.root, (*path.attributes, ITEMS)),), (), (), False, node.lineno)]

    def _child(self, node: ast.AST) -> list[Read]:
        if isinstance(node, ast.expr):
            return self.expression(node)
        return [read for child in ast.iter_child_nodes(node) for read in self._child(child)]

    def _comprehension(self, node: ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp) -> list[Read]:
        """The reads that a comprehension is computed from; variables of the same names elsewhere are others."""
        own = stored(part.target for part in node.generators)
        renamed = {name: f"{name}{OF_COMPREHENSION}{node.lineno}:{node.col_offset}" for name in own}
        parts = [with_names(part, renamed) for part in node.generators]
        parts[0].iter = node.generators[0].iter  # is not within
        results = [node.key, node.value] if isinstance(node, ast.DictComp) else [node.elt]
        read: list[Read] = []
        before = self._conditions
        for part in parts:
            read += (items := self._bind_items(part.target, part.iter))
            read += [ItemsOf(each) for each in items if isinstance(each, Call)]
            for test in part.ifs:
                read += (tested := self.expression(test))
                self._conditions = (*self._conditions, *tested)
        for result in results:
            read += self.expression(with_names(result, renamed))
        self._conditions = before
        return [one for one in read if not (isinstance(one, Path) and one.root in renamed.values())]

    def _call(self, node: ast.Call) -> Call:
        call = Call(
            tuple(self.expression(node.func)),
            tuple(tuple(self._argument(one)) for one in node.args),
            tuple((one.arg or "", tuple(self._argument(one.value))) for one in node.keywords),
            any(isinstance(one, ast.Starred) for one in node.args),
            node.lineno,
            next((number for number, one in enumerate(node.args) if isinstance(one, ast.Starred)), len(node.args)),
            method=getattr(node.func, "attr", getattr(node.func, "id", "")),
        )
        self._use(call, None, (), node)
        owner = path_of(_changed_by_chain(node.func.value)) if isinstance(node.func, ast.Attribute) else None
        if (path := all_of(node)) is not None:
            self._change(path, (path, *call.every), node.lineno)
        if call.method == "shuffle" and node.args and (path := path_of(node.args[0])) is not None:
            self._set(path.text, [call])  # in place, by a generator
        if owner is not None and isinstance(node.func, ast.Attribute):
            if not owner.attributes and (call.arguments or call.keywords or node.func.attr in TAKES_AWAY):
                self.reads.filled_from.setdefault(owner.root, []).extend(
                    self._guarded((*call.every, *self._conditions))
                )
            if node.func.attr == "setdefault":
                self.reads.items_set.append(self._changed(owner, call.every, node.lineno))
            if node.func.attr in GROWS:
                self._change(owner, (owner, *call.every), node.lineno)
            elif node.func.attr == "clear":
                self._change(owner, (), node.lineno)
        return call

    def _argument(self, node: ast.expr) -> list[Read]:
        """As `expression`, and a text by itself, by which a function may choose another one."""
        read = self.expression(node)
        match node:
            case ast.Constant(value=str() as text):
                return [*read, Text((text,), ())]
            case ast.JoinedStr(values=values):
                parts = [text_part(part) for part in values]
                return [Text(tuple(part for part in parts if part is not None), tuple(read))] if all(parts) else read
        return read


def _changed_by_chain(node: ast.expr) -> ast.expr:
    """``m`` of ``m.mul_(0.9).add_(x)``, which changes m twice; else ``node`` itself."""
    while isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr.endswith("_"):
        node = node.func.value
    return node


def _lines_of(node: ast.expr) -> Lines:
    return Lines(node.lineno, node.end_lineno or node.lineno)
