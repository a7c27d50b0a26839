"""`--trace`: one more run of a variant, of which each rank's steps are recorded by `torch.profiler`."""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from lockstep.errors import LaunchError
from lockstep.launch import Machine
from lockstep.report import new_figure, save_svg
from lockstep.scale.bench import BenchPlan, look
from lockstep.scale.bench_report import PART_COLOURS
from lockstep.scale.measured_run import FailedRun, MeasuredRun, measure
from lockstep.scale.sweep import BatchSizes, Variant, start_of
from lockstep.scale.timeline import (
    Span,
    clock_offsets,
    communication,
    laid_out,
    median_and_worst,
    merge_traces,
    straggler_lines,
    stragglers,
)
from lockstep.step_record import RankRecord

#: Recorded steps: enough for a median, few enough for a file that a browser opens.
_RECORDED = 10
_LANE = 0.38  # of the height of a rank
_SENDS = "#59a14f"

Lanes = dict[int, tuple[list[Span], list[Span]]]
"""By rank: what it computes, with exposed communication among it, and what it sends, both since the step began."""


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


def lanes_of(records: Sequence[RankRecord], sends: Mapping[int, Sequence[Span]], place: int) -> Lanes:
    """The lanes of the step at ``place`` of each record. A pure function."""
    offsets = clock_offsets(records)
    begins = [r.began_at - offset for r, offset in zip(records, offsets, strict=True)]
    starts = [begin + r.steps[place].began_s for r, begin in zip(records, begins, strict=True)]
    origin = min(starts)
    lanes: Lanes = {}
    for record, begin in zip(records, begins, strict=True):
        own = [_shifted(span, begin - origin) for span in laid_out(record.steps[place])]
        end = max(span.end_s for span in own)
        sent = [_shifted(span, -origin) for span in sends.get(record.rank, ())]
        within = [span for span in sent if span.end_s > 0 and span.start_s < end]
        lanes[record.rank] = ([span for span in own if span.end_s > span.start_s], within)
    return lanes


def _shifted(span: Span, by_s: float) -> Span:
    return Span(span.name, span.start_s + by_s, span.end_s + by_s)


def draw_timeline(steps: Mapping[str, Lanes], path: Path, title: str) -> None:
    """Write the picture of some steps, by their titles, to ``path``, and what it shows as JSON beside it.

    Raises:
        SettingError: if matplotlib is not installed; the JSON file is there then.
    """
    shown = {
        name: {
            rank: {"computes": [asdict(s) for s in own], "sends": [asdict(s) for s in sent]}
            for rank, (own, sent) in lanes.items()
        }
        for name, lanes in steps.items()
    }
    path.with_suffix(".json").write_text(json.dumps(shown, indent=1) + "\n", encoding="utf-8")
    ranks = max(len(lanes) for lanes in steps.values())
    drawing = new_figure(11, 1.5 + 0.9 * ranks * len(steps))
    for axes, (name, lanes) in zip(
        drawing.subplots(len(steps), squeeze=False, sharex=True)[:, 0], steps.items(), strict=True
    ):
        _draw_step(axes, lanes)
        axes.set_title(name, loc="left", fontsize="medium")
    axes.set_xlabel("ms")
    handles = [_patch(axes, part, colour) for part, colour in PART_COLOURS.items()]
    drawing.legend(
        handles=[*handles, _patch(axes, "sends", _SENDS)], loc="outside lower center", ncols=7, fontsize="small"
    )
    drawing.suptitle(title)
    save_svg(drawing, path)


def _draw_step(axes: Any, lanes: Lanes) -> None:
    for rank, (own, sent) in lanes.items():
        for span in own:
            exposed = span.name == "exposed"
            lane = rank + _LANE if exposed else rank
            _bar(axes, span, lane, PART_COLOURS[span.name], hatch="///" if exposed else None)
        for span in sent:
            _bar(axes, span, rank + _LANE, _SENDS, zorder=1)
    axes.set_yticks([rank + _LANE / 2 for rank in lanes], [f"rank {rank}" for rank in lanes])
    axes.invert_yaxis()


def _bar(axes: Any, span: Span, lane: float, colour: str, hatch: str | None = None, zorder: int = 2) -> None:
    width = 1e3 * (span.end_s - span.start_s)
    axes.barh(
        lane, width, _LANE, 1e3 * span.start_s, color=colour, hatch=hatch, edgecolor="white", lw=0.4, zorder=zorder
    )


def _patch(axes: Any, name: str, colour: str) -> object:
    return axes.barh(0, 0, color=colour, hatch="///" if name == "exposed" else None, edgecolor="white", label=name)
