"""How Slurm writes lists: hosts as ``gpu[01-03,7]``, counts as ``2(x3),1``; and how it numbers steps.

Shared by ranks, which find their place in these variables, and by launchers, which find their nodes in them.
"""

from __future__ import annotations

import itertools
import math
import re
from typing import Final

#: Slurm counts steps from 0; a batch script, an interactive step and their like get numbers from here on.
FIRST_SPECIAL_STEP: Final = 0xFFFFFFF0


#: Slurm's own limit of nodes in a cluster.
_MOST: Final = 1 << 16
_MOST_DIGITS: Final = 18


def expand_hosts(hosts: str) -> list[str]:
    """The hosts of a node list: ``gpu[01-03,7],login`` is gpu01, gpu02, gpu03, gpu7, login.

    Raises:
        ValueError: if it is not such a list, or names more hosts than a cluster has.
    """
    found: list[str] = []
    for parts in _items(hosts.strip()):
        # Texts and ranges take turns: gpu [01-03] -ib.
        choices = [_numbers(part) if index % 2 else [part] for index, part in enumerate(parts)]
        _limit(len(found) + math.prod(map(len, choices)), hosts)
        found += ["".join(chosen) for chosen in itertools.product(*choices)]
    return found


def _items(hosts: str) -> list[list[str]]:
    """The parts of each item, in turns outside of brackets and inside; one pass over the text."""
    items, inside = [[""]], False
    for token in re.findall(r"[^\[\],]+|[\[\],]", hosts):
        if token in "[]":
            if inside == (token == "["):
                break
            inside = not inside
            items[-1].append("")
        elif token == "," and not inside:
            items.append([""])
        else:
            items[-1][-1] += token
    else:
        if not inside and [""] not in items:
            return items
    raise ValueError(f"not a list of hosts: {hosts[:200]!r}")


def expand_counts(counts: str) -> list[int]:
    """One number for each node: ``2(x3),1`` is 2, 2, 2, 1.

    Raises:
        ValueError: if it is not such a list, or of more nodes than a cluster has.
    """
    found: list[int] = []
    for item in counts.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", item.strip())
        if match is None:
            raise ValueError(f"not a list of counts: {counts[:200]!r}")
        times = _whole(match[2] or "1")
        _limit(len(found) + times, counts)
        found += [_whole(match[1])] * times
    return found


def _numbers(ranges: str) -> list[str]:
    numbers: list[str] = []
    for each in ranges.split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", each)
        if match is None:
            raise ValueError(f"not a range of numbers: {each!r}")
        first, last = match[1], match[2] or match[1]
        _limit(len(numbers) + max(0, _whole(last) - _whole(first)), ranges)
        numbers += [str(number).zfill(len(first)) for number in range(_whole(first), _whole(last) + 1)]
    return numbers


def _whole(digits: str) -> int:
    """As `int`, which reads no more than some thousand digits."""
    if len(digits) > _MOST_DIGITS:
        raise ValueError(f"{digits[:_MOST_DIGITS]}... is no number of a host, nor of hosts")
    return int(digits)


def _limit(count: int, text: str) -> None:
    if count > _MOST:
        raise ValueError(f"{text[:80]!r} stands for {count} nodes, and a cluster has {_MOST} at most")
