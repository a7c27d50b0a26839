"""`lockstep.tune`: decides whether this process starts workers or is a rank of one, and returns the result."""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path

from lockstep.errors import LaunchError, MismatchError, SettingError
from lockstep.launch import Function
from lockstep.launch_contract import ENDS_AT, EXIT_OK, EXIT_STOPPED, SEARCH
from lockstep.report import is_notebooks
from lockstep.tune.record.search_directory import Death, Search, SearchDirectory, WorkerPlacement, open_directory
from lockstep.tune.results.result import SearchResult, load
from lockstep.tune.results.summary import warm_start_lines
from lockstep.tune.search import AlgorithmFactory, Islands, Space
from lockstep.tune.search_settings import SearchSettings
from lockstep.tune.stopping import StoppingRule
from lockstep.tune.workers.driver import Driver, SearchRequest
from lockstep.tune.workers.trial_channel import StopSignals, TrialChannel
from lockstep.world import World

#: No trial begins in the last seconds of a job.
_MARGIN_S = 30.0
#: The search that this process has carried out as a worker.
_carried_out: list[Path] = []


def tune(
    objective: Callable[..., object],
    space: Mapping[str, object] | Space,
    *,
    trials: int = 100,
    seed: int = 0,
    algorithm: str | AlgorithmFactory | None = None,
    islands: int | Islands = 1,
    stopping: str | StoppingRule | None = None,
    objectives: int = 1,
    workers: int | None = None,
    ranks_per_worker: int | Sequence[int] = 1,
    run_dir: str | os.PathLike[str] | None = None,
    resume: bool = False,
    fresh: bool = False,
    retries: int = 1,
    keep_trials: int | None = 5,
    inherit_weights: bool = False,
    time_limit_s: float | None = None,
    hang_after_s: float | None = None,
    patience: int | None = None,
    min_improvement: float = 0.0,
    repeats: int = 0,
    repeat_best: int = 5,
    enqueue: Sequence[Mapping[str, object]] = (),
    warm_start: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] = (),
) -> SearchResult:
    """Search ``space`` for the parameters with which ``objective`` returns the lowest loss. Collective.

    In a script that ``lockstep tune`` has started, this process is one rank of one worker, and options of the command
    line override the arguments. The call returns on the ranks of one worker, the one that records the end of the
    search; on all other workers it ends the script. In a script that was started otherwise, and in a notebook, the call
    starts ``workers`` itself and returns in the calling process. Without ``workers`` and ``ranks_per_worker``, the
    ranks of this world, under plain ``python`` this process, are the only worker.

    When it returns, every trial has ended, and its result is in the run directory, from which `load` reads it again.
    A trial that fails does not end the search. A search that is killed at any moment continues with ``resume=True``
    without losing a finished trial. The search itself takes some milliseconds for each trial, and an objective with a
    `Run` about 15 ms more.

    Args:
        objective: is called on all ranks of a trial with the same parameters: ``objective(run, params)``, with a `Run`
            on the ranks of the worker, or ``objective(params)``, which opens its own `Run` or needs none. It returns
            the loss, which is minimised; for several objectives a tuple of losses; with constraints an `Evaluated`. The
            value that the leader returns is used.
        space: maps the name of each parameter to a `Float`, `Int`, `Choice` or `Bool`, or to a tuple as in Propulate.
        trials: number of trials in total; those from before a resume count.
        seed: of the search, and of the training of each trial.
        algorithm: the search algorithm, such as ``gp`` or ``cma-es``, or a factory of your own; None: what ``islands``
            says, which is ``auto`` by default.
        islands: number of islands, or an `Islands` with further options.
        stopping: the rule that stops trials early, such as ``asha:eta=3`` or ``patience:5``, or a rule of your own;
            None: no trial is stopped early.
        objectives: number of losses that the objective returns.
        workers: number of workers to start, which evaluate trials at the same time.
        ranks_per_worker: number of ranks of each worker; or one number for each worker.
        run_dir: directory of the search; None: a new one under ``runs``.
        resume: continue the search in ``run_dir``.
        fresh: move the search in ``run_dir`` aside and begin a new one.
        retries: number of further attempts at a trial that hung or was killed. A trial whose objective raised an
            exception is not tried again.
        keep_trials: number of trials whose checkpoints are kept, the best ones; None: all.
        inherit_weights: a trial begins with the weights of the first of its parents that has a checkpoint.
        time_limit_s: seconds after which no trial begins; trials that run then are finished.
        hang_after_s: seconds without progress after which a trial counts as hanging; None: chosen from its pace.
        patience: no trial begins once the best loss has not improved in so many trials that have ended one after the
            other; None: all ``trials`` are evaluated. A search that has ended so goes on with a larger number.
        min_improvement: by which part of the best loss a loss must be lower to count as an improvement for
            ``patience``, such as 0.01.
        repeats: how often the best trials are evaluated again, each time with another seed, after all others. The
            result's best is then the one with the lowest mean loss of its repeats. They do not count as ``trials``.
        repeat_best: how many of the best trials that is done with.
        enqueue: parameters of trials to evaluate first, such as ``[{"lr": 0.1}]``. The algorithm chooses those that
            are not given. When the search is resumed, what is new here is evaluated next.
        warm_start: the directory of another search, or of several, whose trials the algorithm knows from the beginning,
            as far as they are in the space. With ``"runs/old:momentum=0.9"`` that is the value of a parameter that its
            trials do not have.

    Returns:
        The result, with all trials.

    Raises:
        SettingError: if an argument cannot be used, if ``run_dir`` holds a search and neither ``resume`` nor ``fresh``
            is given, or if it holds a search over another space, seed or number of objectives.
        LaunchError: if the workers that this call has started failed.
        KeyboardInterrupt: if the kernel of a notebook was interrupted; the search can be resumed.
        SystemExit: with code 75 if the search was asked to stop otherwise, and can be resumed; with code 0 on workers
            that are not to continue the script.
    """
    searched = Space.of(space)
    sources = (warm_start,) if isinstance(warm_start, str | os.PathLike) else warm_start
    settings = SearchSettings(
        trials=trials,
        seed=seed,
        objectives=objectives,
        algorithm=algorithm,
        islands=islands if isinstance(islands, Islands) else Islands(count=islands),
        stopping=stopping,
        retries=retries,
        keep_trials=keep_trials,
        inherit_weights=inherit_weights,
        time_limit_s=time_limit_s,
        patience=patience,
        min_improvement=min_improvement,
        repeats=repeats,
        repeat_best=repeat_best,
        enqueue=tuple(enqueue),
        warm_start=tuple(map(os.path.abspath, sources)),
    )
    for params in settings.enqueue:
        searched.check_some(params)
    world = World.from_env(os.environ)
    if (told := os.environ.get(SEARCH)) is not None:
        return _as_worker(objective, searched, settings, world, WorkerPlacement.from_text(told))
    sizes = _sizes(workers, ranks_per_worker)
    if world.size == 1 and sizes is not None:
        directory = open_directory(run_dir, "search", datetime.now(), resume=resume, fresh=fresh)
        return _start_workers(objective, searched, settings, directory, sizes, hang_after_s)
    return _alone(objective, searched, settings, world, run_dir, resume=resume, fresh=fresh)


def _sizes(workers: int | None, ranks_per_worker: int | Sequence[int]) -> tuple[int, ...] | None:
    """Number of ranks of each worker to start; None: no workers are to be started."""
    if isinstance(ranks_per_worker, int):
        if workers is None and ranks_per_worker == 1:
            return None
        return worker_sizes(workers or 1, (ranks_per_worker,))
    return worker_sizes(workers or len(ranks_per_worker), tuple(ranks_per_worker))


def worker_sizes(workers: int, ranks: Sequence[int]) -> tuple[int, ...]:
    """Number of ranks of each of ``workers`` workers, from one number for all or one for each.

    Raises:
        SettingError: if a number is below 1, or there are not as many numbers as workers.
    """
    if workers < 1 or not ranks or min(ranks) < 1:
        raise SettingError(f"{workers} workers of {', '.join(map(str, ranks))} ranks: give at least one of each")
    if len(ranks) not in (1, workers):
        raise SettingError(
            f"{len(ranks)} numbers of ranks ({', '.join(map(str, ranks))}) for {workers} workers; give one for all, or "
            "one for each"
        )
    return tuple(ranks) * workers if len(ranks) == 1 else tuple(ranks)


def _as_worker(
    objective: Callable[..., object],
    space: Space,
    settings: SearchSettings,
    world: World,
    placement: WorkerPlacement,
) -> SearchResult:
    """As one rank of a worker that the driver has started."""
    directory = SearchDirectory(Path(placement.directory))
    if _carried_out:
        raise SettingError(
            f"this script calls lockstep.tune once more, after the search in {directory.path}: `lockstep tune` carries "
            "out one search. Start the script with python, where each tune(...) is a search of its own, or make it two "
            "scripts"
        )
    search = Search(space, settings.with_options(placement.options), directory)
    # Late, for it imports torch.
    from lockstep.tune.workers.trial_ranks import open_channel

    with open_channel(world, by_driver=True) as (channel, stops):
        is_over = _be_worker(objective, search, world, placement, channel, stops)
    if not is_over:
        raise SystemExit(EXIT_OK)
    _carried_out.append(directory.path)
    return load(directory.path)


def _alone(
    objective: Callable[..., object],
    space: Space,
    settings: SearchSettings,
    world: World,
    run_dir: str | os.PathLike[str] | None,
    *,
    resume: bool,
    fresh: bool,
) -> SearchResult:
    """As the only worker."""
    # Late, for it imports torch.
    from lockstep.tune.workers.trial_ranks import open_channel

    with open_channel(world, by_driver=False) as (channel, stops), contextlib.ExitStack() as stack:
        path, worker = "", 0
        if world.leads:
            if run_dir is None and world.run_dir is not None:
                # The launcher may have started these ranks again; the search is in the directory then.
                directory = SearchDirectory(Path(world.run_dir, "search"))
                directory.path.mkdir(exist_ok=True)
                directory.unfinish()
            else:
                goes_on = resume or world.generation > 0
                directory = open_directory(run_dir, _script(), datetime.now(), resume=goes_on, fresh=fresh)
            worker = stack.enter_context(directory.being_worker())
            path = str(directory.path)
        path = channel.tell(path)
        directory = SearchDirectory(Path(path))
        placement = WorkerPlacement(path, worker, 1, time.time(), {})
        _be_worker(objective, Search(space, settings, directory), world, placement, channel, stops)
        return load(directory.path)


def _be_worker(
    objective: Callable[..., object],
    search: Search,
    world: World,
    placement: WorkerPlacement,
    channel: TrialChannel,
    stops: StopSignals,
) -> bool:
    """Evaluate trials; returns whether this worker is the one that records the end of the search."""
    # Late, for it imports torch.
    from lockstep.tune.workers.search_worker import SearchWorker
    from lockstep.tune.workers.trial_ranks import Objective, evaluate_trials

    called = Objective.of(objective)
    directory, settings, worker = search.directory, search.settings, placement.worker
    _compare_ranks(search.space, settings, channel)
    with contextlib.ExitStack() as stack:
        leader: SearchWorker | None = None
        if world.leads:
            directory.begin(search.space, settings, placement.workers, placement.options)
            if SEARCH not in os.environ:
                sys.stderr.write("".join(f"{line}\n" for line in warm_start_lines(directory.settings())))
            leader = SearchWorker(
                search,
                placement,
                ranks=world.size,
                death=Death.read(directory.worker(worker), world.generation),
                leave_at_s=_job_stop_at_s(),
            )
            stack.enter_context(contextlib.closing(leader))
        is_over = evaluate_trials(search, called, channel, stops, leader)
        if not is_over and time.time() >= _job_stop_at_s():
            raise SystemExit(EXIT_STOPPED)
        says_so = is_over and leader is not None and directory.finish(worker, _log_bytes())
        return channel.tell("yes" if says_so else "") == "yes"


def _start_workers(
    objective: Callable[..., object],
    space: Space,
    settings: SearchSettings,
    directory: SearchDirectory,
    sizes: tuple[int, ...],
    hang_after_s: float | None,
) -> SearchResult:
    """From a script or a notebook: workers that are copies of this process."""

    def be_rank() -> None:
        try:
            told = WorkerPlacement.from_text(os.environ[SEARCH])
            _as_worker(objective, space, settings, World.from_env(os.environ), told)
        except SystemExit as end:
            if end.code != EXIT_OK:
                raise

    request = SearchRequest(
        Function(be_rank), directory, sizes, hang_after_s=hang_after_s, again="tune(..., resume=True)"
    )
    driver = Driver(request, sys.stdout, sys.stderr)
    code = driver.run()
    if code == EXIT_STOPPED and driver.is_interrupted and is_notebooks(sys.stdout):
        raise KeyboardInterrupt
    if code == EXIT_STOPPED:
        raise SystemExit(code)
    if code != EXIT_OK:
        raise LaunchError(f"the search in {directory.path} has failed; its output above says why")
    return load(directory.path)


def _compare_ranks(space: Space, settings: SearchSettings, channel: TrialChannel) -> None:
    """Check that all ranks search the same: each makes the parameters of a trial of its own space. Collective.

    Raises:
        MismatchError: on the ranks that do not, such as where a space is made of a set, whose order is another in each
            process.
    """
    own = json.dumps([space.to_json(), settings.seed, settings.objectives])
    if (leaders := channel.tell(own)) != own:
        raise MismatchError(
            f"the ranks of a trial search over different spaces: {own} here, {leaders} on the leader; make the space "
            "of what is the same on all ranks, in the same order: of a list, not of a set"
        )


def _job_stop_at_s() -> float:
    """When the job that holds this search is about to end, in seconds since 1970; infinity without one."""
    return float(os.environ[ENDS_AT]) - _MARGIN_S if os.environ.get(ENDS_AT) else math.inf


def _script() -> str:
    return Path(sys.argv[0]).stem if sys.argv and sys.argv[0] not in ("", "-c") else "search"


def _log_bytes() -> int:
    """Length of what this rank has written by now."""
    sys.stdout.flush()
    return os.fstat(1).st_size
