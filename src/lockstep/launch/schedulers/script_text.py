"""The parts of a job script that are the same for all schedulers: its frame, and the warning before its end."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

from lockstep.launch.schedulers.scheduler import JobCommand, JobRequest

SITE_FILE: Final = "lockstep.toml"  #: where a site's or a project's defaults are found: in the working directory

#: How long before the end of the job the run is asked to save and stop.
_WARNING_S = 120


@dataclass(frozen=True, slots=True)
class Directive:
    """An option for the scheduler, as a line of the script."""

    option: str
    why: str = ""  #: a comment, if it needs one


@dataclass(frozen=True, slots=True)
class Usage:
    """The scheduler's commands that the head of a script names."""

    submit: str
    watch: str
    stop: str


def given(*directives: Directive | str | int | Literal[False] | None) -> list[Directive]:
    """Those that are asked for: ``request.mem and Directive(...)`` is none where ``mem`` is left open."""
    return [each for each in directives if isinstance(each, Directive)]


def from_site(request: JobRequest) -> list[Directive]:
    """The options that the site's file adds."""
    return [Directive(option, f"from {SITE_FILE}") for option in request.extra]


def script_text(directives: Sequence[str], request: JobRequest, command: JobCommand, usage: Usage) -> str:
    """The whole script around lines of ``directives``."""
    setup = ["", "# What this site or project needs first.", *request.setup] if request.setup else []
    return "\n".join(
        [
            "#!/bin/bash",
            f"# Written by lockstep {command.version}, which writes it again with",
            f"#   {command.written_by}",
            "#",
            f"#   submit         {usage.submit} THIS_FILE",
            f"#   watch          {usage.watch}",
            f"#   save and stop  {usage.stop}",
            "#",
            *directives,
            *setup,
            "",
            "# exec: the launcher takes the shell's place, for a shell would die of the warning and not hand it on.",
            f"exec {shlex.join(command.argv)}",
            "",
        ]
    )


def warning_s(request: JobRequest) -> int:
    """Seconds before the end; a short job keeps most of its time."""
    return min(_WARNING_S, (request.time_s or 0) // 4)


def clock(total_s: int) -> str:
    """``HH:MM:SS``."""
    return f"{total_s // 3600:02d}:{total_s // 60 % 60:02d}:{total_s % 60:02d}"
