"""Measures the source of a package, so that one can be held beside another.

    .venv/bin/python tests/harness/house_measures.py src/lockstep                 one column
    .venv/bin/python tests/harness/house_measures.py src/lockstep path/to/other   one column for each package

Everything is read from the syntax tree; nothing of the package is imported. The rows:

lines, files            physical lines and ``.py`` files
statements              nodes of the syntax tree that are statements, without docstrings; and how many to a line of code
small, one importer     files of fewer than 100 lines that one other file imports; those are often a part of that one.
                        The door of a package (``__init__.py``) is a part of no other file, and does not count
file                    lines of a file: median, maximum
function                lines of code of a function, without docstring, comments and blank lines: median, 99 %, maximum
widest class            methods of the class that has most of them, and how many of those are public
parameters              most parameters of one function, and functions with eight or more
nesting                 deepest nesting of statements in a function, and functions with four levels or more
mutual imports          pairs of modules that import each other, and pairs of top-level units that do
public with docstring   public functions and methods that have one
docstrings, comments    their share of all lines
values in messages      ``raise`` statements with a message that shows a value, of all with a message
Any                     ``Any`` in signatures, for each 1,000 lines
ignore, cast            ``type: ignore`` comments and calls of ``cast``
swallowed errors        ``except Exception`` or broader whose body neither raises nor uses what was caught
foreign privates        attributes ``_x`` of others: not of ``self``, not of a class in the same file, in no manual;
                        after the slash those in files named ``*_private.py``, where a package may gather them
environment             files that name ``os.environ``
echo docstrings         docstrings that only say "See `X`."
"""

from __future__ import annotations

import ast
import io
import itertools
import re
import statistics
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

MANY_PARAMETERS = 8
SMALL = 100
DEEP = 4
ECHO = re.compile(r"See :?[\w:.`~]+\.?")
BROAD = ("Exception", "BaseException")
#: Names that begin with an underscore and are documented all the same.
DOCUMENTED = {"_exit", "_getframe", "_current_frames", "_replace", "_asdict", "_fields", "_make"}

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, slots=True)
class Module:
    """One file of a package."""

    name: str  #: with dots, without the package's own name; "" is its ``__init__``
    text: str
    tree: ast.Module

    @property
    def functions(self) -> list[Function]:
        """All of them, wherever they stand."""
        return [node for node in ast.walk(self.tree) if isinstance(node, Function)]


def modules_of(package: Path) -> list[Module]:
    """The files of ``package``, without its tests."""
    found = []
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package).with_suffix("").parts
        if any(part in ("tests", "test") for part in parts):
            continue
        text = path.read_text(encoding="utf-8")
        found.append(Module(".".join(p for p in parts if p != "__init__"), text, ast.parse(text)))
    if not found:
        raise SystemExit(f"{package}: there is no Python file; name the directory of a package")
    return found


def measure(package: Path) -> dict[str, str]:
    """What the module docstring lists, ready to be printed."""
    modules = modules_of(package)
    lines = sum(len(module.text.splitlines()) for module in modules)
    files = [len(module.text.splitlines()) for module in modules]
    functions = [function for module in modules for function in module.functions]
    sizes = sorted(map(_code_lines, functions)) or [0]
    parameters = list(map(_parameters, functions)) or [0]
    depths = list(map(_depth, functions)) or [0]
    widest = max((_width(node) for module in modules for node in ast.walk(module.tree)), default=(0, 0, ""))
    public = [function for function in functions if not function.name.startswith("_")]
    docstrings = [text for module in modules for text in _docstrings(module.tree)]
    doc_lines = sum(len(text.splitlines()) for text in docstrings)
    comments = sum(_comment_lines(module.text) for module in modules)
    messages = [shows for module in modules for shows in _messages(module.tree)]
    nodes = [node for module in modules for node in ast.walk(module.tree)]
    statements = sum(isinstance(node, ast.stmt) for node in nodes) - len(docstrings)
    code_lines = sum(map(_lines_with_code, modules)) - doc_lines + sum(text.count("\n\n") for text in docstrings)
    ignores, casts = (_count(modules, pattern) for pattern in (r"# type: ignore", r"[^.\w]cast\("))
    return {
        "lines, files": f"{lines:,} / {len(files)}",
        "statements": f"{statements:,} / {statements / max(1, code_lines):.2f}",
        "small, one importer": str(_small(package.name, modules)),
        "file": f"{statistics.median(files):.0f} / {max(files):,}",
        "function": f"{statistics.median(sizes):.0f} / {sizes[int(0.99 * (len(sizes) - 1))]} / {sizes[-1]}",
        "widest class": f"{widest[0]} ({widest[1]}) {widest[2]}",
        "parameters": f"{max(parameters)} / {sum(count >= MANY_PARAMETERS for count in parameters)}",
        "nesting": f"{max(depths)} / {sum(depth >= DEEP for depth in depths)}",
        "mutual imports": "{} / {}".format(*mutual_imports(package.name, modules)),
        "public with docstring": _share(sum(ast.get_docstring(f) is not None for f in public), len(public)),
        "docstrings, comments": f"{_share(doc_lines, lines)} + {_share(comments, lines)}",
        "values in messages": f"{_share(sum(messages), len(messages))} of {len(messages)}",
        "Any": f"{1000 * sum(map(_any_count, functions)) / max(1, lines):.1f}",
        "ignore, cast": f"{ignores} / {casts}",
        "swallowed errors": str(sum(_swallows(node) for module in modules for node in ast.walk(module.tree))),
        "foreign privates": "{} / {}".format(*foreign_privates(modules)),
        "environment": str(sum("os.environ" in module.text for module in modules)),
        "echo docstrings": str(sum(ECHO.fullmatch(" ".join(text.split())) is not None for text in docstrings)),
    }


def table(packages: list[Path]) -> str:
    """A Markdown table with one column for each package."""
    columns = [measure(package) for package in packages]
    heads = [f"{package.name} {_commit(package)}".strip() for package in packages]
    rows = [["measure", *heads], ["---"] * (len(packages) + 1)]
    rows += [[name, *(column[name] for column in columns)] for name in columns[0]]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _code_lines(function: Function) -> int:
    """Lines that hold a part of a statement of the body; a docstring is none."""
    body = function.body[1:] if ast.get_docstring(function) is not None else function.body
    nodes = itertools.chain.from_iterable(ast.walk(statement) for statement in body)
    return len({line for node in nodes if hasattr(node, "lineno") for line in (node.lineno, node.end_lineno)})


def _parameters(function: Function) -> int:
    arguments = function.args
    named = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    return sum(argument.arg not in ("self", "cls") for argument in named)


def _depth(function: Function) -> int:
    blocks = (ast.For, ast.AsyncFor, ast.While, ast.If, ast.With, ast.AsyncWith, ast.Try, ast.Match)

    def below(node: ast.AST, *, is_elif: bool = False) -> int:
        deeper = isinstance(node, blocks) and not is_elif
        children = (
            below(child, is_elif=isinstance(node, ast.If) and node.orelse == [child] and isinstance(child, ast.If))
            for child in ast.iter_child_nodes(node)
            if not isinstance(child, Function | ast.ClassDef | ast.Lambda)
        )
        return deeper + max(children, default=0)

    return below(function)


def _width(node: ast.AST) -> tuple[int, int, str]:
    if not isinstance(node, ast.ClassDef):
        return (0, 0, "")
    methods = [child.name for child in node.body if isinstance(child, Function)]
    return len(methods), sum(not name.startswith("_") for name in methods), node.name


def _docstrings(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, Function | ast.ClassDef | ast.Module) and (text := ast.get_docstring(node)):
            yield text


def _lines_with_code(module: Module) -> int:
    """Lines that are neither blank nor only a comment."""
    return sum(bool(line.strip()) and not line.lstrip().startswith("#") for line in module.text.splitlines())


def _comment_lines(text: str) -> int:
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return len({token.start[0] for token in tokens if token.type == tokenize.COMMENT})


def _messages(tree: ast.Module) -> Iterator[bool]:
    """For each ``raise`` with a message, whether it shows a value."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args:
            parts = list(ast.walk(node.exc.args[0]))
            if any(isinstance(part, ast.Constant) and isinstance(part.value, str) for part in parts):
                yield any(isinstance(part, ast.FormattedValue | ast.Name | ast.Attribute) for part in parts)


def _any_count(function: Function) -> int:
    arguments = function.args
    hints = [a.annotation for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs) if a.annotation]
    hints += [function.returns] if function.returns else []
    return sum(isinstance(part, ast.Name) and part.id == "Any" for hint in hints for part in ast.walk(hint))


def _swallows(node: ast.AST) -> bool:
    if not isinstance(node, ast.ExceptHandler):
        return False
    named = [part.id for part in ast.walk(node.type) if isinstance(part, ast.Name)] if node.type else list(BROAD)
    parts = [part for statement in node.body for part in ast.walk(statement)]
    goes_on = any(
        isinstance(part, ast.Raise) or (isinstance(part, ast.Name) and part.id == node.name) for part in parts
    )
    return not goes_on and any(name in BROAD for name in named)


def foreign_privates(modules: list[Module]) -> tuple[int, int]:
    """Uses of others' private names: outside of the modules that are there for these, and in them."""
    privates = [0, 0]
    for module in modules:
        privates[module.name.endswith("_private")] += _foreign_privates(module.tree)
    return privates[0], privates[1]


def _foreign_privates(tree: ast.Module) -> int:
    own = {node.name for node in ast.walk(tree) if isinstance(node, Function)}
    annotated = (node.target for node in ast.walk(tree) if isinstance(node, ast.AnnAssign))
    own |= {target.id for target in annotated if isinstance(target, ast.Name)}
    reads = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and re.match(r"_[a-z]", node.attr)]
    others = []
    for node in reads:
        of_itself = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
        (own.add if of_itself else others.append)(node.attr)
    return sum(name not in own and name not in DOCUMENTED for name in others)


def mutual_imports(package: str, modules: list[Module]) -> tuple[int, int]:
    """Pairs that import each other: of modules, and of the units directly below the package."""
    known = {module.name for module in modules}
    arrows = {
        (module.name, target)
        for module in modules
        for target in _targets(package, module, known)
        if target != module.name
    }
    units = {(start.split(".")[0], end.split(".")[0]) for start, end in arrows if start and end}
    return _pairs(arrows), _pairs({(start, end) for start, end in units if start != end})


def _small(package: str, modules: list[Module]) -> int:
    known = {module.name for module in modules}
    doors = {name.rpartition(".")[0] for name in known}
    importers: dict[str, set[str]] = {}
    for module in modules:
        for target in set(_targets(package, module, known)) - {module.name}:
            importers.setdefault(target, set()).add(module.name)
    files = [module for module in modules if module.name not in doors]
    return sum(len(m.text.splitlines()) < SMALL and len(importers.get(m.name, ())) == 1 for m in files)


def _commit(package: Path) -> str:
    """The commit of the tree that ``package`` is in, and whether files there were changed since; "" outside of git."""
    asked = ["git", "-C", str(package), "describe", "--always", "--dirty", "--abbrev=10"]
    return subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip()


def _pairs(arrows: set[tuple[str, str]]) -> int:
    return sum((end, start) in arrows for start, end in arrows) // 2


def _targets(package: str, module: Module, known: set[str]) -> Iterator[str]:
    """Modules of the package that ``module`` imports when it is loaded."""
    for node in ast.walk(module.tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            start = package if node.level else ""
            if node.level:
                above = module.name.split(".")[: -node.level] if module.name else []
                start = ".".join([package, *above])
            base = ".".join(part for part in (start, node.module or "") if part)
            names = [base, *(f"{base}.{alias.name}" for alias in node.names)]
        for name in names:
            inside = name.removeprefix(f"{package}.")
            if inside != name and inside in known:
                yield inside


def _count(modules: list[Module], pattern: str) -> int:
    return sum(len(re.findall(pattern, module.text)) for module in modules)


def _share(part: int, whole: int) -> str:
    return f"{100 * part / max(1, whole):.0f} %"


if __name__ == "__main__":
    print(table([Path(argument) for argument in sys.argv[1:]] or [Path(__file__).parents[2] / "src" / "lockstep"]))
