"""Paths of the script's expressions: a variable, and the attributes and constant keys that lead on from it."""

from __future__ import annotations

import ast
import copy
import re
from collections.abc import Iterator
from typing import Final, NamedTuple, TypeVar

_Node = TypeVar("_Node", bound=ast.AST)
OF_COMPREHENSION: Final = " in "  #: before the place of a comprehension, in the name of a variable of its own
OF_USE: Final = " at "  #: before the place where a name begins to stand for another variable, in that one's own name


class Path(NamedTuple):
    """A variable that is read, or a value that attributes and constant keys lead to: ``self.parts['pool'].images``."""

    root: str
    attributes: tuple[str, ...] = ()  #: and keys, as ``['pool']``

    @property
    def text(self) -> str:
        """The text of the path in the script."""
        return name_in_script(self.root) + "".join(name if is_key(name) else f".{name}" for name in self.attributes)

    @property
    def owner(self) -> Path:
        """The path to the object that has the last attribute."""
        return Path(self.root, self.attributes[:-1])

    @property
    def holder(self) -> Path:
        """The path without the keys at its end."""
        end = len(self.attributes)
        while end and is_key(self.attributes[end - 1]):
            end -= 1
        return Path(self.root, self.attributes[:end])


def name_in_script(name: str) -> str:
    """The name that the script has for a variable."""
    return name.partition(OF_COMPREHENSION)[0].partition(OF_USE)[0]


def text_in_script(node: ast.expr) -> str:
    """The text of an expression, with the names that the script has."""
    return re.sub(rf"({OF_COMPREHENSION}|{OF_USE})\d+:\d+", "", ast.unparse(node))


def is_of_comprehension(name: str) -> bool:
    """Whether a variable is a comprehension's own, which has another name here than variables around it."""
    return OF_COMPREHENSION in name


def is_key(attribute: str) -> bool:
    """Whether a part of a path is a key, not an attribute."""
    return attribute.startswith("[")


def with_names(node: _Node, names: dict[str, str]) -> _Node:
    """A copy of ``node`` with other names of variables."""
    made = copy.deepcopy(node)
    for each in ast.walk(made):
        if isinstance(each, ast.Name):
            each.id = names.get(each.id, each.id)
    return made


def all_of(call: ast.Call) -> Path | None:
    """The object whose attributes a call sets by name, such as `setattr` and ``vars(x).update``."""
    match call:
        case ast.Call(func=ast.Name(id="setattr"), args=[owner, ast.Constant(value=str() as name), _]):
            path = path_of(owner)
            return None if path is None else Path(path.root, (*path.attributes, name))
        case ast.Call(func=ast.Name(id="setattr"), args=[owner, *_]):
            return path_of(owner)
        case ast.Call(func=ast.Attribute(value=ast.Call(func=ast.Name(id="vars"), args=[owner]), attr="update")):
            return path_of(owner)
        case ast.Call(func=ast.Attribute(value=ast.Attribute(value=owner, attr="__dict__"), attr="update")):
            return path_of(owner)
    return None


def text_part(node: ast.expr) -> str | Path | None:
    """A part of an f-string: a text or a path; None for a computed part."""
    match node:
        case ast.Constant(value=str() as text):
            return text
        case ast.FormattedValue(value=value, conversion=-1, format_spec=None):
            return path_of(value)
    return None


def asks_for_several_ranks(test: ast.expr) -> bool:
    """Whether a test asks for the number of ranks only, such as the test before lines that only several ranks need."""
    match test:
        case ast.Compare(left=left, comparators=[ast.Constant()]):
            return "world_size" in ast.unparse(left).lower()
    return False


def path_of(node: ast.expr) -> Path | None:
    """The path of an expression; None for an expression that is no path."""
    attributes: list[str] = []
    while True:
        match node:
            case ast.Attribute(value=owner, attr=name):
                attributes.append(name)
            case ast.Call(func=ast.Name(id="getattr"), args=[owner, ast.Constant(value=str() as name), *_]):
                attributes.append(name)
            case ast.Subscript(value=ast.Call(func=ast.Name(id="globals")), slice=ast.Constant(value=str() as name)):
                return Path(name, tuple(reversed(attributes)))
            case ast.Subscript(value=owner, slice=ast.Constant(value=str() | int() as key)):
                attributes.append(f"[{key!r}]")
            case _:
                break
        node = owner
    return Path(node.id, tuple(reversed(attributes))) if isinstance(node, ast.Name) else None


def within(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes of a statement's blocks, but not those of functions within."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda):
            yield child
            yield from within(child)
