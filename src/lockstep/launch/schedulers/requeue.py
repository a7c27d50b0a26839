"""A job that its scheduler starts again resumes by itself, in the same run directory."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from lockstep.launch.schedulers.scheduler import Allocation

About = Callable[[Path], Mapping[str, Any] | None]
"""What a run directory says of itself; None if it is none."""


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


def goes_on(given: Allocation, subject: str, record: Mapping[str, Any] | None) -> bool:
    """Whether a run directory, which holds ``record``, is this run's from before its job was started again."""
    last = record["starts"][-1] if record and record["starts"] else {}
    mine = last.get("job") == given.job and last.get("subject") == subject
    # Where it is not known which start this is, going on loses nothing; to begin anew would.
    return mine and given.restarted and (not given.start or last.get("job_start") != given.start)


def noted(given: Allocation, subject: str) -> dict[str, Any]:
    """What a run directory is to say of a start, for `directory` and `goes_on` to read."""
    return {"job": given.job, "job_start": given.start, "subject": subject}
