"""`house_measures` on a package small enough to be measured by eye."""

import subprocess
import sys
from pathlib import Path

import pytest

import house_measures

FIRST = '''"""Two modules that import each other."""

import os

from tiny import second


class Wide:
    """See `Narrow`."""

    def shown(self, value: Any, other):
        """A docstring."""
        # why
        if value:
            for each in other:
                raise ValueError(f"{each} is wrong")
        raise ValueError("always the same")

    def _hidden(self):
        return os.environ[self.name], second._private
'''
SECOND = """from tiny import first


def undocumented():
    try:
        return cast(int, 1)  # type: ignore
    except Exception:
        return None
"""
EXPECTED = {
    "lines, files": "28 / 3",
    "statements": "15 / 0.94",
    "small, one importer": "2",
    "file": "8 / 20",
    "function": "4 / 4 / 4",
    "widest class": "2 (1) Wide",
    "parameters": "2 / 0",
    "nesting": "2 / 0",
    "mutual imports": "1 / 1",
    "public with docstring": "50 %",
    "docstrings, comments": "11 % + 7 %",
    "values in messages": "50 % of 2",
    "Any": "35.7",
    "ignore, cast": "1 / 1",
    "swallowed errors": "1",
    "foreign privates": "1 / 0",
    "environment": "1",
    "echo docstrings": "1",
}


@pytest.fixture
def tiny(tmp_path):
    package = tmp_path / "tiny"
    package.mkdir()
    for name, text in {"__init__": "", "first": FIRST, "second": SECOND}.items():
        (package / f"{name}.py").write_text(text)
    return package


def test_each_measure_is_that_of_a_count_by_hand(tiny):
    assert house_measures.measure(tiny) == EXPECTED


def test_the_command_holds_packages_side_by_side(tiny):
    script = Path(house_measures.__file__)
    done = subprocess.run([sys.executable, script, tiny, tiny], capture_output=True, text=True, timeout=60, check=True)
    head, _, *rows = done.stdout.splitlines()
    assert head == "| measure | tiny | tiny |"
    assert rows[0] == "| lines, files | 28 / 3 | 28 / 3 |"
    empty = subprocess.run([sys.executable, script, tiny.parent / "none"], capture_output=True, text=True, timeout=60)
    assert empty.returncode == 1
    assert "there is no Python file" in empty.stderr
