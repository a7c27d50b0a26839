"""The profile of a script: a few steps on one device, and how sums between ranks go."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final

from lockstep.errors import LaunchError
from lockstep.launch import Module, Script, check_program
from lockstep.scale.fit import divisors
from lockstep.scale.measured_run import FailedRun, MeasuredRun, Records, measure
from lockstep.scale.steady_state import timing, warm_up
from lockstep.scale.step_profile import GradientReady, LinkProfile, StepProfile, fixed_share
from lockstep.step_record import RankRecord

#: Sizes of the sums of a link profile: 4 KiB to 64 MiB, in ten steps of equal ratio.
SUM_BYTES = tuple(int(4096 * (64 * 2**20 / 4096) ** (step / 9)) // 4 * 4 for step in range(10))
#: So many times as small as the script's is a second micro-batch: what 8 ranks make of one.
_SMALLER: Final = 8


def profile_script(
    program: Script | Module, *, settings: Mapping[str, str] | None = None, steps: int = 40
) -> StepProfile:
    """Measure ``steps`` steps of a script on one rank here, and a quarter as many with smaller micro-batches.

    Takes as long as they do, and two starts. A script that fails with smaller micro-batches is measured without them.

    Args:
        program: the user's script, unchanged.
        settings: for `Run`, over those of the script, such as ``{"precision": "bf16"}``; batch sizes among them.
        steps: so many are measured, of which the warm-up is cut off; one more counts operations.

    Raises:
        SettingError: if there is no such script.
        LaunchError: if it fails, with why.
    """
    check_program(program)
    run = MeasuredRun(program, 1, dict(settings or {}), steps, gradients=True, memory=True, flops=True)
    measured = measure(run)
    if isinstance(measured, FailedRun):
        raise LaunchError(f"{program.name} could not be profiled: {measured.cause}")
    profile = step_profile(program.name, measured)
    smaller = divisors(profile.micro_batch, max(1, profile.micro_batch // _SMALLER))[-1]
    if smaller < profile.micro_batch:
        run = replace(
            run, settings={**run.settings, "micro_batch": str(smaller)}, steps=-(-steps // 4), memory=False, flops=False
        )
        again = measure(run)
        if not isinstance(again, FailedRun):
            profile = with_fixed_part(profile, step_profile(program.name, again))
    return profile


def with_fixed_part(profile: StepProfile, smaller: StepProfile) -> StepProfile:
    """``profile`` with what its passes take besides their samples, from one with smaller micro-batches."""
    whole, part = (one.forward.median_s + one.backward.median_s for one in (profile, smaller))
    share = fixed_share(smaller.micro_batch / profile.micro_batch, part / whole)
    return replace(profile, fixed_samples=share * profile.micro_batch)


def profile_link(program: Script | Module, ranks: int, *, settings: Mapping[str, str] | None = None) -> LinkProfile:
    """Measure sums of ten sizes between ``ranks`` ranks of this machine, in at most about 30 seconds.

    They are started as those of the script, which makes two steps before, so that its own devices and settings hold.

    Raises:
        LaunchError: if the script fails, with why.
    """
    run = MeasuredRun(program, ranks, dict(settings or {}), 2, sum_bytes=SUM_BYTES, sum_budget_s=30.0)
    measured = measure(run)
    if isinstance(measured, FailedRun):
        raise LaunchError(f"the link of {program.name} on {ranks} ranks could not be profiled: {measured.cause}")
    return link_profile(measured)


def step_profile(script: str, measured: Records) -> StepProfile:
    """What one rank has seen, without its warm-up. A pure function."""
    record = measured.ranks[0]
    steady = [s for s in record.steps[warm_up([s.total_s for s in record.steps]).steps :] if not s.begins_pass]
    steady = steady or list(record.steps)
    return StepProfile(
        script=Path(script).name,
        device=record.device if record.on_gpu else f"{record.device}, {record.threads} threads",
        precision=record.precision,
        global_batch=record.global_batch,
        micro_batch=record.micro_batch,
        micro_batches=-(-record.global_batch // record.micro_batch),
        steps=len(steady),
        data=timing([s for step in steady for s in step.data_s]),
        forward=timing([s for step in steady for s in step.forward_s]),
        backward=timing([s for step in steady for s in step.backward_s]),
        optimizer=timing([step.optimizer_s for step in steady]),
        other=timing([step.other_s for step in steady]),
        gradients=tuple(GradientReady(g.name, g.bytes, g.ready_s) for g in record.gradients),
        parameter_bytes=record.parameter_bytes,
        optimizer_bytes=record.optimizer_bytes,
        peak_bytes=record.peak_bytes if record.on_gpu else None,
        flops_per_sample=record.flops_per_sample,
        steps_per_epoch=record.steps_per_epoch,
        epochs=record.epochs,
        training_steps=record.training_steps,
    )


def link_profile(measured: Records) -> LinkProfile:
    """The curve that the ranks have measured together. A pure function."""
    record: RankRecord = measured.ranks[0]
    return LinkProfile(
        ranks=record.ranks,
        nodes=len({each.host for each in measured.ranks}),
        backend=record.backend,
        bytes=tuple(size for size, _ in record.sums),
        seconds=tuple(seconds for _, seconds in record.sums),
    )
