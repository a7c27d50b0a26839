"""A profile as it would be on another GPU, and with other batch sizes: what is known of it, and how well.

On another GPU the part of a pass that computes goes with the peak of its arithmetic, the part that moves data with the
bandwidth of its memory, as in a roofline (Williams et al., 2009). Which part is which a profile does not say kernel by
kernel: the share that computes is taken from how much of its peak the profiled device reached, if operations were
counted, else half; the interval is from one extreme to the other.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from lockstep.errors import PlanError
from lockstep.scale.catalogue import Catalogue, Gpu
from lockstep.scale.step_profile import StepProfile, Timing, time_at

#: Of a device's peak, what passes reach that do nothing but compute.
_BEST_USE: Final = 0.6


@dataclass(frozen=True, slots=True)
class MovedProfile:
    """A profile on another device: the likely one, and those of the two extremes."""

    likely: StepProfile
    fast: StepProfile
    slow: StepProfile
    notes: tuple[str, ...] = ()


def on_gpu(profile: StepProfile, gpu: Gpu, catalogue: Catalogue) -> MovedProfile:
    """``profile`` as ``gpu`` would compute it; itself, where it was taken on such a one."""
    own = catalogue.find_gpu(profile.device) or catalogue.gpu("cpu")
    if own.name == gpu.name:
        return MovedProfile(profile, profile, profile)
    computing = own.flops(profile.precision) / gpu.flops(profile.precision)
    moving = own.memory_bytes_per_s / gpu.memory_bytes_per_s
    share = _computing_share(profile, own)
    said = "" if profile.flops_per_sample else ", operations were not counted"
    note = f"{gpu.name} from {own.name} by roofline: {share:.0%} of a pass is taken to be arithmetic{said}"
    return MovedProfile(
        _scaled(profile, share * computing + (1 - share) * moving, gpu),
        _scaled(profile, min(computing, moving), gpu),
        _scaled(profile, max(computing, moving), gpu),
        (note,),
    )


def _computing_share(profile: StepProfile, own: Gpu) -> float:
    passes = profile.forward.median_s + profile.backward.median_s
    if not profile.flops_per_sample or passes <= 0:
        return 0.5
    used = profile.flops_per_sample * profile.micro_batch / passes / own.flops(profile.precision)
    return min(1.0, used / _BEST_USE)


def _scaled(profile: StepProfile, factor: float, gpu: Gpu) -> StepProfile:
    return replace(
        profile,
        device=gpu.name,
        forward=_times(profile.forward, factor),
        backward=_times(profile.backward, factor),
        optimizer=_times(profile.optimizer, factor),
        gradients=tuple(replace(one, ready_s=one.ready_s * factor) for one in profile.gradients),
    )


def _times(timing: Timing, factor: float) -> Timing:
    return Timing(timing.median_s * factor, timing.p10_s * factor, timing.p90_s * factor)


def with_micro_batch(profile: StepProfile, samples: int, share: float) -> StepProfile:
    """``profile`` with micro-batches of ``samples``: a device is slower on each sample of a small one.

    Args:
        profile: says how much slower, if it was measured with two sizes.
        samples: of a micro-batch.
        share: what of a pass does not shrink, over what does, where the profile does not say so.
    """
    fixed = share * profile.micro_batch if profile.fixed_samples is None else profile.fixed_samples
    ratio = samples / profile.micro_batch
    factor = time_at(ratio, fixed / profile.micro_batch)
    return replace(
        profile,
        micro_batch=samples,
        fixed_samples=fixed,
        data=_times(profile.data, ratio),
        forward=_times(profile.forward, factor),
        backward=_times(profile.backward, factor),
        gradients=tuple(replace(one, ready_s=one.ready_s * factor) for one in profile.gradients),
    )


def for_ranks(profile: StepProfile, ranks: int, share: float, *, weak: bool) -> StepProfile:
    """What one of ``ranks`` computes in a step: all that the profiled device did (weak), or its part of the step.

    Where there are more ranks than micro-batches, micro-batches become smaller (`with_micro_batch`).

    Raises:
        PlanError: if there are more ranks than samples.
    """
    if weak or ranks == 1:
        return profile
    if ranks > profile.global_batch:
        raise PlanError(f"{ranks} ranks share a step of {profile.global_batch} samples; give a larger global_batch")
    if ranks <= profile.micro_batches:
        return replace(profile, micro_batches=-(-profile.micro_batches // ranks))
    return replace(with_micro_batch(profile, -(-profile.global_batch // ranks), share), micro_batches=1)
