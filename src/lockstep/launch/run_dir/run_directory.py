"""The run directory, and what is checked and prepared in it before any rank starts."""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import json
import os
import resource
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any, Literal, TextIO

from lockstep.errors import SettingError
from lockstep.faults import FaultPlan
from lockstep.formatting import plural, relative_path
from lockstep.launch.host.child_process import require_linux
from lockstep.launch.host.machine import Machine, threads_of_rank
from lockstep.launch.host.timed_calls import call_in_time
from lockstep.launch.job.program import check_program
from lockstep.launch.job.request import Executable, Request, Script, StartMethod, with_option
from lockstep.launch.schedulers.scheduler import Allocation
from lockstep.launch.terminal.console import say
from lockstep.launch_contract import LOCK_FILE, RUN_FILE
from lockstep.project_files import resolve_settings
from lockstep.provenance import settings_record, surroundings
from lockstep.report import about_run, change_about_run, newest_run
from lockstep.settings import OPTIONS_VARIABLE, check_variables, options_given
from lockstep.small_files import unused_path
from lockstep.world import World

_RUNS = Path("runs")
_NO_SCHEDULER = Allocation()
_FILES_OF_RANK = 48  # 25 were counted in a rank of two that loads nothing from files
_FILES_FOR_EACH_PEER = 8  # sockets, of each group that a strategy makes


@dataclass(frozen=True, slots=True)
class Job:
    """One run, checked: what `lockstep.launch.agent` carries out, and where its files are."""

    request: Request
    ranks: int
    run_dir: Path  #: absolute
    begins: Literal["new", "resume", "fresh"]
    aside: Path | None  #: where an earlier run in ``run_dir`` is moved
    generation: int  #: the first one
    start_method: StartMethod
    notes: tuple[str, ...] = ()  #: for the user, before it starts
    given: Allocation = _NO_SCHEDULER  #: by a scheduler

    @property
    def run_id(self) -> str:
        """The name of the run in the ranks' environment."""
        return self.run_dir.name

    @property
    def logs(self) -> Path:
        """Where each rank has a file."""
        return self.run_dir / "logs"

    @property
    def status(self) -> Path:
        """Where the leader writes how far the run is."""
        return self.run_dir / "status.json"

    @property
    def to_resume(self) -> str:
        """The command that resumes this run."""
        return self.request.command("--resume", "--run-dir", relative_path(self.run_dir))

    def to_resume_at(self, endpoint: str) -> str:
        """The command that resumes this run with another endpoint."""
        request = replace(self.request, options=with_option(self.request.options, "--rdzv-endpoint", endpoint))
        return request.command("--resume", "--run-dir", relative_path(self.run_dir))

    def log(self, rank: int) -> Path:
        """Where all output of a rank is, of all generations."""
        return self.logs / f"rank-{rank:04d}.log"

    def failure(self, generation: int, rank: int) -> Path:
        """Where a rank that fails writes why."""
        return self.run_dir / "failures" / f"generation-{generation}" / f"rank-{rank:04d}.json"

    def stacks(self, rank: int) -> Path:
        """Where a rank writes the stacks of its threads when it is asked for them."""
        return self.run_dir / "stacks" / f"rank-{rank:04d}.txt"

    @property
    def hangs(self) -> Path:
        """Where reports of hangs are kept."""
        return self.run_dir / "hangs"

    def result(self, rank: int) -> Path:
        """Where a rank writes what its function returned."""
        return self.run_dir / "results" / f"rank-{rank:04d}.pickle"


def prepare(
    request: Request,
    *,
    machine: Machine,
    env: Mapping[str, str],
    now: datetime,
    given: Allocation = _NO_SCHEDULER,
    follows: bool = False,
) -> Job:
    """Check ``request`` against this machine, what a scheduler has ``given``, and its files; changes nothing.

    With ``follows`` another node, the coordinator, decides on the run directory and on how the run begins.

    Raises:
        SettingError: for what cannot be done, with what can.
        WorldError: if the environment says that this process is itself one of several ranks.
    """
    world = World.from_env(env)
    if world.size > 1 and not (world.launcher == "slurm" and given.has_launcher_per_node):
        raise SettingError(
            f"this process is already {world} (started by {world.launcher}), and would start ranks of its own; "
            "start the launcher once, or the script itself under what started this"
        )
    _check_numbers(request)
    _check_working_directory()
    check_variables(env)
    threads_of_rank(env)
    check_program(request.program)
    ranks, notes = ranks_of(request, machine, env)
    _check_open_files(ranks)
    if request.attach is not None:
        _check_attached(request.attach, ranks)
    if request.faults and isinstance(request.program, Executable):
        raise SettingError("--fault with --no-python: faults are injected by Python; leave one of them out")
    plan = FaultPlan.parse(request.faults)
    if request.nodes is None:
        plan.check(ranks=ranks, nodes=1)
    if follows:
        return Job(request, ranks, Path(), "new", None, 0, _start_method(request), notes, given)
    run_dir, begins, more = _run_dir(request, given, now)
    aside = None
    if begins == "fresh" and run_dir.exists() and about_run(run_dir) is not None:
        aside = unused_path(run_dir.with_name(f"{run_dir.name}-before-{now:%Y%m%d-%H%M%S}"))
        more = (f"the earlier run is now in {relative_path(aside)}; nothing of it was deleted", *more)
    return Job(
        request=request,
        ranks=ranks,
        run_dir=run_dir,
        begins=begins,
        aside=aside,
        generation=len(_generations(run_dir)) if begins == "resume" else 0,
        start_method=_start_method(request),
        notes=(*notes, *more),
        given=given,
    )


def prepare_in_time(
    request: Request,
    machine: Machine,
    given: Allocation | None = None,
    env: Mapping[str, str] = os.environ,
    follows: bool = False,
) -> Job:
    """As `prepare`, with a deadline."""
    more = {} if given is None else {"given": given}
    return call_in_time(
        lambda: prepare(request, machine=machine, env=env, now=datetime.now(), follows=follows, **more),
        f"the run directory {request.run_dir or 'runs'}",
        say,
    )


def _check_numbers(request: Request) -> None:
    if request.max_restarts < 0:
        raise SettingError(f"{request.spelt('--max-restarts', request.max_restarts)}: it must be at least 0")
    if not request.refill_after_s > 0:
        given_s = request.spelt("--refill-after", request.refill_after_s)
        raise SettingError(f"{given_s}: it must be more than 0 seconds; inf never counts from 0 again")
    if not request.grace_s >= 0:
        raise SettingError(f"{request.spelt('--grace', request.grace_s)}: it must be at least 0 seconds")
    if not (request.hang_after_s is None or request.hang_after_s > 0):
        given_s = request.spelt("--hang-after", request.hang_after_s)
        raise SettingError(f"{given_s}: it must be more than 0 seconds; inf never asks")


def _check_open_files(ranks: int) -> None:
    """Refuse what would fail late and anywhere: within torch, or as a hang of ranks that wait for the failed one."""
    limit, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = _FILES_OF_RANK + _FILES_FOR_EACH_PEER * ranks
    if limit != resource.RLIM_INFINITY and limit < needed:
        is_for_root = most != resource.RLIM_INFINITY and most < needed
        raise SettingError(
            f"a process may open {limit} files here, and each of {plural(ranks, 'rank')} needs up to {needed}: say "
            f"'ulimit -n {needed}' first, or more than that"
            + (f"; only root may allow more than {most}" if is_for_root else "")
        )


def _check_working_directory() -> None:
    # Python itself looks for modules there, and paths are relative to it.
    try:
        Path.cwd()
    except FileNotFoundError:
        raise SettingError("the working directory has been removed; change to another one (cd)") from None


def _check_attached(rank: int, ranks: int) -> None:
    if not 0 <= rank < ranks:
        raise SettingError(f"--attach {rank}: give one of the {ranks} ranks, from 0 to {ranks - 1}")


def _start_method(request: Request) -> StartMethod:
    require_linux("one rank needs no launcher: python train.py")
    # A program that is no Python has no use for torch, which a fork server would import.
    return request.start_method or ("plain" if isinstance(request.program, Executable) else "fork")


def settle(job: Job, *, now: datetime) -> TextIO:
    """Make the run directory ready, and lock it for this launcher for as long as the returned lock is open.

    Raises:
        SettingError: if another launcher uses the directory, or it cannot be written.
    """
    try:
        if job.aside is not None:
            with _locked(job.run_dir):
                job.run_dir.rename(job.aside)
        if not job.run_dir.exists():
            job.run_dir.parent.mkdir(parents=True, exist_ok=True)
            job.run_dir.mkdir(mode=0o700)
        job.logs.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SettingError(
            f"the run directory {relative_path(job.run_dir)} cannot be made ready: {error.strerror}; "
            "give another with --run-dir"
        ) from error
    lock = _locked(job.run_dir)
    job.status.unlink(missing_ok=True)
    start = {
        "command": job.request.command(*begin_options(job)),
        "time": now.astimezone().isoformat(timespec="seconds"),
        "ranks": job.ranks,
        "begins": job.begins,
        "settings": _settings_before_the_script(job.request),
        **about_job(job.given, job.request.subject),
        **surroundings(_source_directory(job.request), job.run_dir),
    }
    change_about_run(job.run_dir, lambda about: about["starts"].append(start))
    return lock


def settle_in_time(job: Job) -> TextIO:
    """As `settle`, with a deadline."""
    return call_in_time(lambda: settle(job, now=datetime.now()), f"the run directory {relative_path(job.run_dir)}", say)


def _settings_before_the_script(request: Request) -> dict[str, dict[str, object]]:
    """What is known of the settings until the leader tells those of the script, too."""
    env = {**os.environ, OPTIONS_VARIABLE: json.dumps({**options_given(os.environ), **request.settings})}
    try:
        return settings_record(resolve_settings({}, env))
    except SettingError:  # which the ranks tell, if they have any use for settings
        return {}


def _source_directory(request: Request) -> Path:
    """Where to look for the repository of what is run."""
    return Path(request.program.name).parent if isinstance(request.program, Script) else Path.cwd()


def note_generation(job: Job, generation: int, *, ranks: int, hosts: Sequence[str], now: datetime) -> None:
    """Record that ``generation`` starts, so that a later launcher continues to count from it."""
    told = {
        "number": generation,
        "ranks": ranks,
        "hosts": list(hosts),
        "time": now.astimezone().isoformat(timespec="seconds"),
    }
    change_about_run(job.run_dir, lambda about: about["generations"].append(told))


def next_generation(run_dir: Path) -> int:
    """The number of the generation that a launcher starts first which goes on in ``run_dir``."""
    return len(_generations(run_dir))


def _is_of_settling(path: Path) -> bool:
    """Whether `settle` makes ``path`` before it writes `RUN_FILE`: a launcher may be killed between both."""
    if path.name == "logs":
        return path.is_dir() and not any(path.iterdir())
    return path.name == LOCK_FILE or (path.name.startswith(".") and RUN_FILE in path.name)


def note_refused(job: Job) -> None:
    """Record that the run was refused before its first step, so that its directory can be used as if it were empty."""
    if about_run(job.run_dir) is not None:
        change_about_run(job.run_dir, lambda about: about["starts"][-1].update(refused=True))


def _was_refused(about: Mapping[str, Any] | None) -> bool:
    return about is not None and all(start.get("refused") for start in about["starts"])


def begin_options(job: Job) -> list[str]:
    """The options that say in which directory and how ``job`` begins, as it was decided."""
    begins = {"new": [], "resume": ["--resume"], "fresh": ["--fresh"]}[job.begins]
    back_to = [] if job.request.resume_from is None else ["--resume-from", job.request.resume_from]
    return [*begins, *back_to, "--run-dir", relative_path(job.run_dir)]


def ranks_of(request: Request, machine: Machine, env: Mapping[str, str]) -> tuple[int, tuple[str, ...]]:
    """How many ranks there will be on this machine, never fewer than asked for; and notes for the user.

    Raises:
        SettingError: if it is no number of ranks, or there are too few GPUs for it.
    """
    asked = request.nproc_per_node
    spelt, two = request.spelt("--nproc-per-node", asked), request.spelt("--nproc-per-node", 2)
    if asked is None:
        if machine.gpus:
            return machine.gpus, ()
        return 1, (f"No GPU found: 1 rank on the CPU; {two} rehearses",)
    if asked == "auto":
        return machine.gpus or machine.cpus, ()
    if asked == "cpu":
        return machine.cpus, ()
    if asked == "gpu":
        if not machine.gpus:
            raise SettingError(
                f"{spelt}, but this machine has no usable GPU{_by(env)}; give a number of ranks to rehearse on the "
                f"CPU: {two}"
            )
        return machine.gpus, ()
    try:
        ranks = int(asked)
    except ValueError:
        raise SettingError(f"{spelt}: give a number of ranks, gpu, cpu or auto") from None
    if ranks < 1:
        raise SettingError(f"{spelt}: it must be at least 1")
    if 0 < machine.gpus < ranks and request.settings.get("rehearse", "false").lower() not in ("true", "1"):
        raise SettingError(
            f"{spelt}, but this process may use {machine.gpus} GPU{'s' * (machine.gpus > 1)}{_by(env)}; use "
            f"{request.spelt('--nproc-per-node', machine.gpus)}, or rehearse on the CPU with CUDA_VISIBLE_DEVICES= "
            "before the command"
        )
    return ranks, ()


def _by(env: Mapping[str, str]) -> str:
    allowed = env.get("CUDA_VISIBLE_DEVICES")
    return "" if allowed is None else f" (CUDA_VISIBLE_DEVICES={allowed})"


def _run_dir(
    request: Request, given: Allocation, now: datetime
) -> tuple[Path, Literal["new", "resume", "fresh"], tuple[str, ...]]:
    """The run directory, how the run begins in it, and notes for the user."""
    if request.resume and request.fresh:
        raise SettingError("--resume and --fresh contradict each other; give one of them")
    again = f"{given} was started again, so its run goes on"
    if request.run_dir is None and given.job and not request.resume:
        path, on = directory_of_job(given, _RUNS.absolute(), request.program.stem, request.subject, about_run)
        return path, "resume" if on else "fresh" if request.fresh else "new", (again,) if on else ()
    if request.run_dir is None:
        if request.resume and not request.settings.get("checkpoint"):
            raise SettingError(f"{request.spelt('--resume', True)}: say which run{_newest_run(request)}")
        new = unused_path((_RUNS / f"{request.program.stem}-{now:%Y%m%d-%H%M%S}").absolute())
        return new, "resume" if request.resume else "fresh" if request.fresh else "new", ()
    run_dir, spelt = Path(request.run_dir).absolute(), request.spelt("--run-dir", request.run_dir)
    if run_dir.exists() and not run_dir.is_dir():
        raise SettingError(f"{spelt} is a file; give a directory")
    held = [path for path in run_dir.iterdir() if not _is_of_settling(path)] if run_dir.exists() else []
    trained = any(path.name in ("metrics.jsonl", "checkpoints") for path in held)
    if not trained and _was_refused(about_run(run_dir)):
        held = []
    if not held and request.fresh:
        return run_dir, "fresh", ()
    if not held:
        return run_dir, "resume" if request.resume else "new", ()
    if about_run(run_dir) is None and trained:
        raise SettingError(
            f"{spelt} holds a run whose {RUN_FILE} is damaged or gone. What it has saved is still there: go on in a "
            f"new directory from a copy of {relative_path(run_dir / 'checkpoints')}, with --resume --checkpoint DIR"
        )
    if about_run(run_dir) is None:
        raise SettingError(f"{spelt} is not empty and holds no run (no {RUN_FILE}); give a new directory")
    if request.resume:
        return run_dir, "resume", ()
    # Before --fresh: a job that began with it is not to start over each time the scheduler starts it again.
    if _goes_on(given, request.subject, about_run(run_dir)):
        return run_dir, "resume", (again,)
    if request.fresh:
        return run_dir, "fresh", ()
    raise SettingError(
        f"{spelt} holds an earlier run; continue it, or set it aside and start over:\n"
        f"  {request.command('--resume', '--run-dir', request.run_dir)}\n"
        f"  {request.command('--fresh', '--run-dir', request.run_dir)}"
    )


def _newest_run(request: Request) -> str:
    if (newest := newest_run()) is not None:
        return f"; the newest is {request.spelt('--run-dir', str(newest))}"
    return f", with {request.spelt('--run-dir', 'DIR')}"


def _generations(run_dir: Path) -> list[object]:
    return list((about_run(run_dir) or {"generations": []})["generations"])


def lock_if_free(run_dir: Path) -> contextlib.AbstractContextManager[object]:
    """A lock on ``run_dir`` as `settle` gives; where a launcher on a lost host still holds it, none."""
    try:
        return _locked(run_dir)
    except SettingError:
        return contextlib.nullcontext()


def _locked(run_dir: Path) -> TextIO:
    """A lock on ``run_dir`` that the kernel releases when this process ends, in whatever way."""
    lock = (run_dir / LOCK_FILE).open("a")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        raise SettingError(
            f"another lockstep run works in {relative_path(run_dir)}; wait for it, stop it, or give another --run-dir"
        ) from None
    except OSError:
        # The file system has no locks.
        pass
    return lock


About = Callable[[Path], Mapping[str, Any] | None]
"""What a run directory says of itself; None if it is none."""


def directory_of_job(given: Allocation, runs: Path, stem: str, subject: str, about: About) -> tuple[Path, bool]:
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
        if _goes_on(given, subject, about(path)):
            return path, True
    raise AssertionError("counting ends")


def _goes_on(given: Allocation, subject: str, record: Mapping[str, Any] | None) -> bool:
    """Whether a run directory, which holds ``record``, is this run's from before its job was started again."""
    last = record["starts"][-1] if record and record["starts"] else {}
    mine = last.get("job") == given.job and last.get("subject") == subject
    # Where it is not known which start this is, going on loses nothing; to begin anew would.
    return mine and given.restarted and (not given.start or last.get("job_start") != given.start)


def about_job(given: Allocation, subject: str) -> dict[str, object]:
    """What a run directory is to say of a start, for `directory_of_job` to read."""
    return {"job": given.job, "job_start": given.start, "subject": subject}
