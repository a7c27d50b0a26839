"""Slurm: one ``srun`` starts a launcher on each node; ``scontrol requeue`` starts a job again.

What it really sends, measured with Slurm 22.05:

    event                  reaches
    scancel JOB            every process of the batch script and of its steps: CONT and TERM; KILL after KillWait
    time limit             the same
    --signal=B:TERM@120    the batch shell alone, which dies of it, unless the launcher has taken its place (exec)
    --signal=TERM@120      the tasks of srun alone: a launcher that runs in the batch script itself sees nothing
    scancel -s USR1 JOB    the tasks of srun alone
    TERM, USR1... to srun  its tasks, on every node
"""

from __future__ import annotations

import re
import signal
from collections.abc import Callable, Mapping, Sequence

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
from lockstep.slurm_syntax import FIRST_SPECIAL_STEP, expand_counts, expand_hosts

_USAGE = Usage(submit="sbatch", watch="squeue --me", stop="scancel JOB")


class Slurm(WritesJobScripts):
    """Jobs of ``sbatch``, ``salloc`` and ``srun``."""

    name = "slurm"
    title = "Slurm"
    # srun hands on USR1 and USR2. It keeps TERM to itself and kills its tasks.
    stop_signals = (signal.SIGUSR1, signal.SIGTERM)
    submit = _USAGE.submit
    gpus_help = "of each node; also a type, a100:4"
    options = (
        JobOption("mem", "SIZE", "of each node, such as 64G"),
        JobOption("partition", "NAME", "where it waits"),
    )

    def detect(self, env: Mapping[str, str]) -> bool:
        """Detected by the number of the job."""
        return bool(env.get("SLURM_JOB_ID"))

    def allocation(self, env: Mapping[str, str], read: Read) -> Allocation:
        """All of it is in the environment."""
        names = _hosts(env)
        step = whole_number(env.get("SLURM_STEP_ID"))
        in_step = step is not None and step < FIRST_SPECIAL_STEP
        restarts = whole_number(env.get("SLURM_RESTART_COUNT")) or 0
        tasks = whole_number(env.get("SLURM_STEP_NUM_TASKS") or env.get("SLURM_NTASKS")) or 1
        return Allocation(
            self,
            env["SLURM_JOB_ID"],
            tuple(map(Node, names, _slots(env, len(names)))),
            gpus_per_node=_gpus(env),
            start=str(restarts),
            restarted=restarts > 0,
            step_tasks=tasks if in_step else 0,
            node_rank=(whole_number(env.get("SLURM_NODEID")) or 0) if in_step else 0,
            inside="SLURMD_NODENAME" in env,
        )

    def job_ends_at(self, env: Mapping[str, str], ask: Ask) -> float | None:
        """Newer versions set a variable; older ones are asked."""
        if env.get("SLURM_JOB_END_TIME", "").isdigit():
            return float(env["SLURM_JOB_END_TIME"])
        end, limit = [*ask(("squeue", "-h", "-j", env["SLURM_JOB_ID"], "-o", "%e %l")).split(), "", ""][:2]
        # A job without a limit has an end too, a year away.
        return None if limit == "UNLIMITED" else timestamp(end)

    def node_address(self, name: str, resolves: Callable[[str], bool], ask: Ask) -> str:
        """Mostly the name of a node is its host name, but it need not be."""
        text = "" if resolves(name) else ask(("scontrol", "show", "node", name, "--oneliner"))
        found = re.search(r"\bNodeAddr=(\S+)", text)
        return found[1] if found else name

    def start_commands(
        self, given: Allocation, launcher: Sequence[str], *, endpoint: str, directory: str
    ) -> list[StartCommand]:
        """One command for all nodes: each launcher finds its node in the environment."""
        count, cpus = len(given.nodes), min(node.slots for node in given.nodes)
        step = (
            f"--nodes={count}",
            f"--ntasks={count}",
            "--ntasks-per-node=1",
            # A step gets one CPU for each task and is bound to it, unless it says otherwise.
            *((f"--cpus-per-task={cpus}", "--cpu-bind=none") if cpus else ()),
            # A launcher that fails tells the others itself, and they must live to report what they know.
            "--kill-on-bad-exit=0",
            "--wait=0",
            "--input=none",
        )
        return [StartCommand("", ("srun", *step, *launcher_argv(given, launcher, endpoint)))]

    def requeue(self, given: Allocation, stopped: int, run: RunCommand) -> Requeued:
        """A job is requeued by ``scontrol requeue``."""
        # A job that is cancelled and one whose time is up are both COMPLETING; only the second says why.
        _, state = run(("squeue", "-h", "-j", given.job, "-o", "%T %r"))
        if state.split()[:1] in (["COMPLETING"], ["CANCELLED"]) and "TimeLimit" not in state:
            return Requeued(stopped, f"Slurm job {given.job} was cancelled, so it is not put in the queue again")
        code, text = run(("scontrol", "requeue", given.job))
        if code == 0:
            return Requeued(stopped, f"Slurm job {given.job} is in the queue again, and will go on by itself")
        why = "there is no scontrol here, as in a container" if code == 127 else text.strip() or f"exit code {code}"
        return Requeued(stopped, f"not in the queue again: {why}; from outside: scontrol requeue {given.job}")

    def job_script(self, request: JobRequest, command: JobCommand) -> str:
        """With a comment beside each directive that needs one."""
        name, nodes = job_name(request, command), request.nodes or 1
        several = "one launcher on each node; it starts" if nodes > 1 else "one launcher, which starts"
        directives = given(
            Directive(f"--job-name={name}"),
            Directive(f"--chdir={_quoted(command.directory)}"),
            Directive(f"--output={name}-%j.out"),
            Directive("--open-mode=append", "when it starts again it goes on in the same file"),
            Directive(f"--nodes={nodes}"),
            Directive("--ntasks-per-node=1", f"{several} the ranks"),
            request.gpus and Directive(f"--gres=gpu:{request.gpus}", "of each node; one rank for each"),
            request.cpus and Directive(f"--cpus-per-task={request.cpus}", "of each node, for all its ranks"),
            request.mem and Directive(f"--mem={request.mem}", "of each node"),
            Directive(f"--time={_time_limit(request.time_s or 0)}"),
            request.partition and Directive(f"--partition={request.partition}"),
            request.account and Directive(f"--account={request.account}"),
            Directive(f"--signal=B:USR1@{warning_s(request)}", "seconds before the end: save, and stop"),
            Directive("--requeue", "after which the job starts again and goes on"),
            *from_site(request),
        )
        width = max(len(each.option) for each in directives if each.why)
        lines = [
            f"#SBATCH {each.option.ljust(width)}  # {each.why}" if each.why else f"#SBATCH {each.option}"
            for each in directives
        ]
        return script_text(lines, request, command, _USAGE)


def _hosts(env: Mapping[str, str]) -> list[str]:
    hosts = env.get("SLURM_JOB_NODELIST") or env.get("SLURM_NODELIST") or env.get("SLURMD_NODENAME") or "here"
    try:
        return expand_hosts(hosts)
    except ValueError:
        raise SettingError(f"the scheduler's list of hosts cannot be read: {hosts!r}") from None


def _slots(env: Mapping[str, str], nodes: int) -> list[int]:
    try:
        slots = expand_counts(env.get("SLURM_JOB_CPUS_PER_NODE", ""))
    except ValueError:
        slots = []
    return slots if len(slots) == nodes else [0] * nodes


def _gpus(env: Mapping[str, str]) -> int | None:
    if (count := whole_number(env.get("SLURM_GPUS_ON_NODE"))) is not None:
        return count
    # Such as 4, a100:4 or a100:2,v100:2.
    counts = [whole_number(each.rpartition(":")[2]) for each in env.get("SLURM_GPUS_PER_NODE", "").split(",")]
    return sum(filter(None, counts)) or None


def _quoted(text: str) -> str:
    """Quoted for a directive: sbatch knows both quotes, and a backslash anywhere."""
    escaped = re.sub(r'(["\\])', r"\\\1", text)
    return text if re.fullmatch(r"[\w./+@:,=-]+", text) else f'"{escaped}"'


def _time_limit(total_s: int) -> str:
    days, rest = divmod(total_s, 86400)
    return f"{days}-{clock(rest)}" if days else clock(rest)
