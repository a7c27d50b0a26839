"""The memory that a process takes, and how much more it may: of the host, within control groups, and of its device.

/proc/self/status   what the process holds, and has held at most
/proc/self/cgroup   its control groups, of version 1 or 2: limits, what is used, how many processes the kernel killed
/proc/meminfo       what the host has left
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

_V1 = ("memory.oom_control", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_V2 = ("memory.events", "memory.max", "memory.current", "inactive_file")


@dataclass(frozen=True, slots=True)
class ControlGroup:
    """What the kernel says about the memory of a process's control groups."""

    limit_bytes: int | None = None  #: the least of all groups that the process is in; None: no limit
    kills: int = 0  #: processes that were killed in its own one, since it was made
    used_bytes: int | None = None  #: of the group with that limit, without cached files; None: unknown
    path: str = ""  #: of that group, below where groups are mounted; "" for the root, which a container has as its own
    free_bytes: int | None = None  #: what may still be used, by the group that leaves the least; None: no limit

    @classmethod
    def read(cls, proc: Path = Path("/proc/self/cgroup"), mounted: Path = Path("/sys/fs/cgroup")) -> Self:
        """That of the process whose ``/proc/PID/cgroup`` is ``proc``. Takes about 0.1 ms."""
        return cls.of(text_of(proc), mounted)

    @classmethod
    def of(cls, names: str, mounted: Path = Path("/sys/fs/cgroup")) -> Self:
        """That of groups by their names, lines as in ``/proc/PID/cgroup``; what cannot be read is no limit, no kill."""
        limits: list[tuple[int, str, int | None]] = []
        kills = None
        for line in names.splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers and "memory" not in controllers.split(","):
                continue
            root = mounted / "memory" if controllers else mounted
            events, limit, usage, cache = _V1 if controllers else _V2
            own = root / path.lstrip("/")
            # Inside of a container the path is that outside of it, and its own group is mounted as the root.
            groups = [group for group in (own, *own.parents) if group == root or root in group.parents]
            for group in groups:
                said = text_of(group / limit).strip()
                if said.isdigit() and int(said) < 1 << 60:  # version 1 has no word for no limit
                    used = _number(text_of(group / usage))
                    files = _entry(text_of(group / "memory.stat"), cache) or 0
                    name = "" if group == root else str(group.relative_to(root))
                    limits.append((int(said), name, None if used is None else max(0, used - files)))
                if kills is None:
                    kills = _entry(text_of(group / events), "oom_kill")
        least, name, used = min(limits, key=lambda one: one[0], default=(None, "", None))
        # Not always of the group with the least limit: other jobs may use that of a group around it.
        free = min((max(0, limit - (used or 0)) for limit, _, used in limits), default=None)
        return cls(least, kills or 0, used, name, free)


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """The memory of one rank, in bytes; what is not known is None."""

    host: int | None = None  #: what its process holds of the host's
    host_peak: int | None = None  #: the most that it has held
    host_free: int | None = None  #: what it may still take: the host's, or what a control group allows
    device: int | None = None  #: what its tensors take of its device's
    device_peak: int | None = None  #: the most that they have taken
    device_free: int | None = None  #: what is free on its device

    def values(self) -> dict[str, int | None]:
        """By name, as JSON can hold it."""
        return asdict(self)


#: Where nobody has looked.
UNKNOWN = MemoryUse()


def host_memory(proc: Path = Path("/proc"), mounted: Path = Path("/sys/fs/cgroup")) -> MemoryUse:
    """What this process takes of the host's memory; its device is left out. Takes about 0.2 ms."""
    status = text_of(proc / "self/status")
    held, peak = (_entry(status, name) for name in ("VmRSS:", "VmHWM:"))
    group = ControlGroup.read(proc / "self/cgroup", mounted)
    left = [] if group.free_bytes is None else [group.free_bytes]
    if (available := _entry(text_of(proc / "meminfo"), "MemAvailable:")) is not None:
        left.append(available << 10)
    return MemoryUse(
        host=None if held is None else held << 10,
        host_peak=None if peak is None else peak << 10,
        host_free=min(left, default=None),
    )


def text_of(path: Path) -> str:
    """The text of a file of the kernel's, "" if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _entry(text: str, name: str) -> int | None:
    """The number behind ``name``, at the beginning of a line of ``text``."""
    for line in text.splitlines():
        words = line.split()
        if len(words) > 1 and words[0] == name:
            return _number(words[1])
    return None


def _number(text: str) -> int | None:
    return int(text) if text.strip().isdigit() else None
