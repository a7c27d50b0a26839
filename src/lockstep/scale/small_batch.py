"""How long a device computes on a smaller batch: a fixed cost, and one for each sample.

    t(b) = F + s b,   so   t(b) / t(b0) = (b / b0 + h) / (1 + h),   h = F / (s b0)

F is what does not shrink: kernels are started, weights are read, and a small batch leaves a part of the device idle.
Seen from a batch that fills the device, h is much the same for devices whose speeds differ by ten: in MXNet's
measurements of ResNet-50 and Inception-v3 on K80, M60 and V100 between 0.07 and 0.1 from 1 to 32 images
(benchmarks/published/batch_sizes.csv). benchmarks/calibrate.py takes its median and its range from all published single
GPUs with several batches. Profiles measure it: `StepProfile.fixed_samples` is F / s.
"""

from __future__ import annotations


def time_at(ratio: float, share: float) -> float:
    """Time of a pass with ``ratio`` times the samples, over that with all; grows with ``ratio``."""
    return (ratio + share) / (1 + share)


def rate_at(ratio: float, share: float) -> float:
    """Samples a second with ``ratio`` times the samples of a pass, over those with all."""
    return ratio / time_at(ratio, share)


def fixed_share(ratio: float, time: float) -> float:
    """The share with which a pass of ``ratio`` times the samples, below 1, takes ``time`` times as long as the whole.

    0 where it is shorter than in proportion; where it is hardly shorter at all, as if it were by a hundredth.
    """
    return max(0.0, (min(time, 0.99) - ratio) / (1 - min(time, 0.99))) if ratio < 0.99 else 0.0
