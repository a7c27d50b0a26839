"""`--trace`: one more run of a variant, of which each rank's steps are recorded by `torch.profiler`.

One timeline of all ranks: their traces merged on one clock, and who was late in a step, and why. Pure functions.
"""

from __future__ import annotations

import gzip
import json
import os
import re
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from lockstep.errors import LaunchError
from lockstep.formatting import plural
from lockstep.launch import Machine
from lockstep.report import new_figure, save_svg
from lockstep.scale.bench import BenchPlan, look
from lockstep.scale.bench_report import PART_COLOURS
from lockstep.scale.measured_run import FailedRun, MeasuredRun, measure
from lockstep.scale.sweep import BatchSizes, Variant, start_of
from lockstep.step_record import RankRecord, StepTimes

#: Recorded steps: enough for a median, few enough for a file that a browser opens.
_RECORDED = 10
_LANE = 0.38  # of the height of a rank
_SENDS = "#59a14f"

Cause = Literal["data", "compute", "host"]
#: What a late rank spent its time with.
MEANING: Mapping[Cause, str] = {
    "data": "its loader had nothing ready",
    "compute": "it computed longer",
    "host": "its process was not running",
}
#: How traces call what moves gradients: gloo's and NCCL's collectives, and NCCL's kernels.
_COMMUNICATION = re.compile(r"(gloo:|nccl:|ncclDevKernel|ncclKernel)")
#: A rank is late if it is by this part of the step behind what is usual.
_LATE = 0.05
_IDS = ("id", "bind_id")


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


@dataclass(frozen=True, slots=True)
class Span:
    """Something that took from ``start_s`` to ``end_s``, since 1970 on the clock of rank 0."""

    name: str
    start_s: float
    end_s: float


Lanes = dict[int, tuple[list[Span], list[Span]]]
"""By rank: what it computes, with exposed communication among it, and what it sends, both since the step began."""


@dataclass(frozen=True, slots=True)
class Straggler:
    """The rank for which the others waited in a step."""

    step: int
    rank: int
    late_s: float  #: behind the median of the ranks
    cause: Cause


def clock_offsets(records: Sequence[RankRecord]) -> list[float]:
    """By how much each rank's clock is ahead of rank 0's, in seconds.

    Ranks of one host share a clock. Those of others have left each step's reduction together: the offset is the median
    of the differences between these moments, right to about the time that a small message takes.
    """
    first = records[0]
    ends = [[record.began_at + span.end_s for span in _exposed_ends(record)] for record in records]
    return [
        0.0 if record.host == first.host else statistics.median(b - a for a, b in zip(ends[0], own, strict=False))
        for record, own in zip(records, ends, strict=True)
    ]


def _exposed_ends(record: RankRecord) -> Iterator[Span]:
    for step in record.steps:
        yield from (span for span in laid_out(step) if span.name == "exposed")


def laid_out(step: StepTimes) -> list[Span]:
    """The parts of a step one after another, since the first step began; also those that took no time."""
    named = [
        (name, seconds)
        for each in zip(step.data_s, step.forward_s, step.backward_s, strict=True)
        for name, seconds in zip(("data", "forward", "backward"), each, strict=True)
    ]
    named += [("exposed", step.exposed_s), ("optimizer", step.optimizer_s), ("other", step.other_s)]
    spans, at = [], step.began_s
    for name, seconds in named:
        spans.append(Span(name, at, at + seconds))
        at += seconds
    return spans


def merge_traces(traces: Sequence[Mapping[str, Any]], records: Sequence[RankRecord]) -> dict[str, object]:
    """One Chrome trace of all ranks, each with processes of its own, on the clock of rank 0.

    Every rank gets one more process, whose lane shows the parts of its steps.

    Args:
        traces: of each rank, as `torch.profiler` exports them.
        records: of each rank, in the same order.
    """
    offsets = clock_offsets(records)
    bases = [float(trace.get("baseTimeNanoseconds", 0)) / 1e3 for trace in traces]
    begins = [base - 1e6 * offset for base, offset in zip(bases, offsets, strict=True)]
    base, events = min(begins), list[dict[str, Any]]()
    processes: dict[tuple[int, Any], int] = {}
    for number, (trace, begin) in enumerate(zip(traces, begins, strict=True)):
        rank = records[number].rank
        for event in trace.get("traceEvents", ()):
            pid = processes.setdefault((rank, event.get("pid")), len(processes) + 1)
            moved = {**event, "pid": pid}
            if "ts" in event:
                moved["ts"] = float(event["ts"]) + begin - base
            for key in _IDS:
                if key in event:
                    moved[key] = f"rank {rank}: {event[key]}"
            if event.get("name") == "process_name":
                moved["args"] = {"name": f"rank {rank}: {event.get('args', {}).get('name', '')}"}
            events.append(moved)
        pid = processes.setdefault((rank, "parts"), len(processes) + 1)
        began_us = 1e6 * (records[number].began_at - offsets[number]) - base
        events += _part_events(records[number], pid, began_us)
    return {"traceEvents": events, "baseTimeNanoseconds": int(base * 1e3), "displayTimeUnit": "ms"}


def _part_events(record: RankRecord, pid: int, began_us: float) -> Iterator[dict[str, object]]:
    name = {"name": f"rank {record.rank}: parts of its steps"}
    yield {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": name}
    yield {"ph": "M", "name": "process_sort_index", "pid": pid, "tid": 0, "args": {"sort_index": record.rank}}
    for step in record.steps:
        for span in laid_out(step):
            if span.end_s > span.start_s:
                yield {
                    "ph": "X",
                    "cat": "step",
                    "name": span.name,
                    "pid": pid,
                    "tid": 0,
                    "ts": began_us + 1e6 * span.start_s,
                    "dur": 1e6 * (span.end_s - span.start_s),
                    "args": {"step": step.step + 1},
                }


def communication(merged: Mapping[str, Any], records: Sequence[RankRecord]) -> dict[int, list[Span]]:
    """By rank, when its trace says that gradients or parameters were moved, on the clock of rank 0."""
    base_s = merged["baseTimeNanoseconds"] / 1e9
    of_process = {
        event["pid"]: int(match[1])
        for event in merged["traceEvents"]
        if event.get("name") == "process_name" and (match := re.match(r"rank (\d+):", event["args"]["name"]))
    }
    found: dict[int, list[Span]] = {record.rank: [] for record in records}
    for event in merged["traceEvents"]:
        if event.get("ph") != "X" or not _COMMUNICATION.match(str(event.get("name", ""))):
            continue
        start_s = base_s + event["ts"] / 1e6
        span = Span(event["name"], start_s, start_s + event.get("dur", 0.0) / 1e6)
        if (rank := of_process.get(event["pid"])) is not None:
            found[rank].append(span)
    return found


def straggler(ranks: Sequence[StepTimes]) -> Straggler | None:
    """The rank for which the others waited in this step, by rank; None if none was late.

    It is the one whose data, forward and backward took longest. What took longer than the median of all ranks is the
    cause: waiting for data; computing, which takes CPU time; or the host, where wall time goes by and no CPU time,
    since something else ran in its place. On a GPU there is no CPU time to compare, so host is never said.
    """
    own = [sum(step.data_s) + step.compute_s for step in ranks]
    rank = max(range(len(own)), key=own.__getitem__)
    late_s = own[rank] - statistics.median(own)
    whole = statistics.median(step.total_s for step in ranks)
    if len(ranks) < 2 or late_s <= _LATE * whole:
        return None
    late = ranks[rank]
    data_s = sum(late.data_s) - statistics.median(sum(step.data_s) for step in ranks)
    longer_s = max(0.0, late.compute_s - statistics.median(step.compute_s for step in ranks))
    cpu = [step.cpu_s for step in ranks if step.cpu_s is not None]
    compute_s = longer_s
    if late.cpu_s is not None and len(cpu) == len(ranks):
        compute_s = min(longer_s, max(0.0, late.cpu_s - statistics.median(cpu)))
    excess: dict[Cause, float] = {"data": data_s, "compute": compute_s, "host": longer_s - compute_s}
    return Straggler(late.step, rank, late_s, max(excess, key=excess.__getitem__))


def stragglers(records: Sequence[RankRecord], first: int = 0) -> list[Straggler]:
    """Of each step from ``first`` on in which a rank was late."""
    steps = [step for step in zip(*(record.steps for record in records), strict=False) if step[0].step >= first]
    return [found for step in steps if (found := straggler(step)) is not None]


def straggler_lines(found: Sequence[Straggler], steps: int) -> list[str]:
    """What is to be said of ``found`` among so many steps."""
    if not found:
        return [f"no rank was late in {plural(steps, 'step')}"]
    lines = []
    for (rank, cause), times in Counter((each.rank, each.cause) for each in found).most_common(3):
        late_ms = 1e3 * statistics.median(e.late_s for e in found if (e.rank, e.cause) == (rank, cause))
        lines.append(
            f"rank {rank} was late in {times} of {plural(steps, 'step')}, by {late_ms:.3g} ms: {MEANING[cause]}"
        )
    return lines


def median_and_worst(records: Sequence[RankRecord], first: int = 0) -> tuple[int, int]:
    """Places in the records of the step of median duration, and of the longest one, from step ``first`` on."""
    steps = list(zip(*(record.steps for record in records), strict=False))
    long = {
        place: statistics.fmean(s.total_s for s in step) for place, step in enumerate(steps) if step[0].step >= first
    }
    by_duration = sorted(long or {0: 0.0}, key=lambda place: long.get(place, 0.0))
    return by_duration[(len(by_duration) - 1) // 2], by_duration[-1]
