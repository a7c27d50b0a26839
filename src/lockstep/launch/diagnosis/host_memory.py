"""Host memory: its limit, what each rank of this node holds of it, and whether the kernel killed for want of it.

    /proc/self/cgroup ──►  control group: limit, kills         version 1 and 2; only differences of kills mean something
    children of the fork_server ──►  rank 0: 1.2 GiB, 4 workers: 51 GiB            looked at once a second

Who is killed can say nothing, so what it held must be known before.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from lockstep.formatting import size
from lockstep.launch import procfs

_LOOK_EVERY_S = 1.0
_TOLD = 8  # ranks


@dataclass(frozen=True, slots=True)
class ControlGroup:
    """What the kernel says about the memory of this job's processes."""

    limit_bytes: int | None = None  #: the least of all groups that this process is in; None: no limit
    kills: int = 0  #: processes that were killed in it, since it was made

    @classmethod
    def read(cls, proc: Path = Path("/proc/self/cgroup"), mounted: Path = Path("/sys/fs/cgroup")) -> Self:
        """Read it; what cannot be read counts as no limit and no kills."""
        limits, kills = [], None
        for line in procfs.text_of(proc).splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers and "memory" not in controllers.split(","):
                continue
            root = mounted / "memory" if controllers else mounted
            events, limit = (
                ("memory.oom_control", "memory.limit_in_bytes") if controllers else ("memory.events", "memory.max")
            )
            own = root / path.lstrip("/")
            # Inside of a container the path is that outside of it, and its own group is mounted as the root.
            groups = [group for group in (own, *own.parents) if group == root or root in group.parents]
            for group in groups:
                said = procfs.text_of(group / limit).strip()
                if said.isdigit() and int(said) < 1 << 60:  # version 1 has no word for no limit
                    limits.append(int(said))
                for entry in procfs.text_of(group / events).splitlines():
                    name, _, count = entry.partition(" ")
                    if name == "oom_kill" and count.isdigit() and kills is None:
                        kills = int(count)
        return cls(min(limits, default=None), kills or 0)


@dataclass(frozen=True, slots=True)
class RankMemory:
    """Approximate memory of one rank that it does not share with others."""

    own_bytes: int
    workers_bytes: int = 0
    workers: int = 0  #: processes that it has started, such as those of a loader

    def __str__(self) -> str:
        """Such as ``1.21 GiB and its 4 workers 51.2 GiB``."""
        if not self.workers:
            return size(self.own_bytes)
        plural = "s" * (self.workers > 1)
        return f"{size(self.own_bytes)} and its {self.workers} worker{plural} {size(self.workers_bytes)}"


class MemoryTracker:
    """Follows what the ranks of one generation hold.

    Args:
        fork_server: the process whose children the ranks are.
        group: asks the kernel.
        measure: what each rank holds now, by rank.
        now: the clock.
    """

    def __init__(
        self,
        fork_server: int,
        group: Callable[[], ControlGroup] = ControlGroup.read,
        measure: Callable[[int], Mapping[int, RankMemory]] | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._fork_server, self._group, self._measure, self._now = fork_server, group, measure or memory_by_rank, now
        self.begin()

    def begin(self) -> None:
        """A generation begins: what was before does not count."""
        self._kills = self._group().kills
        self._memory: dict[int, RankMemory] = {}
        self._next_s = self._now()

    def poll(self) -> None:
        """To be called often; looks once a second."""
        if self._now() >= self._next_s:
            self._next_s = self._now() + _LOOK_EVERY_S
            self._memory |= self._measure(self._fork_server)

    def reason(self, rank: int) -> str:
        """Why ``rank`` or a worker of it was killed, in lines; "" if the kernel killed nothing for want of memory."""
        group = self._group()
        kills = group.kills - self._kills
        if kills <= 0:
            return ""
        limit = "" if group.limit_bytes is None else f", of which this job may use {size(group.limit_bytes)}"
        lines = [
            f"the kernel killed {kills} process{'es' * (kills > 1)} of this job: host memory ran out{limit}",
        ]
        if (own := self._memory.get(rank)) is not None:
            lines.append(f"rank {rank} held {own}")
        others = [f"rank {other} {held}" for other, held in sorted(self._memory.items()) if other != rank]
        if others:
            lines.append(f"beside it: {'; '.join(others[:_TOLD])}{', ...' * (len(others) > _TOLD)}")
        fewer = f"fewer loader workers (--set workers={own.workers // 2}), " if own and own.workers else ""
        lines.append(f"use {fewer}smaller batches or fewer ranks on this node, or ask for more memory")
        return "\n".join(lines)


def memory_by_rank(fork_server: int) -> dict[int, RankMemory]:
    """What each rank holds that the process ``fork_server`` has started; one that is just ending may be missing."""
    # Late, for most commands do without it.
    import psutil

    found: dict[int, RankMemory] = {}
    for child in procfs.children(fork_server):
        with contextlib.suppress(psutil.Error):
            name = psutil.Process(child).name()
            if name.startswith("rank "):
                workers = procfs.descendants(child)
                rank = int(name.removeprefix("rank "))
                found[rank] = RankMemory(_own_bytes(child), sum(map(_own_bytes, workers)), len(workers))
    return found


def _own_bytes(process: int) -> int:
    """Memory that ``process`` shares with no other, about; 0 if it has ended."""
    import psutil

    with contextlib.suppress(psutil.Error):
        memory = psutil.Process(process).memory_info()
        return int(memory.rss - getattr(memory, "shared", 0))
    return 0
