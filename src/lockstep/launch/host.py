"""What this machine has that ranks can run on, found without importing torch."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import socket
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from lockstep.cpu_affinity import allotted_cpus

#: Variables that name the network interface of torch's CPU backends.
INTERFACES = ("GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME")
_SIOCGIFADDR = 0x8915
_LISTENS = "0A"  # the kernel's number for a listening socket


@dataclass(frozen=True, slots=True)
class Machine:
    """What ranks may use here."""

    gpus: int
    cpus: int

    @classmethod
    def detect(cls, env: Mapping[str, str]) -> Self:
        """Ask the operating system and the GPU driver; takes a few milliseconds and touches no GPU."""
        try:
            affinity = len(os.sched_getaffinity(0))
        except AttributeError:  # not on macOS
            affinity = os.cpu_count() or 1
        cpus = allotted_cpus(env, affinity=affinity, cpu_max=_text(Path("/sys/fs/cgroup/cpu.max")) or "max")
        return cls(gpus=visible(env.get("CUDA_VISIBLE_DEVICES"), _driver_gpus()), cpus=cpus)


def visible(allowed: str | None, present: int) -> int:
    """How many of ``present`` GPUs a process with this ``CUDA_VISIBLE_DEVICES`` sees.

    As CUDA reads it: the list ends at the first entry that names no GPU. Entries that are no numbers (such as
    ``GPU-5ebe9f43`` or ``MIG-...``) are counted unseen.
    """
    if allowed is None or not present:
        return present
    count = 0
    for entry in map(str.strip, allowed.split(",")):
        if not entry or (entry.lstrip("-").isdigit() and not 0 <= int(entry) < present):
            break
        count += 1
    return count


def _driver_gpus() -> int:
    """GPUs that NVIDIA's driver lets this process use; 0 without one."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return 0
    if nvml.nvmlInit_v2() != 0:
        return 0
    count = ctypes.c_uint(0)
    found = nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)) == 0
    nvml.nvmlShutdown()
    return count.value if found else 0


def interface_of(address: str) -> str:
    """The name of the network interface that has this IPv4 or IPv6 ``address``; "" if none has."""
    if ":" in address:
        spelt = socket.inet_pton(socket.AF_INET6, address.partition("%")[0]).hex()
        lines = (_text(Path("/proc/net/if_inet6")) or "").splitlines()
        return next((line.split()[-1] for line in lines if line.split()[0] == spelt), "")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            with contextlib.suppress(OSError):
                if socket.inet_ntoa(fcntl.ioctl(asked, _SIOCGIFADDR, request)[20:24]) == address:
                    return name
    return ""


def holder_of(port: int) -> tuple[int, str] | None:
    """The process that listens at TCP ``port`` here, with its command; None if it cannot be seen."""
    sockets = set()
    for table in ("tcp", "tcp6"):
        for line in (_text(Path("/proc/net") / table) or "").splitlines()[1:]:
            words = line.split()
            if words[3] == _LISTENS and int(words[1].rpartition(":")[2], 16) == port:
                sockets.add(f"socket:[{words[9]}]")
    for process in Path("/proc").glob("[0-9]*") if sockets else ():
        with contextlib.suppress(OSError):
            if any(os.readlink(descriptor) in sockets for descriptor in (process / "fd").iterdir()):
                command = (_text(process / "cmdline") or "").replace("\0", " ").strip()
                return int(process.name), command or (_text(process / "comm") or "").strip()
    return None


def _text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="ascii", errors="replace")
    except OSError:
        return None
