"""Host memory: its limit, what each rank of this node holds of it, and whether the kernel killed for lack of it.

    /proc/PID/cgroup ──►  control group: limit, use, kills     the job's, and that of a rank which is in one of its own
    children of the fork_server ──►  rank 0: 1.2 GiB, 4 workers: 51 GiB            looked at once a second

Who is killed can say nothing, so what it held must be known before.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from lockstep.formatting import size
from lockstep.launch.host import procfs
from lockstep.memory_use import ControlGroup, text_of

_LOOK_EVERY_S = 1.0
_TOLD = 8  # ranks


@dataclass(frozen=True, slots=True)
class RankMemory:
    """Approximate memory of one rank that it does not share with others."""

    own_bytes: int
    workers_bytes: int = 0
    workers: int = 0  #: processes that it has started, such as those of a loader
    groups: str = ""  #: its control groups, as ``/proc/PID/cgroup`` names them

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
        group: asks the kernel about the job's control groups, or about those that are named.
        measure: what each rank holds now, by rank.
        now: the clock.
    """

    def __init__(
        self,
        fork_server: int,
        group: Callable[[str], ControlGroup] | None = None,
        measure: Callable[[int], Mapping[int, RankMemory]] | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._fork_server, self._measure, self._now = fork_server, measure or memory_by_rank, now
        self._group = group or _control_group
        self.begin()

    def begin(self) -> None:
        """A generation begins: what was before does not count."""
        self._memory: dict[int, RankMemory] = {}
        # By the names of the groups, "" for the job's: what it said first, and last while its processes were alive.
        first = self._group("")
        self._first, self._last = {"": first}, {"": first}
        self._next_s = self._now()

    def poll(self) -> None:
        """To be called often; looks once a second."""
        if self._now() >= self._next_s:
            self._next_s = self._now() + _LOOK_EVERY_S
            self._memory |= self._measure(self._fork_server)
            for groups in {"", *(held.groups for held in self._memory.values())}:
                self._last[groups] = self._group(groups)
                self._first.setdefault(groups, self._last[groups])

    def reason(self, rank: int) -> str:
        """Why ``rank`` or a worker of it was killed, in lines; "" if the kernel killed nothing for lack of memory."""
        own = self._memory.get(rank)
        groups = {own.groups if own else "": "rank", "": "job"}
        for name, whose in groups.items():
            # The kills that a group counts are read now, and what it used while the one that was killed still did.
            kills = self._group(name).kills - self._first[name].kills
            if kills > 0:
                return self._killed(rank, kills, self._last[name], whose)
        return ""

    def _killed(self, rank: int, kills: int, group: ControlGroup, whose: str) -> str:
        own = self._memory.get(rank)
        limit = ""
        if group.limit_bytes is not None:
            where = f" (control group {group.path})" if group.path else ""
            used = "" if group.used_bytes is None else f", and used {size(group.used_bytes)} when last looked at"
            limit = f", of which this {whose} may use {size(group.limit_bytes)}{where}{used}"
        lines = [
            f"the kernel killed {kills} process{'es' * (kills > 1)} of this job: host memory ran out{limit}",
        ]
        if own is not None:
            lines.append(f"rank {rank} held {own}")
        others = [f"rank {other} {held}" for other, held in sorted(self._memory.items()) if other != rank]
        if others:
            lines.append(f"beside it: {'; '.join(others[:_TOLD])}{', ...' * (len(others) > _TOLD)}")
        fewer = f"fewer loader workers (--set workers={own.workers // 2}), " if own and own.workers else ""
        lines.append(f"use {fewer}smaller batches or fewer ranks on this node, or ask for more memory")
        return "\n".join(lines)


def _control_group(names: str) -> ControlGroup:
    """The control groups that ``names`` tells, in the form of ``/proc/PID/cgroup``; "": those of this process."""
    return ControlGroup.read() if not names else ControlGroup.of(names)


def memory_by_rank(fork_server: int) -> dict[int, RankMemory]:
    """What each rank holds that the process ``fork_server`` has started; one that is just ending may be missing."""
    # Late, for most commands do without it.
    import psutil

    found: dict[int, RankMemory] = {}
    own_groups = text_of(Path("/proc/self/cgroup"))
    for child in procfs.children(fork_server):
        with contextlib.suppress(psutil.Error):
            name = psutil.Process(child).name()
            if name.startswith("rank "):
                workers = procfs.descendants(child)
                rank = int(name.removeprefix("rank "))
                # A process that ends gives up its memory first and its groups after: where it holds memory once its
                # groups are read, they were its own. One that has ended tells the root's groups.
                groups = text_of(Path(f"/proc/{child}/cgroup"))
                if not (own_bytes := _own_bytes(child)):
                    continue
                found[rank] = RankMemory(
                    own_bytes,
                    sum(map(_own_bytes, workers)),
                    len(workers),
                    "" if groups == own_groups else groups,
                )
    return found


def _own_bytes(process: int) -> int:
    """Memory that ``process`` shares with no other, about; 0 if it has ended."""
    import psutil

    with contextlib.suppress(psutil.Error):
        memory = psutil.Process(process).memory_info()
        return int(memory.rss - getattr(memory, "shared", 0))
    return 0
