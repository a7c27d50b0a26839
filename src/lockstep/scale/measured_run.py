"""One run of the user's script that is measured for some steps, through the launcher like any other."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from lockstep.formatting import duration
from lockstep.launch import Module, Script, first_failure
from lockstep.launch_contract import EXIT_KILLED, EXIT_OK, MEASURE
from lockstep.step_record import MeasureRequest, RankRecord

#: In the words of CUDA's allocator, of the CPU's and of Python.
_OUT_OF_MEMORY = re.compile(r"out of memory|OutOfMemoryError|MemoryError|can't allocate memory|Cannot allocate memory")
_LAST_LINES = 3  # of the launcher, where no rank has said why it failed


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
        code, said = launch_quietly(_command(run, run_dir), _environment(request), run.time_limit_s)
        if code is None:
            return FailedRun(f"not done after {duration(run.time_limit_s)}", unmeasured=True)
        if code != EXIT_OK:
            return failure_of(run_dir, code, said)
        found = tuple(RankRecord.read(path) for path in sorted(records.glob("rank-*.json")))
        if not found or not all(record.steps for record in found):
            cause = "no step was measured: the script trains in no loop over run.train(...)"
            return FailedRun(cause, unmeasured=True)
        traces = tuple(path.read_bytes() for path in sorted((run_dir / "profile").glob("*.json.gz"), key=_rank_of))
        return Records(found, traces, _children_cpu_s() - before)


def launch_quietly(options: Sequence[str], env: Mapping[str, str], time_limit_s: float) -> tuple[int | None, str]:
    """Carry out ``lockstep run`` with ``options``: its exit code, None if its time was over, and what it said itself.

    What its ranks print goes nowhere. When this returns or raises, none of its processes is left.
    """
    with subprocess.Popen(
        [sys.executable, "-m", "lockstep", "run", *options],
        env=dict(env),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
    ) as launcher:
        try:
            _, said = launcher.communicate(timeout=time_limit_s)
        except BaseException as error:
            # Not killed: it has ranks to end.
            launcher.terminate()
            _, said = launcher.communicate()
            if isinstance(error, subprocess.TimeoutExpired):
                return None, said
            raise
    return launcher.returncode, said


def _command(run: MeasuredRun, run_dir: Path) -> list[str]:
    settings = {"track": "none", "save_every": "none", **run.settings}
    words = [word for name, value in settings.items() for word in ("--set", f"{name}={value}")]
    module = ["-m"] if isinstance(run.program, Module) else []
    ranks = ["--standalone", "--nproc-per-node", str(run.ranks), "--run-dir", str(run_dir)]
    return [*ranks, *words, *module, run.program.name, *run.program.args]


def _environment(request: MeasureRequest) -> dict[str, str]:
    return {**os.environ, MEASURE: request.to_text(), "LOCKSTEP_VIEW": "silent"}


def failure_of(run_dir: Path, code: int, said: str) -> FailedRun:
    """Why a run in ``run_dir`` ended with ``code``, of which the launcher ``said`` something."""
    failure = first_failure(run_dir)
    if failure is not None:
        first_line = failure.message.partition("\n")[0]
        cause = f"rank {failure.rank}: {failure.kind.rpartition('.')[2]}: {first_line}"
        return FailedRun(cause, _OUT_OF_MEMORY.search(f"{failure.kind}: {failure.message}") is not None)
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    cause = " ".join(lines[-_LAST_LINES:]).removeprefix("lockstep run: ") or f"exit code {code}"
    return FailedRun(cause, code == EXIT_KILLED or _OUT_OF_MEMORY.search(cause) is not None)


def _children_cpu_s() -> float:
    """CPU time of all processes that this one has started and that have ended."""
    times = os.times()
    return times.children_user + times.children_system


def _rank_of(trace: Path) -> int:
    return int(trace.name.partition("-rank")[2].partition(".")[0])
