"""Job scripts with nothing left to edit: what is asked for, read from options and ``lockstep.toml``, and checked."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from lockstep.errors import SettingError
from lockstep.formatting import did_you_mean
from lockstep.launch.schedulers import JOB_SCRIPT_SCHEDULERS
from lockstep.launch.schedulers.scheduler import JobCommand, JobRequest, WritesJobScripts
from lockstep.project_files import FILE, ProjectFile, unknown_tables

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def write(scheduler: WritesJobScripts, request: JobRequest, command: JobCommand) -> str:
    """The text of a whole job script; submitting it needs no edit.

    Raises:
        SettingError: naming all that is missing, or what cannot be used.
    """
    missing = [
        *(["--time 12:00:00"] if request.time_s is None else []),
        *(["--gpus N or --cpus N (of each node)"] if request.gpus is None and request.cpus is None else []),
        *scheduler.missing(request),
    ]
    if missing:
        raise SettingError(f"missing: {'; '.join(missing)}. Give them here, or once in {FILE} under [{scheduler.name}]")
    return scheduler.job_script(request, command)


def site_defaults(scheduler: WritesJobScripts, files: Sequence[ProjectFile]) -> JobRequest:
    """What the tables of ``scheduler`` in ``files``, such as ``[slurm]``, say, the first file over the others.

    Raises:
        SettingError: for unknown tables, and unknown or wrong keys, all of them at once.
    """
    values: dict[str, Any] = {}
    wrong = unknown_tables(files)
    for file in reversed(files):
        for key, value in file.table(scheduler.name).items():
            try:
                values |= _value(scheduler, key, value)
            except SettingError as error:
                wrong.append(f"{file.place(scheduler.name, key)}: [{scheduler.name}] {key}: {error}")
    if wrong:
        raise SettingError("\n  ".join(wrong))
    return JobRequest(**values)


def seconds(text: str) -> int:
    """``12:00:00``, ``2-00:00:00``, ``2-12``, ``90m``, ``12h`` and ``2d`` in seconds.

    Raises:
        SettingError: for anything else; ``30`` and ``1:30`` mean other things to other schedulers.
    """
    text = text.strip()
    total = 0
    if match := re.fullmatch(r"(\d+)([smhd])", text):
        total = int(match[1]) * _UNITS[match[2]]
    elif match := re.fullmatch(r"(?:(\d+)-)?(\d+):([0-5]?\d):([0-5]?\d)", text):
        days, hours, minutes, rest = (int(part or 0) for part in match.groups())
        total = ((days * 24 + hours) * 60 + minutes) * 60 + rest
    elif match := re.fullmatch(r"(\d+)-(\d+)", text):
        total = (int(match[1]) * 24 + int(match[2])) * 3600
    if not total:
        raise SettingError(f"{text!r} is no time; give hours:minutes:seconds such as 12:00:00, or 90m, 12h, 2d, 2-12")
    return total


def _keys(scheduler: WritesJobScripts) -> list[str]:
    """What its table may hold: what every scheduler has, and its own options."""
    every = {option.name for each in JOB_SCRIPT_SCHEDULERS.values() for option in each.options}
    foreign = every - {option.name for option in scheduler.options}
    return [name for name in ("time", *(each.name for each in fields(JobRequest))) if name not in ("time_s", *foreign)]


def _value(scheduler: WritesJobScripts, key: str, value: object) -> dict[str, object]:
    known = _keys(scheduler)
    if key not in known:
        raise SettingError(f"no such key; {did_you_mean(key, known)}")
    if key == "time":
        return {"time_s": seconds(str(value))}
    if key in ("nodes", "cpus"):
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise SettingError(f"{value!r}: it must be a whole number, at least 1")
        return {key: value}
    if key in ("setup", "extra"):
        if not isinstance(value, list) or not all(isinstance(line, str) for line in value):
            raise SettingError(f"{value!r}: it must be a list of texts")
        return {key: tuple(value)}
    if not isinstance(value, str | int) or isinstance(value, bool):
        raise SettingError(f"{value!r}: it must be a text")
    return {key: str(value)}


def checked(request: JobRequest) -> JobRequest:
    """``request``, whose texts can stand in a job script.

    Raises:
        SettingError: for one that cannot.
    """
    forms = {
        "gpus": (r"(?:[\w.-]+:)?[1-9]\d*", "a number of GPUs such as 4, for Slurm also a100:4"),
        "mem": (r"[1-9]\d*[KMGTkmgt]?", "a size such as 64G"),
        "name": (r"[\w.+-]+", "letters, digits and any of _ . + -"),
        "partition": (r"[\w.,+-]+", "the name of a partition"),
        "queue": (r"[\w.,@*+-]+", "the name of a queue"),
        "account": (r"[\w.+-]+", "the name of an account"),
        "pe": (r"[\w.*+-]+", "the name of a parallel environment"),
        "gpu_resource": (r"[\w.-]+", "the name of a resource"),
    }
    for name, (form, what) in forms.items():
        value = getattr(request, name)
        if value is not None and re.fullmatch(form, value) is None:
            raise SettingError(f"--{name.replace('_', '-')} {value!r}: give {what}")
    for name in ("nodes", "cpus"):
        if (value := getattr(request, name)) is not None and value < 1:
            raise SettingError(f"--{name} {value}: it must be at least 1")
    return request
