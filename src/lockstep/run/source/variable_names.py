"""Variables whose name a function uses for several things: each gets a name of its own before the lines are read.

    for x, y in run.train(batches):
        out = model(x)                          out
        run.step(loss_of(out, y))
        if count % 10 == 0:
            out = model(example)                out at 5:12     no value of the step is computed from it
            print(out)

Values and their uses belong together that some way through the lines connects, as in a compiler ("webs" of definitions
and uses). A value that only lines of the same turn of the same loop read is renamed; a value that outlives a turn keeps
its name, by which it is found in the running function.
"""

from __future__ import annotations

import ast
import copy
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Final, TypeVar

from lockstep.loop_variables import LATER, free_names, reads_all, stored
from lockstep.run.source.source_paths import OF_USE

_Node = TypeVar("_Node", bound=ast.AST)
_Environment = dict[str, frozenset[int]]  # by name: the definitions that may reach this point
_BEFORE: Final = -1  # stands for a value from before the function's lines


def with_separate_names(function: _Node) -> _Node:
    """``function`` or a copy of it, in which variables have names of their own that only share one in the script."""
    names = _separable(function)
    if not names:
        return function
    copied = copy.deepcopy(function)
    uses = _Uses(names)
    uses.block(getattr(copied, "body", ()), {})
    for name, webs in uses.webs().items():
        for web in webs:
            for node in web:
                node.id = f"{name}{OF_USE}{web[0].lineno}:{web[0].col_offset}"
    return copied


def _separable(function: ast.AST) -> set[str]:
    """The names that are set more than once, and only where the order of the lines says what reads them."""
    if isinstance(function, ast.Lambda):
        return set()
    inner = [part for child in ast.iter_child_nodes(function) for part in ast.walk(child)]
    if reads_all(function):
        return set()
    counted: defaultdict[str, int] = defaultdict(int)
    others: set[str] = set()
    for part in inner:
        match part:
            case ast.Name(id=name, ctx=ast.Store()):
                counted[name] += 1
            case ast.Name(id=name, ctx=ast.Del()):
                others.add(name)
            case ast.Global(names=names) | ast.Nonlocal(names=names):
                others.update(names)
            case ast.MatchAs(name=str() as name) | ast.MatchStar(name=str() as name):
                others.add(name)
            case ast.MatchMapping(rest=str() as name) | ast.ExceptHandler(name=str() as name):
                others.add(name)
            case ast.alias(name=name, asname=alias):
                others.add((alias or name).partition(".")[0])
        if isinstance(part, LATER):
            others |= free_names(part)
            others.add(getattr(part, "name", ""))
    return {name for name, times in counted.items() if times > 1} - others


class _Uses:
    """Goes through a function's lines and notes which definitions of each name may reach which use."""

    def __init__(self, names: set[str]) -> None:
        self._names = names  # without those of the comprehension that is gone through
        self._rank: Final[dict[ast.Name, int]] = {}  # in which order they are come to
        self._nodes: Final[list[ast.Name]] = []
        self._loop_of: Final[list[ast.AST | None]] = []
        self._reaching: Final[defaultdict[int, set[int]]] = defaultdict(set)  # by use
        self._of_items: Final[set[int]] = set()  # definitions by a loop, which are its turn's
        self._loop: ast.AST | None = None
        self._left: list[tuple[list[_Environment], list[_Environment]]] = []  # by `continue` and by `break`

    def webs(self) -> dict[str, list[list[ast.Name]]]:
        """By name: the nodes of each variable that is to have another name."""
        web_of = list(range(len(self._nodes)))

        def root(one: int) -> int:
            while web_of[one] != one:
                one = web_of[one]
            return one

        stay = set()
        for use, definitions in self._reaching.items():
            for definition in definitions:
                is_of_turn = definition in self._of_items or self._loop_of[definition] is self._loop_of[use]
                if definition == _BEFORE or not is_of_turn:
                    stay.add(use)
                if definition != _BEFORE:
                    web_of[root(definition)] = root(use)
        members: defaultdict[int, list[int]] = defaultdict(list)
        for number in range(len(self._nodes)):
            members[root(number)].append(number)
        found: defaultdict[str, list[list[int]]] = defaultdict(list)
        for web in members.values():
            found[self._nodes[web[0]].id].append(web)
        return {
            name: [[self._nodes[one] for one in web] for web in webs if web is not first and stay.isdisjoint(web)]
            for name, webs in found.items()
            for first in [next((web for web in webs if not stay.isdisjoint(web)), webs[0])]
        }

    def block(self, statements: Iterable[ast.stmt], before: _Environment | None) -> _Environment | None:
        """Go through ``statements``; returns what reaches their end, None where they are always left before it."""
        for node in statements:
            if before is None:
                return None
            before = self._statement(node, before)
        return before

    def _statement(self, node: ast.stmt, now: _Environment) -> _Environment | None:
        match node:
            case ast.Assign(targets=targets, value=value):
                self._expression(value, now)
                for target in targets:
                    self._expression(target, now)
            case ast.AugAssign(target=target, value=value):
                self._expression(value, now)
                if isinstance(target, ast.Name):
                    self._read(target, now)  # the same variable goes on
                    self._set(target, now)
                else:
                    self._expression(target, now)
            case ast.AnnAssign(target=target, value=value):
                if value is not None:
                    self._expression(value, now)
                    self._expression(target, now)
            case ast.If(test=test, body=body, orelse=orelse):
                self._expression(test, now)
                return _merged(self.block(body, dict(now)), self.block(orelse, dict(now)))
            case ast.For() | ast.AsyncFor() | ast.While():
                return self._go_through_loop(node, now)
            case ast.With(items=managers, body=body) | ast.AsyncWith(items=managers, body=body):
                before = dict(now)
                for item in managers:
                    self._expression(item, now)
                is_left = any("suppress" in ast.unparse(item.context_expr) for item in managers)
                after = self.block(body, now)
                return _merged(self._some_of(body, before), after) if is_left else after
            case ast.Try() | ast.TryStar():
                after = self.block(node.body, dict(now))
                caught = self._some_of(node.body, now)
                ends = [self.block(node.orelse, after)]
                ends += [self.block(handler.body, dict(caught)) for handler in node.handlers]
                left = _merged(*ends)
                ended = self.block(node.finalbody, self._some_of([node], now) if node.finalbody else left)
                return None if left is None else ended
            case ast.Match(subject=subject, cases=cases):
                self._expression(subject, now)
                ends = [dict(now)]
                for case in cases:
                    inner = dict(now)
                    self._expression(case.pattern, inner)
                    if case.guard is not None:
                        self._expression(case.guard, inner)
                    ends.append(self.block(case.body, inner))
                return _merged(*ends)
            case ast.Break() | ast.Continue():
                self._left[-1][isinstance(node, ast.Break)].append(now)
                return None
            case ast.Return() | ast.Raise():
                self._expression(node, now)
                return None
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                pass  # names of theirs are not separated
            case _:
                self._expression(node, now)
        return now

    def _go_through_loop(self, node: ast.For | ast.AsyncFor | ast.While, now: _Environment) -> _Environment | None:
        if not isinstance(node, ast.While):
            self._expression(node.iter, now)
        around, self._loop = self._loop, node
        begins, ends = None, dict(now)
        while ends != begins:  # until no more comes around
            begins = dict(ends)
            turn = dict(begins)
            self._left.append(([], []))
            self._expression(node.test if isinstance(node, ast.While) else node.target, turn)
            if not isinstance(node, ast.While):
                self._of_items.update(self._rank[part] for part in ast.walk(node.target) if part in self._rank)
            tested = dict(turn)
            after = self.block(node.body, turn)
            again, broken = self._left.pop()
            ends = _merged(begins, after, *again) or begins
        self._loop = around
        done = tested if isinstance(node, ast.While) else begins
        return _merged(self.block(node.orelse, dict(done)), *broken)

    def _some_of(self, statements: Sequence[ast.stmt], now: _Environment) -> _Environment:
        """What reaches the lines after some of the ``statements`` have run."""
        found = dict(now)
        for part in (part for node in statements for part in ast.walk(node)):
            if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store) and part in self._rank:
                found[part.id] = found.get(part.id, frozenset({_BEFORE})) | {self._rank[part]}
        return found

    def _expression(self, node: ast.AST, now: _Environment) -> None:
        if isinstance(node, LATER):
            return
        if isinstance(node, ast.NamedExpr):
            self._expression(node.value, now)
            self._expression(node.target, now)
        elif isinstance(node, ast.ListComp | ast.SetComp | ast.DictComp):
            self._expression(node.generators[0].iter, now)
            names = self._names
            self._names = names - stored(part.target for part in node.generators)
            for child in ast.iter_child_nodes(node):
                self._expression(child, now)
            self._names = names
        elif isinstance(node, ast.Name):
            (self._set if isinstance(node.ctx, ast.Store) else self._read)(node, now)
        else:
            for child in ast.iter_child_nodes(node):
                self._expression(child, now)

    def _read(self, node: ast.Name, now: _Environment) -> None:
        if node.id in self._names:
            self._reaching[self._number(node)] |= now.get(node.id, frozenset({_BEFORE}))

    def _set(self, node: ast.Name, now: _Environment) -> None:
        if node.id in self._names:
            now[node.id] = frozenset({self._number(node)})

    def _number(self, node: ast.Name) -> int:
        if node not in self._rank:
            self._rank[node] = len(self._nodes)
            self._nodes.append(node)
            self._loop_of.append(self._loop)
        return self._rank[node]


def _merged(*ends: _Environment | None) -> _Environment | None:
    """What reaches the line where these ways meet; None where none of them leads there."""
    met = [end for end in ends if end is not None]
    if not met:
        return None
    names = {name for end in met for name in end}
    return {name: frozenset().union(*(end.get(name, {_BEFORE}) for end in met)) for name in names}
