"""`lockstep.tune`: which part of a search this process is, and its result."""

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
from typing import Any

from lockstep.errors import LaunchError, MismatchError, SettingError
from lockstep.launch import Function
from lockstep.launch_contract import ENDS_AT, EXIT_OK, EXIT_STOPPED, SEARCH
from lockstep.tune.death import Death
from lockstep.tune.driver import Driver, SearchRequest
from lockstep.tune.rank_channel import RankChannel
from lockstep.tune.result import SearchResult, load
from lockstep.tune.search import AlgorithmFactory, Islands, Space
from lockstep.tune.search_directory import SearchDirectory, open_directory
from lockstep.tune.search_settings import SearchSettings
from lockstep.tune.stop_signals import StopSignals
from lockstep.tune.stopping import StoppingRule
from lockstep.world import World

#: So long before the end of a job no trial begins any more.
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
) -> SearchResult:
    """Search ``space`` for parameters with which ``objective`` gives the least loss. Collective.

    In a script that ``lockstep tune`` has started it evaluates trials as one rank of one worker, and what the command
    line says wins over the arguments here. It returns on the worker that sees the last trial end, and the script goes
    on there; on the others the script ends with it. In a script that was started otherwise, and in a notebook, it
    starts ``workers`` itself; without ``workers`` this world is the only one.

    Args:
        objective: called on all ranks of a trial with equal parameters: ``objective(run, params)``, with a `Run` on the
            worker's ranks, or ``objective(params)``, which may open its own, or needs none. Returns the loss, smaller
            is better; a tuple for several objectives; an `Evaluated` with constraints. The leader's counts.
        space: `Float`, `Int`, `Choice` or `Bool` by name, or Propulate's tuples.
        trials: how many in all, those of before a resume included.
        seed: of the search, and of the training of each trial.
        algorithm: what breeds trials, such as ``evolution`` or ``cma-es``; or a factory of one's own.
        islands: how many, or an `Islands` with more to say.
        stopping: the rule that ends trials early, such as ``asha:eta=3`` or ``patience:5``; or a rule of one's own.
        objectives: how many losses the objective returns.
        workers: how many are started; None: this world is the only one, unless ``ranks_per_worker`` is given.
        ranks_per_worker: a number, or one for each worker.
        run_dir: where the search writes its files; None: a new directory under ``runs``.
        resume: go on with the search in ``run_dir``.
        fresh: move the search in ``run_dir`` aside.
        retries: further attempts at a trial that died by a kill or a hang. An error of its own is not tried again.
        keep_trials: of how many trials, the best ones, checkpoints are kept; None: of all.
        inherit_weights: a trial begins with the weights of the first of its parents that has a checkpoint.
        time_limit_s: seconds after which no trial begins.
        hang_after_s: seconds without progress after which a trial is ended; None: by its pace.

    Returns:
        What came out.

    Raises:
        SettingError: if the search cannot begin as asked for.
        LaunchError: if the workers it started have failed.
        SystemExit: with code 75, if it was asked to stop; it can be gone on with. On workers that are done, with 0.
    """
    searched = Space.of(space)
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
    )
    world = World.from_env(os.environ)
    if (told := os.environ.get(SEARCH)) is not None:
        return _as_worker(objective, searched, settings, world, json.loads(told))
    sizes = _sizes(workers, ranks_per_worker)
    if world.size == 1 and sizes is not None:
        directory = open_directory(run_dir, "search", datetime.now(), resume=resume, fresh=fresh)
        return _start_workers(objective, searched, settings, directory, sizes, hang_after_s)
    return _alone(objective, searched, settings, world, run_dir, resume=resume, fresh=fresh)


def _sizes(workers: int | None, ranks_per_worker: int | Sequence[int]) -> tuple[int, ...] | None:
    """How many ranks each worker is to have; None: no workers are to be started."""
    if isinstance(ranks_per_worker, int):
        if workers is None and ranks_per_worker == 1:
            return None
        return worker_sizes(workers or 1, (ranks_per_worker,))
    return worker_sizes(workers or len(ranks_per_worker), tuple(ranks_per_worker))


def worker_sizes(workers: int, ranks: Sequence[int]) -> tuple[int, ...]:
    """How many ranks each of ``workers`` has, of one number for all, or one for each.

    Raises:
        SettingError: if they do not fit.
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
    told: Mapping[str, Any],
) -> SearchResult:
    """As one rank of a worker that the driver has started."""
    directory = SearchDirectory(Path(told["directory"]))
    if _carried_out:
        raise SettingError(
            f"this script calls lockstep.tune once more, after the search in {directory.path}: `lockstep tune` carries "
            "out one search. Start the script with python, where each tune(...) is a search of its own, or make it two "
            "scripts"
        )
    settings = settings.with_options(told["options"])
    worker, workers = int(told["worker"]), int(told["workers"])
    # Late, for it imports torch.
    from lockstep.tune.trial_ranks import open_channel

    with open_channel(world) as (channel, stops):
        began_s = float(told["began_s"])
        options = told["options"]
        is_over = _evaluate(
            objective, space, settings, world, directory, worker, workers, channel, stops, began_s, options
        )
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
    from lockstep.tune.trial_ranks import open_channel

    with open_channel(world) as (channel, stops), contextlib.ExitStack() as stack:
        path, worker = "", 0
        if world.leads:
            if run_dir is None and world.run_dir is not None:
                # Of a launcher that starts its ranks again, and then the search is there.
                directory = SearchDirectory(Path(world.run_dir, "search"))
                directory.path.mkdir(exist_ok=True)
                directory.unfinish()
            else:
                goes_on = resume or world.generation > 0
                directory = open_directory(run_dir, _script(), datetime.now(), resume=goes_on, fresh=fresh)
            worker = stack.enter_context(directory.being_worker())
            path = str(directory.path)
        directory = SearchDirectory(Path(channel.tell(path)))
        _evaluate(objective, space, settings, world, directory, worker, 1, channel, stops, time.time(), {})
        return load(directory.path)


def _evaluate(
    objective: Callable[..., object],
    space: Space,
    settings: SearchSettings,
    world: World,
    directory: SearchDirectory,
    worker: int,
    workers: int,
    channel: RankChannel,
    stops: StopSignals,
    began_s: float,
    options: Mapping[str, Any],
) -> bool:
    """Evaluate trials; returns whether this worker is to say that the search is over."""
    # Late, for it imports torch.
    from lockstep.tune.search_worker import SearchWorker
    from lockstep.tune.trial_ranks import Objective, evaluate_trials

    called = Objective.of(objective)
    _compare_ranks(space, settings, channel)
    with contextlib.ExitStack() as stack:
        leader: SearchWorker | None = None
        if world.leads:
            directory.begin(space, settings, workers, options)
            leader = SearchWorker(
                directory,
                worker,
                ranks=world.size,
                space=space,
                settings=settings,
                workers=workers,
                death=Death.read(directory.worker(worker), world.generation),
                limit_at_s=math.inf if settings.time_limit_s is None else began_s + settings.time_limit_s,
                leave_at_s=_job_stop_at_s(),
            )
            stack.enter_context(contextlib.closing(leader))
        is_over = evaluate_trials(directory, called, space, settings, channel, stops, leader)
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
            _as_worker(objective, space, settings, World.from_env(os.environ), json.loads(os.environ[SEARCH]))
        except SystemExit as end:
            if end.code != EXIT_OK:
                raise

    request = SearchRequest(
        Function(be_rank), directory, sizes, hang_after_s=hang_after_s, again="tune(..., resume=True)"
    )
    code = Driver(request, sys.stdout, sys.stderr).run()
    if code == EXIT_STOPPED:
        raise SystemExit(code)
    if code != EXIT_OK:
        raise LaunchError(f"the search in {directory.path} has failed; what it said is above")
    return load(directory.path)


def _compare_ranks(space: Space, settings: SearchSettings, channel: RankChannel) -> None:
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
