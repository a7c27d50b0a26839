"""One timeline of all ranks: their traces merged on one clock, and who was late in a step, and why. Pure functions."""

from __future__ import annotations

import re
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from lockstep.formatting import plural
from lockstep.step_record import RankRecord, StepTimes

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
class Span:
    """Something that took from ``start_s`` to ``end_s``, since 1970 on the clock of rank 0."""

    name: str
    start_s: float
    end_s: float


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
