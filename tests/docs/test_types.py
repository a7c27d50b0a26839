"""A user's script that uses each public name passes the strict modes of mypy, see `make lint`, and of pyright."""

import ast
import json
import re
import shutil
import subprocess
import sys

import pytest

from doc_blocks import HOUSE, environment
from public_surface import FILE, read

USE = HOUSE / "tests" / "harness" / "typed_use.py"
PLANTED = "wrong: int = lockstep.launch(main)\n"


def words_of(node):
    names = {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}
    return names | {each.attr for each in ast.walk(node) if isinstance(each, ast.Attribute)}


def test_the_script_uses_all_that_is_public():
    tree = ast.parse(USE.read_text())
    functions = {node.name: words_of(node) for node in tree.body if isinstance(node, ast.FunctionDef)}
    missing, public = set(), read(FILE.read_text())
    for name in (name for name in public if name.startswith("lockstep.") and not name.endswith("__")):
        *module, owner, member = name.split(".")
        if owner[0].isupper():
            used = functions.get(f"use{re.sub('([A-Z])', lambda found: '_' + found[1].lower(), owner)}", set())
            missing |= {name} - {f"{'.'.join(module)}.{owner}.{each}" for each in used}
        elif member not in words_of(tree):
            missing.add(name)
    assert missing == set()


@pytest.fixture
def script(tmp_path):
    """The script in a directory of its own, as a user's; and the same with an error."""
    shutil.copy(USE, tmp_path / "train.py")
    (tmp_path / "wrong.py").write_text(USE.read_text() + PLANTED)
    return tmp_path


def run(command, cwd):
    return subprocess.run(command, cwd=cwd, env=environment(), capture_output=True, text=True)


@pytest.mark.campaign
@pytest.mark.long
def test_pyright_finds_no_error_in_it(script):
    pytest.importorskip("pyright")
    command = [sys.executable, "-m", "pyright"]
    if (there := run([*command, "--version"], script)).returncode:
        pytest.skip(f"pyright does not run here: {(there.stderr or there.stdout).strip().splitlines()[-1]}")
    strict = {"typeCheckingMode": "strict", "extraPaths": [str(HOUSE / "src")]}
    for name, wrong in (("train.py", ""), ("wrong.py", 'error: Type "list[dict[str, Tensor]]" is not assignable')):
        (script / "pyrightconfig.json").write_text(json.dumps(strict | {"include": [name]}))
        done = run([*command, "-p", str(script), "--pythonpath", sys.executable], script)
        assert bool(done.returncode) == bool(wrong), done.stdout + done.stderr
        assert wrong in done.stdout
