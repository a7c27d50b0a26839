"""How Slurm writes lists: hosts as ``gpu[01-03,7]``, counts as ``2(x3),1``; and how it numbers steps.

Shared by ranks, which find their place in these variables, and by launchers, which find their nodes in them.
"""

from __future__ import annotations

import itertools
import re
from typing import Final

#: Slurm counts steps from 0; a batch script, an interactive step and their like get numbers from here on.
FIRST_SPECIAL_STEP: Final = 0xFFFFFFF0


def expand_hosts(hosts: str) -> list[str]:
    """The hosts of a node list: ``gpu[01-03,7],login`` is gpu01, gpu02, gpu03, gpu7, login.

    Raises:
        ValueError: if it is not such a list.
    """
    found: list[str] = []
    for item in re.split(r",(?![^\[]*\])", hosts.strip()):
        parts = re.split(r"\[([^\]]*)\]", item)
        if not item or any("[" in part or "]" in part for part in parts):
            raise ValueError(f"not a list of hosts: {hosts!r}")
        # Texts and ranges take turns: gpu [01-03] -ib.
        choices = [_numbers(part) if index % 2 else [part] for index, part in enumerate(parts)]
        found += ["".join(chosen) for chosen in itertools.product(*choices)]
    return found


def expand_counts(counts: str) -> list[int]:
    """One number for each node: ``2(x3),1`` is 2, 2, 2, 1.

    Raises:
        ValueError: if it is not such a list.
    """
    found: list[int] = []
    for item in counts.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", item.strip())
        if match is None:
            raise ValueError(f"not a list of counts: {counts!r}")
        found += [int(match[1])] * int(match[2] or 1)
    return found


def _numbers(ranges: str) -> list[str]:
    numbers: list[str] = []
    for each in ranges.split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", each)
        if match is None:
            raise ValueError(f"not a range of numbers: {each!r}")
        first, last = match[1], match[2] or match[1]
        numbers += [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
    return numbers
