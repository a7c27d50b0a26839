"""The blocks of code and of commands in the pages of the documentation."""

import os
import re
import socket
import sys
from dataclasses import dataclass
from pathlib import Path

HOUSE = Path(__file__).parents[2]
PAGES = sorted([HOUSE / "README.md", *(HOUSE / "docs").rglob("*.md")])


@dataclass(frozen=True)
class Block:
    page: str
    line: int
    language: str
    file: str | None  # from a comment above it: <!-- file: train.py -->, <!-- shell: train.py -->
    text: str

    def __str__(self):
        return f"{self.page}:{self.line}"


_BLOCK = re.compile(
    r"(?:<!-- (?:file|shell): (?P<file>\S+) -->\n)?```(?P<language>\w+)[^\n]*\n(?P<text>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)


def blocks_of(page):
    text = page.read_text(encoding="utf-8")
    for found in _BLOCK.finditer(text):
        line = text.count("\n", 0, found.start("text")) + 1
        yield Block(page.relative_to(HOUSE).as_posix(), line, found["language"], found["file"], found["text"])


BLOCKS = [block for page in PAGES for block in blocks_of(page)]
#: Without those of pages whose blocks other tests run one after the other.
SCRIPTS = {
    block.file: block
    for block in BLOCKS
    if block.file and block.language == "python" and block.page not in ("docs/tutorial.md", "docs/jupyter.md")
}


def environment(**more):
    hidden = ("LOCKSTEP_", "RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "SLURM_", "OMPI_", "PMI")
    env = {name: value for name, value in os.environ.items() if not name.startswith(hidden)}
    return env | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""} | more


def free_port():
    with socket.socket() as door:
        door.bind(("127.0.0.1", 0))
        return str(door.getsockname()[1])
