"""The user's own Python files that a program imports, found by reading it, so that nodes can compare them.

    train.py ─ import models.unet, losses ─►  models/__init__.py, models/unet.py, losses.py ─► what these import

What is imported by a name that the program computes is not found, and neither is what is installed.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path

from lockstep.launch.program import source_file
from lockstep.launch.request import Module, Program, Script

#: More files are not compared: a program that has them is installed rather than written beside its script.
_MOST_FILES = 500


def source_hashes(program: Program) -> Mapping[str, str]:
    """The first digits of the SHA-256 of each of the program's own files, by its path from the program's directory.

    Reads these files once; about a millisecond each.
    """
    # Late: it loads a library of some megabytes, which launchers of one machine do without.
    import hashlib

    file = source_file(program)
    if file is None or not isinstance(program, Script | Module):
        return {}
    root = file.resolve().parent if isinstance(program, Script) else Path.cwd()
    hashes: dict[str, str] = {}
    waiting = [file.resolve()]
    while waiting and len(hashes) < _MOST_FILES:
        path = waiting.pop()
        name = str(path.relative_to(root)) if path.is_relative_to(root) else path.name
        if name in hashes:
            continue
        try:
            content = path.read_bytes()
            found = list(_imported(ast.parse(content), path, root))
        except (OSError, SyntaxError, ValueError, RecursionError):
            continue
        hashes[name] = hashlib.sha256(content).hexdigest()[:16]
        waiting += found
    return hashes


def _imported(tree: ast.Module, path: Path, root: Path) -> Iterator[Path]:
    """The files below ``root`` that the source at ``path`` imports."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield from _files_of(root, alias.name.split("."))
        elif isinstance(node, ast.ImportFrom):
            parents = path.parents
            at = root if not node.level else parents[min(node.level, len(parents)) - 1]
            parts = node.module.split(".") if node.module else []
            yield from _files_of(at, parts)
            for alias in node.names:
                yield from _files_of(at, [*parts, alias.name])


def _files_of(root: Path, parts: list[str]) -> Iterator[Path]:
    """The files of the module with this dotted name, and of the packages around it."""
    place = root
    for part in parts:
        module, package = place / f"{part}.py", place / part / "__init__.py"
        if package.is_file():
            yield package.resolve()
        elif module.is_file():
            yield module.resolve()
        place /= part
