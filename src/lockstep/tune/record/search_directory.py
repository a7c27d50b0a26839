"""The run directory of a search: its files, and the locks that say which workers are running.

RUN/search.json           what is searched
RUN/claims                which worker has which trial
RUN/planned.json          trials that users have enqueued, and repeats, by the numbers that are bound to them
RUN/warm_start.json       what is known from other searches
RUN/journal/              a file for each worker, and a lock that its process holds for as long as it lives
RUN/finished.json         which worker has recorded the end of the search
RUN/workers/0000/         the run directory of a worker: logs, failures, reports of hangs; death.json: how it died
RUN/trials/00000/         the files of a trial: metrics, checkpoints
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Self

from lockstep.errors import SettingError
from lockstep.launch import RankExit, failure_line, how_it_ended, next_generation
from lockstep.records import JsonRecord, from_known, of_kind, read_object
from lockstep.small_files import create_text, replace_text, unused_path
from lockstep.tune.record.journal import SEARCH_FILE, SearchPlan, journal_file, read_search, try_lock
from lockstep.tune.record.planned_trials import enqueue
from lockstep.tune.record.warm_start import WarmStart
from lockstep.tune.search import Space
from lockstep.tune.search_settings import FIXED, SearchSettings

_ENDING_S = 5.0
_LOOK_S = 0.2
_FINISHED = "finished.json"


@dataclass(frozen=True, slots=True)
class SearchDirectory:
    """The directory that holds the files of a search."""

    path: Path

    def trial(self, number: int) -> Path:
        """The directory of a trial."""
        return self.path / "trials" / f"{number:05d}"

    def worker(self, worker: int) -> Path:
        """The run directory of a worker."""
        return self.path / "workers" / f"{worker:04d}"

    @contextlib.contextmanager
    def being_worker(self) -> Iterator[int]:
        """Hold the lock of the first worker that does not run; gives the worker's number.

        Raises:
            SettingError: if the file system has no locks.
        """
        number, lock = 0, self._lock(0)
        while lock is None:
            number += 1
            lock = self._lock(number)
        try:
            yield number
        finally:
            os.close(lock)

    def is_gone(self, worker: int) -> bool:
        """Whether ``worker`` does not run now."""
        lock = self._lock(worker)
        if lock is None:
            return False
        os.close(lock)
        # A rank may outlive a driver that was killed for a moment.
        path = journal_file(self.path, worker)
        if not path.exists():
            return True
        file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            return try_lock(file)
        finally:
            os.close(file)

    def is_alive(self) -> bool:
        """Whether any worker of this search runs now."""
        locks = self.path.glob("journal/worker-*.lock")
        return any(not self.is_gone(int(path.stem.removeprefix("worker-"))) for path in locks)

    def begin(self, space: Space, settings: SearchSettings, workers: int, options: Mapping[str, object]) -> None:
        """Write the space, the settings and what is enqueued, or compare them with those that were written before.

        Args:
            space: what is searched.
            settings: of the search.
            workers: how many it has, as far as is known.
            options: those of the settings that the command line said, for workers that join (`options`).

        Raises:
            SettingError: if the directory holds a search over another space, or with another seed or number of
                objectives, or was begun with the trials of other searches.
        """
        written = settings.to_json() | {"workers": workers, "options": dict(options)}
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        if told := WarmStart.begin(self.path, space, settings.objectives, settings.warm_start).told:
            written["warm_start"] = {source: dict(found) for source, found in told.items()}
        plan = SearchPlan(space.to_json(), written)
        if SearchPlan.read(self.path) is None and plan.write(self.path):
            enqueue(self.path, settings.enqueue, again=False)
            return
        before = SearchPlan.read(self.path)
        assert before is not None, "it was there, or was written"
        if json.dumps(before.space) != json.dumps(plan.space):
            raise SettingError(
                f"the search in {self.path} is over another space: {_difference(before.space, plan.space)}. Give the "
                "same space, or another --run-dir, or begin again with --fresh"
            )
        for name in FIXED:
            if before.settings.get(name) != written[name]:
                raise SettingError(
                    f"the search in {self.path} was begun with {name}={before.settings.get(name)}, and is asked to go "
                    f"on with {name}={written[name]}; give the same, another --run-dir, or --fresh"
                )
        if before.settings != json.loads(json.dumps(written)):
            plan.replace(self.path)
        enqueue(self.path, settings.enqueue, again=False)

    def options(self) -> Mapping[str, Any]:
        """What the command line says of the settings of the search that runs here; waits until that has begun."""
        while (plan := SearchPlan.read(self.path)) is None and self.is_alive():
            time.sleep(_LOOK_S)
        return {} if plan is None else plan.settings.get("options", {})

    def settings(self) -> Mapping[str, Any]:
        """The settings of the search that has begun here, as they are written."""
        plan = SearchPlan.read(self.path)
        return {} if plan is None else plan.settings

    def finish(self, worker: int, log_bytes: int) -> bool:
        """Record that all trials have ended; returns whether this worker is the first that records it.

        Args:
            worker: the number of this worker.
            log_bytes: length of its leader's log; what the script prints after the search begins there.
        """
        text = json.dumps({"worker": worker, "log_bytes": log_bytes})
        if create_text(self.path / _FINISHED, text):
            return True
        if (self.finished() or {}).get("worker") != worker:
            return False
        replace_text(self.path / _FINISHED, text)
        return True

    def finished(self) -> dict[str, int] | None:
        """What `finish` has recorded; None before that."""
        try:
            told: dict[str, int] = of_kind(dict[str, int], read_object(self.path / _FINISHED), _FINISHED)
        except (OSError, ValueError):
            return None
        return told if told.keys() >= {"worker", "log_bytes"} else None

    def unfinish(self) -> None:
        """Remove the record of `finish`: the search continues, perhaps with more trials."""
        (self.path / _FINISHED).unlink(missing_ok=True)

    def _lock(self, worker: int) -> int | None:
        """A descriptor that holds the lock of ``worker``; None if another process holds it."""
        path = journal_file(self.path, worker).with_suffix(".lock")
        path.parent.mkdir(parents=True, exist_ok=True)
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        locked = False
        try:
            locked = try_lock(file)
        finally:
            if not locked:
                os.close(file)
        return file if locked else None


@dataclass(frozen=True, slots=True)
class Search:
    """What is searched, how, and where it is recorded."""

    space: Space
    settings: SearchSettings
    directory: SearchDirectory


@dataclass(frozen=True, slots=True)
class WorkerPlacement(JsonRecord):
    """Which worker of which search a process is a part of, as its driver tells it."""

    directory: str  #: of the search
    worker: int  #: its number
    workers: int  #: of the search, without those that join later
    began_s: float  #: when the driver began, in seconds since 1970
    options: dict[str, Any]  #: settings of the command line, over those of the script


def open_directory(
    run_dir: str | os.PathLike[str] | None, name: str, now: datetime, *, resume: bool, fresh: bool
) -> SearchDirectory:
    """The directory for a search that begins or is resumed; a new one has mode 0700, as that of a run.

    Args:
        run_dir: None: a new one under ``runs``.
        name: of the script, with which the name of such a new one begins.
        now: the time, which is the rest of that name.
        resume: continue the search in the directory.
        fresh: move the search in the directory aside.

    Raises:
        SettingError: if the directory holds a search and neither is asked for, if a search runs in it, if it holds
            other files, or if it is a file.
    """
    if resume and fresh:
        raise SettingError("--resume and --fresh contradict each other; give one of them")
    if run_dir is None:
        if resume:
            raise SettingError("--resume: give the search to resume, with --run-dir")
        return SearchDirectory(_new(Path("runs").absolute() / f"{name}-{now:%Y%m%d-%H%M%S}"))
    path = Path(run_dir).absolute()
    directory = SearchDirectory(path)
    if path.exists() and not path.is_dir():
        raise SettingError(f"--run-dir {os.fspath(run_dir)} is a file; give a directory")
    if not path.exists() or not any(path.iterdir()):
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        return directory
    if not is_search(path) and not (path / "journal").exists():
        raise SettingError(f"--run-dir {os.fspath(run_dir)} is not empty and holds no search (no {SEARCH_FILE})")
    until_s = time.monotonic() + _ENDING_S
    # The processes of a search that was just killed may take a moment to end.
    while (is_alive := directory.is_alive()) and time.monotonic() < until_s:
        time.sleep(0.1)
    if is_alive:
        raise SettingError(
            f"a search runs in {os.fspath(run_dir)} now; add workers to it with lockstep tune --join, or give another "
            "--run-dir"
        )
    if fresh:
        path.rename(unused_path(path.with_name(f"{path.name}-before-{now:%Y%m%d-%H%M%S}")))
        path.mkdir(mode=0o700)
        return directory
    if not resume:
        record = read_search(path) if is_search(path) else None
        ended = sum(trial.state != "running" for trial in record.trials) if record is not None else 0
        raise SettingError(
            f"--run-dir {os.fspath(run_dir)} holds a search of which {ended} trials have ended: go on with --resume, "
            "or begin a new one with --fresh, which moves the old one aside"
        )
    directory.unfinish()
    return directory


def is_search(run_dir: Path) -> bool:
    """Whether the directory of a run is that of a search."""
    return (run_dir / SEARCH_FILE).exists()


def join_directory(run_dir: str | None, within_s: float) -> SearchDirectory:
    """The directory of a search that runs, for further workers.

    Args:
        run_dir: of the search.
        within_s: how long to wait for the search to begin, in seconds.

    Raises:
        SettingError: if ``run_dir`` is None, or no search runs there by then.
    """
    if run_dir is None:
        raise SettingError("--join: give the search to join, with --run-dir")
    directory = SearchDirectory(Path(run_dir).absolute())
    until_s = time.monotonic() + within_s
    while not (is_alive := directory.is_alive()) and time.monotonic() < until_s:
        time.sleep(_LOOK_S)
    if not is_alive:
        raise SettingError(f"no search runs in {run_dir}; begin one: lockstep tune --run-dir {run_dir} search.py")
    return directory


def _new(path: Path) -> Path:
    path = unused_path(path)
    path.mkdir(mode=0o700, parents=True)
    return path


def _difference(before: Mapping[str, object], now: Mapping[str, object]) -> str:
    names = [name for name in {**before, **now} if before.get(name) != now.get(name)]
    if not names:
        return "its dimensions come in another order"
    name = names[0]
    return f"{name} was {json.dumps(before.get(name))} and is {json.dumps(now.get(name))}"


@dataclass(frozen=True, slots=True)
class Death:
    """The end of one generation of a worker that failed."""

    generation: int
    at_s: float  #: seconds since 1970
    reason: str  #: in one line
    #: The objective raised an error, which it would raise again; False after a kill or a hang.
    is_of_objective: bool

    @classmethod
    def of(cls, exits: Sequence[RankExit], generation: int, at_s: float) -> Self:
        """The death of a generation whose ranks ended by ``exits``."""
        failure = failure_line(exits)
        return cls(generation, at_s, failure.text, failure.raised)

    @classmethod
    def within_trial(cls, worker_dir: Path, at_s: float) -> Self:
        """The death of a worker whose objective has ended the process as if all were well."""
        reason = "the objective ended its process with exit code 0"
        return cls(next_generation(worker_dir) - 1, at_s, reason, is_of_objective=True)

    @classmethod
    def of_launcher(cls, worker_dir: Path, code: int, at_s: float) -> Self:
        """The death of a worker whose launcher has ended with ``code`` in the middle of a trial, and its ranks with it.

        A trial may do that to its launcher, and would do it again at each attempt.
        """
        reason = f"the launcher of its worker {how_it_ended(code)}"
        return cls(next_generation(worker_dir) - 1, at_s, reason, is_of_objective=False)

    def write(self, worker_dir: Path) -> None:
        """Write it into the run directory of the worker."""
        replace_text(worker_dir / "death.json", json.dumps(asdict(self)))

    @classmethod
    def read(cls, worker_dir: Path, generation: int) -> Self | None:
        """How the generation before ``generation`` died; None if it did not die, or was stopped."""
        try:
            death = from_known(cls, read_object(worker_dir / "death.json"))
        except (OSError, ValueError):
            return None
        return death if death.generation == generation - 1 else None
