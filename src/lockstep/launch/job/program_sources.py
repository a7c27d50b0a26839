"""The user's own Python files that a program imports, found by reading it, so that nodes can compare them.

    train.py ─ import models.unet, losses ─►  models/__init__.py, models/unet.py, losses.py ─► what these import

What is imported by a name that the program computes is not found, and neither is what is installed.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

from lockstep.launch.job.program import source_file
from lockstep.launch.job.request import Function, Module, Program, Script

#: More files are not compared: a program that has them is installed rather than written beside its script.
_MOST_FILES = 500
#: In more files nobody looks for the one that imports Lockstep: that takes longer than it is worth.
_MOST_SEARCHED = 40
#: What makes options that stand in no source: of the fields of installed classes, or of configuration files.
_PARSES_BY_ITSELF = re.compile(rb"CLI\b|HfArgumentParser|jsonargparse|hydra|absl|\bgin\b|tyro|simple_parsing|omegaconf")


def source_hashes(program: Program) -> Mapping[str, str]:
    """The first digits of the SHA-256 of each of the program's own files, by its path from the program's directory.

    Reads these files once; about a millisecond each.
    """
    # Late: it loads a library of some megabytes, which launchers of one machine do without.
    import hashlib

    return {name: hashlib.sha256(content).hexdigest()[:16] for name, content in own_files(program, _MOST_FILES)}


def sources_hash(program: Program) -> str:
    """The SHA-256 of the program's own files together: of what `own_files` gives."""
    import hashlib  # late, as above

    return hashlib.sha256(b"\0".join(content for _, content in own_files(program))).hexdigest()


def mentions_lockstep(program: Program) -> bool:
    """Whether the ranks of ``program`` probably use `Run`: a file of its own mentions Lockstep, or it is a function."""
    if isinstance(program, Function):
        return True
    return any(b"lockstep" in content for _, content in own_files(program))


def needs_only_python(program: Program) -> bool:
    """Whether ranks of ``program`` need no torch: its own files import each other and Python's modules, nothing else.

    False where that is not certain. Ranks that import torch all the same, by a computed name, only start later.
    """
    file = source_file(program)
    if file is None or not isinstance(program, Script | Module):
        return False
    sources = [content for _, content in own_files(program, _MOST_SEARCHED)]
    if not 0 < len(sources) < _MOST_SEARCHED or re.search(rb"torch|lockstep", b"\n".join(sources)):
        return False
    root = _root_of(program, file)
    try:
        named = {name for content in sources for name in _named_modules(ast.parse(content))}
    except (SyntaxError, ValueError, RecursionError):
        return False
    return all(name in sys.stdlib_module_names or any(_files_of(root, [name])) for name in named)


def own_sources(program: Program) -> list[tuple[str, str]]:
    """Path and text of the program's source, and of each file of its own that this imports."""
    root = Path.cwd() if isinstance(program, Module) else Path(program.name).resolve().parent
    return [(str(root / name), text.decode(errors="replace")) for name, text in own_files(program, _MOST_SEARCHED)]


def unread_options(program: Program, known: Collection[str]) -> list[str]:
    """Those of the ``known`` options among the program's arguments that its source does not mention.

    Nothing is known of a program whose options are made by a library from something else, or that has no source here.
    """
    given = [] if isinstance(program, Function) else [each.partition("=")[0] for each in program.args]
    options = [each for each in dict.fromkeys(given) if each.startswith("--") and each in known]
    text = b"\n".join(content for _, content in own_files(program)) if options else b""
    if not text or _PARSES_BY_ITSELF.search(text):
        return []
    return [each for each in options if not re.search(each[2:].replace("-", "[-_]").encode(), text)]


def own_files(program: Program, most: int = _MOST_SEARCHED) -> Iterator[tuple[str, bytes]]:
    """Path from the program's directory, and content, of its source and of what that imports, the nearest first."""
    file = source_file(program)
    if file is None or not isinstance(program, Script | Module):
        return
    root = _root_of(program, file)
    waiting, seen = [file.resolve()], set[Path]()
    while waiting and len(seen) < most:
        path = waiting.pop(0)
        if path in seen:
            continue
        seen.add(path)
        try:
            content = path.read_bytes()
            yield str(path.relative_to(root)) if path.is_relative_to(root) else path.name, content
            waiting += _imported(ast.parse(content), path, root)
        except (OSError, SyntaxError, ValueError, RecursionError):
            continue


def _root_of(program: Script | Module, file: Path) -> Path:
    return file.resolve().parent if isinstance(program, Script) else Path.cwd()


def _named_modules(tree: ast.Module) -> Iterator[str]:
    """The outermost modules that a source names in its imports, but for its own package."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.partition(".")[0]


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
