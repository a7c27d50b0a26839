"""How much of the host's memory a process may still take."""

from __future__ import annotations

import contextlib
from pathlib import Path


def free_memory(proc: Path = Path("/proc/self/cgroup"), mounted: Path = Path("/sys/fs/cgroup")) -> int:
    """Free bytes of the host's memory, or of this process's control groups if less: files in memory count in them.

    A job whose group is full is killed with its launcher.
    """
    lines = Path("/proc/meminfo").read_text().splitlines()
    free = int(next(line for line in lines if line.startswith("MemAvailable:")).split()[1]) << 10
    for line in proc.read_text().splitlines() if proc.exists() else ():
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        names = ("memory.limit_in_bytes", "memory.usage_in_bytes") if controllers else ("memory.max", "memory.current")
        root = mounted / "memory" if controllers else mounted
        own = root / path.lstrip("/")
        # Inside of a container the path is that outside of it, and its own group is mounted as the root.
        for group in (group for group in (own, *own.parents) if group == root or root in group.parents):
            with contextlib.suppress(OSError, ValueError):  # there is none, or it has no limit
                limit, used = (int((group / name).read_text()) for name in names)
                free = min(free, limit - used)
    return free
