"""Where each rank is, and who waits for whom, in a small file for another terminal.

lockstep run, one on each node ─►  ranks-0000.json, ranks-0001.json ...  ─►  lockstep top
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from lockstep.memory_use import UNKNOWN, MemoryUse
from lockstep.records import of_kind, read_bytes, value_in
from lockstep.small_files import replace_text

#: Less waiting than this is not reported: all ranks wait a little for each other.
_NOTEWORTHY = 0.1


@dataclass(frozen=True, slots=True)
class RankStatus:
    """Where one rank is; all of it as it was when it was last heard."""

    rank: int
    step: int  #: optimizer steps done; -1 while nobody counts them
    phase: str
    place: str  #: the user's line, such as ``train.py:17``, and what it has called
    waits: float | None = None  #: the part of its last seconds in which it waited for other ranks
    silent_s: float = 0.0  #: since it was last heard
    memory: MemoryUse = UNKNOWN  #: of the host's and its device's


def lateness(ranks: Sequence[RankStatus]) -> str:
    """Who keeps the others waiting, such as ``3 ranks wait 38 % for rank 2``; "" if nobody does much."""
    known = [(one.waits, one.rank) for one in ranks if one.waits is not None]
    if len(known) < 2:
        return ""
    least, late = min(known)
    others = sorted(waits for waits, rank in known if rank != late)
    usual = others[len(others) // 2]
    if usual - least < _NOTEWORTHY:
        return ""
    return f"{len(others)} rank{'s wait' if len(others) > 1 else ' waits'} {usual:.0%} for rank {late}".replace(
        "%", " %"
    )


class RanksFile:
    """One launcher's file in the run directory.

    Args:
        run_dir: it exists.
        number: of this launcher's node.
    """

    def __init__(self, run_dir: Path, number: int) -> None:
        #: The file.
        self.path = run_dir / f"ranks-{number:04d}.json"

    def write(self, ranks: Sequence[RankStatus]) -> None:
        """Replace what is there. What cannot be written, such as on a full disk, is dropped."""
        with contextlib.suppress(OSError):
            replace_text(self.path, json.dumps([asdict(one) for one in ranks]))

    @staticmethod
    def read_all(run_dir: Path) -> list[RankStatus]:
        """What the launchers of all nodes have written, by rank; what cannot be read is left out."""
        found: dict[int, RankStatus] = {}
        for path in sorted(run_dir.glob("ranks-*.json")):
            with contextlib.suppress(OSError, ValueError):
                ranks = of_kind(list[RankStatus], value_in(read_bytes(path)), path.name)
                found |= {one.rank: one for one in ranks}
        return [found[rank] for rank in sorted(found)]
