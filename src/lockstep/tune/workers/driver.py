"""Starts the workers of a search on this machine, watches them, and shows the progress of the search.

    driver, torch imported once ─┬─ a copy: the launcher of worker 0 ─► its fork server ─► its ranks
                                 ├─ a copy: the launcher of worker 1 ─► ...
                                 └─ reads the journal, for its user

Each worker is a run of its own under the launcher of `lockstep run`, with restarts, root causes and the detection of
hangs, so a failure in one worker does not disturb the others.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.connection
import os
import signal
import sys
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any, TextIO

from lockstep.errors import LaunchError, LockstepError, SettingError
from lockstep.formatting import plural, relative_path
from lockstep.launch import (
    STOP_SIGNALS,
    Function,
    Machine,
    Module,
    RankExit,
    Request,
    Script,
    Stops,
    check_program,
    die_with_parent,
    import_torch,
    name_process,
    require_linux,
    watch,
)
from lockstep.launch_contract import ENDS_AT, EXIT_FAILED, EXIT_OK, EXIT_STOPPED, EXIT_USAGE, SEARCH, STOP_FILE
from lockstep.report import ended, is_notebooks
from lockstep.small_files import size_of
from lockstep.tune.record.journal import FollowedSearch, SearchRecord, is_within_trial, journal_file
from lockstep.tune.record.search_directory import Death, SearchDirectory, WorkerPlacement
from lockstep.tune.results.live_views import choose_search_view, watch_search
from lockstep.tune.results.result import SearchResult
from lockstep.tune.results.summary import warm_start_lines

#: A worker whose ranks fail this often in a row before they begin a trial is not started again.
_FAILED_STARTS = 3
#: Exit codes of a worker whose ranks got a signal.
_STOPPED = (EXIT_STOPPED, 128 + signal.SIGINT)
_LOOK_S = 0.2
_SHOW_EVERY_S = 1.0
_NO_LIMIT = 10**9
#: Exit code of a worker's launcher that cannot start ranks any more; a new launcher may be able to.
_NO_FORK_SERVER = 70
#: How long the processes of a killed launcher may take to end.
_ENDING_S = 20.0


@dataclass(frozen=True, slots=True)
class SearchRequest:
    """What the driver is to start."""

    program: Script | Module | Function
    directory: SearchDirectory
    ranks: tuple[int, ...]  #: of each worker
    workers: int = 0  #: of the whole search, if other machines have some; 0: those of ``ranks``
    options: Mapping[str, Any] = field(default_factory=dict)  #: settings of the search, over the script's
    settings: Mapping[str, str] = field(default_factory=dict)  #: for the runs of its trials
    hang_after_s: float | None = None  #: without progress until a trial counts as hanging; None: by its pace
    grace_s: float = 10.0  #: from asking a rank to end until it is killed
    again: str = ""  #: the command that resumes it


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """One worker to start."""

    number: int
    ranks: int
    gpus: tuple[str, ...] | None  #: those of this machine that it may use; None: the machine has none


def plan_workers(numbers: Sequence[int], ranks: Sequence[int], gpus: Sequence[str]) -> list[WorkerSpec]:
    """The workers with their GPUs, which are given out in order; with no GPUs on a machine that has none.

    Raises:
        SettingError: if there are fewer GPUs than ranks.
    """
    if gpus and sum(ranks) > len(gpus):
        raise SettingError(
            f"{plural(len(ranks), 'worker')} of {', '.join(map(str, ranks))} ranks need {sum(ranks)} GPUs, and "
            f"{len(gpus)} can be used on this machine, where all ranks of a worker are: fewer --workers or "
            "--ranks-per-worker, or CUDA_VISIBLE_DEVICES= before the command, to rehearse on the CPU"
        )
    specs, first = [], 0
    for number, count in zip(numbers, ranks, strict=True):
        specs.append(WorkerSpec(number, count, tuple(gpus[first : first + count]) if gpus else None))
        first += count
    return specs


def visible_gpus(machine: Machine, env: Mapping[str, str]) -> tuple[str, ...]:
    """The GPUs of ``machine``, as ``CUDA_VISIBLE_DEVICES`` names them."""
    names = [name.strip() for name in env.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    return tuple(names[: machine.gpus]) if names else tuple(map(str, range(machine.gpus)))


class Driver:
    """Carries out one search on this machine; `run` is called once, in the main thread.

    Args:
        request: what to start.
        out: gets what the script prints after the search.
        err: gets the progress of the search, which in a notebook ``out`` gets; and the reason of a failure.
    """

    def __init__(self, request: SearchRequest, out: TextIO, err: TextIO) -> None:
        self._request, self._directory = request, request.directory
        self._out, self._err = out, err
        self._processes: dict[WorkerSpec, ForkProcess] = {}
        self._starts: dict[WorkerSpec, list[int]] = {}  # length of the worker's journal at each start
        self._held: dict[int, contextlib.ExitStack] = {}  # by worker: its lock, while it may be started
        self._codes: dict[WorkerSpec, int] = {}  # of workers that have ended
        self._stops = Stops()
        self._forwarded = 0
        self._has_begun = False  # as far as is shown
        self._began_s = time.time()
        # A notebook marks all of ``err`` as errors.
        self._view = choose_search_view(out if is_notebooks(out) else err, os.environ)

    @property
    def is_interrupted(self) -> bool:
        """Whether the user, and not the end of the job or a file, was the first to ask the search to stop."""
        return self._stops.first == signal.SIGINT

    def run(self) -> int:
        """Start the workers, and return the exit code once all have ended.

        Raises:
            SettingError: if the workers cannot be started as asked for.
            LaunchError: if no process can be forked.
        """
        require_linux("one worker of one rank needs no other process: python search.py, without workers=")
        request = self._request
        if not isinstance(request.program, Function):
            check_program(request.program)
        gpus = visible_gpus(Machine.detect(os.environ), os.environ)
        with contextlib.ExitStack() as stack:
            numbers = []
            for _ in request.ranks:
                held = stack.enter_context(contextlib.ExitStack())
                numbers.append(held.enter_context(self._directory.being_worker()))
                self._held[numbers[-1]] = held
            specs = plan_workers(numbers, request.ranks, gpus)
            self._view.line(
                f"{plural(len(specs), 'worker')} of {', '.join(sorted({plural(s.ranks, 'rank') for s in specs}))}; "
                f"logs: {relative_path(self._directory.path / 'workers')}"
            )
            import_torch()
            stack.callback(self._end_all)
            stack.enter_context(self._stops.listening())
            with FollowedSearch(self._directory.path) as followed:
                for spec in specs:
                    self._start(spec)
                self._watch(followed)
                self._view.close()
                return self._say_end(followed.record())

    def _watch(self, followed: FollowedSearch) -> None:
        """Watch the workers until all have ended."""
        next_show_s = 0.0
        while self._processes:
            multiprocessing.connection.wait([p.sentinel for p in self._processes.values()], _LOOK_S)
            if not self._stops.times and (self._directory.path / STOP_FILE).exists():
                self._stops.ask(signal.SIGTERM)
            self._forward_stops()
            for spec, process in list(self._processes.items()):
                if process.exitcode is not None:
                    self._ended(spec, process)
            if time.monotonic() >= next_show_s:
                began_s = time.monotonic()
                self._show(followed)
                # A search of very many trials takes a while to be shown, and its ranks need the CPU.
                next_show_s = time.monotonic() + max(_SHOW_EVERY_S, 20 * (time.monotonic() - began_s))
        self._show(followed)

    def _show(self, followed: FollowedSearch) -> None:
        """Show how far the search is, and what has ended attempts at trials since the last time."""
        record = followed.record()
        for cut in followed.new_deaths():
            if cut.at_s >= self._began_s:  # in a search that goes on, others were told before
                self._view.line(f"trial {cut.number}, attempt {cut.attempt}: {cut.reason}; it is tried again")
        if record is not None:
            if not self._has_begun:
                self._has_begun = True
                for line in warm_start_lines(record.settings):
                    self._view.line(line)
            self._view.show(record)

    def _start(self, spec: WorkerSpec) -> None:
        env = {
            **os.environ,
            SEARCH: WorkerPlacement(
                directory=str(self._directory.path),
                worker=spec.number,
                workers=self._request.workers or len(self._request.ranks),
                began_s=self._began_s,
                options=dict(self._request.options),
            ).to_text(),
            **({} if spec.gpus is None else {"CUDA_VISIBLE_DEVICES": ",".join(spec.gpus)}),
        }
        self._starts.setdefault(spec, []).append(size_of(journal_file(self._directory.path, spec.number)))
        self._directory.worker(spec.number).parent.mkdir(parents=True, exist_ok=True)
        process = multiprocessing.get_context("fork").Process(
            target=_be_launcher, args=(self._request, spec, env, os.getpid()), name=f"worker {spec.number}"
        )
        before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        try:
            with warnings.catch_warnings():
                # Python warns of other threads, such as those of a notebook; the forked process does not use them.
                warnings.simplefilter("ignore", DeprecationWarning)
                process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        self._processes[spec] = process

    def _ended(self, spec: WorkerSpec, process: ForkProcess) -> None:
        """The launcher of a worker has ended."""
        del self._processes[spec]
        code = process.exitcode or 0
        process.close()
        written = size_of(journal_file(self._directory.path, spec.number))
        is_gone = code < 0 or code == _NO_FORK_SERVER
        if is_gone and not self._stops.times and not _no_progress(self._starts[spec], written):
            self._view.line(f"worker {spec.number}: its launcher was killed; starting it again")
            if is_within_trial(self._directory.path, spec.number):
                run_dir = self._directory.worker(spec.number)
                Death.of_launcher(run_dir, code, time.time()).write(run_dir)
            self._start(spec)
            return
        if code == EXIT_OK and not self._stops.times and is_within_trial(self._directory.path, spec.number):
            Death.within_trial(self._directory.worker(spec.number), time.time()).write(
                self._directory.worker(spec.number)
            )
            self._start(spec)
            return
        if code in _STOPPED and not self._is_to_stop() and not _no_progress(self._starts[spec], written):
            # Somebody has sent a signal to its ranks alone.
            self._view.line(f"worker {spec.number} was stopped, and the search was not; starting it again")
            self._start(spec)
            return
        self._codes[spec] = code
        self._held.pop(spec.number).close()  # from now on another worker may take over its trial
        if code == EXIT_USAGE:
            # The other workers have the same settings, and would fail in the same way.
            self._stops.ask(signal.SIGTERM)
        if code not in (EXIT_OK, EXIT_STOPPED) and not self._stops.times:
            self._view.line(f"worker {spec.number} failed and is not started again")

    def _is_to_stop(self) -> bool:
        """Whether the search was asked to stop, or its job ends."""
        return bool(self._stops.times) or ENDS_AT in os.environ or (self._directory.path / STOP_FILE).exists()

    def _forward_stops(self) -> None:
        if self._stops.times <= self._forwarded:
            return
        self._forwarded = self._stops.times
        self._view.line(
            "stopping: running trials save a checkpoint if they have a Run" if self._forwarded == 1 else "stopping now"
        )
        for process in self._processes.values():
            if process.pid is not None:
                os.kill(process.pid, signal.SIGTERM if self._forwarded == 1 else signal.SIGINT)

    def _end_all(self) -> None:
        """End all workers; only after an error of the driver itself are there any."""
        for process in self._processes.values():
            process.kill()
            process.join()

    def _say_end(self, record: SearchRecord | None) -> int:
        """Write the end of the search to the user's streams; returns the exit code."""
        request = self._request
        causes = [text for spec in self._codes if (text := _failure_of(self._directory, spec.number))]
        failed = [code for code in self._codes.values() if code not in (EXIT_OK, EXIT_STOPPED)]
        finished = self._directory.finished()
        if finished is not None and finished["worker"] in {spec.number for spec in self._codes}:
            self._out.write(_last_words(self._directory, finished))
            self._out.flush()
        if EXIT_USAGE in failed:
            self._err.write(f"{causes[0] if causes else 'the search cannot begin'}\n")
            return EXIT_USAGE
        if record is None:
            self._err.write(
                "".join(f"{text}\n" for text in causes[:1]) or "the script ended without a call of lockstep.tune\n"
            )
            return EXIT_FAILED if failed or not self._stops.times else EXIT_STOPPED
        if self._starts and not (self._directory.path / "journal").is_dir():
            self._err.write(
                f"the journal of the search, {self._directory.path / 'journal'}, was removed while it ran: what was in "
                "it is lost. Put it back from a copy and go on with --resume, or begin again with --fresh\n"
            )
            return EXIT_FAILED
        result = SearchResult(record)
        is_over = len(record.trials) - result.counts["running"] >= int(record.settings["trials"])
        if record.settings.get("repeats"):
            is_over &= finished is not None
        with contextlib.suppress(OSError):
            (self._directory.path / STOP_FILE).unlink(missing_ok=True)
        if not is_over and (self._stops.times or EXIT_STOPPED in self._codes.values()):
            self._err.write(f"stopped; to go on: {request.again}\n")
            return EXIT_STOPPED
        fails_after = finished is not None and any(
            spec.number == finished["worker"] and code in failed for spec, code in self._codes.items()
        )
        if failed and (not is_over or fails_after):
            self._err.write("".join(f"{text}\n" for text in causes[:1]))
            return EXIT_FAILED
        if not result.top(1):
            reasons = "\n".join(f"    {plural(len(one.numbers), 'trial')}: {one.reason}" for one in result.failures)
            self._err.write(f"no trial of the search has a loss:\n{reasons}\n")
            return EXIT_FAILED
        return EXIT_OK


def _be_launcher(request: SearchRequest, spec: WorkerSpec, env: Mapping[str, str], driver: int) -> None:
    """The process that starts and watches the ranks of one worker; it exits with their exit code."""
    die_with_parent(driver)
    for signum in STOP_SIGNALS:
        signal.signal(signum, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    os.setsid()
    name_process(f"worker {spec.number}")
    os.environ.clear()
    os.environ.update(env)
    run_dir = request.directory.worker(spec.number)
    _write_to(run_dir.with_suffix(".txt"))
    failure = run_dir.with_suffix(".failure")
    failure.unlink(missing_ok=True)
    code, why = EXIT_FAILED, ""
    until_s = time.monotonic() + _ENDING_S
    while not ended(run_dir) and time.monotonic() < until_s:
        time.sleep(_LOOK_S)
    try:
        code, why = watch(
            Request(
                request.program,
                nproc_per_node=spec.ranks,
                run_dir=str(run_dir),
                resume=True,
                max_restarts=_NO_LIMIT,
                settings=request.settings,
                grace_s=request.grace_s,
                hang_after_s=request.hang_after_s,
                on_hang="restart",
                start_method="fork" if isinstance(request.program, Function) else "copy",
                everywhere=False,
            ),
            _RestartRule(request.directory, spec.number).after_failure,
        )
    except LockstepError as error:
        why, code = str(error), _NO_FORK_SERVER if isinstance(error, LaunchError) else EXIT_USAGE
    if why:
        failure.write_text(why, encoding="utf-8")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


class _RestartRule:
    """Decides whether a worker whose ranks have failed is started again: it is, as long as it begins trials."""

    def __init__(self, directory: SearchDirectory, worker: int) -> None:
        self._directory, self._worker = directory, worker
        self._written = size_of(journal_file(directory.path, worker))
        self._in_vain = 0

    def after_failure(self, exits: Sequence[RankExit], generation: int) -> bool:
        death = Death.of(exits, generation, time.time())
        death.write(self._directory.worker(self._worker))
        finished = self._directory.finished()
        if death.is_of_objective and finished is not None and finished["worker"] == self._worker:
            return False  # an error of what the script does after its search
        before, self._written = self._written, size_of(journal_file(self._directory.path, self._worker))
        if self._written > before:
            self._in_vain = 0
            return True
        self._in_vain += 1
        # An error of the script before its first trial would come again.
        return not death.is_of_objective and self._in_vain < _FAILED_STARTS


def _no_progress(starts: Sequence[int], written: int) -> bool:
    """Whether nothing was written during the last few starts."""
    return len(starts) >= _FAILED_STARTS and starts[-_FAILED_STARTS] == written


def _write_to(path: Path) -> None:
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for descriptor, standard in ((nothing, 0), (file, 1), (file, 2)):
        os.dup2(descriptor, standard)
    sys.stdout = open(1, "w", buffering=1, encoding="utf-8", closefd=False)  # noqa: SIM115 - for the whole process
    sys.stderr = open(2, "w", buffering=1, encoding="utf-8", closefd=False)  # noqa: SIM115


def _last_words(directory: SearchDirectory, finished: Mapping[str, int]) -> str:
    """What the script wrote after the search, on the worker that recorded the end of it."""
    log = directory.worker(finished["worker"]) / "logs" / "rank-0000.log"
    try:
        with log.open("rb") as file:
            file.seek(finished["log_bytes"])
            return file.read().decode(errors="replace")
    except OSError:
        return ""


def _failure_of(directory: SearchDirectory, worker: int) -> str:
    try:
        return directory.worker(worker).with_suffix(".failure").read_text(encoding="utf-8")
    except OSError:
        return ""


def watch_directory(run_dir: Path, stream: TextIO, *, once: bool) -> None:
    """Show the search in ``run_dir`` until all workers have ended, or ``once``. Writes nothing to the directory."""
    directory = SearchDirectory(run_dir)
    watch_search(run_dir, stream, os.environ, once=once, is_over=lambda: not directory.is_alive())
