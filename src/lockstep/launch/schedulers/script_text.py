"""The parts of a job script that are the same for all schedulers: its frame, and the warning before its end."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from lockstep.errors import SettingError
from lockstep.formatting import acts, harmless
from lockstep.launch.schedulers.scheduler import JobCommand, JobRequest
from lockstep.project_files import FILE

#: How long before the end of the job the run is asked to save and stop.
_WARNING_S = 120


@dataclass(frozen=True, slots=True)
class Directive:
    """An option for the scheduler, as a line of the script.

    Raises:
        SettingError: if it would be more than that line.
    """

    option: str
    why: str = ""  #: a comment, if it needs one

    def __post_init__(self) -> None:
        refuse_control_characters(self.option)


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
    return [Directive(option, f"from {FILE}") for option in request.extra]


def refuse_control_characters(text: str) -> str:
    """``text``, which becomes a part of a line of a job script: what is behind the line's end would be obeyed.

    Raises:
        SettingError: if it holds a line break, or another character that is no sign.
    """
    if acts(text):
        raise SettingError(
            f"'{harmless(text)}' cannot be in a job script, for it holds a line break or another control character: "
            "rename the file or the directory, or give another value"
        )
    return text


def job_name(request: JobRequest, command: JobCommand) -> str:
    """The name of the job: what is asked for, else the program's with a hyphen for what schedulers take for more."""
    return request.name or re.sub(r"[^\w.+-]+", "-", refuse_control_characters(command.stem)).lstrip("-") or "job"


def script_text(directives: Sequence[str], request: JobRequest, command: JobCommand, usage: Usage) -> str:
    """The whole script around lines of ``directives``.

    Raises:
        SettingError: if a word of the command holds a control character. The lines of ``request.setup`` are the user's
            own, and may be anything that a shell carries out.
    """
    for word in (*command.argv, command.written_by):
        refuse_control_characters(word)
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
