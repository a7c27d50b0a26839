"""The CPUs, GPUs and ports of this machine, found without importing torch; and on which devices its ranks run."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

from lockstep.cpu_affinity import allotted_cpus
from lockstep.errors import SettingError
from lockstep.formatting import format_ranks, plural
from lockstep.gpu_driver import ask_driver
from lockstep.launch.diagnosis.root_cause import RankExit


@dataclass(frozen=True, slots=True)
class Machine:
    """The resources of this machine that ranks may use."""

    gpus: int
    cpus: int

    @classmethod
    def detect(cls, env: Mapping[str, str]) -> Self:
        """Ask the operating system and the GPU driver; takes a few milliseconds and touches no GPU."""
        present, divided = _driver_gpus()
        gpus = visible(env.get("CUDA_VISIBLE_DEVICES"), present)
        return cls(gpus=min(gpus, 1) if divided else gpus, cpus=allotted_cpus(env))


def visible(allowed: str | None, present: int) -> int:
    """How many of ``present`` GPUs a process with this ``CUDA_VISIBLE_DEVICES`` sees.

    As CUDA reads it: the list ends at the first entry that names no GPU. Entries that are no numbers (such as
    ``GPU-5ebe9f43`` or ``MIG-...``) are counted unseen.
    """
    return len(_entries(allowed, present))


def gpu_names(env: Mapping[str, str]) -> list[str]:
    """The GPUs of this machine that a process sees, as ``CUDA_VISIBLE_DEVICES`` names them; none where one is divided.

    CUDA shows a process one part of a divided one.
    """
    present, divided = _driver_gpus()
    return [] if divided else _entries(env.get("CUDA_VISIBLE_DEVICES"), present)


def _entries(allowed: str | None, present: int) -> list[str]:
    """The names of the GPUs, in the order in which CUDA numbers them."""
    if allowed is None or not present:
        return list(map(str, range(present)))
    names = []
    for entry in map(str.strip, allowed.split(",")):
        if not entry or (entry.lstrip("-").isdigit() and not 0 <= int(entry) < present):
            break
        names.append(entry)
    return names


def _driver_gpus() -> tuple[int, bool]:
    """GPUs that NVIDIA's driver lets this process use, 0 without one; and whether some are divided into parts (MIG).

    The driver counts whole GPUs, while CUDA shows a process one part of one of them.
    """

    def present(nvml: Any) -> tuple[int, bool]:
        count = int(nvml.nvmlDeviceGetCount())
        return count, any(_is_divided(nvml, nvml.nvmlDeviceGetHandleByIndex(number)) for number in range(count))

    return ask_driver(present, (0, False))


def cpus_beside_gpus(allowed: str | None, cpus: int) -> list[frozenset[int]]:
    """For each GPU that a process with this ``CUDA_VISIBLE_DEVICES`` sees, the CPUs of its socket; empty if unknown.

    Args:
        allowed: the variable; None: it is not set.
        cpus: a number above that of every CPU of this machine.
    """

    def beside(nvml: Any) -> list[frozenset[int]]:
        entries = _entries(allowed, int(nvml.nvmlDeviceGetCount()))
        return [_cpus_beside(nvml, entry, cpus) for entry in entries]

    return ask_driver(beside, [])


def _is_divided(nvml: Any, handle: Any) -> bool:
    try:
        return bool(nvml.nvmlDeviceGetMigMode(handle)[0])
    except nvml.NVMLError:  # a GPU that cannot be
        return False


def _cpus_beside(nvml: Any, name: str, cpus: int) -> frozenset[int]:
    by_number = name.isdigit()
    handle = nvml.nvmlDeviceGetHandleByIndex(int(name)) if by_number else nvml.nvmlDeviceGetHandleByUUID(name)
    words = nvml.nvmlDeviceGetCpuAffinity(handle, -(-cpus // 64))
    mask = sum(int(word) << (64 * place) for place, word in enumerate(words))
    return frozenset(cpu for cpu in range(cpus) if mask >> cpu & 1)


def holder_of(port: int) -> tuple[int, str] | None:
    """The process that listens at TCP ``port`` here, with its command; None if it cannot be seen."""
    import psutil

    with contextlib.suppress(psutil.Error):
        for connection in psutil.net_connections("tcp"):
            # An address is a pair of host and port, or empty where there is none.
            if connection.status == psutil.CONN_LISTEN and connection.laddr[1:2] == (port,) and connection.pid:
                process = psutil.Process(connection.pid)
                return process.pid, " ".join(process.cmdline()) or process.name()
    return None


def threads_of_rank(env: Mapping[str, str]) -> int:
    """How many CPU threads each rank has: the number in OMP_NUM_THREADS, or the first one of a list there.

    Raises:
        SettingError: if it holds something else, which OpenMP would ignore and use all CPUs.
    """
    given = env.get("OMP_NUM_THREADS", "")
    first = given.split(",")[0].strip()
    if not given.strip():
        return 1
    if not (first.isdecimal() and int(first)):
        raise SettingError(f"OMP_NUM_THREADS={given!r}: give the number of CPU threads of each rank, or unset it")
    return int(first)


@dataclass(frozen=True, slots=True)
class Devices:
    """The devices of one node: its local ranks take those that are not left out, in their order."""

    ranks: int  #: asked for
    gpus: tuple[str, ...] = ()  #: as ``CUDA_VISIBLE_DEVICES`` names them; empty: CPUs, or not looked up
    left_out: frozenset[int] = frozenset()  #: by place among the GPUs, or among the ranks where there are none

    @property
    def can_start(self) -> int:
        """How many ranks this node can start: as many as asked for, while it has spare GPUs."""
        return min(self.ranks, len(self._free))

    def without(self, local_ranks: Collection[int], gpus: Callable[[], Sequence[str]]) -> Self:
        """The devices without those of ``local_ranks``; ``gpus`` looks up which the node has.

        Where ranks share GPUs, ranks are left out, and no GPU.
        """
        if not local_ranks:
            return self
        names = self.gpus or tuple(gpus())
        here = self if self.left_out or len(names) < self.ranks else replace(self, gpus=names)
        return replace(here, left_out=here.left_out | {here._free[rank] for rank in local_ranks})

    def variables(self) -> Mapping[str, str]:
        """What hides from ranks the GPUs that are left out."""
        if not (self.gpus and self.left_out):
            return {}
        return {"CUDA_VISIBLE_DEVICES": ",".join(self.gpus[place] for place in self._free)}

    @property
    def _free(self) -> list[int]:
        return [place for place in range(len(self.gpus) or self.ranks) if place not in self.left_out]


def without_accused(
    devices: Devices, endings: Sequence[RankExit], ranks: range, gpus: Callable[[], Sequence[str]]
) -> tuple[Devices, str]:
    """The devices for the next generation, after this node's ``ranks`` of one have ended; and what to tell the user.

    They are ``devices`` without those of ranks that were found to compute wrong bits.
    """
    accused = {rank for ending in endings if ending.failure for rank in ending.failure.accused}
    odd = sorted(accused.intersection(ranks))
    if not odd:
        return devices, ""
    rest = devices.without([rank - ranks[0] for rank in odd], gpus)
    whose = "whose device is" if len(odd) == 1 else "whose devices are"
    return rest, (
        f"wrong bits on {format_ranks(odd)}, {whose} left out from now on: {plural(rest.can_start, 'rank')} of "
        f"{rest.ranks} can start here"
    )
