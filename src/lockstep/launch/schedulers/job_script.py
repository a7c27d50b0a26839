"""Writes job scripts with nothing left to edit, for Slurm and Grid Engine."""

from __future__ import annotations

import difflib
import re
import shlex
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, Self

from lockstep.errors import SettingError

Scheduler = Literal["slurm", "sge"]
SITE = "lockstep.toml"  #: where a site's or a project's defaults are found: in the working directory

#: How long before the end of the job the run is asked to save and stop.
_WARNING_S = 120
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a job script asks the scheduler for. None: left to the scheduler, or asked for by nobody yet."""

    nodes: int | None = None
    gpus: str | None = None  #: on each node; for Slurm also a type, ``a100:4``
    cpus: int | None = None  #: on each node
    time_s: int | None = None
    mem: str | None = None  #: on each node, such as 64G
    partition: str | None = None  #: of Slurm
    queue: str | None = None  #: of Grid Engine
    account: str | None = None  #: of Slurm; the project of Grid Engine
    name: str | None = None
    pe: str | None = None  #: parallel environment of Grid Engine
    gpu_resource: str | None = None  #: what Grid Engine calls a GPU at this site
    setup: tuple[str, ...] = ()  #: shell lines before the launcher, such as ``module load cuda``
    extra: tuple[str, ...] = ()  #: more options for the scheduler, such as ``--constraint=nvlink``

    def over(self, defaults: Self) -> Self:
        """This, and for what it leaves open ``defaults``."""
        given = {each.name: value for each in fields(self) if (value := getattr(self, each.name)) not in (None, ())}
        return replace(defaults, **given)


@dataclass(frozen=True, slots=True)
class Command:
    """What the job runs."""

    words: tuple[str, ...]  #: of the launcher and its script: ``python -m lockstep run ... train.py ...``
    directory: str  #: absolute; where it runs
    stem: str  #: what the run is called after
    written_by: str  #: the command line that writes this script again
    version: str  #: of Lockstep


def write(scheduler: Scheduler, wanted: Wanted, command: Command) -> str:
    """The text of a whole job script; submitting it needs no edit.

    Raises:
        SettingError: naming all that is missing, or what cannot be used.
    """
    _complete(scheduler, wanted)
    return (_slurm if scheduler == "slurm" else _grid_engine)(wanted, command)


def site_defaults(scheduler: Scheduler, text: str, file: str = SITE) -> Wanted:
    """What the table ``[slurm]`` or ``[sge]`` of ``lockstep.toml`` says.

    Raises:
        SettingError: for what is no TOML, and for unknown or wrong keys, all of them at once.
    """
    try:
        tables = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise SettingError(f"{file}: {error}") from None
    wrong = [f"{file}: no table [{name}] is known; {_near(name, ('slurm', 'sge'))}" for name in tables
             if name not in ("slurm", "sge")]  # fmt: skip
    table = tables.get(scheduler, {})
    if not isinstance(table, dict):
        raise SettingError(f"{file}: {scheduler}: it must be a table, [{scheduler}]")
    values: dict[str, Any] = {}
    for key, value in table.items():
        try:
            values |= _value(scheduler, key, value)
        except SettingError as error:
            wrong.append(f"{file}: [{scheduler}] {key}: {error}")
    if wrong:
        raise SettingError("\n  ".join(wrong))
    return Wanted(**values)


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


def _complete(scheduler: Scheduler, wanted: Wanted) -> None:
    asked = [
        (wanted.time_s is None, "--time 12:00:00"),
        (wanted.gpus is None and wanted.cpus is None, "--gpus N or --cpus N (of each node)"),
        (
            scheduler == "sge" and wanted.pe is None and _slots(wanted) > 1,
            f"--pe NAME, the parallel environment for {_slots(wanted)} slots (qconf -spl lists them)",
        ),
    ]
    missing = [what for is_missing, what in asked if is_missing]
    if missing:
        raise SettingError(f"missing: {'; '.join(missing)}. Give them here, or once in {SITE} under [{scheduler}]")
    if scheduler == "sge" and wanted.gpus is not None and not wanted.gpus.isdigit():
        raise SettingError(f"--gpus {wanted.gpus}: Grid Engine takes a number; name the kind with extra in {SITE}")


def _slurm(wanted: Wanted, command: Command) -> str:
    name = wanted.name or command.stem
    nodes = wanted.nodes or 1
    several = "one launcher on each node; it starts" if nodes > 1 else "one launcher, which starts"
    directives = [
        (f"--job-name={name}", ""),
        (f"--chdir={command.directory}", ""),
        (f"--output={name}-%j.out", ""),
        ("--open-mode=append", "when it starts again it goes on in the same file"),
        (f"--nodes={nodes}", ""),
        ("--ntasks-per-node=1", f"{several} the ranks"),
        (wanted.gpus and f"--gres=gpu:{wanted.gpus}", "of each node; one rank for each"),
        (wanted.cpus and f"--cpus-per-task={wanted.cpus}", "of each node, for all its ranks"),
        (wanted.mem and f"--mem={wanted.mem}", "of each node"),
        (f"--time={_slurm_time(wanted.time_s or 0)}", ""),
        (wanted.partition and f"--partition={wanted.partition}", ""),
        (wanted.account and f"--account={wanted.account}", ""),
        (f"--signal=B:USR1@{_warning(wanted)}", "seconds before the end: save, and stop"),
        ("--requeue", "after which the job starts again and goes on"),
        *((option, f"from {SITE}") for option in wanted.extra),
    ]
    return _script("#SBATCH", directives, wanted, command, ("sbatch", "squeue --me", "scancel JOB"))


def _grid_engine(wanted: Wanted, command: Command) -> str:
    name = wanted.name or command.stem
    time_s = wanted.time_s or 0
    slots = _slots(wanted)
    gpu = wanted.gpu_resource or "gpu"
    directives = [
        ("-S /bin/bash", ""),
        # Grid Engine takes no name that begins with a digit.
        (f"-N {name if not name[:1].isdigit() else f'j{name}'}", ""),
        (f"-wd {_word(command.directory)}", ""),
        (f"-o {_word(name)}-$JOB_ID.out", ""),
        ("-j y", "errors in the same file"),
        (slots > 1 and f"-pe {wanted.pe} {slots}", f"CPUs, {wanted.nodes or 1} x {wanted.cpus or 1}"),
        (wanted.gpus and f"-l {gpu}={wanted.gpus}", "of each node; one rank for each"),
        (wanted.mem and f"-l h_vmem={wanted.mem}", "for each slot"),
        (f"-l h_rt={_clock(time_s)}", ""),
        (f"-l s_rt={_clock(time_s - _warning(wanted))}", "from here on: save, and stop (SIGUSR1)"),
        (wanted.queue and f"-q {wanted.queue}", ""),
        (wanted.account and f"-P {wanted.account}", ""),
        ("-notify", "SIGUSR2 before the job is killed; without it qdel kills at once"),
        ("-r y", "after which the job starts again and goes on"),
        *((option, f"from {SITE}") for option in wanted.extra),
    ]
    return _script("#$", directives, wanted, command, ("qsub", "qstat", "qdel JOB"))


def _script(
    mark: str,
    directives: Sequence[tuple[str | bool | int | None, str]],
    wanted: Wanted,
    command: Command,
    how: tuple[str, str, str],
) -> str:
    submit, watch, stop = how
    given = [(option, why) for option, why in directives if isinstance(option, str)]
    width = max(len(option) for option, why in given if why)
    # Grid Engine would take a remark on the same line for more options.
    lines: list[str] = []
    for option, why in given:
        if mark == "#$":
            lines += [f"# {why}:"] if why else []
            lines.append(f"{mark} {option}")
        else:
            lines.append(f"{mark} {option.ljust(width)}  # {why}" if why else f"{mark} {option}")
    setup = ["", "# What this site or project needs first.", *wanted.setup] if wanted.setup else []
    return "\n".join(
        [
            "#!/bin/bash",
            f"# Written by lockstep {command.version}, which writes it again with",
            f"#   {command.written_by}",
            "#",
            f"#   submit         {submit} THIS_FILE",
            f"#   watch          {watch}",
            f"#   save and stop  {stop}",
            "#",
            *lines,
            *setup,
            "",
            "# exec: the launcher takes the shell's place, for a shell would die of the warning and not hand it on.",
            f"exec {shlex.join(command.words)}",
            "",
        ]
    )


def _value(scheduler: Scheduler, key: str, value: Any) -> dict[str, Any]:
    other = {"slurm": ("queue", "pe", "gpu_resource"), "sge": ("partition",)}[scheduler]
    known = [name for name in ("time", *(each.name for each in fields(Wanted))) if name not in ("time_s", *other)]
    if key not in known:
        raise SettingError(f"no such key; {_near(key, known)}")
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


def checked(wanted: Wanted) -> Wanted:
    """``wanted``, whose texts can stand in a job script.

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
        value = getattr(wanted, name)
        if value is not None and re.fullmatch(form, value) is None:
            raise SettingError(f"--{name.replace('_', '-')} {value!r}: give {what}")
    for name in ("nodes", "cpus"):
        if (value := getattr(wanted, name)) is not None and value < 1:
            raise SettingError(f"--{name} {value}: it must be at least 1")
    return wanted


def _near(name: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {near[0]}?" if near else f"there are {', '.join(known)}"


def _slots(wanted: Wanted) -> int:
    return (wanted.nodes or 1) * (wanted.cpus or 1)


def _warning(wanted: Wanted) -> int:
    """Seconds before the end; a short job keeps most of its time."""
    return min(_WARNING_S, (wanted.time_s or 0) // 4)


def _clock(total_s: int) -> str:
    return f"{total_s // 3600:02d}:{total_s // 60 % 60:02d}:{total_s % 60:02d}"


def _slurm_time(total_s: int) -> str:
    days, rest = divmod(total_s, 86400)
    return f"{days}-{_clock(rest)}" if days else _clock(rest)


def _word(text: str) -> str:
    """In a directive, where quotes are understood as in a shell."""
    return text if re.fullmatch(r"[\w./+@:,-]+", text) else f'"{text}"'
