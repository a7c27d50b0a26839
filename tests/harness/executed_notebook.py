"""Executes a notebook and keeps its outputs in the file; and the shape of the outputs, for a test that compares them.

.venv/bin/python tests/harness/executed_notebook.py examples/notebook.ipynb
"""

from __future__ import annotations

import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

#: What differs from one execution to the next, in a text: numbers, and how wide they make a column.
_VARIES = re.compile(r"[-+.\d]*\d[\d.,]*(e[-+]?\d+)?|\s+")
Shape = list[tuple[str, ...]]


def executed(path: Path, directory: Path) -> Any:
    """The notebook at ``path`` with the outputs that its cells have in ``directory``; the file stays as it is.

    Raises:
        CellExecutionError: if a cell fails.
    """
    notebook = nbformat.read(path, as_version=4)
    client = NotebookClient(
        notebook, timeout=100, coalesce_streams=True, record_timing=False, resources={"metadata": {"path": directory}}
    )
    client.execute()
    return notebook


def shapes(notebook: Any) -> list[Shape]:
    """Of each cell of code: its outputs, each as its type, its name or kinds, and the text of a value without numbers.

    Streams stand at the end, each once: the threads of a run decide how they interleave.
    """
    return [_shape(cell.outputs) for cell in notebook.cells if cell.cell_type == "code"]


def _shape(outputs: Any) -> Shape:
    streams = {(one.output_type, one.name) for one in outputs if one.output_type == "stream"}
    values = [(one.output_type, *sorted(one.data), *_text(one)) for one in outputs if one.output_type != "stream"]
    return values + sorted(streams)


def _text(output: Any) -> list[str]:
    return [_VARIES.sub(" ", output.data["text/plain"])] if output.output_type == "execute_result" else []


if __name__ == "__main__":
    for name in sys.argv[1:]:
        with tempfile.TemporaryDirectory(prefix="notebook-") as directory:
            nbformat.write(executed(Path(name), Path(directory)), name)
