"""How many CPUs a rank may use, and which of them belong to it alone."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from pathlib import Path

from lockstep.launch_contract import BIND
from lockstep.memory_use import text_of
from lockstep.world import Environment, World, number_in


def usable_cpus() -> set[int]:
    """The CPUs that this process may run on; all of them where the system does not bind processes, such as macOS."""
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))


def allotted_cpus(env: Environment, *, affinity: int | None = None, cpu_max: str | None = None) -> int:
    """How many CPUs this process may use, at least one.

    A rank gets its part of the CPUs that the ranks of its node share. A launcher is no rank and gets all CPUs of its
    job.

    Args:
        env: the environment of this process.
        affinity: number of CPUs that it may run on; None: `usable_cpus`.
        cpu_max: the text of its control group's ``cpu.max``, such as ``max 100000`` or ``200000 100000``; None: it is
            read.

    Raises:
        WorldError: as `World.from_env`.
    """
    affinity = len(usable_cpus()) if affinity is None else affinity
    cpu_max = text_of(Path("/sys/fs/cgroup/cpu.max")) if cpu_max is None else cpu_max
    limits = [affinity]
    quota, _, period = cpu_max.strip().partition(" ")
    if quota.isdigit() and period.isdigit() and int(period):
        limits.append(int(quota) // int(period))
    world = World.from_env(env)
    own = number_in(env, ("SLURM_CPUS_PER_TASK",)) if world.launcher == "slurm" else None
    if own:
        return max(1, min(*limits, own))
    limits += [cpus for name in ("SLURM_CPUS_ON_NODE", "NSLOTS", "NCPUS") if (cpus := number_in(env, (name,)))]
    if env.get(BIND) == "1":
        return max(1, min([affinity, *(limit // world.local_size for limit in limits[1:])]))
    # Where another launcher has bound each rank to CPUs of its own, this is too few, but no variable says so.
    return max(1, min(limits) // world.local_size)


def own_cpus(cpus: Sequence[int], env: Environment, near: Sequence[AbstractSet[int]] = ()) -> set[int]:
    """This rank's part of ``cpus``: neighbouring ones, and as many for each rank as for any other, within one.

    All of them where there are fewer CPUs than ranks.

    Args:
        cpus: that this process may use, neighbours beside each other, as by `by_core`.
        env: the environment of this rank.
        near: for each rank of this node, the CPUs beside its GPU. Ranks beside the same CPUs share these out.
    """
    world = World.from_env(env)
    sharing, own = list(range(world.local_size)), list(cpus)
    if len(near) == world.local_size:
        beside = near[world.local_rank]
        close = [cpu for cpu in cpus if cpu in beside]
        at_it = [rank for rank in sharing if near[rank] == beside]
        if len(close) >= len(at_it):
            sharing, own = at_it, close
    place = sharing.index(world.local_rank)
    first, end = (len(own) * number // len(sharing) for number in (place, place + 1))
    return set(own[first:end]) if len(own) >= len(sharing) else set(own)


def by_core(cpus: Iterable[int], system: Path = Path("/sys/devices/system/cpu")) -> list[int]:
    """``cpus`` by socket and core: threads of one core, whose numbers may lie far apart, stand beside each other."""

    def place(cpu: int) -> tuple[int, int, int]:
        numbers = []
        for name in ("physical_package_id", "thread_siblings_list"):
            first = re.match(r"\d+", text_of(system / f"cpu{cpu}" / "topology" / name))
            numbers.append(int(first[0]) if first else -1)
        socket, core = numbers
        return socket, cpu if core < 0 else core, cpu

    return sorted(cpus, key=place)
