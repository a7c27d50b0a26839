"""How busy the CPUs of this machine are, and how much of that is the work of a process."""

from __future__ import annotations

import os
import time
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Final

#: Of `/proc/stat`, the columns of a CPU in which it is idle: idle, and waiting for a disk.
_IDLE: Final = (3, 4)
_FOREIGN_SHARE = 0.1  # of the CPUs, beyond which others are in the way


@dataclass(frozen=True, slots=True)
class CpuUse:
    """Who used the CPUs for a while."""

    cores: int  #: that this process may use
    own: float  #: cores that the watched process kept busy, on average
    others: float  #: cores that everything else kept busy

    @property
    def idle(self) -> float:
        """Cores on which nothing ran."""
        return max(0.0, self.cores - self.own - self.others)

    @property
    def disturbed(self) -> bool:
        """Whether others took cores that the run would have had, or shared its caches and its memory."""
        return self.others > _FOREIGN_SHARE * self.cores and self.own + self.others > 0.75 * self.cores


class CpuWatch:
    """Watches ``cpus``, which this process may use, from when it is made."""

    def __init__(self, cpus: Collection[int]) -> None:
        self._cpus: Final = cpus
        self._began_s: Final = time.monotonic()
        self._busy_s: Final = busy_s(self._cpus)

    def used(self, own_s: float) -> CpuUse:
        """Since the beginning, in which the watched process took ``own_s`` seconds of CPU time."""
        took = max(1e-3, time.monotonic() - self._began_s)
        others = busy_s(self._cpus) - self._busy_s - own_s
        return CpuUse(len(self._cpus), own_s / took, max(0.0, others / took))


def busy_s(cpus: Collection[int], stat: Path = Path("/proc/stat")) -> float:
    """Seconds that ``cpus`` were not idle since the machine began; 0 where the system does not say."""
    try:
        lines = stat.read_text(encoding="ascii").splitlines()
    except OSError:
        return 0.0
    wanted = {f"cpu{cpu}" for cpu in cpus}
    ticks = 0
    for line in lines:
        name, *columns = line.split()
        if name in wanted:
            # The last two columns, guests, are in the first two already.
            ticks += sum(int(c) for place, c in enumerate(columns[:8]) if place not in _IDLE)
    return ticks / os.sysconf("SC_CLK_TCK")
