"""Measuring the variants of a script on this machine: in rounds, one after the other."""

from __future__ import annotations

import os
import platform
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from lockstep.cpu_affinity import usable_cpus
from lockstep.cpu_use import CpuUse, CpuWatch
from lockstep.formatting import plural
from lockstep.launch import Machine, Module, Script, check_program
from lockstep.provenance import versions
from lockstep.scale.bench_result import (
    BenchMachine,
    BenchResult,
    BenchRow,
    Prices,
    RoundSeen,
    measured,
    with_reference,
    with_times,
)
from lockstep.scale.catalogue import open_catalogue
from lockstep.scale.measured_run import FailedRun, MeasuredRun, Records, measure
from lockstep.scale.sweep import BatchSizes, Start, Sweep, Variant, rounds_of, start_of
from lockstep.step_record import RankRecord

#: Steps of the run that finds out the batch sizes of a script, and what a step of it computes.
_FIRST_STEPS = 3

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class BenchPlan:
    """What is to be measured."""

    program: Script | Module
    sweep: Sweep
    steps: int = 30  #: of each round
    rounds: int = 3
    time_limit_s: float = 900.0  #: of each run
    prices: Prices = field(default_factory=Prices)


def bench(plan: BenchPlan, say: Say) -> BenchResult:
    """Measure every variant of ``plan``; one that fails is a row with its cause, and the others go on.

    Each variant runs once in each round, so that what changes on the machine meets all of them. Takes about the rounds
    times the variants times a start and ``steps`` steps.

    Args:
        plan: what is measured.
        say: is told what goes on, in lines.

    Raises:
        SettingError: if the script does not exist, or the sweep needs a batch size that cannot be found out.
    """
    check_program(plan.program)
    machine = Machine.detect(os.environ)
    first = look(plan.program, plan.sweep.settings, time_limit_s=plan.time_limit_s)
    if isinstance(first, FailedRun):
        say(f"one rank alone fails, so sizes and operations are not known: {first.cause}")
    record = None if isinstance(first, FailedRun) else first
    sizes = None if record is None else BatchSizes(record.global_batch, record.micro_batch)
    variants = plan.sweep.variants()
    starts = {v: start_of(v, plan.sweep, sizes, on_gpu=machine.gpus > 0) for v in variants}
    seen: dict[Variant, list[RoundSeen]] = {variant: [] for variant in variants}
    failed: dict[Variant, FailedRun] = {}
    for number, order in enumerate(rounds_of(variants, plan.rounds), 1):
        for variant in order:
            if variant in failed:
                continue
            outcome, use = measure_round(plan, starts[variant])
            if isinstance(outcome, FailedRun):
                failed[variant] = outcome
                say(f"round {number} of {plan.rounds}: {variant}: failed: {outcome.cause}")
                continue
            seen[variant].append(RoundSeen(outcome, use))
            say(f"round {number} of {plan.rounds}: {variant}: {_pace(outcome)}")
            if use.disturbed:
                say(
                    f"warning: something else kept {use.others:.1f} of {use.cores} cores busy meanwhile, so this is "
                    "slower than it would be; measure on a quiet machine"
                )
    flops = None if record is None else record.flops_per_sample
    rows = []
    for variant in variants:
        threads = seen[variant][0].records.ranks[0].threads if seen[variant] else 1
        row = row_of(variant, seen[variant], failed.get(variant), plan.prices)
        crowded = machine.gpus == 0 and variant.ranks * threads > machine.cpus
        rows.append(replace(row, oversubscribed=crowded, mfu=_mfu(row, record)))
    return BenchResult(
        script=plan.program.name,
        machine=_machine(machine, record or next((s[0].records.ranks[0] for s in seen.values() if s), None)),
        scaling=plan.sweep.scaling,
        rounds=plan.rounds,
        steps=plan.steps,
        rows=tuple(with_reference(rows)),
        currency=plan.prices.currency if any(row.cost is not None for row in rows) else "",
        flops_per_sample=flops,
    )


def look(
    program: Script | Module, settings: Mapping[str, str], *, time_limit_s: float = 900.0
) -> RankRecord | FailedRun:
    """What one rank sees of a script in three steps: batch sizes, operations of a sample, memory that it takes."""
    run = MeasuredRun(program, 1, dict(settings), _FIRST_STEPS, memory=True, flops=True, time_limit_s=time_limit_s)
    outcome = measure(run)
    return outcome if isinstance(outcome, FailedRun) else outcome.ranks[0]


def measure_round(plan: BenchPlan, start: Start) -> tuple[Records | FailedRun, CpuUse]:
    """One run of one variant, and who used the CPUs meanwhile."""
    watch = CpuWatch(usable_cpus())
    run = MeasuredRun(plan.program, start.ranks, start.settings, plan.steps, time_limit_s=plan.time_limit_s)
    outcome = measure(run)
    own_s = 0.0 if isinstance(outcome, FailedRun) else outcome.own_cpu_s
    return outcome, watch.used(own_s)


def row_of(variant: Variant, seen: list[RoundSeen], failed: FailedRun | None, prices: Prices) -> BenchRow:
    """The row of a variant that was measured in some rounds, or has ``failed``. A pure function."""
    if failed is not None or not seen:
        cause = failed or FailedRun("not measured")
        return BenchRow(variant, None, failed=cause.cause, out_of_memory=cause.out_of_memory)
    found = measured(seen)
    if found is None:
        return BenchRow(variant, None, failed="no step after the warm-up: give more --steps, or a larger data set")
    return with_times(BenchRow(variant, found), prices.of(seen[0].records.ranks[0].device))


def _pace(outcome: Records) -> str:
    steps = outcome.ranks[0].steps
    half = steps[len(steps) // 2 :]
    seconds = sum(step.total_s for step in half) / len(half)
    return f"{1e3 * seconds:.3g} ms a step over the last {plural(len(half), 'step')}"


def _mfu(row: BenchRow, record: RankRecord | None) -> float | None:
    if record is None or not record.flops_per_sample or row.samples_per_s is None:
        return None
    gpu = open_catalogue().find_gpu(record.device) if record.on_gpu else None
    if gpu is None:
        return None
    peak = gpu.flops(row.variant.precision or record.precision)
    return row.samples_per_s * record.flops_per_sample / (peak * row.variant.ranks)


def _machine(machine: Machine, record: RankRecord | None) -> BenchMachine:
    return BenchMachine(
        host=socket.gethostname(),
        device=record.device if record else platform.machine(),
        on_gpu=machine.gpus > 0,
        cores=machine.cpus,
        versions=versions(),
    )
