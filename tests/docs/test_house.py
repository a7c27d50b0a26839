"""Keeps the walls of the house that docs/house.md draws, by reading the source."""

from __future__ import annotations

import ast
import importlib.util
import io
import itertools
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

import house_measures

HOUSE = Path(__file__).parents[2] / "src" / "lockstep"

#: From the bottom to the top. A room may use the floors below its own.
FLOORS = (
    (
        *("errors", "launch_contract", "trial_contract", "slurm_syntax", "formatting", "memory_use"),
        *("network_interface", "records", "nested", "small_files", "cpython_private", "loop_variables", "gpu_driver"),
    ),
    (
        *("world", "batch", "progress", "settings", "size_balancing", "heartbeat_message"),
        *("peer_failure", "option_words", "script_end", "step_record", "transcript", "torch_private"),
    ),
    ("collectives", "seeding", "heartbeat", "cpu_affinity", "cpu_use", "strategy_kinds", "project_files", "provenance"),
    ("strategies", "checkpoint", "data", "report", "faults", "error_advice"),
    ("run", "launch", "saved_run"),
    ("tune", "scale", "verify", "html_report"),
    ("doctor",),
    ("cli", "testing"),
    ("__init__", "__main__"),
)
FLOOR = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}
TORCH_FREE = (
    *("errors", "launch_contract", "trial_contract", "slurm_syntax", "world", "batch", "progress", "settings"),
    *("size_balancing", "memory_use", "network_interface", "option_words"),
    *("formatting", "heartbeat_message", "peer_failure", "script_end", "heartbeat", "cpu_affinity", "report", "faults"),
    *("cpu_use", "launch", "strategy_kinds", "saved_run", "error_advice", "step_record", "records", "transcript"),
    *("small_files", "nested", "cpython_private", "project_files", "loop_variables", "gpu_driver", "provenance"),
    *("html_report", "cli", "__init__", "__main__"),
)  # fmt: skip
#: Files of torch-free rooms that run in processes of their own, or in launchers of several machines. They start from
#: the launcher's side all the same, so they import torch in a function; `test_front_door.py` sees that their room stays
#: free of it.
OWN_PROCESS = {
    "launch/workers/tcp_store.py": "serves the store where ranks meet, and outlives each of them",
    "launch/rendezvous/store_connection.py": "asks such a store, in the launcher of several machines only",
}
#: What a strategy may take from torch.distributed: modules that it wraps and their types, never a collective.
WRAPPED = ("fsdp", "optim", "algorithms", "tensor", "device_mesh", "pipelining", "GradBucket")
#: Words of a private language that the code once spoke. They name nothing any more.
BANISHED = re.compile(
    "vigil|nursery|council|creed|heeded|preside|seats?|crew|heart|sights?|agenda|appointment|wishes|tell(er|ing)|keeper|pupil|"
    "lessons?|lots?|stock|shop|staff|hogwild|letter|parting|commons|bury|birth|spot|taught|foretold"
)
#: Longer classes and files tell more than one story. The door of `Run` is as wide as what a script may ask for, and
#: what it promises for each stands there: its docstrings do not count.
MOST_METHODS, WIDE_DOOR = 25, "run/run.py"
MOST_LINES = 600
NOT_A_NAME = re.compile(r"(?i)^_*(utils?|helpers?|common|base|managers?|core|misc)_*$")


def violations(house: Path) -> list[str]:
    """Every wall that the package in ``house`` breaks, as ``file:line: what``."""
    return sorted(
        f"{path.relative_to(house)}:{line}: {what}"
        for path in sorted(house.rglob("*.py"))
        for line, what in _of_file(house, path)
    )


def _of_file(house: Path, path: Path) -> Iterator[tuple[int, str]]:
    parts = path.relative_to(house).with_suffix("").parts
    room = parts[0]
    for part in parts:
        if NOT_A_NAME.match(part):
            yield 1, f"a file named {part} says that the idea was not found"
    if room not in FLOOR:
        yield 1, f"room {room} stands on no floor"
        return
    source = path.read_text()
    tree = ast.parse(source)
    own_process = path.relative_to(house).as_posix() in OWN_PROCESS
    for line, target, name in _imports(tree):
        if target.split(".")[0] == "lockstep":
            for what in _within(house, room, target, name):
                yield line, what
        elif target.split(".")[0] == "torch" and room in TORCH_FREE and not own_process:
            yield line, f"{room} is free of torch"
    if not own_process:
        yield from _speaks(room, tree)
    for node in ast.walk(tree):
        of_door = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "lockstep"
        if of_door and node.attr[:2] != "__":
            yield node.lineno, "the front door is for users; import from the room"
        if isinstance(node, ast.Call) and _last_name(node.func).endswith(("import_module", "__import__")):
            named = [arg.value for arg in node.args if isinstance(arg, ast.Constant)]
            if any(str(value).startswith("lockstep") for value in named):
                yield node.lineno, "a room imported by name, where no wall sees it"
    yield from _glued(source)


def _last_name(function: ast.expr) -> str:
    match function:
        case ast.Attribute(attr=name) | ast.Name(id=name):
            return name
    return ""


def _imports(tree: ast.AST) -> Iterator[tuple[int, str, str]]:
    """Each import as (line, module, name), wherever it stands: in a function and under TYPE_CHECKING too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = "lockstep." * (node.level > 0) + (node.module or "")
            yield from ((node.lineno, module, alias.name) for alias in node.names)


def _within(house: Path, room: str, target: str, name: str) -> Iterator[str]:
    if target == "lockstep":
        if name not in ("", "__version__"):
            yield "the front door is for users; import from the room"
        return
    _, other, *inside = target.split(".")
    if other == room:
        return
    if other not in FLOOR:
        yield f"imports {other}, which stands on no floor"
    elif FLOOR[other] == FLOOR[room]:
        yield f"{room} and {other} are siblings and do not know each other"
    elif FLOOR[other] > FLOOR[room]:
        yield f"{room} imports {other}, which stands above it"
    door = house / other / "__init__.py"
    if inside or (name and (house / other / f"{name}.py").exists() and name not in _bound(door)):
        yield f"enters {other} past its door"
    if name.startswith("_"):
        yield f"{name} is private to {other}"


def _bound(door: Path) -> set[str]:
    """Names that a module binds at its top level."""
    names: set[str] = set()
    for node in ast.parse(door.read_text()).body:
        if isinstance(node, ast.ImportFrom | ast.Import):
            names |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
    return names


def _speaks(room: str, tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Uses of torch.distributed outside of its room."""
    if room == "collectives":
        return
    what = "only collectives speaks torch.distributed"
    called = {"torch.distributed"}  # what the module goes by in this file
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                called |= {alias.asname} if alias.name == "torch.distributed" and alias.asname else set()
                if room != "strategies" and f"{alias.name}.".startswith("torch.distributed."):
                    yield node.lineno, what
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                target = f"{node.module}.{alias.name}"
                called |= {alias.asname or alias.name} if target == "torch.distributed" else set()
                inside = target.removeprefix("torch.distributed.").split(".")[0]
                if not f"{target}.".startswith("torch.distributed."):
                    continue
                if room != "strategies" or (target != "torch.distributed" and inside not in WRAPPED):
                    yield node.lineno, what
    for node in ast.walk(tree):
        used = isinstance(node, ast.Attribute) and ast.unparse(node.value) in called
        if used and (room != "strategies" or node.attr not in WRAPPED):
            yield node.lineno, f"{what}, not {ast.unparse(node)}"


def _glued(source: str) -> Iterator[tuple[int, str]]:
    """Where a string literal goes on in the next line and two words meet without a space."""
    lines = source.splitlines()
    opens = {tokenize.STRING, getattr(tokenize, "FSTRING_START", -1)}
    closes = {tokenize.STRING, getattr(tokenize, "FSTRING_END", -1)}
    tokens = [
        token
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type not in (tokenize.NL, tokenize.COMMENT)
    ]
    for left, right in itertools.pairwise(tokens):
        if left.type not in closes or right.type not in opens or left.end[0] == right.start[0]:
            continue
        before = lines[left.end[0] - 1][: left.end[1] - 1]
        after = re.sub(r"^[A-Za-z]*[\"']", "", lines[right.start[0] - 1][right.start[1] :])
        if re.search(r"\\.$", before):  # ends in an escape such as a new line
            continue
        # A brace where the other side is a word or a brace may put in what is sometimes empty: it is held to be meant.
        if (re.search(r"[\w.,;:!?)}]$", before) and re.match(r"[\w(]", after)) or (
            re.search(r"[.,;:!?)]$", before) and after.startswith("{")
        ):
            yield right.start[0], f"words meet without a space: ...{before[-12:]}|{after[:12]}..."
        if before.endswith(" ") and after.startswith(" "):
            yield right.start[0], f"words meet with two spaces: ...{before[-12:]}|{after[:12]}..."


def test_the_house_keeps_its_walls():
    found = violations(HOUSE)
    assert not found, "\n" + "\n".join(found)


def test_docs_name_every_room():
    drawn = (HOUSE.parents[1] / "docs" / "house.md").read_text()
    rooms = {path.stem for path in HOUSE.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    missing = [room for room in sorted(rooms) if f"`{room}`" not in drawn and not room.startswith("__")]
    assert not missing, f"docs/house.md does not say what is behind {missing}"


def words_of(name: str) -> list[str]:
    """The words that a name in snake_case or CamelCase is made of."""
    return [word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)]


def banished(source: str) -> list[str]:
    """The banished words in the names of ``source``, each with its line."""
    names = [token for token in tokenize.generate_tokens(io.StringIO(source).readline) if token.type == tokenize.NAME]
    return [f"{name.start[0]}: {name.string}" for name in names if any(map(BANISHED.fullmatch, words_of(name.string)))]


def test_words_of_a_private_language_stay_away():
    files = [*HOUSE.rglob("*.py"), *(HOUSE.parents[1] / "tests").rglob("*.py")]
    found = [f"{path.name}:{what}" for path in files for what in banished(path.read_text())]
    found += [str(path) for path in files if any(map(BANISHED.fullmatch, words_of(path.stem)))]
    assert not found, "\n".join(found)
    assert banished("class Crew:\n    def all_seats(self, fork_server): ...") == ["1: Crew", "2: all_seats"]


def vocabulary_of_torch() -> set[str]:
    """The words of its files, and of what it names in the parts that we build on; those of Python's modules, too."""
    torch = Path(importlib.util.find_spec("torch").origin).parent
    known = {word for path in torch.rglob("*.py") for word in words_of(path.stem)}
    known |= {word for module in sys.stdlib_module_names for word in words_of(module)}
    for part in ("distributed", "nn", "optim", "utils/data"):
        for path in (torch / part).rglob("*.py"):
            for name in re.findall(r"^\s*(?:class|def) (\w+)", path.read_text(), re.MULTILINE):
                known |= set(words_of(name))
    return known


def test_the_glossary_explains_every_word_that_is_not_torchs_own():
    """Of the names of files and of public classes."""
    glossary = (HOUSE.parents[1] / "docs" / "glossary.md").read_text()
    known = vocabulary_of_torch() | set(words_of(glossary)) | {"diloco", "powersgd", "lockstep"}
    names = {path.stem for path in HOUSE.rglob("*.py")}
    for path in HOUSE.rglob("*.py"):
        names |= {node.name for node in ast.parse(path.read_text()).body if isinstance(node, ast.ClassDef)}
    unexplained = {
        name: [word for word in words_of(name) if not {word, f"{word}s", word.removesuffix("s")} & known]
        for name in names
        if not name.startswith("_")
    }
    unexplained = {name: words for name, words in unexplained.items() if words}
    assert not unexplained, f"docs/glossary.md does not explain {unexplained}"


def test_modules_do_not_import_each_other_and_private_names_are_taken_in_one_place():
    modules = house_measures.modules_of(HOUSE)
    assert house_measures.mutual_imports(HOUSE.name, modules) == (0, 0)
    elsewhere, in_their_place = house_measures.foreign_privates(modules)
    assert elsewhere == 0 < in_their_place


def docstring_lines(node: ast.AST) -> int:
    """How many lines the docstring of a class or function takes."""
    if not isinstance(node, ast.ClassDef | ast.FunctionDef) or ast.get_docstring(node) is None:
        return 0
    return (node.body[0].end_lineno or 0) - node.body[0].lineno + 1


def test_classes_and_files_tell_one_story_each():
    found = []
    for path in HOUSE.rglob("*.py"):
        file, source = path.relative_to(HOUSE).as_posix(), path.read_text()
        nodes = list(ast.walk(ast.parse(source)))
        lines = len(source.splitlines()) - (file == WIDE_DOOR) * sum(map(docstring_lines, nodes))
        if lines > MOST_LINES:
            found.append(f"{file}: {lines} lines")
        for node in nodes:
            if isinstance(node, ast.ClassDef) and file != WIDE_DOOR:
                methods = sum(isinstance(child, ast.FunctionDef) for child in node.body)
                found += [f"{file}: {node.name} has {methods} methods"] if methods > MOST_METHODS else []
    assert not found, "\n".join(found)


PLANTED = {
    "an import from above": ("batch.py", "from lockstep.run import Run", "stands above"),
    "inside a function": ("batch.py", "def f():\n    from lockstep.run import Run", "stands above"),
    "under TYPE_CHECKING": ("data.py", "if TYPE_CHECKING:\n    import lockstep.run", "stands above"),
    "a sibling": ("data.py", "from lockstep.checkpoint import Checkpoints", "siblings"),
    "run and launch": ("run.py", "from lockstep.launch import launch", "siblings"),
    "the front door": ("run.py", "from lockstep import World", "front door"),
    "the front door by attribute": ("run.py", "import lockstep\nlockstep.World", "front door"),
    "a relative import": ("run.py", "from .launch import launch", "siblings"),
    "past a door": ("run.py", "from lockstep.strategies.ddp import Replicate", "past its door"),
    "past a door by name": ("run.py", "from lockstep.strategies import ddp", "past its door"),
    "a private name": ("run.py", "from lockstep.batch import _secret", "private"),
    "torch where it is not": ("cli.py", "def f():\n    import torch", "free of torch"),
    "a second speaker": ("data.py", "import torch.distributed as dist", "only collectives"),
    "by from": ("run.py", "from torch import distributed", "only collectives"),
    "by attribute": ("run.py", "import torch\ntorch.distributed.barrier()", "only collectives"),
    "by attribute in a strategy": (
        "strategies/ddp.py",
        "import torch\ntorch.distributed.barrier()",
        "only collectives",
    ),
    "a strategy's collective": (
        "strategies/ddp.py",
        "import torch.distributed as d\nd.all_reduce(x)",
        "not d.all_reduce",
    ),
    "a strategy's import": (
        "strategies/ddp.py",
        "from torch.distributed import all_reduce",
        "only collectives",
    ),
    "a bad name": ("strategies/utils.py", "", "idea was not found"),
    "a room without a floor": ("cellar.py", "", "no floor"),
    "a room by its name": ("data.py", "import_module('lockstep.run')", "imported by name"),
    "glued words": ("run.py", 'x = (\n    "two words"\n    "meet"\n)', "without a space"),
    "glued words of an f-string": ("run.py", 'x = (\n    f"rank {r},"\n    f"{x}"\n)', "without a space"),
    "two spaces": ("run.py", 'x = (\n    "two "\n    " words"\n)', "two spaces"),
}


@pytest.mark.parametrize("plant", PLANTED)
def test_each_wall_is_seen_to_hold(tmp_path, plant):
    file, source, what = PLANTED[plant]
    (tmp_path / "strategies").mkdir()
    (tmp_path / "strategies" / "__init__.py").write_text("")
    (tmp_path / "strategies" / "ddp.py").write_text("")
    (tmp_path / file).write_text(source)
    (found,) = violations(tmp_path)
    assert what in found
    assert found.startswith(file)


def test_what_is_allowed_is_no_violation(tmp_path):
    (tmp_path / "strategies").mkdir()
    (tmp_path / "strategies" / "__init__.py").write_text("from lockstep.strategies.ddp import ddp\n")
    (tmp_path / "strategies" / "ddp.py").write_text(
        "import torch.distributed as dist\nfrom torch.distributed.fsdp import fully_shard\n"
        "dist.GradBucket\nfrom lockstep.strategies.hook import x\n"
    )
    (tmp_path / "run.py").write_text(
        "from lockstep.strategies import ddp\nimport lockstep\nlockstep.__version__\n"
        "x = (\n    'one, '\n    f'two {3}'\n    ' four\\n'\n    'five'\n)\ny = ['six',\n     'seven']\n"
    )
    assert violations(tmp_path) == []
