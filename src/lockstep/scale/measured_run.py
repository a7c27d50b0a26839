"""One run of the user's script that is measured for some steps, through the launcher like any other."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from lockstep.launch import Module, QuietEnd, QuietRun, Script
from lockstep.launch_contract import EXIT_KILLED, EXIT_OK, MEASURE
from lockstep.step_record import MeasureRequest, RankRecord

#: In the words of CUDA's allocator, of the CPU's and of Python.
_OUT_OF_MEMORY = re.compile(r"out of memory|OutOfMemoryError|MemoryError|can't allocate memory|Cannot allocate memory")


@dataclass(frozen=True, slots=True)
class MeasuredRun:
    """What to start, and what to measure in it."""

    program: Script | Module
    ranks: int = 1
    settings: Mapping[str, str] = field(default_factory=dict)  #: over those of the script
    steps: int = 30
    gradients: bool = False
    memory: bool = False
    flops: bool = False
    waits: bool = False
    budget_s: float = 0.0
    sum_bytes: tuple[int, ...] = ()
    sum_budget_s: float = 60.0
    time_limit_s: float = 900.0  #: then it is ended, and has failed


@dataclass(frozen=True, slots=True)
class FailedRun:
    """Why there is nothing to tell."""

    cause: str  #: one line
    out_of_memory: bool = False
    unmeasured: bool = False  #: nothing went wrong: it did not come to a step that is measured, or not in time

    @classmethod
    def of(cls, end: QuietEnd) -> FailedRun:
        """Why a run that has ended so has failed."""
        if end.code is None:
            return cls(end.cause, unmeasured=True)
        if end.failure is not None:
            return cls(end.cause, _OUT_OF_MEMORY.search(f"{end.failure.kind}: {end.failure.message}") is not None)
        return cls(end.cause, end.code == EXIT_KILLED or _OUT_OF_MEMORY.search(end.cause) is not None)


@dataclass(frozen=True, slots=True)
class Records:
    """What the ranks have seen."""

    ranks: tuple[RankRecord, ...]  #: by rank; those of the first node, where there are several without a shared disk
    traces: tuple[bytes, ...] = ()  #: of `torch.profiler`, by rank, compressed; none where none was asked for
    own_cpu_s: float = 0.0  #: CPU time of all processes of the run


def measure(run: MeasuredRun) -> Records | FailedRun:
    """Carry out ``run``; nothing of it is left on disk. What it prints goes nowhere.

    The script is started with the settings that ``run`` has, and its own for everything else; no checkpoint is written
    and none is read. No tracker is told.
    """
    with tempfile.TemporaryDirectory(prefix="lockstep-bench-") as place:
        run_dir, records = Path(place, "run"), Path(place, "records")
        request = MeasureRequest(
            directory=str(records),
            steps=run.steps,
            gradients=run.gradients,
            memory=run.memory,
            flops=run.flops,
            waits=run.waits,
            budget_s=run.budget_s,
            sum_bytes=run.sum_bytes,
            sum_budget_s=run.sum_budget_s,
        )
        before = _children_cpu_s()
        end = QuietRun(
            run.program,
            run_dir,
            run.ranks,
            settings=run.settings,
            env={MEASURE: request.to_text()},
            time_limit_s=run.time_limit_s,
        ).carry_out()
        if end.code != EXIT_OK:
            return FailedRun.of(end)
        found = tuple(RankRecord.read(path) for path in sorted(records.glob("rank-*.json")))
        if not found or not all(record.steps for record in found):
            cause = "no step was measured: the script trains in no loop over run.train(...)"
            return FailedRun(cause, unmeasured=True)
        traces = tuple(path.read_bytes() for path in sorted((run_dir / "profile").glob("*.json.gz"), key=_rank_of))
        return Records(found, traces, _children_cpu_s() - before)


def _children_cpu_s() -> float:
    """CPU time of all processes that this one has started and that have ended."""
    times = os.times()
    return times.children_user + times.children_system


def _rank_of(trace: Path) -> int:
    return int(trace.name.partition("-rank")[2].partition(".")[0])
