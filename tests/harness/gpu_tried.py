"""The table of docs/gpu.md that says what has been tried on a GPU, and on which.

    python tests/harness/gpu_tried.py            print it, as the page has it
    python tests/harness/gpu_tried.py --write    a row for each test of tests/gpu: without a GPU, "by reading only"

`make test-gpu` writes what it has found. A row stays as it is where its test was left out.
"""

import ast
import re
import sys
from collections.abc import Mapping
from pathlib import Path

TESTS = Path(__file__).parents[1] / "gpu"
PAGE = Path(__file__).parents[2] / "docs" / "gpu.md"
BEGIN, END = "<!-- made by tests/harness/gpu_tried.py -->\n", "<!-- end of tests/harness/gpu_tried.py -->\n"
UNTRIED = "by reading only"


def titles() -> dict[str, str]:
    """For each test of a GPU by ``file::name``, what it shows, in words."""
    found = {}
    for path in sorted(TESTS.glob("test_*.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                found[f"{path.name}::{node.name}"] = node.name.removeprefix("test_").replace("_", " ")
    return found


def told(page: str) -> dict[str, str]:
    """What the ``page`` says of each title."""
    table = page.partition(BEGIN)[2].partition(END)[0]
    return dict(re.findall(r"^\| (.+?) \| (.+?) \|$", table, re.MULTILINE))


def table(page: str, found: Mapping[str, str]) -> str:
    """The table after some tests were run.

    Args:
        page: as it is, whose rows stay where nothing was found.
        found: by ``file::name``, how the test ended and on what.
    """
    before = told(page)
    rows = [f"| {title} | {found.get(name) or before.get(title, UNTRIED)} |" for name, title in titles().items()]
    return "\n".join(["| what | tried |", "|---|---|", *rows]) + "\n"


def page_with(page: str, made: str) -> str:
    """The ``page`` with ``made`` in the place of its table."""
    before, _, rest = page.partition(BEGIN)
    return f"{before}{BEGIN}{made}{END}{rest.partition(END)[2]}"


def in_words(outcomes: list[str], where: str) -> str:
    """Of the cases of one test, such as ``12 passed, 1 failed: ...``; "" if all were left out."""
    counts = {word: outcomes.count(word) for word in ("passed", "failed")}
    said = ", ".join(f"{number} {word}" for word, number in counts.items() if number)
    return f"{said}: {where}" if said else ""


if __name__ == "__main__":
    text = PAGE.read_text()
    if sys.argv[1:] == ["--write"]:
        PAGE.write_text(page_with(text, table(text, {})))
    else:
        print(text.partition(BEGIN)[2].partition(END)[0])
