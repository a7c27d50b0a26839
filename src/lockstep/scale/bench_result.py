"""The result of a benchmark: its rows from what ranks have seen, as plain values, and as JSON.

::

    {"schema": "lockstep-bench", "version": 1, "script": ..., "machine": {...}, "scaling": ..., "rows": [...], ...}

with the fields of `BenchResult`, `BenchRow` and what they hold under their names. A field may be added under the same
version; what is there keeps its name and unit. docs/bench.md has the list.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from lockstep.cpu_use import CpuUse
from lockstep.errors import DataError
from lockstep.records import from_known, read_object
from lockstep.scale.measured_run import Records
from lockstep.scale.steady_state import MedianInterval, median_interval, warm_up
from lockstep.scale.sweep import Scaling, Variant
from lockstep.step_record import StepTimes

SCHEMA, VERSION = "lockstep-bench", 1
PARTS = ("data", "forward", "backward", "exposed", "optimizer", "other")
#: An additional rank is worth it while it adds half of what the first one does.
_WORTH = 0.5


@dataclass(frozen=True, slots=True)
class Measured:
    """What was measured of a variant, over its rounds, without warm-up."""

    global_batch: int
    micro_batch: int
    step_s: MedianInterval
    parts_s: Mapping[str, float]  #: of a step, mean over ranks and steps, by `PARTS`; they add up to the mean step
    peak_bytes: int  #: of the rank with most; on a CPU of its process, with all libraries
    steps: int  #: that count
    warm_up_steps: int  #: that were cut off, of all rounds
    steady: bool  #: whether durations had settled in each round
    first_step_s: float  #: how much longer the first step of a pass takes, where one was seen after the first pass
    steps_per_epoch: int | None
    epochs: int | None
    other_cores: float  #: kept busy by what is not this benchmark
    disturbed: bool  #: whether that was in the way


@dataclass(frozen=True, slots=True)
class BenchRow:
    """One variant. What is None cannot be told, as everything where ``failed`` says why."""

    variant: Variant
    measured: Measured | None
    failed: str = ""
    out_of_memory: bool = False
    oversubscribed: bool = False  #: more threads than cores: it says how the script behaves, not how it scales
    samples_per_s: float | None = None
    speed_up: float | None = None  #: over the reference of its group, see `rows.with_reference`
    efficiency: float | None = None  #: speed-up by how many times more ranks
    epoch_s: float | None = None  #: without evaluation, checkpoints and what comes before the first step
    gpu_hours: float | None = None  #: of an epoch
    cost: float | None = None  #: of an epoch
    mfu: float | None = None  #: operations that the model needs, of those that the device can do


@dataclass(frozen=True, slots=True)
class BenchMachine:
    """Where it was measured."""

    host: str
    device: str
    on_gpu: bool
    cores: int
    versions: Mapping[str, str | None]


@dataclass(frozen=True, slots=True)
class BenchResult:
    """A whole benchmark."""

    script: str
    machine: BenchMachine
    scaling: Scaling
    rounds: int
    steps: int  #: of each round
    rows: tuple[BenchRow, ...]
    currency: str = ""  #: of `cost`; "": no price is known
    flops_per_sample: float | None = None

    def write(self, path: Path) -> None:
        """Write it to ``path`` as JSON."""
        content = {"schema": SCHEMA, "version": VERSION, **asdict(self)}
        path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> BenchResult:
        """What `write` has written.

        Raises:
            DataError: if ``path`` holds something else, or another version.
        """
        try:
            content = read_object(path)
            if content.pop("schema") != SCHEMA or content.pop("version") != VERSION:
                raise DataError(f"{path} is no benchmark of version {VERSION}; lockstep bench --out DIR writes one")
            return from_known(cls, content)
        except (ValueError, KeyError) as error:
            raise DataError(f"{path} is no whole benchmark: {error!r}") from error


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
