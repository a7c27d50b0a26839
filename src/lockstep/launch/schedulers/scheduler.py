"""The protocol of schedulers, and its values.

    environment ─► detect ─► allocation ─┬─► start_commands   one launcher on each node
                                         ├─► job_ends_at      when the job must have saved
                                         └─► requeue          the job starts again

    options, missing, job_script                              for those schedulers that job scripts are written for

A new scheduler is one file beside this one, and one row in the table of `lockstep.launch.schedulers`.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from datetime import datetime
from typing import Final, Self

from lockstep.errors import LaunchError
from lockstep.formatting import plural
from lockstep.launch.host.child_process import die_with_parent
from lockstep.launch_contract import job_port
from lockstep.records import read_bytes

#: Asks a scheduler's own command; what it printed, or "" if it cannot be asked.
Ask = Callable[[Sequence[str]], str]
#: Runs a scheduler's own command; its exit code, 127 if there is no such command, and what it printed.
RunCommand = Callable[[Sequence[str]], tuple[int, str]]
#: The text of a file, or "" if it cannot be read.
Read = Callable[[str], str]
#: Sent to the start commands when the user asks to stop: first to save and leave, then to end at once.
StopSignals = tuple[signal.Signals, signal.Signals]

_COMMAND_TIMEOUT_S = 15.0
_TICK_S = 0.1

#: Exit codes of a launcher that its scheduler has warned, and whose ranks had nothing to save.
WARNED: Final = tuple(128 + number for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU))


class Scheduler:
    """The methods that every scheduler has: this one is of no job, in which nothing was given.

    Others override what they know better.
    """

    name = "none"  #: in commands and files, such as ``slurm``
    title = "no job"  #: in messages, such as ``Slurm``
    stop_signals: StopSignals = (signal.SIGUSR1, signal.SIGTERM)

    def detect(self, env: Mapping[str, str]) -> bool:
        """Whether this process belongs to one of its jobs."""
        return True

    def allocation(self, env: Mapping[str, str], read: Read) -> Allocation:
        """The allocation of this process's job; costs no more than reading two small files.

        Raises:
            SettingError: if the variables cannot be understood.
        """
        return Allocation()

    def job_ends_at(self, env: Mapping[str, str], ask: Ask) -> float | None:
        """When it will end the job, in seconds since 1970; None if there is no end or it does not say.

        May ask the scheduler, which takes tens of milliseconds.
        """
        return None

    def node_address(self, name: str, resolves: Callable[[str], bool], ask: Ask) -> str:
        """An address of the node that it calls ``name``; ``resolves`` says whether a host name is known here."""
        return name

    def start_commands(
        self, given: Allocation, launcher: Sequence[str], *, endpoint: str, directory: str
    ) -> list[StartCommand]:
        """How to start ``launcher``, a command with its options, on every node of ``given``; the first node's first.

        Args:
            given: with at least one node.
            launcher: ``python -m lockstep run ...``.
            endpoint: ``HOST:PORT`` where the launchers meet.
            directory: where each of them is to run.
        """
        return []

    def requeue(self, given: Allocation, stopped: int, run: RunCommand) -> Requeued:
        """Have the job start again, now that its ranks have stopped with a complete checkpoint.

        A job that its user has cancelled stays so.

        Args:
            given: the job.
            stopped: the exit code for a run that stopped and is not started again.
            run: carries out a command of the scheduler.
        """
        return cannot_requeue(stopped)


class WritesJobScripts(Scheduler, ABC):
    """A scheduler for which ``lockstep job`` writes scripts."""

    submit: str  #: the command that submits a script
    gpus_help: str  #: what ``--gpus`` means
    options: tuple[JobOption, ...]  #: what it can be asked for beside nodes, GPUs, CPUs, time, account and name

    def missing(self, request: JobRequest) -> list[str]:
        """What this scheduler needs and ``request`` leaves open, as options with an explanation."""
        return []

    @abstractmethod
    def job_script(self, request: JobRequest, command: JobCommand) -> str:
        """The text of a complete job script.

        Raises:
            SettingError: for a value that this scheduler does not take.
        """


NO_SCHEDULER: Final = Scheduler()


@dataclass(frozen=True, slots=True)
class Node:
    """One machine of an allocation."""

    name: str
    slots: int  #: CPUs, as the scheduler counts them; 0 if it does not say


@dataclass(frozen=True, slots=True)
class Allocation:
    """What a scheduler has allocated to the job of this process."""

    scheduler: Scheduler = NO_SCHEDULER
    job: str = ""  #: the same when the job starts again; "" outside of a job
    nodes: tuple[Node, ...] = ()
    gpus_per_node: int | None = None  #: None: it does not say
    start: str = ""  #: tells this start of the job from its others; "" if the scheduler does not
    restarted: bool = False  #: the scheduler has started this job before
    step_tasks: int = 0  #: processes that srun started along with this one, itself among them; 0: srun did not start it
    node_rank: int = 0  #: of this process's node, where ``step_tasks`` says that it is one of several
    inside: bool = True  #: False: on another machine, such as under salloc on a login node

    @property
    def has_launcher_per_node(self) -> bool:
        """Whether something else, such as the user's own srun, has started a launcher on each node already."""
        return self.step_tasks == len(self.nodes) > 1

    @property
    def starts_launchers(self) -> bool:
        """Whether a launcher here is to start one on each node, rather than ranks."""
        return not self.step_tasks and (len(self.nodes) > 1 or bool(self.nodes and not self.inside))

    def port(self) -> int:
        """Where launchers of this job may meet if none of them can tell the others; the same on all nodes."""
        return job_port(self.job)

    def __str__(self) -> str:
        """Such as ``Slurm job 812 (2 nodes: n1, n2)``."""
        if not self.job:
            return self.scheduler.title
        count = len(self.nodes)
        hosts = ", ".join(node.name for node in self.nodes[:4]) + (", ..." if count > 4 else "")
        return f"{self.scheduler.title} job {self.job} ({plural(count, 'node')}: {hosts})"


@dataclass(frozen=True, slots=True)
class StartCommand:
    """A command that starts launchers, and the node that it is for."""

    host: str  #: "" for all of them
    argv: tuple[str, ...]
    by_user: bool = False  #: it cannot be carried out from here: the user is asked to run it on ``host``

    def __str__(self) -> str:
        """As it is typed in a shell."""
        return shlex.join(self.argv)


@dataclass(frozen=True, slots=True)
class Requeued:
    """The result of a request to start the job again."""

    code: int  #: to leave with
    message: str  #: for the user


@dataclass(frozen=True, slots=True)
class JobOption:
    """An option of ``lockstep job`` that only some schedulers have; also a key in ``lockstep.toml``."""

    name: str  #: the field of `JobRequest`
    metavar: str
    help: str


@dataclass(frozen=True, slots=True)
class JobRequest:
    """What a job script asks the scheduler for. None: left to the scheduler, or not given yet."""

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

    def with_defaults(self, defaults: Self) -> Self:
        """This request, with ``defaults`` for what it leaves open."""
        given = {each.name: value for each in fields(self) if (value := getattr(self, each.name)) not in (None, ())}
        return replace(defaults, **given)


@dataclass(frozen=True, slots=True)
class JobCommand:
    """What the job runs."""

    argv: tuple[str, ...]  #: of the launcher and its script: ``python -m lockstep run ... train.py ...``
    directory: str  #: absolute; where it runs
    stem: str  #: what the run is called after
    written_by: str  #: the command line that writes this script again
    version: str  #: of Lockstep


def cannot_requeue(stopped: int) -> Requeued:
    """The answer of a scheduler that cannot start a job again."""
    return Requeued(stopped, "--requeue: no Slurm or Grid Engine job, so nothing starts it again")


def launcher_argv(given: Allocation, launcher: Sequence[str], endpoint: str) -> list[str]:
    """``python -m lockstep run ...`` with the options by which the launchers of ``given`` find each other."""
    after = launcher.index("run") + 1
    options = ("--nnodes", str(len(given.nodes)), "--rdzv-endpoint", endpoint, "--rdzv-id", given.job)
    return [*launcher[:after], *options, *launcher[after:]]


def merge_nodes(lines: Iterable[tuple[str, int]]) -> tuple[Node, ...]:
    """A node for each host; one may be in several lines, such as one for each queue that it gives slots from."""
    slots: dict[str, int] = {}
    for host, count in lines:
        slots[host] = slots.get(host, 0) + count
    return tuple(Node(host, count) for host, count in slots.items())


def whole_number(text: str | None) -> int | None:
    """The number in ``text``; None if there is none."""
    return int(text) if text and text.isdigit() else None


def timestamp(text: str) -> float | None:
    """Seconds since 1970 of a local time as schedulers write it; None if it is not one."""
    for form in ("%Y-%m-%dT%H:%M:%S", "%m/%d/%Y %H:%M:%S", "%m/%d/%Y %H:%M:%S.%f"):
        try:
            return datetime.strptime(text, form).timestamp()
        except ValueError:
            continue
    return None


def run_command(argv: Sequence[str]) -> tuple[int, str]:
    """Carry out a scheduler's command, for at most 15 s; its exit code, 127 if there is none, and what it printed."""
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=_COMMAND_TIMEOUT_S, check=False)
    except FileNotFoundError:
        return 127, f"{argv[0]}: not found"
    except (OSError, subprocess.TimeoutExpired) as error:
        return 126, str(error)
    return done.returncode, done.stdout + done.stderr


def output_of(argv: Sequence[str]) -> str:
    """The output of a scheduler's command; "" if it fails."""
    code, text = run_command(argv)
    return text if code == 0 else ""


def text_of(path: str) -> str:
    """A file's text, "" if it cannot be read, or is longer than one that lists nodes."""
    try:
        return read_bytes(path).decode(errors="replace")
    except (OSError, ValueError):
        return ""


def run_start_commands(
    commands: Sequence[StartCommand], env: Mapping[str, str], stops: Callable[[], int], stop_signals: StopSignals
) -> int:
    """Carry out ``commands``; returns when all have ended, with the first one's exit code, or else the highest.

        lockstep run ─► srun ─┬─► lockstep run on node 0 ─► ranks          Slurm
                              └─► lockstep run on node 1 ─► ranks

        lockstep run ─┬─► lockstep run on node 0 ─► ranks                  Grid Engine
                      └─► qrsh ─► lockstep run on node 1 ─► ranks

    Args:
        commands: the one for the first node, or for all nodes, comes first.
        env: the environment of each of them.
        stops: how often this process was asked to stop. Once: the launchers are asked to save and leave. Twice: they
            are ended.
        stop_signals: what is sent to the commands the first and the second time.

    Raises:
        LaunchError: if one of the commands cannot be started.
    """
    running: list[subprocess.Popen[bytes]] = []
    try:
        running.extend(_started(command, env) for command in commands)
        sent = 0
        while any(each.poll() is None for each in running):
            if stops() > sent:
                sent = stops()
                for each in running:
                    if each.poll() is None:
                        each.send_signal(stop_signals[0 if sent == 1 else 1])
            time.sleep(_TICK_S)
    finally:
        for each in running:
            if each.poll() is None:
                each.kill()
                each.wait()
    codes = [each.returncode if each.returncode >= 0 else 128 - each.returncode for each in running]
    return codes[0] or max(codes)


def _started(command: StartCommand, env: Mapping[str, str]) -> subprocess.Popen[bytes]:
    parent = os.getpid()
    try:
        return subprocess.Popen(
            command.argv,
            env=dict(env),
            stdin=subprocess.DEVNULL,
            # A terminal's Ctrl-C is for this process, which hands it on in a way that lets them save.
            start_new_session=True,
            preexec_fn=lambda: die_with_parent(parent),  # noqa: PLW1509  there are no threads yet
        )
    except OSError as error:
        where = f" on {command.host}" if command.host else ""
        raise LaunchError(
            f"no launcher could be started{where}: {command.argv[0]}: {error.strerror}; "
            f"start it there yourself: {command}"
        ) from error
