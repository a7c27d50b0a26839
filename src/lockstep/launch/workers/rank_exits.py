"""What is found out about how ranks ended: their failure records, the ends of their logs, faults that were planned."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path

from lockstep.faults import Fault, FaultPlan
from lockstep.launch.diagnosis.error_record import Failure
from lockstep.launch.diagnosis.root_cause import RankExit
from lockstep.launch.host.timed_calls import FileThread
from lockstep.launch.job.request import Module, Script
from lockstep.launch.run_dir.run_directory import Job
from lockstep.launch.workers.generation import Generation
from lockstep.launch_contract import EXIT_OK, EXIT_STOPPED, FAULT_NOTES

_TAIL_BYTES = 4096


def described_endings(
    exited: Sequence[RankExit],
    current: Generation,
    job: Job,
    log_starts: Mapping[int, int],
    files: FileThread,
    hung: Mapping[int, Failure],
    memory_reason: Callable[[int], str],
) -> tuple[RankExit, ...]:
    """``exited`` with their failures, the ends of their logs, and why they may have been killed.

    Args:
        exited: all ranks of this node.
        current: their generation, with the failures that the launcher heard of. The file may say more, and the launcher
            hears more than a file system takes.
        job: whose they are.
        log_starts: by rank, the length of its log before this generation.
        files: reads them; what it cannot read in time is left out.
        hung: what stands for the failure of a rank that hung, by rank. What a rank says of its own accord counts more;
            that it then lost a peer, or that it had left before as if all were done, counts less.
        memory_reason: what memory has to do with it that a rank was killed.
    """
    paths = {ending.rank: (job.log(ending.rank), job.failure(current.number, ending.rank)) for ending in exited}
    nothing = dict[int, tuple[Failure | None, str]]()
    read = files.ask(lambda: _read_files(paths, log_starts), nothing, of=job.logs, urgent=True)
    planned = _planned_kills(job, files)
    endings = []
    for ending in exited:
        written, tail = read.get(ending.rank, (None, ""))
        failure = written or current.failures.get(ending.rank)
        if failure is None or failure.collateral or failure.ends_well:
            failure = hung.get(ending.rank, failure)
        killed = ending.status == -signal.SIGKILL
        lost = killed or (failure is not None and failure.lost_worker)
        described = replace(
            ending,
            planned=planned.get(ending.rank, "") if killed else "",
            failure=failure,
            log_tail="" if ending.status in (EXIT_OK, EXIT_STOPPED) else tail,
            memory=memory_reason(ending.rank) if lost and not ending.ended_by_us else "",
        )
        endings.append(described)
    return tuple(endings)


def _planned_kills(job: Job, files: FileThread) -> dict[int, str]:
    plan, notes = FaultPlan.parse(job.request.faults), job.run_dir / FAULT_NOTES
    kills = list[Fault]()
    if any(fault.kind == "kill" for fault in plan.faults):
        kills = files.ask(lambda: [one for one in plan.past(notes) if one.kind == "kill"], kills, of=notes)
    return {fault.rank: str(fault) for fault in kills}


def unused_store(endings: Iterable[RankExit], ranks: int, job: Job) -> str:
    """What to tell the user of ranks that ended well and never met: else nothing looks wrong. "" if nothing."""
    done = {ending.status for ending in endings} == {EXIT_OK}
    if not (done and ranks > 1 and isinstance(job.request.program, Script | Module)):
        return ""
    return (
        f"note: the {ranks} ranks never joined a process group: each has run the whole script by "
        "itself, and written what it writes. Ranks that train one model use lockstep.Run, or "
        "torch.distributed.init_process_group and DistributedDataParallel"
    )


def prepare_files(files: Sequence[tuple[Path, Path]], generation: int) -> list[int]:
    """Make each log and failure record ready for ``generation``; returns how long each log is."""
    starts = []
    for log, failure in files:
        failure.unlink(missing_ok=True)
        log.parent.mkdir(parents=True, exist_ok=True)
        # On a full disk, what was said before is not said again: how long the log is is known, too.
        with contextlib.suppress(OSError), log.open("a") as file:
            if generation or file.tell():
                file.write(f"--- generation {generation}, {datetime.now():%Y-%m-%d %H:%M:%S} ---\n")
        starts.append(log.stat().st_size if log.exists() else 0)
    return starts


def _read_files(
    files: Mapping[int, tuple[Path, Path]], starts: Mapping[int, int]
) -> dict[int, tuple[Failure | None, str]]:
    """Each rank's failure record, and the end of its log."""
    return {rank: (Failure.read(failure), _end_of(log, starts.get(rank, 0))) for rank, (log, failure) in files.items()}


def _end_of(log: Path, start: int) -> str:
    """The last lines of ``log``, of what was written since it was ``start`` bytes long; "" if it is gone."""
    try:
        with log.open("rb") as file:
            file.seek(max(start, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
            return file.read().decode(errors="replace")
    except OSError:
        return ""


def without_repeated_tracebacks(endings: Sequence[RankExit]) -> Sequence[RankExit]:
    """Endings small enough for a store: of those that failed alike, only the first one keeps its traceback."""
    seen: set[object] = set()
    small: list[RankExit] = []
    for ending in sorted(endings, key=lambda ending: ending.since_s):
        repeated = ending.failure is not None and ending.failure_key in seen
        seen.add(ending.failure_key)
        small.append(_without_traceback(ending) if repeated else ending)
    return small


def _without_traceback(ending: RankExit) -> RankExit:
    return replace(ending, failure=ending.failure and replace(ending.failure, traceback=""))
