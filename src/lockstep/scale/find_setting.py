"""Finding the best value of one setting: the batch that fits and is fastest, loader processes, the size of buckets.

Each try is a run of its own: a rank whose memory runs out ends it for all of them, so that no rank goes on with
another verdict than the others. A batch is here what a rank computes at once, its micro-batch: that is what takes
memory, and a step holds one of them for each rank.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Literal

from lockstep.errors import SettingError
from lockstep.formatting import count, plural
from lockstep.launch import Machine, check_program
from lockstep.scale.bench import BenchPlan, Say, look, measure_round, row_of
from lockstep.scale.bench_result import Prices, RoundSeen
from lockstep.scale.measured_run import FailedRun
from lockstep.scale.sweep import BatchSizes, Start, start_of

Setting = Literal["batch", "workers", "bucket"]
#: A smaller value is taken instead of a faster one that gains no more than this: it is noise, or not worth it.
WORTH = 0.02
BUCKETS_MB = (0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0)
_MOST = 1 << 20


@dataclass(frozen=True, slots=True)
class Try:
    """One value, and how fast it was."""

    value: float
    samples_per_s: float | None  #: None: it failed
    out_of_memory: bool = False
    cause: str = ""


@dataclass(frozen=True, slots=True)
class Found:
    """What was tried, and what is best."""

    setting: Setting
    tries: tuple[Try, ...]  #: by value
    best: Try | None  #: None: nothing worked
    largest: float | None = None  #: batch that fits


def find(plan: BenchPlan, setting: Setting, say: Say) -> Found:
    """The best value of ``setting`` for the first variant of ``plan``.

    Numbers of loader processes and bucket sizes take turns in as many rounds as ``plan`` has; a batch is tried once.

    Raises:
        SettingError: if the script cannot be started at all.
    """
    check_program(plan.program)
    machine, variant = Machine.detect(os.environ), plan.sweep.variants()[0]
    first = look(plan.program, plan.sweep.settings, time_limit_s=plan.time_limit_s)
    if isinstance(first, FailedRun) and not (first.out_of_memory and variant.batch):
        raise SettingError(f"{plan.program.name} could not be tried: {first.cause}")
    sizes = None if isinstance(first, FailedRun) else BatchSizes(first.global_batch, first.micro_batch)
    start = start_of(variant, plan.sweep, sizes, on_gpu=machine.gpus > 0)

    def attempt(value: float) -> Try:
        settings = dict(start.settings)
        if setting == "batch":
            settings |= {"micro_batch": f"{value:g}", "global_batch": f"{value * variant.ranks:g}"}
        else:
            settings[{"workers": "workers", "bucket": "bucket_mb"}[setting]] = f"{value:g}"
        outcome, use = measure_round(plan, Start(start.ranks, settings))
        if isinstance(outcome, FailedRun):
            say(f"{setting} {value:g}: {'out of memory' if outcome.out_of_memory else outcome.cause}")
            return Try(value, None, outcome.out_of_memory, outcome.cause)
        if use.disturbed:
            say(f"warning: something else kept {use.others:.1f} of {use.cores} cores busy meanwhile")
        row = row_of(variant, [RoundSeen(outcome, use)], None, Prices())
        say(f"{setting} {value:g}: {row.failed or f'{count(row.samples_per_s or 0.0)} samples/s'}")
        return Try(value, row.samples_per_s, cause=row.failed)

    if setting == "batch":
        return find_batch(variant.batch or (sizes.micro_batch if sizes else 1), attempt)
    values = worker_counts(max(1, machine.cpus // variant.ranks)) if setting == "workers" else BUCKETS_MB
    return find_among(setting, values, attempt, plan.rounds)


def find_batch(first: int, attempt: Callable[[int], Try]) -> Found:
    """The largest batch that does not run out of memory, and the fastest.

    Doubles ``first`` until memory runs out, or twice in a row it is no faster, and then narrows the largest one down
    to an eighth of it. Where not even ``first`` fits, it halves.
    """
    tries: dict[int, Try] = {}

    def fits(value: int) -> bool:
        if value not in tries:
            tries[value] = attempt(value)
        return tries[value].samples_per_s is not None

    value = first
    while not fits(value) and tries[value].out_of_memory and value > 1:
        value //= 2
    low = value if fits(value) else 0
    while low and value < _MOST:
        value *= 2
        if not fits(value):
            break
        low = value
        if _levelled_off([tries[v] for v in sorted(tries) if v <= value]):
            break
    high = min((v for v, seen in tries.items() if seen.out_of_memory), default=0)
    while low and high - low > max(1, low // 8):
        middle = (low + high) // 2
        if fits(middle):
            low = middle
        else:
            high = middle
    seen = tuple(tries[v] for v in sorted(tries))
    return Found("batch", seen, best_of(seen), low or None)


def find_among(setting: Setting, values: Sequence[float], attempt: Callable[[float], Try], rounds: int = 1) -> Found:
    """The best of ``values``: each tried by ``attempt`` once in each round, until it fails; its median counts."""
    seen: dict[float, list[Try]] = {value: [] for value in sorted(values)}
    for _ in range(rounds):
        for value, tries in seen.items():
            if not (tries and tries[-1].samples_per_s is None):
                tries.append(attempt(value))
    middle = tuple(_middle(tries) for tries in seen.values())
    return Found(setting, middle, best_of(middle))


def worker_counts(cpus_per_rank: int) -> tuple[int, ...]:
    """Numbers of loader processes worth a try: none, one, and doublings up to the CPUs of a rank."""
    counts = [0, 1]
    while counts[-1] * 2 <= cpus_per_rank:
        counts.append(counts[-1] * 2)
    return tuple(counts)


def best_of(tries: Sequence[Try]) -> Try | None:
    """The smallest value that is at most `WORTH` slower than the fastest; None if none worked."""
    fastest = max((t.samples_per_s for t in tries if t.samples_per_s is not None), default=None)
    if fastest is None:
        return None
    return min(
        (t for t in tries if t.samples_per_s and t.samples_per_s >= (1 - WORTH) * fastest), key=lambda t: t.value
    )


def report(found: Found) -> list[str]:
    """What was found, as lines of at most 80 columns."""
    unit = {"batch": "samples of a rank", "workers": "loader processes", "bucket": "MiB"}[found.setting]
    lines = [f"{unit:>20}{'samples/s':>12}"]
    for each in found.tries:
        speed = "out of memory" if each.out_of_memory else (each.cause or "failed")[:46]
        if each.samples_per_s is not None:
            speed = f"{count(each.samples_per_s):>12}"
        lines.append(f"{each.value:>20g}{speed if each.samples_per_s is not None else '   ' + speed}")
    if found.best is None:
        return [*lines, "", f"none of these {plural(len(found.tries), 'value')} worked"]
    options = {"batch": "micro_batch", "workers": "workers", "bucket": "bucket_mb"}
    ranks = " and global_batch= that times the ranks" if found.setting == "batch" else ""
    lines += ["", f"best: --set {options[found.setting]}={found.best.value:g}{ranks}"]
    if found.largest is not None:
        lines.append(f"the largest that was seen to fit: {found.largest:g}")
    return lines


def _middle(tries: Sequence[Try]) -> Try:
    """The last one if it failed, else that of the median speed."""
    return tries[-1] if tries[-1].samples_per_s is None else replace(tries[0], samples_per_s=median(_speeds(tries)))


def _speeds(tries: Sequence[Try]) -> list[float]:
    return [each.samples_per_s or 0.0 for each in tries]


def _levelled_off(tries: Sequence[Try]) -> bool:
    """Whether the last two doublings gained nothing."""
    speeds = _speeds(tries)
    return len(speeds) >= 3 and max(speeds[-2:]) <= (1 + WORTH) * speeds[-3]
