"""Run directories as runs leave them, written without one, with any text at any place that a run can fill."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path

from lockstep.memory_use import MemoryUse
from lockstep.report import MetricsFile, RanksFile, RankStatus, Status, StatusFile

BEGAN_S = 1_795_600_000.0


def _moment(wall_s: float) -> str:
    return datetime.fromtimestamp(wall_s).astimezone().isoformat()


def write_run(run_dir: Path, said: str = "x", *, steps: int = 40, metric: str = "loss") -> Path:
    """A run of two generations, in which all that others may say is ``said``."""
    run_dir.mkdir(parents=True, exist_ok=True)
    start = {
        "command": said,
        "time": "2026-11-25T10:00:00+00:00",
        "settings": {"save_every": {"value": said, "source": said}},
        "versions": {said: said},
        "source": {"commit": said, "branch": said, "dirty": True, "untracked": [said], "patch": "source.patch"},
        "nodes": {said: {"cpu": said, "gpus": [{"name": said}]}},
    }
    generations = [
        {"number": number, "ranks": 2 - number, "hosts": [said], "time": _moment(BEGAN_S - 8 + 70 * number)}
        for number in (0, 1)
    ]
    about = {"format": 1, "starts": [start], "generations": generations}
    (run_dir / "run.json").write_text(json.dumps(about))
    clock = iter(float(BEGAN_S + 3 * step) for step in range(10**6))
    metrics = MetricsFile(run_dir / "metrics.jsonl", step=0, say=print, wall=lambda: next(clock))
    for step in range(1, steps + 1):
        metrics.write(step, 1, {metric: 1 / step, "accuracy": float("nan") if step == 3 else step / steps})
    metrics.close()
    StatusFile(run_dir / "status.json").write(Status(step=steps, loss=1 / steps, samples_per_s=120.0, late=said))
    ranks = [RankStatus(rank, steps, said, said, 0.1 * rank, 0.5, MemoryUse(1 << 30, 2 << 30)) for rank in (0, 1)]
    RanksFile(run_dir, 0).write(ranks)
    line = said.encode(errors="backslashreplace").decode()
    for name in ("hangs/hang-1.txt", "logs/rank-0000.log", "faults.txt", "source.patch"):
        (run_dir / name).parent.mkdir(exist_ok=True)
        (run_dir / name).write_text(f"{line}\t{BEGAN_S + 61}\t{line}\n")
    failures = run_dir / "failures" / "generation-0"
    failures.mkdir(parents=True, exist_ok=True)
    (failures / "rank-0000.json").write_text(
        json.dumps({"rank": 0, "kind": said, "message": said, "traceback": said * 90})
    )
    return run_dir
