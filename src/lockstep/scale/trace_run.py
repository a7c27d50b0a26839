"""`--trace`: one more run of a variant, of which each rank's steps are recorded by `torch.profiler`."""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from lockstep.errors import LaunchError
from lockstep.launch import Machine
from lockstep.scale.bench import BenchPlan, look
from lockstep.scale.measured_run import FailedRun, MeasuredRun, measure
from lockstep.scale.sweep import BatchSizes, Variant, start_of
from lockstep.scale.timeline import (
    communication,
    median_and_worst,
    merge_traces,
    straggler_lines,
    stragglers,
)
from lockstep.scale.timeline_picture import Lanes, draw_timeline, lanes_of

#: Recorded steps: enough for a median, few enough for a file that a browser opens.
_RECORDED = 10


@dataclass(frozen=True, slots=True)
class Timeline:
    """What was recorded."""

    merged: Path  #: a Chrome trace of all ranks
    picture: Path
    lines: tuple[str, ...]  #: who was late, for the user
    steps: Mapping[str, Lanes]  #: that the picture shows


def trace(plan: BenchPlan, variant: Variant, out: Path) -> Timeline:
    """Record ten steps of ``variant``, after as many others, and write ``trace.json.gz`` and the picture to ``out``.

    Recording slows steps down, above all short ones on a CPU: proportions are to be read here, and times in the table.

    Raises:
        LaunchError: if the variant fails.
        SettingError: if matplotlib is not installed; the trace is there then.
    """
    first = look(plan.program, plan.sweep.settings, time_limit_s=plan.time_limit_s)
    sizes = None if isinstance(first, FailedRun) else BatchSizes(first.global_batch, first.micro_batch)
    start = start_of(variant, plan.sweep, sizes, on_gpu=Machine.detect(os.environ).gpus > 0)
    begins = _RECORDED
    settings = {**start.settings, "profile": f"steps {begins}:{begins + _RECORDED}"}
    ends = begins + _RECORDED
    measured = measure(MeasuredRun(plan.program, start.ranks, settings, ends + 1, time_limit_s=plan.time_limit_s))
    if isinstance(measured, FailedRun):
        raise LaunchError(f"{variant} could not be recorded: {measured.cause}")
    if len(measured.traces) != len(measured.ranks):
        raise LaunchError(f"{variant} has no trace: it ended before step {begins + 1}; give it more data or epochs")
    records = [replace(r, steps=tuple(s for s in r.steps if begins <= s.step < ends)) for r in measured.ranks]
    merged = merge_traces([json.loads(gzip.decompress(one)) for one in measured.traces], records)
    file = out / "trace.json.gz"
    file.write_bytes(gzip.compress(json.dumps(merged).encode(), mtime=0))
    sends = communication(merged, records)
    median, worst = median_and_worst(records)
    shown = {
        f"{name}: step {records[0].steps[place].step + 1}": lanes_of(records, sends, place)
        for name, place in (("a median step", median), ("the worst step", worst))
    }
    found = stragglers(records)
    draw_timeline(shown, out / "timeline.svg", f"{Path(plan.program.name).name}, {variant}")
    return Timeline(file, out / "timeline.svg", tuple(straggler_lines(found, len(records[0].steps))), shown)
