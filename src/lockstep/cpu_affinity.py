"""How many CPUs a rank may use, and which of them belong to it alone."""

from __future__ import annotations

from lockstep.launch_contract import BIND
from lockstep.world import Environment, World, number_in


def allotted_cpus(env: Environment, *, affinity: int, cpu_max: str = "max") -> int:
    """How many CPUs this process may use, at least one.

    A rank gets its part of the CPUs that the ranks of its node share. A launcher is no rank and gets all CPUs of its
    job.

    Args:
        env: the environment of this process.
        affinity: CPUs that it may run on, ``len(os.sched_getaffinity(0))``.
        cpu_max: the text of its control group's ``cpu.max``, such as ``max 100000`` or ``200000 100000``.

    Raises:
        WorldError: as `World.from_env`.
    """
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


def own_cpus(allowed: set[int], env: Environment) -> set[int]:
    """This rank's part of ``allowed``: neighbouring CPUs, and as many for each rank as for any other, within one.

    All of them where there are fewer CPUs than ranks.
    """
    world, cpus = World.from_env(env), sorted(allowed)
    first, end = (len(cpus) * rank // world.local_size for rank in (world.local_rank, world.local_rank + 1))
    return set(cpus[first:end]) if len(cpus) >= world.local_size else allowed
