"""Grid Engine: ``qrsh -inherit`` starts a launcher on each other node; exit code 99 starts a job again.

What it really sends, measured with Grid Engine 8.1.9:

    event             reaches
    qdel JOB          nobody: KILL at once; submit with -notify
    qdel JOB, -notify USR2 to shell and launcher; KILL after the queue's notify time. A shell that does not trap it
                      dies at once, and the job with it: the launcher must take its place (exec)
    s_rt passed       USR1, likewise
    h_rt passed       KILL at once; with -notify USR2 before
    s_rt passed, in a job on several hosts
                      as h_rt, on all of them: there a run has to know the limit and stop before it
    exit 99           the job starts again, with the same JOB_ID and RESTARTED=1, also the third time
    exit 99, in a job on several hosts
                      likewise, but of these hosts it is given the first one alone again: it waits for others
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Final

from lockstep.errors import SettingError
from lockstep.launch.schedulers.scheduler import (
    Allocation,
    Ask,
    JobCommand,
    JobOption,
    JobRequest,
    Node,
    Read,
    Requeued,
    RunCommand,
    StartCommand,
    WritesJobScripts,
    launcher_argv,
    merge_nodes,
    timestamp,
    whole_number,
)
from lockstep.launch.schedulers.script_text import (
    Directive,
    Usage,
    clock,
    from_site,
    given,
    job_name,
    script_text,
    warning_s,
)
from lockstep.project_files import FILE

#: What Grid Engine takes for: start this job again.
EXIT_RERUN: Final = 99
_QRSH = ("qrsh", "-inherit", "-nostdin", "-V")
_USAGE = Usage(submit="qsub", watch="qstat", stop="qdel JOB")


class GridEngine(WritesJobScripts):
    """Jobs of ``qsub``."""

    name = "sge"
    title = "Grid Engine"
    submit = _USAGE.submit
    gpus_help = "of each node"
    options = (
        JobOption("mem", "SIZE", "of each slot, which is a CPU, such as 8G"),
        JobOption("queue", "NAME", "where it waits"),
        JobOption("pe", "NAME", "parallel environment, for several slots"),
        JobOption("gpu_resource", "NAME", "what a GPU is called here (default: gpu)"),
    )

    def detect(self, env: Mapping[str, str]) -> bool:
        """Detected by three variables, since JOB_ID alone may be the user's own."""
        return all(env.get(name) for name in ("JOB_ID", "SGE_ROOT", "QUEUE"))

    def allocation(self, env: Mapping[str, str], read: Read) -> Allocation:
        """The nodes of a parallel job are in a file."""
        task = env.get("SGE_TASK_ID", "undefined")
        lines = [line.split() for line in read(env.get("PE_HOSTFILE", "")).splitlines()]
        nodes = merge_nodes([(fields[0], whole_number(fields[1]) or 0) for fields in lines if len(fields) >= 2])
        return Allocation(
            self,
            env["JOB_ID"] + ("" if task in ("undefined", "") else f".{task}"),
            nodes or (Node(env.get("HOSTNAME", "here"), whole_number(env.get("NSLOTS")) or 1),),
            start=_which_start(env, read),
            restarted=bool(whole_number(env.get("RESTARTED"))),
        )

    def job_ends_at(self, env: Mapping[str, str], ask: Ask) -> float | None:
        """The first of the limits ``s_rt`` and ``h_rt``, counted from the start of this job or task."""
        job, task = env["JOB_ID"], env.get("SGE_TASK_ID", "undefined")
        limits = [int(limit) for limit in re.findall(r"\b[hs]_rt=(\d+)", ask(("qstat", "-j", job)))]
        if not limits:
            return None
        # Only some versions of it say there when a job began.
        rows = [row for row in _rows_of(job, ask(("qstat", "-s", "r", "-u", "*"))) if task in ("undefined", row[-1])]
        start = timestamp(" ".join(rows[0][5:7])) if rows else None
        return None if start is None else start + min(limits)

    def start_commands(
        self, given: Allocation, launcher: Sequence[str], *, endpoint: str, directory: str
    ) -> list[StartCommand]:
        """The first node's launcher starts here, the others by ``qrsh``."""
        argv = launcher_argv(given, launcher, endpoint)
        first, *others = given.nodes
        # It starts a command in the home directory, by a shell.
        line = shlex.quote(f"cd {shlex.quote(directory)} && exec {shlex.join(argv)}")
        remote = [StartCommand(node.name, (*_QRSH, node.name, "exec", "/bin/sh", "-c", line)) for node in others]
        return [StartCommand(first.name, tuple(argv)), *remote]

    def requeue(self, given: Allocation, stopped: int, run: RunCommand) -> Requeued:
        """A job is requeued by its exit code."""
        _, queue = run(("qstat", "-u", "*"))
        number, _, _ = given.job.partition(".")  # as it is listed, without the task of an array
        if any("d" in row[4] for row in _rows_of(number, queue)):
            return Requeued(stopped, f"Grid Engine job {given.job} was deleted, so it does not start again")
        again = f"Grid Engine starts job {given.job} again for exit code {EXIT_RERUN}"
        # It bars the hosts beside the first until they say once more that the job has left them, which they never do.
        barred = ", ".join(node.name for node in given.nodes[1:])
        without = f", on others than {barred}, which it bars from this job" if barred else ""
        return Requeued(EXIT_RERUN, again + without)

    def missing(self, request: JobRequest) -> list[str]:
        """Several slots come from a parallel environment."""
        slots = _slots(request)
        if request.pe is not None or slots == 1:
            return []
        return [f"--pe NAME, the parallel environment for {slots} slots (qconf -spl lists them)"]

    def job_script(self, request: JobRequest, command: JobCommand) -> str:
        """With a comment above each directive that needs one: on the same line it would be read as more options."""
        if request.gpus is not None and not request.gpus.isdigit():
            raise SettingError(f"--gpus {request.gpus}: Grid Engine takes a number; name the kind with extra in {FILE}")
        name, time_s, slots = job_name(request, command), request.time_s or 0, _slots(request)
        directives = given(
            Directive("-S /bin/bash"),
            # Grid Engine takes no name that begins with a digit.
            Directive(f"-N {name if not name[:1].isdigit() else f'j{name}'}"),
            Directive(f"-wd {_quoted(command.directory)}"),
            Directive(f"-o {name}-$JOB_ID.out"),
            Directive("-j y", "errors in the same file"),
            slots > 1 and Directive(f"-pe {request.pe} {slots}", f"CPUs, {request.nodes or 1} x {request.cpus or 1}"),
            request.gpus
            and Directive(f"-l {request.gpu_resource or 'gpu'}={request.gpus}", "of each node; one rank for each"),
            request.mem and Directive(f"-l h_vmem={request.mem}", "for each slot"),
            Directive(f"-l h_rt={clock(time_s)}"),
            # On several hosts a soft limit kills: there the run goes by the hard one, which it knows, too.
            (request.nodes or 1) == 1
            and Directive(f"-l s_rt={clock(time_s - warning_s(request))}", "from here on: save, and stop (SIGUSR1)"),
            request.queue and Directive(f"-q {request.queue}"),
            request.account and Directive(f"-P {request.account}"),
            Directive("-notify", "SIGUSR2 before the job is killed; without it qdel kills at once"),
            Directive("-r y", "after which the job starts again and goes on"),
            *from_site(request),
        )
        lines = [
            line for each in directives for line in (*([f"# {each.why}:"] if each.why else []), f"#$ {each.option}")
        ]
        return script_text(lines, request, command, _USAGE)


def _which_start(env: Mapping[str, str], read: Read) -> str:
    """The first line that the process which started this job wrote: where, when, and its process number."""
    spool = env.get("SGE_JOB_SPOOL_DIR")
    first, _, _ = (read(f"{spool}/trace") if spool else "").partition("\n")
    return f"{env.get('HOSTNAME', '')} {first}" if first else ""


def _rows_of(job: str, listed: str) -> list[list[str]]:
    """The words of the lines of ``qstat`` that are about ``job``, one for each of its tasks."""
    return [row for row in map(str.split, listed.splitlines()) if row[:1] == [job] and len(row) > 4]


def _slots(request: JobRequest) -> int:
    return (request.nodes or 1) * (request.cpus or 1)


def _quoted(text: str) -> str:
    """Quoted for a directive, in which quotes hold what they hold, with no way to write their own sign in them.

    Raises:
        SettingError: if ``text`` has both kinds of quotes.
    """
    if re.fullmatch(r"[\w./+@:,-]+", text):
        return text
    quote = next((sign for sign in "\"'" if sign not in text), None)
    if quote is None:
        raise SettingError(f"{text!r} cannot be in a job script of Grid Engine, for it has both kinds of quotes")
    return f"{quote}{text}{quote}"
