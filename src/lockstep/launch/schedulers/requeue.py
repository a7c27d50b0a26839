"""A job that its scheduler starts again goes on where it stopped: in the same run directory, without being told."""

from __future__ import annotations

import itertools
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.launch.schedulers.allocation import Allocation

#: What Grid Engine takes for: start this job again.
EXIT_RERUN = 99
#: With which a launcher leaves whose scheduler has warned it, and whose ranks had nothing to save.
WARNED = tuple(128 + number for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU))

About = Callable[[Path], Mapping[str, Any] | None]
"""What a run directory says of itself; None if it is none."""


@dataclass(frozen=True, slots=True)
class Requeued:
    """What came of asking for the job to be started again."""

    code: int  #: to leave with
    said: str  #: for the user


def requeue(given: Allocation, stopped: int, ask: Callable[[Sequence[str]], tuple[int, str]]) -> Requeued:
    """Have the scheduler start this job again, now that its ranks have stopped with a complete checkpoint.

    A job that its user has cancelled stays so.

    Args:
        given: the job.
        stopped: the exit code for a run that stopped and is not started again.
        ask: carries out a scheduler's command; its exit code, 127 if there is none, and what it said.
    """
    match given.scheduler:
        case "sge":
            _, queue = ask(("qstat", "-u", "*"))
            if any("d" in line[4] for line in map(str.split, queue.splitlines()) if line[:1] == [_number(given)]):
                return Requeued(stopped, f"Grid Engine job {given.job} was deleted, so it does not start again")
            return Requeued(EXIT_RERUN, f"Grid Engine starts job {given.job} again for exit code {EXIT_RERUN}")
        case "slurm":
            # A job that is cancelled and one whose time is up are both COMPLETING; only the second says why.
            _, state = ask(("squeue", "-h", "-j", given.job, "-o", "%T %r"))
            if state.split()[:1] in (["COMPLETING"], ["CANCELLED"]) and "TimeLimit" not in state:
                return Requeued(stopped, f"Slurm job {given.job} was cancelled, so it is not put in the queue again")
            code, said = ask(("scontrol", "requeue", given.job))
            if code == 0:
                return Requeued(stopped, f"Slurm job {given.job} is in the queue again, and will go on by itself")
            why = "there is no scontrol here, as in a container" if code == 127 else said.strip() or f"exit code {code}"
            return Requeued(stopped, f"not in the queue again: {why}; from outside: scontrol requeue {given.job}")
        case _:
            return Requeued(stopped, "--requeue: no Slurm or Grid Engine job, so nothing starts it again")


def _number(given: Allocation) -> str:
    """As Grid Engine lists it, without the task of an array."""
    return given.job.partition(".")[0]


def directory(given: Allocation, runs: Path, stem: str, subject: str, about: About) -> tuple[Path, bool]:
    """Where this run of a job leaves its files, and whether it goes on there.

    A job may start several runs, also equal ones; started again it starts them again, in the same order. So each goes
    to the first directory of its own subject that this start of the job has not used yet.

    Args:
        given: the job.
        runs: where run directories are.
        stem: what the run is called after.
        subject: what is run with which settings; what differs is another run.
        about: reads a run directory.
    """
    for number in itertools.count(1):
        path = runs / f"{stem}-job{given.job}{f'-{number}' if number > 1 else ''}"
        if not path.exists():
            return path, False
        if goes_on(given, subject, about(path)):
            return path, True
    raise AssertionError("counting ends")


def goes_on(given: Allocation, subject: str, told: Mapping[str, Any] | None) -> bool:
    """Whether a run directory, which says ``told``, is this run's from before its job was started again."""
    last = told["starts"][-1] if told and told["starts"] else {}
    mine = last.get("job") == given.job and last.get("subject") == subject
    return mine and last.get("job_restarts", 0) < given.restarts


def noted(given: Allocation, subject: str) -> dict[str, Any]:
    """What a run directory is to say of a start, for `directory` and `goes_on` to read."""
    return {"job": given.job, "job_restarts": given.restarts, "subject": subject}
