"""From what ranks have seen to the rows of a benchmark: medians, efficiency, cost. Pure functions."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from lockstep.cpu_use import CpuUse
from lockstep.scale.bench_result import PARTS, BenchRow, Measured
from lockstep.scale.measured_run import Records
from lockstep.scale.steady_state import median_interval, warm_up
from lockstep.step_record import StepTimes

#: An additional rank is worth it while it adds half of what the first one does.
_WORTH = 0.5


@dataclass(frozen=True, slots=True)
class RoundSeen:
    """One round of one variant."""

    records: Records
    use: CpuUse


@dataclass(frozen=True, slots=True)
class Prices:
    """What a device costs an hour."""

    per_hour: Mapping[str, float] = field(default_factory=dict)  #: by a word in the device's name
    currency: str = ""

    def of(self, device: str) -> float | None:
        """An hour of ``device``: the price whose name is in its name, in any case; the longest one."""
        named = [name for name in self.per_hour if name.lower() in device.lower()]
        return self.per_hour[max(named, key=len)] if named else None


def measured(rounds: Sequence[RoundSeen]) -> Measured | None:
    """What ``rounds`` of a variant say together; None if no step of them counts.

    Steps count after the warm-up of their round, if they hold a whole global batch and do not begin a pass. A step's
    duration is the mean of its ranks', which wait for each other.
    """
    series, parts, cut, steady, first = [], [], 0, True, []
    for seen in rounds:
        ranks = seen.records.ranks
        steps = list(zip(*(record.steps for record in ranks), strict=False))
        durations = [statistics.fmean(each.total_s for each in step) for step in steps]
        found = warm_up(durations)
        cut, steady = cut + found.steps, steady and found.steady
        whole = max(step[0].samples for step in steps)
        kept = [
            (step, seconds)
            for step, seconds in zip(steps[found.steps :], durations[found.steps :], strict=True)
            if step[0].samples == whole and not step[0].begins_pass
        ]
        first += [d for step, d in zip(steps, durations, strict=True) if step[0].begins_pass and step[0].step]
        if kept:
            series.append([seconds for _, seconds in kept])
            parts += [each for step, _ in kept for each in step]
    if not series:
        return None
    record, step_s = rounds[0].records.ranks[0], median_interval(series)
    return Measured(
        global_batch=record.global_batch,
        micro_batch=record.micro_batch,
        step_s=step_s,
        parts_s=parts_of(parts),
        peak_bytes=max(each.peak_bytes for seen in rounds for each in seen.records.ranks),
        steps=sum(map(len, series)),
        warm_up_steps=cut,
        steady=steady,
        first_step_s=max(0.0, statistics.median(first) - step_s.median) if first else 0.0,
        steps_per_epoch=record.steps_per_epoch,
        epochs=record.epochs,
        other_cores=statistics.fmean(seen.use.others for seen in rounds),
        disturbed=any(seen.use.disturbed for seen in rounds),
    )


def parts_of(steps: Sequence[StepTimes]) -> dict[str, float]:
    """The mean of each part of a step."""
    sums = {
        "data": [sum(step.data_s) for step in steps],
        "forward": [sum(step.forward_s) for step in steps],
        "backward": [sum(step.backward_s) for step in steps],
        "exposed": [step.exposed_s for step in steps],
        "optimizer": [step.optimizer_s for step in steps],
        "other": [step.other_s for step in steps],
    }
    return {part: statistics.fmean(sums[part]) for part in PARTS}


def with_times(row: BenchRow, price_per_hour: float | None) -> BenchRow:
    """``row`` with what follows from its own measurement."""
    seen = row.measured
    if seen is None:
        return row
    epoch_s = None
    if seen.steps_per_epoch:
        epoch_s = seen.steps_per_epoch * seen.step_s.median + seen.first_step_s
    hours = None if epoch_s is None else epoch_s * row.variant.ranks / 3600
    return replace(
        row,
        samples_per_s=seen.global_batch / seen.step_s.median,
        epoch_s=epoch_s,
        gpu_hours=hours,
        cost=None if hours is None or price_per_hour is None else hours * price_per_hour,
    )


def with_reference(rows: Sequence[BenchRow]) -> list[BenchRow]:
    """Rows with speed-up and efficiency over the reference of their group: its row with fewest ranks, `ddp` first.

    The speed-up is in samples a second, so that it means the same with strong and with weak scaling.
    """
    compared = []
    for row in rows:
        reference = reference_of(row, rows)
        if reference is None or row.samples_per_s is None or reference.samples_per_s is None:
            compared.append(row)
            continue
        speed_up = row.samples_per_s / reference.samples_per_s
        more = row.variant.ranks / reference.variant.ranks
        compared.append(replace(row, speed_up=speed_up, efficiency=speed_up / more))
    return compared


def reference_of(row: BenchRow, rows: Sequence[BenchRow]) -> BenchRow | None:
    """The row that ``row`` is compared with; None if none of its group was measured."""
    alike = [r for r in rows if r.variant.group == row.variant.group and r.samples_per_s is not None]
    return min(alike, key=lambda r: (r.variant.ranks, not r.variant.strategy.startswith("ddp")), default=None)


def most_worthwhile(rows: Sequence[BenchRow]) -> BenchRow | None:
    """Of rows of one strategy: up to which number of ranks each further one is worth it.

    That is the last row before one whose additional ranks each add less than half of what a rank of the first row
    gives.
    """
    known = sorted((r for r in rows if r.samples_per_s is not None), key=lambda r: r.variant.ranks)
    if not known:
        return None
    best, each = known[0], (known[0].samples_per_s or 0.0) / known[0].variant.ranks
    for row in known[1:]:
        gained = (row.samples_per_s or 0.0) - (best.samples_per_s or 0.0)
        if gained < _WORTH * each * (row.variant.ranks - best.variant.ranks):
            break
        best = row
    return best
