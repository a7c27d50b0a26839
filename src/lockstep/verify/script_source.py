"""What the source of a script says of names: where they are set, which of them a body reads, what may be to blame.

Only the script and the files of its own that it imports are read; nothing of them is run.
"""

from __future__ import annotations

import ast
import contextlib
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from lockstep.launch import Module, Script, own_sources
from lockstep.loop_variables import fresh_variables

_GENERATORS: Final = {"Generator", "default_rng", "RandomState", "Random"}
_CHANGES: Final = {
    "append",
    "extend",
    "add",
    "update",
    "pop",
    "insert",
    "appendleft",
    "setdefault",
    "step",
    "copy_",
    "clear",
    "remove",
}
_FORWARD_DEPTH: Final = 30  # rounds of following names


@dataclass(frozen=True, slots=True)
class Line:
    """A line of the script."""

    file: str
    number: int
    text: str = ""

    def __str__(self) -> str:
        return f"{Path(self.file).name}:{self.number}" + (f"  {self.text}" if self.text else "")


@dataclass(slots=True)
class ScriptSource:
    """The files of a script, as syntax trees."""

    lines: dict[str, list[str]]  #: by file
    trees: dict[str, ast.Module]
    _sets: dict[str, list[tuple[int, Line]]] = field(default_factory=dict)

    @classmethod
    def of(cls, program: Script | Module) -> ScriptSource:
        """What can be read of ``program``; empty, if nothing can."""
        lines: dict[str, list[str]] = {}
        trees: dict[str, ast.Module] = {}
        for path, text in own_sources(program):
            with contextlib.suppress(SyntaxError, ValueError, RecursionError):
                trees[path] = ast.parse(text)
                lines[path] = text.splitlines()
        return cls(lines, trees)

    def line(self, file: str, number: int) -> Line:
        """The line of this number, with its text where that is known."""
        path = next((path for path in self.lines if Path(path) == Path(file)), file)
        held = self.lines.get(path, [])
        return Line(path, number, held[number - 1].strip() if 0 < number <= len(held) else "")

    def nodes(self) -> Iterator[tuple[str, ast.AST]]:
        """All nodes of all files."""
        for file, tree in self.trees.items():
            for node in ast.walk(tree):
                yield file, node

    # ---- where something is --------------------------------------------------------------------------------------

    def set_at(self, path: str) -> Line | None:
        """Where what a ``path`` such as ``dataset.counts['a']`` leads to is set, the line that says most of several.

        A line that changes it in a function tells more than one in ``__init__`` or at the top.
        """
        for name in reversed(self.names(path)):
            if found := self._all_sets().get(name):
                return max(found, key=lambda each: each[0])[1]
        return None

    def calls(self, *names: str, keyword: str = "") -> list[Line]:
        """The lines that call a function or method of one of these names, with this keyword if one is given."""
        found = [
            (file, node.lineno)
            for file, node in self.nodes()
            if isinstance(node, ast.Call)
            and _name_of(node.func) in names
            and (not keyword or any(each.arg == keyword for each in node.keywords))
        ]
        return [self.line(*place) for place in found]

    def unseeded_generators(self) -> list[Line]:
        """The lines that make a random generator and give it no seed."""
        found = []
        for file, node in self.nodes():
            if (
                isinstance(node, ast.Call)
                and _name_of(node.func) in _GENERATORS
                and not node.args
                and not node.keywords
            ):
                line = self.line(file, node.lineno)
                if "manual_seed" not in line.text:
                    found.append(line)
        return found

    def hash_orders(self) -> list[Line]:
        """The lines that call ``hash`` or ``id``, or go through a set in whatever order it has."""
        sets = {
            target.id
            for _, node in self.nodes()
            if isinstance(node, ast.Assign) and _is_set(node.value, ())
            for target in node.targets
            if isinstance(target, ast.Name)
        }
        found = []
        for file, node in self.nodes():
            match node:
                case ast.Call(func=ast.Name(id="hash" | "id")):
                    found.append(self.line(file, node.lineno))
                case ast.Call(func=ast.Name(id="list" | "tuple" | "enumerate" | "iter" | "next" | "zip"), args=args):
                    if any(_is_set(arg, sets) for arg in args):
                        found.append(self.line(file, node.lineno))
                case ast.For(iter=ast.expr() as each) | ast.comprehension(iter=ast.expr() as each):
                    if _is_set(each, sets):
                        found.append(self.line(file, each.lineno))
                case ast.Call(func=ast.Attribute(attr="pop", value=ast.Name(id=name)), args=[]) if name in sets:
                    found.append(self.line(file, node.lineno))
                case _:
                    pass
        return found

    def rank_reads(self) -> list[Line]:
        """The lines that read a rank or a number of ranks, but to print or to log."""
        found = []
        for file, node in self.nodes():
            is_read = isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load) and node.attr in _RANK_READS
            is_variable = (
                isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in _RANK_VARIABLES
            )
            if (is_read or is_variable) and hasattr(node, "lineno"):
                line = self.line(file, node.lineno)
                if not re.match(r"(print|run\.say|run\.log|log|logger)\b", line.text):
                    found.append(line)
        return found

    def class_at(self, name: str, method: str = "forward") -> Line | None:
        """Where a class of this ``name`` defines ``method``."""
        for file, node in self.nodes():
            if isinstance(node, ast.ClassDef) and node.name == name:
                for each in node.body:
                    if isinstance(each, ast.FunctionDef) and each.name == method:
                        return self.line(file, each.lineno)
        return None

    def breaks(self) -> list[Line]:
        """The lines that leave the loop over a pass."""
        loops = [
            (file, node) for file, node in self.nodes() if isinstance(node, ast.For) and _calls(node.iter, "train")
        ]
        found = [(file, each.lineno) for file, loop in loops for each in ast.walk(loop) if isinstance(each, ast.Break)]
        return [self.line(*place) for place in found]

    def names_given(self, *methods: str) -> set[str]:
        """Names in the arguments of all calls of ``methods``."""
        calls = [n for _, n in self.nodes() if isinstance(n, ast.Call) and _name_of(n.func) in methods]
        return {name for call in calls for arg in (*call.args, *call.keywords) for name in _names_in(arg)}

    @staticmethod
    def names(path: str) -> list[str]:
        """The names on a path: ``model.blocks[0].calls`` has model, blocks and calls."""
        return re.findall(r"(?:^|\.)([A-Za-z_]\w*)", re.sub(r"\[[^\]]*\]", "", path)) or [path]

    # ---- what a body reads ---------------------------------------------------------------------------------------

    def read_by_body(self) -> tuple[set[str], set[str]]:
        """Names that bodies of ``run.train`` set before they read them, and all names that their losses depend on."""
        dead: set[str] = set()
        needed: set[str] = set()
        loops = [node for _, node in self.nodes() if isinstance(node, ast.For) and _calls(node.iter, "train")]
        for loop in loops:
            dead |= fresh_variables(loop)
            for node in ast.walk(loop):
                if isinstance(node, ast.Call) and _name_of(node.func) in ("step", "backward", "measure"):
                    needed |= {name for arg in (*node.args, *node.keywords) for name in _names_in(arg)}
        return dead, self.followed(needed)

    def followed(self, names: Collection[str]) -> set[str]:
        """The ``names``, and what they are computed from, through assignments, functions and classes."""
        needed = set(names)
        for _ in range(_FORWARD_DEPTH):
            size = len(needed)
            for _, node in self.nodes():
                match node:
                    case ast.FunctionDef(name=name) | ast.ClassDef(name=name) if name in needed:
                        needed |= _names_in(node)
                    case ast.Assign(targets=targets, value=value) if any(needed & _names_in(each) for each in targets):
                        needed |= _names_in(value)
                    case ast.AugAssign(target=target, value=value) if needed & _names_in(target):
                        needed |= _names_in(value)
                    case ast.For(target=target, iter=each) if needed & _names_in(target):
                        needed |= _names_in(each)
                    case _:
                        pass
            if len(needed) == size:
                break
        return needed

    def _all_sets(self) -> dict[str, list[tuple[int, Line]]]:
        """By the last part of a name: the lines that set or change it, each with how much it tells."""
        if not self._sets:
            for file, tree in self.trees.items():
                for line, name, rank in _sets_in(tree, _Scope(trains=True)):
                    self._sets.setdefault(name, []).append((rank, self.line(file, line)))
        return self._sets


_RANK_READS: Final = {"rank", "world_size", "local_rank", "leads", "local_size"}
_RANK_VARIABLES: Final = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "SLURM_PROCID", "LOCAL_WORLD_SIZE", "GROUP_RANK"}


@dataclass(frozen=True, slots=True)
class _Scope:
    """Where a statement stands."""

    function: str = ""
    in_loop: bool = False
    trains: bool = False  #: whether the loop over micro-batches is in the same function

    @property
    def tells(self) -> int:
        """How much a change here tells: one in a loop more than one that is made once, as in ``__init__``."""
        return (self.function not in ("", "__init__", "main")) + 2 * self.in_loop


def _sets_in(node: ast.AST, scope: _Scope) -> Iterator[tuple[int, str, int]]:
    """The lines below ``node`` that set or change something: its last name, and how much the line tells."""
    for child in ast.iter_child_nodes(node):
        inner = scope
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            inner = _Scope(getattr(child, "name", "lambda"), trains=_trains(child))
        elif isinstance(child, ast.For | ast.While):
            inner = replace(scope, in_loop=True)
        changes: Sequence[ast.expr]
        match child:
            case ast.Assign(targets=targets, value=value):
                changes, more = targets, _generator_bonus(value)
            case ast.AnnAssign(target=target, value=ast.expr() as value):
                changes, more = [target], _generator_bonus(value)
            case ast.AugAssign(target=target):
                changes, more = [target], 4
            case ast.Call(func=ast.Attribute(attr=change, value=owner)) if change in _CHANGES:
                changes, more = [owner], 3
            case ast.For(iter=ast.expr() as over):  # as over the parameters of a model, which are changed one by one
                changes, more = _owners_of_parts(over), 3
            case _:
                changes, more = [], 0
        for each in changes:
            for name, is_variable in _targets(each):
                # A variable that the loop reads is one of its function; an attribute may be set anywhere.
                is_other = is_variable and not scope.trains and scope.function
                yield each.lineno, name, scope.tells + more - (20 if is_other else 0)
        yield from _sets_in(child, inner)


def _owners_of_parts(node: ast.expr) -> list[ast.expr]:
    calls = [each.func for each in ast.walk(node) if isinstance(each, ast.Call)]
    return [call.value for call in calls if isinstance(call, ast.Attribute) and call.attr in ("parameters", "buffers")]


def _trains(node: ast.AST) -> bool:
    return any(isinstance(each, ast.For) and _calls(each.iter, "train") for each in ast.walk(node))


def _generator_bonus(value: ast.expr) -> int:
    """Where a random generator is made is where it would be seeded: that tells more than where it is drawn from."""
    return 9 if any(isinstance(n, ast.Call) and _name_of(n.func) in _GENERATORS for n in ast.walk(value)) else 0


def _targets(target: ast.expr) -> Iterator[tuple[str, bool]]:
    """What an assignment to ``target`` sets: the last name of each, and whether that is a variable."""
    match target:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            yield name, isinstance(target, ast.Name)
        case ast.Subscript(value=value) | ast.Starred(value=value):
            yield from _targets(value)
        case ast.Tuple(elts=parts) | ast.List(elts=parts):
            for part in parts:
                yield from _targets(part)
        case _:
            pass


def _name_of(node: ast.AST) -> str:
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
        case ast.Subscript(value=value):
            return _name_of(value)
        case _:
            return ""


def _names_in(node: ast.AST) -> set[str]:
    return {_name_of(each) for each in ast.walk(node) if isinstance(each, ast.Name | ast.Attribute)}


def _calls(node: ast.AST, method: str) -> bool:
    return any(
        isinstance(each, ast.Call) and isinstance(each.func, ast.Attribute) and each.func.attr == method
        for each in ast.walk(node)
    )


def _is_set(node: ast.AST, names: Collection[str]) -> bool:
    match node:
        case ast.Set() | ast.SetComp() | ast.Call(func=ast.Name(id="set" | "frozenset")):
            return True
        case ast.Name(id=name):
            return name in names
        case ast.BinOp(left=left, right=right, op=ast.BitOr() | ast.BitAnd() | ast.Sub()):
            return _is_set(left, names) or _is_set(right, names)
        case _:
            return False
