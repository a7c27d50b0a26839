"""Which scheduler gave this process its machines, what it allotted, and how to start one launcher on each of them.

What schedulers really send, measured with Slurm 22.05 and Grid Engine 8.1.9:

    Slurm                  reaches
    scancel JOB            every process of the batch script and of its steps: CONT and TERM; KILL after KillWait
    time limit             the same
    --signal=B:TERM@120    the batch shell alone, which dies of it, unless the launcher has taken its place (exec)
    --signal=TERM@120      the tasks of srun alone: a launcher that runs in the batch script itself sees nothing
    scancel -s USR1 JOB    the tasks of srun alone
    TERM, USR1... to srun  its tasks, on every node

    Grid Engine            reaches
    qdel JOB               nobody: KILL at once; submit with -notify
    qdel JOB, -notify      USR2 to shell and launcher; KILL after the queue's notify time. A shell that does not trap
                           it dies at once, and the job with it: the launcher must take its place (exec)
    s_rt passed            USR1, likewise
    h_rt passed            KILL at once; with -notify USR2 before
    exit 99                the job starts again, with RESTARTED=1 and the same JOB_ID
"""

from __future__ import annotations

import itertools
import re
import shlex
import subprocess
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Literal

from lockstep.errors import SettingError

#: Asks a scheduler's own command; what it printed, or "" if it cannot be asked.
Ask = Callable[[Sequence[str]], str]
#: The text of a file, or "" if it cannot be read.
Read = Callable[[str], str]

# Slurm counts steps from 0; a batch script, an interactive step and their like get numbers from here on.
_FIRST_SPECIAL_STEP = 0xFFFFFFF0
_ASK_TIMEOUT_S = 15.0
_QRSH = ("qrsh", "-inherit", "-nostdin", "-V")


@dataclass(frozen=True, slots=True)
class Node:
    """One machine of an allocation."""

    name: str
    slots: int  #: CPUs, as the scheduler counts them; 0 if it does not say


@dataclass(frozen=True, slots=True)
class Allocation:
    """What a scheduler gave to the job that this process belongs to."""

    scheduler: Literal["none", "slurm", "sge", "pbs"] = "none"
    job: str = ""  #: the same when the job starts again; "" outside of a job
    nodes: tuple[Node, ...] = ()
    gpus_per_node: int | None = None  #: None: it does not say
    restarts: int = 0  #: how often the scheduler has started this job again
    step_tasks: int = 0  #: processes that srun started along with this one, itself among them; 0: srun did not start it
    node_rank: int = 0  #: of this process's node, where ``step_tasks`` says that it is one of several
    inside: bool = True  #: False: on another machine, such as under salloc on a login node

    @property
    def one_of_many(self) -> bool:
        """Whether something else, such as the user's own srun, has started a launcher on each node already."""
        return self.step_tasks == len(self.nodes) > 1

    @property
    def spreads(self) -> bool:
        """Whether a launcher here is to start one on each node, rather than ranks."""
        return not self.step_tasks and (len(self.nodes) > 1 or bool(self.nodes and not self.inside))

    def port(self) -> int:
        """Where launchers of this job may meet if none of them can say so to the others; the same on all nodes."""
        # Below the range from which Linux hands out ports by itself, above those of the usual services.
        return 16384 + zlib.crc32(self.job.encode()) % 16384

    def __str__(self) -> str:
        """Such as ``Slurm job 812 (2 nodes: n1, n2)``."""
        name = {"slurm": "Slurm job", "sge": "Grid Engine job", "pbs": "PBS job", "none": "no job"}[self.scheduler]
        count = len(self.nodes)
        hosts = ", ".join(node.name for node in self.nodes[:4]) + (", ..." if count > 4 else "")
        return f"{name} {self.job} ({count} node{'s' * (count != 1)}: {hosts})" if self.job else name


@dataclass(frozen=True, slots=True)
class Start:
    """A command that starts launchers, and the node that it is for."""

    host: str  #: "" for all of them
    words: tuple[str, ...]

    def __str__(self) -> str:
        """As it is typed in a shell."""
        return shlex.join(self.words)


def allocation(env: Mapping[str, str], read: Read) -> Allocation:
    """What the environment says; costs no more than reading one small file.

    Raises:
        SettingError: if it cannot be made out.
    """
    if env.get("SLURM_JOB_ID"):
        return _slurm(env)
    if env.get("JOB_ID") and env.get("SGE_ROOT") and env.get("QUEUE"):
        return _grid_engine(env, read)
    if env.get("PBS_JOBID") and env.get("PBS_NODEFILE"):
        nodes = _counted([(line.strip(), 1) for line in read(env["PBS_NODEFILE"]).splitlines() if line.strip()])
        return Allocation("pbs", env["PBS_JOBID"], nodes)
    return Allocation()


def ends_at(env: Mapping[str, str], ask: Ask) -> float | None:
    """When the scheduler will end this job, in seconds since 1970; None if there is no end or it does not say.

    May ask the scheduler, which takes tens of milliseconds.
    """
    if env.get("SLURM_JOB_ID"):
        if env.get("SLURM_JOB_END_TIME", "").isdigit():
            return float(env["SLURM_JOB_END_TIME"])
        end, limit = [*ask(("squeue", "-h", "-j", env["SLURM_JOB_ID"], "-o", "%e %l")).split(), "", ""][:2]
        # A job without a limit has an end too, a year away.
        return None if limit == "UNLIMITED" else _time(end)
    if env.get("JOB_ID") and env.get("SGE_ROOT"):
        said = ask(("qstat", "-j", env["JOB_ID"]))
        limits = [int(limit) for limit in re.findall(r"\b[hs]_rt=(\d+)", said)]
        began = re.search(r"(?m)^start_time\s+\d+:\s+(\S+ \S+)", said)
        start = _time(began[1]) if began else None
        return start + min(limits) if limits and start is not None else None
    return None


def starts(given: Allocation, words: Sequence[str], *, endpoint: str, directory: str) -> list[Start]:
    """How to start ``words``, a launcher and its options, on every node of ``given``, the first node's command first.

    Under Slurm one command does it, and each launcher finds its node in the environment. Elsewhere there is one for
    each node; under Grid Engine it is to be carried out here, under others by whoever can reach the node.
    """
    count = len(given.nodes)
    launcher = _with_options(words, ("--nnodes", str(count), "--rdzv-endpoint", endpoint, "--rdzv-id", given.job))
    if given.scheduler == "slurm":
        cpus = min(node.slots for node in given.nodes)
        return [
            Start(
                "",
                (
                    "srun",
                    f"--nodes={count}",
                    f"--ntasks={count}",
                    "--ntasks-per-node=1",
                    # A step gets one CPU for each task and is bound to it, unless it says otherwise.
                    *((f"--cpus-per-task={cpus}", "--cpu-bind=none") if cpus else ()),
                    # A launcher that fails tells the others itself, and they must live to say what they know.
                    "--kill-on-bad-exit=0",
                    "--wait=0",
                    "--input=none",
                    *launcher,
                ),
            )
        ]
    if given.scheduler != "sge":
        return [Start(node.name, tuple(launcher)) for node in given.nodes]
    first, *others = given.nodes
    # It starts a command in the home directory, by a shell.
    line = shlex.quote(f"cd {shlex.quote(directory)} && exec {shlex.join(launcher)}")
    remote = [Start(node.name, (*_QRSH, node.name, "exec", "/bin/sh", "-c", line)) for node in others]
    return [Start(first.name, tuple(launcher)), *remote]


def reachable(name: str, resolves: Callable[[str], bool], ask: Ask) -> str:
    """An address of the node that Slurm calls ``name``: mostly that is its host name, but it need not be."""
    said = "" if resolves(name) else ask(("scontrol", "show", "node", name, "--oneliner"))
    found = re.search(r"\bNodeAddr=(\S+)", said)
    return found[1] if found else name


def asked(words: Sequence[str]) -> tuple[int, str]:
    """Carry out a scheduler's command, for at most 15 s; its exit code, 127 if there is none, and what it said."""
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=_ASK_TIMEOUT_S, check=False)
    except FileNotFoundError:
        return 127, f"{words[0]}: not found"
    except (OSError, subprocess.TimeoutExpired) as error:
        return 126, str(error)
    return done.returncode, done.stdout + done.stderr


def answer(words: Sequence[str]) -> str:
    """What a scheduler's command says, "" if it fails."""
    code, said = asked(words)
    return said if code == 0 else ""


def text_of(path: str) -> str:
    """A file's text, "" if it cannot be read."""
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def expand(hosts: str) -> list[str]:
    """The hosts of a Slurm list: ``gpu[01-03,7],login`` is gpu01, gpu02, gpu03, gpu7, login.

    Raises:
        SettingError: if it is no such list.
    """
    found: list[str] = []
    for item in re.split(r",(?![^\[]*\])", hosts.strip()):
        parts = re.split(r"\[([^\]]*)\]", item)
        if not item or any("[" in part or "]" in part for part in parts):
            raise SettingError(f"the scheduler's list of hosts cannot be read: {hosts!r}")
        # Texts and numbers take turns: gpu [01-03] -ib.
        choices = [_numbers(part, hosts) if place % 2 else [part] for place, part in enumerate(parts)]
        found += ["".join(chosen) for chosen in itertools.product(*choices)]
    return found


def _numbers(ranges: str, hosts: str) -> list[str]:
    numbers: list[str] = []
    for each in ranges.split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", each)
        if match is None:
            raise SettingError(f"the scheduler's list of hosts cannot be read: {hosts!r}")
        first, last = match[1], match[2] or match[1]
        numbers += [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
    return numbers


def _slurm(env: Mapping[str, str]) -> Allocation:
    names = expand(env.get("SLURM_JOB_NODELIST") or env.get("SLURM_NODELIST") or env.get("SLURMD_NODENAME") or "here")
    slots: list[int] = []
    for each in env.get("SLURM_JOB_CPUS_PER_NODE", "").split(","):
        if match := re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", each.strip()):
            slots += [int(match[1])] * int(match[2] or 1)
    if len(slots) != len(names):
        slots = [0] * len(names)
    step = _whole(env.get("SLURM_STEP_ID"))
    in_step = step is not None and step < _FIRST_SPECIAL_STEP
    return Allocation(
        "slurm",
        env["SLURM_JOB_ID"],
        tuple(map(Node, names, slots)),
        gpus_per_node=_gpus(env),
        restarts=_whole(env.get("SLURM_RESTART_COUNT")) or 0,
        step_tasks=_whole(env.get("SLURM_STEP_NUM_TASKS") or env.get("SLURM_NTASKS")) or 1 if in_step else 0,
        node_rank=(_whole(env.get("SLURM_NODEID")) or 0) if in_step else 0,
        inside="SLURMD_NODENAME" in env,
    )


def _gpus(env: Mapping[str, str]) -> int | None:
    if (count := _whole(env.get("SLURM_GPUS_ON_NODE"))) is not None:
        return count
    # Such as 4, a100:4 or a100:2,v100:2.
    counts = [_whole(each.rpartition(":")[2]) for each in env.get("SLURM_GPUS_PER_NODE", "").split(",")]
    return sum(filter(None, counts)) or None


def _grid_engine(env: Mapping[str, str], read: Read) -> Allocation:
    task = env.get("SGE_TASK_ID", "undefined")
    lines = [line.split() for line in read(env.get("PE_HOSTFILE", "")).splitlines()]
    nodes = _counted([(words[0], _whole(words[1]) or 0) for words in lines if len(words) >= 2])
    return Allocation(
        "sge",
        env["JOB_ID"] + ("" if task in ("undefined", "") else f".{task}"),
        nodes or (Node(env.get("HOSTNAME", "here"), _whole(env.get("NSLOTS")) or 1),),
        restarts=_whole(env.get("RESTARTED")) or 0,
    )


def _counted(lines: Sequence[tuple[str, int]]) -> tuple[Node, ...]:
    """A host may stand in several lines, such as one for each queue that it gives slots from."""
    slots: dict[str, int] = {}
    for host, count in lines:
        slots[host] = slots.get(host, 0) + count
    return tuple(Node(host, count) for host, count in slots.items())


def _with_options(words: Sequence[str], options: Sequence[str]) -> list[str]:
    """``python -m lockstep run OPTIONS ...``."""
    after = words.index("run") + 1
    return [*words[:after], *options, *words[after:]]


def _whole(text: str | None) -> int | None:
    return int(text) if text and text.isdigit() else None


def _time(text: str) -> float | None:
    for form in ("%Y-%m-%dT%H:%M:%S", "%m/%d/%Y %H:%M:%S", "%m/%d/%Y %H:%M:%S.%f"):
        try:
            return datetime.strptime(text, form).timestamp()
        except ValueError:
            continue
    return None
