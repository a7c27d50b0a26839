"""Schedulers of clusters: how to detect each, its allocation, its commands; a file for each, listed in `SCHEDULERS`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from lockstep.launch.schedulers.grid_engine import GridEngine
from lockstep.launch.schedulers.pbs import Pbs
from lockstep.launch.schedulers.scheduler import NO_SCHEDULER, Allocation, Ask, Read, Scheduler, WritesJobScripts
from lockstep.launch.schedulers.slurm import Slurm

#: In the order in which they are asked; the first that detects its job is taken.
SCHEDULERS: Final[tuple[Scheduler, ...]] = (Slurm(), GridEngine(), Pbs(), NO_SCHEDULER)

#: Those that ``lockstep job NAME`` writes scripts for, by name.
JOB_SCRIPT_SCHEDULERS: Final[Mapping[str, WritesJobScripts]] = {
    scheduler.name: scheduler for scheduler in SCHEDULERS if isinstance(scheduler, WritesJobScripts)
}


def detected(env: Mapping[str, str]) -> Scheduler:
    """The scheduler whose job this process belongs to; outside of a job one that gives nothing."""
    return next(scheduler for scheduler in SCHEDULERS if scheduler.detect(env))


def allocation(env: Mapping[str, str], read: Read) -> Allocation:
    """What the environment says; costs no more than reading two small files.

    Raises:
        SettingError: if it cannot be understood.
    """
    return detected(env).allocation(env, read)


def job_ends_at(env: Mapping[str, str], ask: Ask) -> float | None:
    """When the scheduler will end this job, in seconds since 1970; None if there is no end or it does not say."""
    return detected(env).job_ends_at(env, ask)
