"""What a benchmark found, put into a page of the documentation."""

import datetime
import os
import re
from collections.abc import Sequence
from pathlib import Path

import torch


def put(page: str, name: str, text: str) -> None:
    """Replace what stands in ``page`` between ``<!-- measured: NAME -->`` and ``<!-- end -->``."""
    path = Path(page)
    before = path.read_text(encoding="utf-8")
    place = re.compile(rf"(<!-- measured: {re.escape(name)} -->\n).*?(<!-- end -->)", re.DOTALL)
    after, times = place.subn(lambda found: f"{found[1]}\n{text}\n\n{found[2]}", before)
    if times != 1:
        raise SystemExit(f"{page} has {times} places <!-- measured: {name} --> ... <!-- end -->; there must be one")
    path.write_text(after, encoding="utf-8")


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table."""
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows))


def circumstances() -> str:
    """When, and on what."""
    load = os.getloadavg()[1]
    version = torch.__version__.partition("+")[0]
    return f"{datetime.date.today()}, {os.cpu_count()} CPU cores (load {load:.0f}), torch {version}"
